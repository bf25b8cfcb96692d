"""What the agent loop asks of an engine: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paravt_ray.episode import Frame


class EngineError(RuntimeError):
    """The engine gave no usable answer (error, empty output, wrong lengths); the rollout fails, it is never scored."""


@dataclass(frozen=True)
class Sampling:
    """How one turn is sampled."""

    temperature: float
    """0 is greedy."""
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Generation:
    """One turn as the engine produced it."""

    prompt_token_ids: list[int]
    """The prompt with its pads expanded, by the engine."""
    token_ids: list[int]
    """Sampled ids, the end-of-turn token included where it was reached."""
    logprobs: list[float]
    """Of the sampled ids under the sampling distribution (temperature applied), one each."""
    finish_reason: str
    """`stop` or `length`."""
    version: int
    """Version of the weights. A push in the middle of a generation makes it the older of the two."""


class Engine(Protocol):
    """vLLM in production, a script in tests."""

    async def generate(self, prompt_ids: Sequence[int], frames: Sequence[Frame], sampling: Sampling) -> Generation:
        """Sample one turn. `frames` are those of the pads in `prompt_ids` [T], in order. Deadlines are the caller's.

        Raises:
            EngineError: there is no usable output.
        """
        ...
