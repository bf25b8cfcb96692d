"""The learning rate as a function of the optimizer step, computed here and nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paravt_ray.config import Config, ConfigError, LearnerConfig


@dataclass(frozen=True)
class LrSchedule:
    """Linear warm-up, then constant or a half cosine that reaches 0 after the last step."""

    peak: float
    warmup_steps: int
    total_steps: int
    kind: str
    """`constant` or `cosine`."""

    @classmethod
    def from_config(cls, config: LearnerConfig, total_steps: int) -> LrSchedule:
        """The schedule of a run of `total_steps` optimizer steps.

        Raises:
            ConfigError: the warm-up is longer than the run.
        """
        if config.warmup_steps > total_steps:
            raise ConfigError(
                f"learner.warmup_steps is {config.warmup_steps}, but the run has {total_steps} optimizer steps: "
                "the learning rate would never reach learner.lr."
            )
        return cls(config.lr, config.warmup_steps, total_steps, config.schedule)

    @classmethod
    def of_training(cls, config: Config) -> LrSchedule:
        """The schedule of reinforcement learning, whose steps make `learner.updates_per_step` optimizer steps each.

        Raises:
            ConfigError: as `from_config`.
        """
        return cls.from_config(config.learner, config.trainer.steps * config.learner.updates_per_step)

    def at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def describe(self) -> str:
        """One line for the log."""
        last = max(0, self.total_steps - 1)
        return (
            f"learning rate: {self.kind}, {self.total_steps} optimizer steps, {self.warmup_steps} of them warm-up; "
            f"first {self.at(0):.3g}, middle {self.at(last // 2):.3g}, last {self.at(last):.3g}"
        )
