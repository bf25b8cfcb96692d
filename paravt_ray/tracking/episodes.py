"""Trajectories for people to read: one JSON object an episode, one file a step.

What the model was shown and what it wrote, turn by turn, each call with what became of it, and what was rewarded.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paravt_ray.episode import NOT_GENERATED, CallRecord, Episode, Group, TurnRecord
from paravt_ray.tracking.metrics import sampled_tokens


def write_episodes(file: Path, groups: Iterable[Group]) -> None:
    """Write one step's episodes and failed rollouts, whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    # A model can sample half a character, which has no UTF-8 form.
    with part.open("w", encoding="utf-8", errors="replace") as stream:
        for group in groups:
            for record in [*map(episode_record, group.episodes), *failure_records(group)]:
                stream.write(f"{json.dumps(record, ensure_ascii=False)}\n")
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)


def episode_record(episode: Episode) -> dict[str, Any]:
    """One episode as it is written."""
    versions = Counter(v for v in episode.trajectory.versions if v != NOT_GENERATED)
    return {
        "group": episode.group_id,
        "index": episode.index,
        "sample": asdict(episode.sample),
        "frame_budget": episode.frame_budget,
        "overview_times": [round(time, 3) for time in episode.overview_times],
        "think_prefix": episode.think_prefix,
        "turns": [_turn_record(turn) for turn in episode.turns],
        "answer": episode.answer,
        "end_reason": episode.end_reason,
        "rewards": asdict(episode.rewards) if episode.rewards is not None else None,
        "policy_version": episode.policy_version,
        "tokens_by_version": {str(version): count for version, count in sorted(versions.items())},
        "tokens": {"sequence": len(episode.trajectory), "sampled": sampled_tokens(episode)},
        "started_at": round(episode.started_at, 3),
        "seconds": round(episode.seconds, 3),
    }


def failure_records(group: Group) -> list[dict[str, Any]]:
    """The rollouts of a group that gave no episode."""
    return [{"group": group.group_id, "sample": asdict(group.sample), "failed": reason} for reason in group.failures]


def _turn_record(record: TurnRecord) -> dict[str, Any]:
    return {
        "text": record.turn.text,
        "tokens": record.end - record.start,
        "finish_reason": record.finish_reason,
        "forced": record.forced,
        "calls": [_call_record(call) for call in record.calls],
        "started_s": round(record.started_s, 3),
        "seconds": round(record.seconds, 3),
    }


def _call_record(record: CallRecord) -> dict[str, Any]:
    return {
        "status": record.status.value,
        "ok": record.call.ok,
        "raw": record.call.raw,
        "video": record.video,
        "window": record.window,
        "frames": [round(time, 3) for time in record.timestamps],
        "reply": record.reply,
        "subagent_tokens": sum(record.subagent.generated) if record.subagent is not None else 0,
        "latency_s": round(record.latency_s, 4),
        "crop_s": round(record.crop_s, 4),
    }
