"""Generators that follow a script, and the real fleet over them: no Ray, no vLLM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paravt_ray.config import Config
from paravt_ray.episode import Group, Sample, Trajectory
from paravt_ray.rollout.canary import CanaryRun
from paravt_ray.rollout.fleet import GeneratorFleet
from paravt_ray.rollout.generator import GeneratorInfo
from paravt_ray.rollout.handle import GeneratorDiedError
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.weights.push import Push

HANG = 3600.0
"""Seconds that no test waits."""


@dataclass
class Script:
    """What the generators of one test do."""

    ready: Callable[[Fake], Any] = lambda fake: None
    """Returns seconds, an event to wait for, or None for no time at all; or raises. So do those below."""
    group: Callable[[Fake, GroupSpec], Any] = lambda fake, spec: None
    """A Group stands for itself."""
    push: Callable[[Fake, Push], Any] = lambda fake, push: None
    sleep: Callable[[Fake], Any] = lambda fake: None
    wake: Callable[[Fake], Any] = lambda fake: None
    health: Callable[[Fake], Any] = lambda fake: None
    canary: Callable[[Fake], float] = lambda fake: -1.0
    """Returns the log-prob that it gives the canary's tokens."""
    canary_s: float = 0.0
    """Seconds that it takes."""
    gpus: Callable[[int], tuple[str, ...]] = lambda index: ()
    made: list[Fake] = field(default_factory=list)

    def start(self, index: int) -> Fake:
        life = sum(fake.index == index for fake in self.made)
        fake = Fake(self, index, life)
        self.made.append(fake)
        return fake


@dataclass
class Fake:
    """One life of one generator."""

    script: Script
    index: int
    life: int
    version: int = 0
    episodes: int = 0
    most_episodes: int = 0
    groups: list[str] = field(default_factory=list)
    served_with: list[int] = field(default_factory=list)
    asleep: bool = False
    ended: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def die(self) -> None:
        """As by SIGKILL: whoever waits for an answer learns of it."""
        self.gone.set()

    async def _do(self, action: Callable[..., Any], *args: Any) -> Any:
        """Do what the script says, or find that the generator has died."""
        result = action(self, *args)
        if isinstance(result, asyncio.Event):
            await result.wait()
            return None
        if self.gone.is_set():
            raise GeneratorDiedError("killed")
        if isinstance(result, (int, float)):
            try:
                async with asyncio.timeout(result):
                    await self.gone.wait()
            except TimeoutError:
                return None
            raise GeneratorDiedError("killed")
        return result

    async def ready(self) -> GeneratorInfo:
        await self._do(self.script.ready)
        return GeneratorInfo(self.index, "here", "node", 1, self.script.gpus(self.index), self.version)

    async def rollout_group(self, spec: GroupSpec) -> Group:
        assert not self.ended and not self.asleep
        self.groups.append(spec.group_id)
        self.served_with.append(self.version)
        self.episodes += spec.group_size
        self.most_episodes = max(self.most_episodes, self.episodes)
        try:
            result = await self._do(self.script.group, spec)
        finally:
            self.episodes -= spec.group_size
        return result or Group(spec.group_id, spec.sample, spec.frame_budget, [])

    async def update_weights(self, push: Push) -> int:
        await self._do(self.script.push, push)
        self.version, self.asleep = push.version, False
        return push.version

    async def sleep(self) -> None:
        await self._do(self.script.sleep)
        self.asleep = True

    async def wake(self) -> None:
        await self._do(self.script.wake)
        self.asleep = False

    async def canary(self) -> CanaryRun:
        assert not self.asleep
        await self._do(lambda fake: self.script.canary_s)
        trajectory = Trajectory()
        trajectory.append_generated([1, 2], [self.script.canary(self)] * 2, self.version)
        return CanaryRun(trajectory, self.version, self.index)

    async def health(self, timeout_s: float) -> int:
        await self._do(self.script.health)
        return self.version

    async def shutdown(self) -> None:
        self.ended = True

    def kill(self) -> None:
        self.ended = True
        self.die()


def make_config(generators: int = 2, concurrency: int = 8, max_restarts: int = 3) -> Config:
    config = Config()
    config.rollout.generators = generators
    config.rollout.concurrency = concurrency
    config.rollout.max_restarts = max_restarts
    config.rollout.episode_timeout_s = 30.0
    config.rollout.start_timeout_s = 5.0
    config.rollout.push_timeout_s = 5.0
    return config


def make_specs(count: int, size: int = 4) -> list[GroupSpec]:
    sample = Sample("s", "?", ("v.mp4",), "A", "mcq")
    return [GroupSpec(f"g{number}", sample, 4, size, temperature=0.7, seed=0) for number in range(count)]


def make_push(version: int) -> Push:
    return Push(version, "", "/nowhere", 0, "", ())


def make_fleet(script: Script, config: Config) -> GeneratorFleet:
    return GeneratorFleet(config, None, Path(), script.start)  # type: ignore[arg-type]  # no crop service


@contextmanager
def running(script: Script, config: Config) -> Iterator[GeneratorFleet]:
    with make_fleet(script, config) as fleet:
        yield fleet
    assert all(fake.ended for fake in script.made)
    assert not [thread for thread in threading.enumerate() if thread.name == "generator-fleet"]
