"""The shape of the records in `episodes/*.jsonl`, and the check of a file's values against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from paravt_ray.episode import CallStatus, QuestionType
from paravt_ray.report.source import finite


class ShapeError(ValueError):
    """A value is not what it should be; the message says where."""


@dataclass(frozen=True)
class Maybe:
    """The shape, or null."""

    shape: Any


SAMPLE = {
    "sample_id": str,
    "question": str,
    "videos": [str],
    "answer": str,
    "question_type": frozenset(get_args(QuestionType)),
}
CALL = {
    "status": frozenset(CallStatus),
    "ok": Maybe(bool),
    "raw": str,
    "video": Maybe(str),
    "window": Maybe([float]),
    "frames": [float],
    "reply": str,
    "subagent_tokens": float,
    "latency_s": float,
}
TURN = {"text": str, "tokens": float, "finish_reason": str, "forced": bool, "seconds": float, "calls": [CALL]}
EPISODE = {
    "index": float,
    "frame_budget": float,
    "overview_times": [float],
    "think_prefix": bool,
    "turns": [TURN],
    "answer": Maybe(str),
    "end_reason": str,
    "rewards": Maybe({"total": float, "accuracy": float, "format": float, "anchor": float, "tool": float}),
    "policy_version": float,
    "tokens": {"sequence": float, "sampled": float},
    "seconds": float,
}
"""Values of an episode's record, without `group` and `sample`, which its group has."""


def checked(value: Any, shape: Any, where: str = "record") -> Any:
    """The value, with the keys of `shape` alone.

    Args:
        value: as JSON gives it.
        shape: `str`, `bool`, `float` (any finite number), a set of texts, `[shape]`, `{key: shape}`, `Maybe(shape)`.
        where: names the value in the error.

    Raises:
        ShapeError: it is something else.
    """
    if isinstance(shape, Maybe):
        return None if value is None else checked(value, shape.shape, where)
    if isinstance(shape, dict) and isinstance(value, dict):
        return {key: checked(value.get(key), inner, f"{where}.{key}") for key, inner in shape.items()}
    if isinstance(shape, list) and isinstance(value, list):
        return [checked(item, shape[0], where) for item in value]
    if isinstance(shape, frozenset) and isinstance(value, str) and value in shape:
        return value
    if (shape is float and finite(value) is not None) or (shape in (str, bool) and isinstance(value, shape)):
        return value
    raise ShapeError(f"{where} is {str(value)[:40]!r}.")
