"""Episodes by the texts that their turns said, for tests of what is scored."""

from __future__ import annotations

from typing import Any

from paravt_ray.episode import CallRecord, CallStatus, Episode, Sample, Trajectory, TurnRecord
from paravt_ray.parsing import parse_turn

THOUGHT = "the red car passes later\n</think>\n"


def episode(
    *texts: str, statuses: list[list[CallStatus]] | None = None, gold: str = "B", prefix: bool = True, kind: Any = "mcq"
) -> Episode:
    """An episode whose turns generated these texts; all its runnable calls were served unless said otherwise."""
    records = []
    for i, text in enumerate(texts):
        turn = parse_turn(text, think_prefilled=prefix)
        served = [CallStatus.SERVED if call.ok else CallStatus.INVALID for call in turn.calls]
        done = [
            CallRecord(call, status, "a reply")
            for call, status in zip(turn.calls, statuses[i] if statuses else served, strict=True)
        ]
        records.append(TurnRecord(turn, 0, 0, "stop", calls=done))
    sample = Sample("s", "What is it?", ("/a.mp4",), gold, kind)
    return Episode(sample, "g", 0, 4, Trajectory(), records, [], prefix, "answered")
