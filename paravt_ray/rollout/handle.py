"""What the fleet asks of a generator, and the generator as a Ray actor."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from paravt_ray.config import Config
from paravt_ray.episode import Group
from paravt_ray.rollout.canary import CanaryRun
from paravt_ray.rollout.generator import Generator, GeneratorInfo, actor_options, log_file, log_tail
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.weights.push import Push

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from tool_workers.pool import CropPool

Answer = TypeVar("Answer")


class GeneratorDiedError(RuntimeError):
    """The generator's process has ended."""


class GeneratorHandle(Protocol):
    """A generator that was started and can be spoken to. Deadlines are the caller's.

    Every method but `kill` raises GeneratorDiedError where the generator is gone.
    """

    async def ready(self) -> GeneratorInfo:
        """Wait until its engine runs."""
        ...

    async def rollout_group(self, spec: GroupSpec) -> Group:
        """Roll out one prompt."""
        ...

    async def update_weights(self, push: Push) -> int:
        """Load a version of the weights and return it."""
        ...

    async def sleep(self) -> None:
        """Give up its GPU's memory."""
        ...

    async def wake(self) -> None:
        """Take it again; so does `update_weights`."""
        ...

    async def canary(self) -> CanaryRun:
        """Generate the canary."""
        ...

    async def health(self, timeout_s: float) -> int:
        """Return the version of its weights; TimeoutError where its engine does not answer, EngineError if broken."""
        ...

    async def shutdown(self) -> None:
        """End its engine in order."""
        ...

    def kill(self) -> None:
        """End its process at once, and its children with it."""
        ...


class RayGenerator:
    """A `Generator` actor."""

    def __init__(
        self, config: Config, index: int, pool: CropPool, log_dir: Path, placement_group: PlacementGroup | None = None
    ) -> None:
        """Create the actor, in place `index` of `placement_group` where it shares its GPU; `ready` waits for it."""
        import ray

        from paravt_ray.placement import has_gpus, place

        self._log = log_file(log_dir, index)
        self._index = index
        where = place(placement_group, index, share=0.5) if placement_group else {}
        actor = ray.remote(Generator).options(**actor_options(config, has_gpus()) | where)
        self._actor = actor.remote(config, index, pool, str(log_dir))

    async def ready(self) -> GeneratorInfo:
        """See `GeneratorHandle`."""
        return await self._answer(self._actor.ready.remote())

    async def rollout_group(self, spec: GroupSpec) -> Group:
        """See `GeneratorHandle`."""
        return await self._answer(self._actor.rollout_group.remote(spec))

    async def update_weights(self, push: Push) -> int:
        """See `GeneratorHandle`."""
        return await self._answer(self._actor.update_weights.remote(push))

    async def sleep(self) -> None:
        """See `GeneratorHandle`."""
        await self._answer(self._actor.sleep.remote())

    async def wake(self) -> None:
        """See `GeneratorHandle`."""
        await self._answer(self._actor.wake.remote())

    async def canary(self) -> CanaryRun:
        """See `GeneratorHandle`."""
        return await self._answer(self._actor.canary.remote())

    async def health(self, timeout_s: float) -> int:
        """See `GeneratorHandle`."""
        return await self._answer(self._actor.health.remote(timeout_s))

    async def shutdown(self) -> None:
        """See `GeneratorHandle`."""
        await self._answer(self._actor.shutdown.remote())

    def kill(self) -> None:
        """See `GeneratorHandle`."""
        import ray

        ray.kill(self._actor)

    async def _answer(self, reference: Awaitable[Answer]) -> Answer:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await reference
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise GeneratorDiedError(
                f"The process of generator {self._index} has ended. {error} The last lines of {self._log}:\n"
                f"{log_tail(self._log)}"
            ) from error
