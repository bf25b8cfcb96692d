"""Generators and a learner that only wait, for what one machine cannot show: many devices, and a thousand engines.

What is real: the driver's side, that is `Trainer`, `GeneratorFleet`, its members and their watch, rewards, advantages,
metrics and files, and every message to and from the generators, which live in other processes (Ray actors, many
generators in each). What is not: the generators' and the learner's work, which is a pause.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from paravt_ray.bench._table import Row, say
from paravt_ray.bench._trainer import BenchTrainer
from paravt_ray.bench._workload import bench_config, spec_of
from paravt_ray.config import Config
from paravt_ray.episode import Episode, Frame, Group, Sample, TrainRow, Trajectory, TurnRecord
from paravt_ray.parsing import parse_turn
from paravt_ray.rollout.canary import CanaryRun
from paravt_ray.rollout.fleet import GeneratorFleet
from paravt_ray.rollout.gating import stable_hash
from paravt_ray.rollout.generator import GeneratorInfo
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.tracking.run_dir import RunDir
from paravt_ray.weights.push import Push

PROMPT_TOKENS, NEW_TOKENS, FRAMES = 800, 400, 16
"""Of one simulated episode; frames of 32x32."""
GENERATORS = 4
"""Where training is simulated too."""


@dataclass(frozen=True)
class Pause:
    """How long a generator takes for a group: uniform between the two, in seconds, the same for the same group."""

    shortest: float
    longest: float

    def of(self, spec: GroupSpec) -> float:
        """Seconds."""
        share = stable_hash("pause", spec.group_id) / 2**63
        return self.shortest + share * (self.longest - self.shortest)


class SimulatedHost:
    """A Ray actor that stands for many generators."""

    def __init__(self, pause: Pause) -> None:
        rng = np.random.default_rng(0)
        frames = [
            Frame(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8), float(t), f"simulated@{t}") for t in range(FRAMES)
        ]
        self._pause, self._frames = pause, frames
        self._ids: list[int] = rng.integers(10, 250, PROMPT_TOKENS + NEW_TOKENS).tolist()

    async def rollout_group(self, spec: GroupSpec, version: int) -> Group:
        """Wait, then return a group of the right size."""
        await asyncio.sleep(self._pause.of(spec))
        episodes = [self._episode(spec, index, version) for index in range(spec.group_size)]
        return Group(spec.group_id, spec.sample, spec.frame_budget, episodes)

    async def ready(self, index: int) -> GeneratorInfo:
        """At once."""
        return GeneratorInfo(index, "simulated", "simulated", 0, (), 0)

    async def health(self) -> None:
        """Answer."""

    def _episode(self, spec: GroupSpec, index: int, version: int) -> Episode:
        trajectory = Trajectory()
        prompt = self._ids[:PROMPT_TOKENS]
        trajectory.append_prompt(prompt, prompt, self._frames)
        trajectory.append_generated(self._ids[PROMPT_TOKENS:], [-0.5 - index / 100] * NEW_TOKENS, version)
        answer = "A" if index % 2 else "B"
        turn = parse_turn(f"look\n</think>\n<answer>{answer}</answer>", think_prefilled=True)
        record = TurnRecord(turn, PROMPT_TOKENS, len(trajectory), "stop")
        times = [frame.time_s for frame in self._frames]
        return Episode(
            spec.sample, spec.group_id, index, spec.frame_budget, trajectory, [record], times, True, "answered"
        )


class SimulatedGenerator:
    """One generator as the fleet sees it (`GeneratorHandle`)."""

    def __init__(self, index: int, host: Any) -> None:
        """`host` is the actor that stands for it."""
        self._index, self._host, self._version = index, host, 0

    async def ready(self) -> GeneratorInfo:
        """See `GeneratorHandle`."""
        return cast(GeneratorInfo, await self._host.ready.remote(self._index))

    async def rollout_group(self, spec: GroupSpec) -> Group:
        """See `GeneratorHandle`."""
        return cast(Group, await self._host.rollout_group.remote(spec, self._version))

    async def update_weights(self, push: Push) -> int:
        """See `GeneratorHandle`."""
        self._version = push.version
        return push.version

    async def canary(self) -> CanaryRun:
        """See `GeneratorHandle`."""
        trajectory = Trajectory()
        trajectory.append_prompt([1], [1], [])
        trajectory.append_generated([1], [-1.0], self._version)
        return CanaryRun(trajectory, self._version, self._index)

    async def sleep(self) -> None:
        """See `GeneratorHandle`."""

    async def wake(self) -> None:
        """See `GeneratorHandle`."""

    async def health(self, timeout_s: float) -> int:
        """See `GeneratorHandle`."""
        await self._host.health.remote()
        return self._version

    async def shutdown(self) -> None:
        """See `GeneratorHandle`."""

    def kill(self) -> None:
        """See `GeneratorHandle`."""


class SimulatedLearner:
    """A learner on devices of its own: the driver waits for it."""

    def __init__(self, update_s: float) -> None:
        """`update_s` is how long one update takes, in seconds."""
        self._update_s = update_s

    def update(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """Wait."""
        time.sleep(self._update_s)
        return {}

    def publish(self, version: int) -> Push:
        """A version without bytes."""
        return Push(version, "", "", 0, "", ())

    def logprobs(self, rows: Sequence[TrainRow]) -> list[NDArray[np.float32]]:
        """What the generators say."""
        return [row.behaviour_logprobs for row in rows]


# ---- a step on separate devices, one version apart -------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """A cluster of four generators and a learner, some twenty times faster than a real one."""

    pause: Pause = Pause(1.5, 3.0)
    update_s: float = 3.0
    steps: int = 6


def overlap_row(model: Path, folder: Path, overlap: Overlap = Overlap()) -> Row:
    """A step at `rollout.staleness=1` against the slower of its rollout and its training alone.

    Needs a connected Ray cluster.
    """
    say(f"Simulating {overlap.steps} steps with and without overlap ...")
    _, stages = _steps(model, folder / "synchronous", overlap, staleness=0)
    overlapped, _ = _steps(model, folder / "overlapped", overlap, staleness=1)
    slower = max(statistics.median(stage[name] for stage in stages) for name in ("rollout", "train"))
    name = "slower of rollout and training"
    return Row("step at staleness 1, simulated", statistics.median(overlapped), slower, name, 0.9, "s", True)


def _steps(model: Path, run_dir: Path, overlap: Overlap, staleness: int) -> tuple[list[float], list[dict[str, float]]]:
    """Seconds of each step after the first, and of its stages."""
    config = bench_config(model, run_dir)
    config.rollout.generators, config.rollout.staleness = GENERATORS, staleness
    # One step's groups keep all generators busy; those of the next wait for room.
    config.rollout.concurrency = config.rollout.prompts_per_step * config.rollout.group_size // GENERATORS
    samples = [Sample(f"s{number}", "Which?", ("clip.mp4",), "A", "mcq") for number in range(64)]
    seconds, stages = [], []
    with (
        RunDir(config) as run,
        _fleet(config, run.logs, overlap.pause, hosts=1) as fleet,
        BenchTrainer(config, samples, run, fleet, SimulatedLearner(overlap.update_s)) as trainer,
    ):
        for step in range(1, overlap.steps + 2):
            seconds.append(trainer.timed_step(step))
            stages.append(dict(trainer.seconds))
    return seconds[1:], stages[1:]


def _fleet(config: Config, log_dir: Path, pause: Pause, hosts: int) -> GeneratorFleet:
    import ray

    options = {"num_cpus": 0, "max_concurrency": 100_000}
    actors = [ray.remote(SimulatedHost).options(**options).remote(pause) for _ in range(hosts)]
    no_pool = cast(Any, None)
    return GeneratorFleet(config, no_pool, log_dir, lambda index: SimulatedGenerator(index, actors[index % hosts]))


# ---- the driver of a thousand generators -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Crowd:
    """Many generators, all busy with as many episodes as they may have."""

    generators: int = 1000
    episodes: int = 10
    """Of each generator at the same time, in two groups."""
    pause: Pause = Pause(30.0, 90.0)
    seconds: float = 120.0
    """How long it goes on."""


def driver_row(folder: Path, crowd: Crowd = Crowd()) -> Row:
    """CPU seconds of the driver's process per second while it feeds a crowd of generators; the limit is one core.

    Needs a connected Ray cluster.
    """
    config = bench_config(folder, folder / "crowd")
    config.rollout.generators, config.rollout.concurrency = crowd.generators, crowd.episodes
    config.rollout.group_size = crowd.episodes // 2
    say(f"Simulating {crowd.generators} generators for {crowd.seconds:g} s ...")
    sample = Sample("s", "Which?", ("clip.mp4",), "A", "mcq")
    enough = int(2 * crowd.generators * (1 + crowd.seconds / crowd.pause.shortest))
    specs = [spec_of(sample, config, f"{number}", config.rollout.group_size) for number in range(enough)]
    with _fleet(config, folder, crowd.pause, hosts=2) as fleet:
        fleet.wait_started()
        wall, cpu = time.perf_counter(), time.process_time()
        batch = fleet.submit(specs)
        while time.perf_counter() - wall < crowd.seconds:
            batch.collect(1)
        cores = (time.process_time() - cpu) / (time.perf_counter() - wall)
    what = f"driver of {crowd.generators:,} generators, {crowd.generators * crowd.episodes:,} episodes, simulated"
    return Row(what, cores, 1.0, "one core", 1.0, "cores", less_is_better=True)
