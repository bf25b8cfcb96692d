"""How much memory one learner rank needs, told from the checkpoint's shapes before anything is loaded."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from paravt_ray.config import Config
from paravt_ray.learner.lora import TARGETS
from paravt_ray.weights.manifest import Shapes

_WIDTHS = {"float32": 4, "bfloat16": 2}
_FLOAT32 = 4


@dataclass(frozen=True)
class LearnerSize:
    """Bytes that one rank holds all the time; activations and DeepSpeed's buffers come on top."""

    parameters: int
    """Of the checkpoint, a number."""
    checkpoint: int
    """All its weights, of which an engine holds as many."""
    pushed: int
    """The part of them that a push brings."""
    trained: int
    """Parameters with gradients, a number."""
    weights: int
    gradients: int
    optimizer: int
    """Adam's two moments, and the float32 weights where the model is in bfloat16."""
    reference: int
    """A second model; 0 where there is none."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.gradients + self.optimizer + self.reference


def learner_size(shapes: Shapes, config: Config) -> LearnerSize:
    """What training a checkpoint with these tensors takes on each rank, as `learner` and `algorithm` are set."""
    learner = config.learner
    width = _WIDTHS[config.model.dtype]
    parameters = sum(math.prod(shape) for shape in shapes.values())
    adapter = sum(learner.lora_rank * sum(shape) for name, shape in shapes.items() if _is_adapted(name))
    trained = adapter if learner.lora_rank else parameters

    def spread(count: int, size: int, from_stage: int) -> int:
        return count * size // (learner.ranks if learner.zero_stage >= from_stage else 1)

    # With LoRA the frozen base is the reference policy.
    has_reference = config.algorithm.kl_coefficient > 0 and not learner.lora_rank
    return LearnerSize(
        parameters=parameters,
        checkpoint=parameters * width,
        pushed=trained * width,
        trained=trained,
        weights=spread(parameters + adapter, width, 3),
        gradients=spread(trained, _FLOAT32, 2),
        optimizer=spread(trained, 2 * _FLOAT32 + (_FLOAT32 if width < _FLOAT32 else 0), 1),
        reference=spread(parameters, width, 3) if has_reference else 0,
    )


def _is_adapted(name: str) -> bool:
    return name.endswith(".weight") and re.fullmatch(TARGETS, name.removesuffix(".weight")) is not None
