"""Run directories as the project's own writers leave them, with episodes of every kind.

`python tests/sample_run.py FOLDER` writes two of them and the page about both, to look at.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import tool_workers
from paravt_ray import report
from paravt_ray.config import Config
from paravt_ray.episode import CallRecord, CallStatus, Episode, Group, Sample, Trajectory, TurnRecord
from paravt_ray.parsing import parse_turn
from paravt_ray.rewards import score_episode
from paravt_ray.tracking.episodes import write_episodes
from paravt_ray.tracking.metrics import step_metrics
from paravt_ray.tracking.run_dir import RunDir

HOSTILE = '</script><script>document.title="owned"</script><!--<img src=x onerror=document.title="owned">\u202e\ud83d'
CALLS = "".join(
    f'<tool_call>\n{{"name": "crop_video", "arguments": {{"start_time": {a}, "end_time": {b}}}}}\n</tool_call>\n'
    for a, b in ((1, 2.5), (2, 3))
)
CALL_TURN = "The ball moves twice, so I look at both places.\n</think>\n" + CALLS
ANSWERS = {
    "right": [CALL_TURN, "Both agree.\n</think>\n<answer>B</answer><|im_end|>"],
    "wrong": ["I can guess.\n</think>\n<answer>A</answer><|im_end|>"],
    "unclosed": ["I think and think <answer>B</answer>"],
    "cut": ["I think and think and"],
    "invalid": ["Look.\n</think>\n<tool_call>\n{broken\n</tool_call>", "So.\n</think>\n<answer>C</answer>"],
}
STARTED_AT = 1_790_000_000.0
STATUSES = {"right": [CallStatus.SERVED, CallStatus.DUPLICATE], "invalid": [CallStatus.INVALID]}


def episode(kind: str, sample: Sample, budget: int, index: int, step: int) -> Episode:
    """One rollout of a known kind, scored by the real rewards."""
    trajectory = Trajectory()
    trajectory.append_prompt([1] * 40, [1] * 40, [])
    turns = []
    for number, text in enumerate(ANSWERS[kind]):
        turn = parse_turn(text, think_prefilled=True)
        start = len(trajectory)
        trajectory.append_generated([2] * 20, [-0.1] * 20, step - 1)
        records = []
        for call, status in zip(turn.calls, STATUSES.get(kind, []), strict=False):
            window = (call.start_time or 0.0, call.end_time or 0.0) if call.ok else None
            times = tuple(np.arange(np.ceil(window[0]), window[1], 1.0).tolist()) if window else ()
            reply = f"{window[0]:g} to {window[1]:g} s: the ball is red" if window else "Error: not valid JSON."
            video = sample.videos[0] if window else None
            run = status is CallStatus.SERVED
            latency, crop = (0.8, 0.3) if run else (0.0, 0.0)
            records.append(CallRecord(call, status, reply, video, window, times, latency, crop))
        finish = "length" if kind == "cut" else "stop"
        turns.append(
            TurnRecord(turn, start, len(trajectory), finish, records, number == 2, 0.4, started_s=1.2 * number)
        )
    video = Path(sample.videos[0])
    taken = tool_workers.overview(video, budget).timestamps.tolist() if video.exists() else None
    overview = taken or [(i + 0.5) * 4.0 / budget for i in range(budget)]
    end = "length" if kind == "cut" else "answered"
    seconds = turns[-1].started_s + turns[-1].seconds
    result = Episode(sample, sample.sample_id, index, budget, trajectory, turns, overview, True, end, seconds)
    result.started_at = STARTED_AT + 10 * step
    result.rewards = score_episode(result, Config())
    return result


def make_run(folder: Path, name: str, steps: int = 6, video: str = "/gone/x.mp4", **trainer: Any) -> Path:
    """A run directory as the project's own writers leave it."""
    config = Config()
    config.trainer.run_dir, config.trainer.steps = str(folder / name), 20
    for key, value in trainer.items():
        setattr(config.trainer, key, value)
    with RunDir(config) as run:
        for step in range(1, steps + 1):
            groups = [
                Group(sample_id, sample, budget, [
                    episode(kind, sample, budget, index, step) for index, kind in enumerate(kinds)
                ], ["timeout: The episode took longer than rollout.episode_timeout_s=900 s."])
                for sample_id, budget, kinds in (
                    ("red ball", 4, ["right", "right", "wrong", "unclosed"]),
                    ("hostile", 8, ["right", "cut", "wrong", "invalid"]),
                )
                for sample in [Sample(
                    sample_id, HOSTILE if sample_id == "hostile" else "Where is the red ball?", (video,), "B", "mcq"
                )]
            ]  # fmt: skip
            write_episodes(run.episodes_file(step), groups)
            timed = {"time/rollout": 4.0, "time/reward": 0.1, "time/train": 2.0 + step / 10, "time/sync": 0.2}
            metrics = step_metrics(groups, 4.0, step) | timed | {"time/step": sum(timed.values()) + 0.3}
            run.log_metrics(step, metrics | {"train/loss": 1 / step, "train/lr": 2e-6, "eval/reward/accuracy": 0.5})
    return folder / name


if __name__ == "__main__":
    target = Path(sys.argv[1])
    made = [make_run(target, "para_grpo", steps=20), make_run(target, "vanilla_grpo", steps=14, seed=1)]
    report.run(made, target / "page.html")
