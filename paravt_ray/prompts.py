"""Which prompts a run asks and when: those of a step, those of the steps ahead, and further ones in a step's place.

Every prompt of the endless order is asked for one step, once. A checkpoint holds which of them its steps have consumed;
those that were asked ahead for later steps are asked again after a restart, and none is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from paravt_ray.config import Config
from paravt_ray.data.reader import SampleStream
from paravt_ray.episode import Group, Sample
from paravt_ray.rollout.fleet import Batch, GeneratorFleet
from paravt_ray.rollout.gating import draw_frame_budget
from paravt_ray.rollout.spec import GroupSpec


class _Asked(NamedTuple):
    """Prompts that were handed out for one step."""

    batch: Batch
    positions: list[int]
    """Theirs in the order of samples."""


class PromptQueue:
    """Draws prompts and hands them to the generators."""

    def __init__(self, config: Config, samples: Sequence[Sample]) -> None:
        """Start with the first prompt for step 1.

        Raises:
            DataError: there are no samples.
        """
        self._config = config
        self._stream = SampleStream(samples, config.trainer.seed)
        self._last_step = 0
        """The last step whose prompts were handed out."""
        self._ahead: deque[_Asked] = deque()
        """Steps that are rolled out, oldest first."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: what was consumed, without what was only asked ahead."""
        return self._stream.state(ahead=[position for asked in self._ahead for position in asked.positions])

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Go on behind a saved state, with the prompts of the step after `step`. Nothing may be asked yet."""
        self._stream.restore(state)
        self._last_step = step

    def roll_out(self, fleet: GeneratorFleet, step: int) -> list[Group]:
        """Hand out the prompts of this step and of as many later ones as `rollout.staleness` allows; this one's groups.

        Raises:
            FleetError: no generator is left, or nothing comes back any more.
        """
        rollout = self._config.rollout
        last = min(step + rollout.staleness, self._config.trainer.steps)
        while self._last_step < last:
            self._last_step += 1
            specs, positions = self._draw(self._last_step, range(rollout.prompts_per_step))
            self._ahead.append(_Asked(fleet.submit(specs), positions))
        return self._ahead.popleft().batch.all()

    def roll_out_further(self, fleet: GeneratorFleet, step: int, numbers: range) -> list[Group]:
        """Ask further prompts for a step with the current weights, before those of the steps ahead.

        Args:
            fleet: the generators.
            step: the step that is going on.
            numbers: one for each prompt, behind those that its earlier ones had.

        Raises:
            FleetError: as `roll_out`.
        """
        specs, _ = self._draw(step, numbers)
        return fleet.submit(specs, first=True).all()

    def _draw(self, step: int, numbers: range) -> tuple[list[GroupSpec], list[int]]:
        """The next prompts as groups `STEP/NUMBER`, and their positions."""
        rollout, seed = self._config.rollout, self._config.trainer.seed
        drawn = self._stream.take(len(numbers))
        specs = [
            GroupSpec(
                group_id=f"{step}/{number}",
                sample=sample,
                frame_budget=draw_frame_budget(seed, sample.sample_id, epoch, rollout.frame_budgets)
                if rollout.gating
                else rollout.overview_frames,
                group_size=rollout.group_size,
                temperature=rollout.temperature,
                seed=seed,
                epoch=epoch,
            )
            for number, (sample, epoch, _) in zip(numbers, drawn, strict=True)
        ]
        return specs, [one.position for one in drawn]
