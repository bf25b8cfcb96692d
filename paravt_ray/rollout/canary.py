"""The canary: a short generation whose log-probs generator and learner must agree on, checked after every push.

It catches a push that did not arrive where it should: a stale output head, a vision tower left behind, answers from a
cache that outlived its weights. It sees a frame and fills a cache as any other prompt does. What it cannot see are
differences as small as the tolerance, such as weights that are one small step old.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paravt_ray.chat import Chat, Message, Rendered, Video
from paravt_ray.config import Config
from paravt_ray.episode import Frame, TrainRow, Trajectory
from paravt_ray.errors import UserError
from paravt_ray.rollout.engine import Engine, Sampling

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.5}
"""Largest |generator - learner| log-prob by `model.dtype`. In bfloat16 both round, in different orders."""
_TOKENS = 16
_SIDE = 4
"""Sides of the test frame in visual tokens, where the pixel limits allow it."""


class CanaryError(UserError):
    """A generator does not hold the learner's weights."""


@dataclass
class CanaryRun:
    """What one generator made of the canary."""

    trajectory: Trajectory
    version: int
    generator: int = 0


def canary_prompt(chat: Chat, config: Config) -> Rendered:
    """A short text with one frame, rendered as the run's frames are: two colour ramps on which every patch differs."""
    model = config.model
    largest = min(model.overview_max_pixels, model.crop_max_pixels)
    side = chat.patch_factor
    while side < _SIDE * chat.patch_factor and (side + chat.patch_factor) ** 2 <= largest:
        side += chat.patch_factor
    ramp = np.linspace(0, 255, side, dtype=np.uint8)
    across, down = np.broadcast_to(ramp[None, :], (side, side)), np.broadcast_to(ramp[:, None], (side, side))
    frame = Frame(np.stack([across, down, 255 - across], axis=-1), 0.0, f"canary/{side}")
    return chat.prompt([Message("user", ("What is in this picture? ", Video((frame,)), "Answer in one sentence."))])


async def run_canary(engine: Engine, chat: Chat, config: Config) -> CanaryRun:
    """Let an engine continue the canary's prompt, at the run's temperature and a fixed seed.

    Raises:
        EngineError: the engine gave no usable answer.
    """
    prompt = canary_prompt(chat, config)
    sampling = Sampling(config.rollout.temperature, _TOKENS, seed=0)
    generation = await engine.generate(prompt.ids, prompt.frames, sampling)
    trajectory = Trajectory()
    trajectory.append_prompt(generation.prompt_token_ids, prompt.ids, prompt.frames)
    trajectory.append_generated(generation.token_ids, generation.logprobs, generation.version)
    return CanaryRun(trajectory, generation.version)


def canary_row(run: CanaryRun) -> TrainRow:
    """The canary as the learner computes log-probs on it."""
    return TrainRow.of(run.trajectory)


def check_canary(
    runs: Sequence[CanaryRun], learner_logprobs: Sequence[NDArray[np.float32]], version: int, dtype: str
) -> float:
    """Compare what generators and learner say of the same tokens.

    Args:
        runs: one for each generator.
        learner_logprobs: the learner's log-probs [T] on `canary_row(run)`, one array for each run.
        version: of the weights that everyone should hold.
        dtype: `model.dtype`, which decides the tolerance.

    Returns:
        The largest difference.

    Raises:
        CanaryError: a generator answers with another version or with other log-probs.
    """
    largest = 0.0
    for run, logprobs in zip(runs, learner_logprobs, strict=True):
        if run.version != version:
            raise CanaryError(
                f"Generator {run.generator} answered with version {run.version} of the weights after version {version} "
                "was pushed: the push did not take effect. Stop the run and report this."
            )
        row = canary_row(run)
        gap = float(np.abs(row.behaviour_logprobs - logprobs)[row.generated].max())
        if not gap <= TOLERANCES[dtype]:  # also where it is not a number
            raise CanaryError(
                f"Generator {run.generator} does not hold the learner's weights: after the push of version {version} "
                f"their log-probs on the same tokens differ by {gap:.2g}, more than {TOLERANCES[dtype]:g}. Going on "
                "would train on samples of another policy. Resume from the last checkpoint; if this comes again, the "
                "two load the model differently (model.dtype, checkpoint, library versions: see `paravt doctor`)."
            )
        largest = max(largest, gap)
    return largest


def check_successor(run: CanaryRun, agreed: CanaryRun, dtype: str) -> None:
    """Compare the canary of a generator that has caught up with one of the same weights on which the learner agreed.

    Both had the same prompt and seed. Where rounding made them sample different tokens, what comes before counts; where
    that is nothing, in bfloat16, the next push will tell.

    Raises:
        CanaryError: their log-probs on the tokens that both sampled differ.
    """
    gaps = []
    for mine, theirs in zip(_sampled(run), _sampled(agreed), strict=False):
        if mine[0] != theirs[0]:
            break
        gaps.append(abs(mine[1] - theirs[1]))
    gap = float(np.max(gaps)) if gaps else np.inf
    if not gaps and dtype != "float32":
        return
    if not gap <= TOLERANCES[dtype]:
        raise CanaryError(
            f"It was given version {run.version} of the weights and does not hold them: its log-probs on the canary "
            f"differ from those of the generators before it by {gap:.2g}, more than {TOLERANCES[dtype]:g}."
        )


def _sampled(run: CanaryRun) -> list[tuple[int, float]]:
    """Its sampled tokens with their log-probs."""
    trajectory = run.trajectory
    rows = zip(trajectory.token_ids, trajectory.logprobs, trajectory.generated, strict=True)
    return [(token, logprob) for token, logprob, generated in rows if generated]
