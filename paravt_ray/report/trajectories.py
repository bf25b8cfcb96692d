"""Trajectories for the page: a run's episode records, checked, grouped by prompt, newest step first.

Every value is checked here, so the page's script meets only what it expects; texts stay as they are and are escaped
where they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import PurePosixPath
from typing import Any

from paravt_ray.episode import CallStatus, Episode, Sample, Trajectory, Turn, TurnRecord
from paravt_ray.parsing import parse_turn
from paravt_ray.report.shapes import EPISODE, SAMPLE, ShapeError, checked
from paravt_ray.report.source import RunData, json_lines
from paravt_ray.rewards import format_stats

TEXT_BYTES = 6 << 20
"""Trajectory files that one page takes in, for each run; of a larger run it shows some of the steps, whole."""
_WHOLE = 1.0 - 1e-9

_CALL_PROBLEMS = {
    CallStatus.INVALID: "call cannot be run",
    CallStatus.OVER_CAP: "call over the cap",
    CallStatus.FAILED: "call failed",
    CallStatus.DUPLICATE: "call repeated",
}
_END_PROBLEMS = {
    "no_answer": "neither call nor answer",
    "length": "out of tokens",
    "invalid_streak": "only calls that cannot be run",
}


@dataclass
class Video:
    """One video of a prompt, as a line of time. Times are seconds."""

    path: str
    overview: list[float]
    start: float
    end: float
    exact: bool = False
    """Whether start and end were read from the file; otherwise they are estimated from the times that were seen."""
    pictures: list[int | None] = field(default_factory=list)
    """For each overview frame its index among the run's pictures; empty where there are none to show."""

    def shown(self) -> dict[str, Any]:
        """What the page needs."""
        name = PurePosixPath(self.path.replace("\\", "/")).name
        return {"name": name, **{key: value for key, value in vars(self).items() if key != "path"}}


@dataclass
class PromptGroup:
    """The rollouts of one prompt in one step."""

    step: int
    group_id: str
    sample: Sample
    frame_budget: int | None = None
    """K; None where every rollout failed."""
    overview: list[float] = field(default_factory=list)
    """Seconds of all overview frames, video after video."""
    videos: list[Video] = field(default_factory=list)
    episodes: list[dict[str, Any]] = field(default_factory=list)
    """`shapes.EPISODE` with `verdict` and `problems`."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Rollouts without an episode: `failed`, `verdict`, `problems`."""

    def shown(self) -> dict[str, Any]:
        """What the page needs."""
        sample = self.sample
        return {
            "step": self.step,
            "group": self.group_id,
            "sample": sample.sample_id,
            "question": sample.question,
            "gold": sample.answer,
            "type": sample.question_type,
            "k": self.frame_budget,
            "videos": [video.shown() for video in self.videos],
            "rollouts": self.episodes + self.failures,
        }


def read_groups(run: RunData, budget: int = TEXT_BYTES) -> list[PromptGroup]:
    """The groups of as many steps as fit into `budget` bytes of files; says in `run.notes` what is left out."""
    sizes = [(step, file.stat().st_size) for step, file in run.episode_files]
    chosen = choose_steps(sizes, budget)
    groups: dict[tuple[int, str], PromptGroup] = {}
    unreadable = 0
    for step, file in reversed(run.episode_files):
        for record in json_lines(file, budget) if step in chosen else ():
            try:
                _add(groups, step, record)
            except ShapeError:
                unreadable += 1
    if len(chosen) < len(sizes):
        steps = ", ".join(map(str, sorted(chosen)))
        run.notes.append(f"Trajectories of {len(chosen)} of {len(sizes)} steps are shown: {steps}.")
    if sizes and sizes[-1][1] > budget:
        run.notes.append(f"The trajectories of step {sizes[-1][0]} are too many: only the first ones are shown.")
    if unreadable:
        run.notes.append(f"{unreadable} trajectories cannot be read and are left out.")
    for group in groups.values():
        group.episodes.sort(key=lambda episode: float(episode["index"]))
        group.videos = _videos(group)
    return list(groups.values())


def choose_steps(sizes: Sequence[tuple[int, int]], budget: int) -> set[int]:
    """As many evenly spread steps as fit, the first and the last among them; at least the last.

    Args:
        sizes: (step, bytes), steps rising.
        budget: bytes.
    """
    for count in range(len(sizes), 1, -1):
        places = {round(i * (len(sizes) - 1) / (count - 1)) for i in range(count)}
        if sum(sizes[place][1] for place in places) <= budget:
            return {sizes[place][0] for place in places}
    return {step for step, _ in sizes[-1:]}


def _add(groups: dict[tuple[int, str], PromptGroup], step: int, record: dict[str, Any] | None) -> None:
    head = checked(record, {"group": str, "sample": SAMPLE})
    assert record is not None
    sample = Sample(**(head["sample"] | {"videos": tuple(head["sample"]["videos"])}))
    episode = None if "failed" in record else checked(record, EPISODE)
    group = groups.setdefault((step, head["group"]), PromptGroup(step, head["group"], sample))
    if episode is None:
        reason = checked(record, {"failed": str})["failed"]
        problem = f"rollout failed: {reason.split(':', 1)[0]}"
        group.failures.append({"failed": reason, "verdict": "no episode", "problems": [problem]})
        return
    for call in calls_of(episode):
        if call["window"] is not None and len(call["window"]) != 2:
            raise ShapeError("A window has two ends.")
        call["video"] = sample.videos.index(call["video"]) if call["video"] in sample.videos else None
    group.frame_budget, group.overview = int(episode["frame_budget"]), episode.pop("overview_times")
    episode["verdict"], episode["problems"] = _verdict(episode["rewards"]), _problems(episode, sample)
    group.episodes.append(episode)


def calls_of(episode: dict[str, Any]) -> list[dict[str, Any]]:
    """All calls of an episode, in order, as the page has them."""
    return [call for turn in episode["turns"] for call in turn["calls"]]


def _verdict(rewards: dict[str, float] | None) -> str:
    if rewards is None:
        return "not scored"
    return "right" if rewards["accuracy"] >= _WHOLE else "partly right" if rewards["accuracy"] > 0 else "wrong"


def _problems(episode: dict[str, Any], sample: Sample) -> list[str]:
    """What went wrong in an episode, in words: its calls, its end, its format."""
    problems = {_CALL_PROBLEMS[call["status"]] for call in calls_of(episode) if call["status"] in _CALL_PROBLEMS}
    if episode["end_reason"] != "answered":
        problems.add(_END_PROBLEMS.get(episode["end_reason"], episode["end_reason"]))
    stats = format_stats(_parsed(episode, sample))
    broken = {
        "format not kept": not stats.compliance,
        "thinking not closed": not stats.think_closed,
        "answer not closed": episode["end_reason"] == "answered" and not stats.answer_closed,
        "call not closed": stats.calls_closed is False,
    }
    return sorted(problems.union(name for name, is_so in broken.items() if is_so))


def _parsed(episode: dict[str, Any], sample: Sample) -> Episode:
    """The record as an Episode, as far as format statistics look at one: its text is parsed again by the one parser."""
    prefix = episode["think_prefix"]
    turns = [
        TurnRecord(_parsed_turn(turn, prefix), 0, 0, turn["finish_reason"], forced=turn["forced"])
        for turn in episode["turns"]
    ]
    return Episode(sample, "", 0, 0, Trajectory(), turns, [], prefix, episode["end_reason"])


def _parsed_turn(record: dict[str, Any], prefix: bool) -> Turn:
    """A turn's text parsed again; whether a call could be read is taken from the record.

    The run may have offered tools that are not here, and nothing that its files name is imported.
    """
    turn = parse_turn(record["text"], prefix)
    recorded = [call["ok"] for call in record["calls"]]
    if len(recorded) != len(turn.calls) or None in recorded:  # a forced turn's calls are not run; an older run
        return turn
    calls = (replace(call, ok=ok) for call, ok in zip(turn.calls, recorded, strict=True))
    return replace(turn, calls=tuple(calls))


def _videos(group: PromptGroup) -> list[Video]:
    """The group's videos with their overview frames, and the length that the times seen speak for."""
    paths = group.sample.videos
    seen: list[list[float]] = [[] for _ in paths]
    for episode in group.episodes:
        for call in calls_of(episode):
            if call["video"] is not None:
                seen[call["video"]] += (call["window"] or []) + call["frames"]
    overviews = split_overview(group.overview, len(paths), group.frame_budget or 0)
    videos = []
    for path, overview, times in zip(paths, overviews, seen, strict=True):
        # Overview frames stand at the centres of equal segments: the last lies as far from the end as the first from 0.
        ends = [overview[0] + overview[-1]] if overview else []
        videos.append(Video(path, overview, start=min([0.0, *times]), end=max([0.0, *ends, *overview, *times])))
    return videos


def shares(frame_budget: int, videos: int) -> list[int]:
    """Overview frames that each of several videos is asked for."""
    return [frame_budget // videos + (index < frame_budget % videos) for index in range(videos)]


def split_overview(times: list[float], videos: int, frame_budget: int) -> list[list[float]]:
    """Cut the overview's times, listed video after video, into one list for each video.

    Each video gets its share of the budget, as when they were taken; where a clip had fewer frames than its share, the
    cut is where times fall.
    """
    if not videos:
        return []
    if frame_budget == len(times):
        cuts = [0, *accumulate(shares(frame_budget, videos))]
    else:
        falls = [place + 1 for place, (a, b) in enumerate(pairwise(times)) if b <= a][: videos - 1]
        cuts = [0, *falls, *[len(times)] * (videos - len(falls))]
    return [times[a:b] for a, b in pairwise(cuts)]
