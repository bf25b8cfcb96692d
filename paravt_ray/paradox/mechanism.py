"""What the paper's mechanism needs of a cold start, measured before any arm is run.

The tool-necessity gap: whether calling pays, at each overview budget K. Format fragility: how many closing tags survive
sampling, at each temperature. Episodes are sampled as GRPO samples them (no forced prefix) and then sorted by whether
they called. Questions on which a model calls differ from those on which it does not, so calling and skipping are also
compared within the questions that got both: that difference is what a group's advantages see.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from paravt_ray.episode import CallStatus, Episode, Group
from paravt_ray.errors import InputError
from paravt_ray.evaluation.tables import bootstrap
from paravt_ray.rewards import format_stats
from paravt_ray.tracking.run_dir import replace_file

TAGS = {"think": "</think>", "call": "</tool_call>", "answer": "</answer>"}


@dataclass
class GroupRecord:
    """The sampled episodes of one question; all lists have the same length."""

    prior: str
    model: str
    """Digest of the checkpoint's files."""
    sample: str
    budget: int
    """K."""
    temperature: float
    sweep: str
    """What it was sampled for: `budget` or `temperature`."""
    called: list[bool] = field(default_factory=list)
    """Whether a call was served."""
    accuracy: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    """Total reward, as GRPO is given it."""
    think: list[bool] = field(default_factory=list)
    call: list[bool | None] = field(default_factory=list)
    """Whether all calls are closed; None where none was attempted."""
    answer: list[bool] = field(default_factory=list)
    """Closing tags that are there, see `paravt_ray.rewards.FormatStats`."""
    failed: int = 0
    """Rollouts without an episode or without a reward."""


@dataclass(frozen=True)
class Share:
    """A mean over questions with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float
    questions: int
    episodes: int


@dataclass(frozen=True)
class Gap:
    """Calling against skipping at one K; None where there is no such episode."""

    budget: int
    call: float | None
    """Mean accuracy reward of the episodes that called."""
    calls: int
    skip: float | None
    skips: int
    accuracy: Share | None
    """Call minus skip, within the questions that have both."""
    total: Share | None
    """The same of the total reward."""


def fill_record(record: GroupRecord, group: Group, asked: int) -> GroupRecord:
    """Take down a group whose episodes have been scored, as far as they can be; `asked` rollouts were asked for."""
    for episode in group.episodes:
        if episode.rewards is not None:
            stats = format_stats(episode)
            record.called.append(_called(episode))
            record.accuracy.append(episode.rewards.accuracy)
            record.total.append(episode.rewards.total)
            record.think.append(stats.think_closed)
            record.call.append(stats.calls_closed)
            record.answer.append(stats.answer_closed)
    record.failed = asked - len(record.called)
    return record


def _called(episode: Episode) -> bool:
    return any(call.status is CallStatus.SERVED for call in episode.call_records)


def gaps(records: Iterable[GroupRecord]) -> list[Gap]:
    """Calling against skipping by K, smallest first."""
    by_budget: dict[int, list[GroupRecord]] = {}
    for record in records:
        by_budget.setdefault(record.budget, []).append(record)
    return [_gap(budget, by_budget[budget]) for budget in sorted(by_budget)]


def _gap(budget: int, records: Sequence[GroupRecord]) -> Gap:
    def split(record: GroupRecord, values: Sequence[float]) -> tuple[list[float], list[float]]:
        pairs = list(zip(record.called, values, strict=True))
        return [value for called, value in pairs if called], [value for called, value in pairs if not called]

    pooled: tuple[list[float], list[float]] = ([], [])
    within: dict[str, list[float]] = {"accuracy": [], "total": []}
    episodes = 0
    for record in records:
        for part, values in zip(pooled, split(record, record.accuracy), strict=True):
            part.extend(values)
        if any(record.called) and not all(record.called):
            episodes += len(record.called)
            for name, differences in within.items():
                call, skip = split(record, getattr(record, name))
                differences.append(fmean(call) - fmean(skip))
    call, skip = pooled
    return Gap(
        budget,
        fmean(call) if call else None,
        len(call),
        fmean(skip) if skip else None,
        len(skip),
        _share(within["accuracy"], episodes),
        _share(within["total"], episodes),
    )


def tag_survival(records: Iterable[GroupRecord], tag: str) -> Share | None:
    """Share of episodes that close a tag (`think`, `call`, `answer`); `call`: of those that attempt one."""
    kept = [[bool(v) for v in getattr(record, tag) if v is not None] for record in records]
    kept = [values for values in kept if values]
    return _share([fmean(values) for values in kept], sum(map(len, kept)))


def _share(means: Sequence[float], episodes: int) -> Share | None:
    """Over the means of single questions: episodes of one question are not independent."""
    if not means:
        return None
    score = bootstrap("", [means])
    return Share(score.value, score.low, score.high, len(means), episodes)


def write_records(file: Path, records: Iterable[GroupRecord]) -> None:
    """Write one JSON object a line, whole or not at all."""
    replace_file(file, "".join(f"{json.dumps(asdict(record), allow_nan=False)}\n" for record in records))


def read_records(file: Path) -> list[GroupRecord]:
    """Read what `write_records` wrote.

    Raises:
        InputError: a line is something else.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [GroupRecord(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise InputError(f"{file} is damaged ({error}). Remove it, and it will be measured again.") from error
