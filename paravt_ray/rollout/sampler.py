"""Sampling one turn onto a trajectory, exactly: every prompt extends the one before, token by token."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from paravt_ray.chat import Chat, Rendered
from paravt_ray.episode import InvalidTrajectoryError, Trajectory
from paravt_ray.rollout.engine import Engine, EngineError, Generation, Sampling


class ContextFullError(RuntimeError):
    """Not one more token fits behind what would have to be appended; nothing was appended."""


@dataclass(frozen=True)
class Sampler:
    """Samples turns of the main agent and of sub-agents alike."""

    engine: Engine
    chat: Chat
    temperature: float
    context_length: int
    """Longest sequence in tokens, pads expanded."""
    timeout_s: float
    """Deadline of one turn."""

    async def extend(self, trajectory: Trajectory, suffix: Rendered, max_new_tokens: int, seed: int) -> Generation:
        """Append `suffix` and one sampled turn of at most `max_new_tokens` tokens; on any error append nothing.

        Raises:
            ContextFullError: there is no room for the suffix and one token.
            EngineError: no usable output, or not in time.
            InvalidTrajectoryError: the engine saw another prompt than we did, or sampled what cannot be trained on.
        """
        expanded = self.chat.expand(suffix.ids, suffix.frames)
        room = self.context_length - len(trajectory) - len(expanded)
        if room < 1:
            raise ContextFullError(
                f"{len(trajectory) + len(expanded)} tokens leave no room for a turn in a context of "
                f"{self.context_length}; raise model.context_length or lower the frame budgets."
            )
        prompt, frames = trajectory.prompt_ids + suffix.ids, trajectory.frames + suffix.frames
        sampling = Sampling(self.temperature, min(max_new_tokens, room), seed)
        try:
            async with asyncio.timeout(self.timeout_s):
                generation = await self.engine.generate(prompt, frames, sampling)
        except TimeoutError as error:
            raise EngineError(f"The engine gave no turn within rollout.turn_timeout_s={self.timeout_s:g} s.") from error
        if generation.prompt_token_ids != trajectory.token_ids + expanded:
            raise InvalidTrajectoryError(_difference(generation.prompt_token_ids, trajectory.token_ids + expanded))
        self._check(generation, sampling)
        trajectory.append_prompt(expanded, suffix.ids, suffix.frames)
        trajectory.append_generated(generation.token_ids, generation.logprobs, generation.version)
        return generation

    def _check(self, generation: Generation, sampling: Sampling) -> None:
        ids, logprobs = generation.token_ids, generation.logprobs
        if not ids or len(ids) > sampling.max_new_tokens:
            raise EngineError(f"The engine returned {len(ids)} tokens where 1 to {sampling.max_new_tokens} were asked.")
        if generation.finish_reason not in ("stop", "length"):
            raise EngineError(f"The engine ended a turn with '{generation.finish_reason}'.")
        if len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)):
            raise InvalidTrajectoryError(f"{len(ids)} tokens came with {len(logprobs)} log-probs, or some not finite.")
        sampled = sorted(set(ids).intersection(self.chat.vision_ids))
        if sampled:
            raise InvalidTrajectoryError(f"The policy sampled vision tokens {sampled}, which stand for no frame.")


def _difference(engine: list[int], ours: list[int]) -> str:
    """Where two expansions of one prompt part ways."""
    at = next((i for i, (a, b) in enumerate(zip(engine, ours, strict=False)) if a != b), min(len(engine), len(ours)))
    return (
        f"The engine's prompt of {len(engine)} tokens and ours of {len(ours)} differ from token {at} on: its "
        "processor, its chat template or its history is another one."
    )
