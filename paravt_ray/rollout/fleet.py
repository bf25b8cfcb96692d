"""The fleet: all generators of a run, seen from the driver. Groups in, groups out, each exactly once.

The driver calls it as it calls anything else; behind that, one event loop in a thread of its own hands out work, keeps
watch, and replaces generators that die, also while the driver is busy elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paravt_ray.config import Config
from paravt_ray.episode import Group
from paravt_ray.errors import UserError
from paravt_ray.rollout.canary import CanaryRun
from paravt_ray.rollout.generator import GeneratorInfo
from paravt_ray.rollout.handle import GeneratorHandle, RayGenerator
from paravt_ray.rollout.member import ATTEMPTS, GRACE_S, POLL_S, SHUTDOWN_S, Job, Member
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.weights.push import Push

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from tool_workers.pool import CropPool

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class FleetError(UserError):
    """The generators cannot go on: they did not start, none is left, or none answers."""


@dataclass(frozen=True)
class MemberStatus:
    """One generator, for people and metrics."""

    index: int
    state: str
    restarts: int
    episodes: int
    """In flight."""
    reason: str
    """Why it is suspect, dead or retired."""


class Batch:
    """Groups that were asked for together. Several batches may be under way; none gets another one's groups."""

    def __init__(self, specs: Sequence[GroupSpec], silence_s: float, delivered_at: Callable[[], float]) -> None:
        """Nothing is handed out yet.

        Args:
            specs: the groups.
            silence_s: seconds without any group after which a healthy fleet would have delivered one.
            delivered_at: when the fleet last delivered a group of any batch, by `time.monotonic`.
        """
        self._specs = list(specs)
        self._silence_s, self._delivered_at = silence_s, delivered_at
        self._results: queue.SimpleQueue[Group | FleetError] = queue.SimpleQueue()
        self.deliver: Callable[[Group | FleetError], None] = self._results.put

    def collect(self, count: int) -> list[Group]:
        """Wait for that many of the groups, as they are finished.

        Raises:
            FleetError: no generator is left, or nothing comes back any more.
        """
        groups: list[Group] = []
        waited_since = time.monotonic()
        while len(groups) < count:
            silent_s = time.monotonic() - max(waited_since, self._delivered_at())
            if silent_s > self._silence_s:
                raise FleetError(f"No group came back for {silent_s:.0f} s.")
            try:
                result = self._results.get(timeout=self._silence_s - silent_s)
            except queue.Empty:
                continue  # earlier batches may have been served in the meantime
            if isinstance(result, FleetError):
                raise result
            groups.append(result)
        return groups

    def all(self) -> list[Group]:
        """Wait for all groups and return them in the order in which they were asked for.

        Raises:
            FleetError: as `collect`.
        """
        groups = {group.group_id: group for group in self.collect(len(self._specs))}
        return [groups[spec.group_id] for spec in self._specs]


class GeneratorFleet:
    """Use as a context manager: entering starts all generators, without waiting; leaving ends them."""

    def __init__(
        self,
        config: Config,
        pool: CropPool,
        log_dir: Path,
        start: Callable[[int], GeneratorHandle] | None = None,
        *,
        placement_group: PlacementGroup | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            config: the run's.
            pool: the crop service.
            log_dir: folder for the generators' logs.
            start: makes the generator of a given index; Ray actors by default.
            placement_group: where each of those shares a place with a learner rank; None where each has its GPUs alone.
        """
        self._config = config
        self._start = start or (lambda index: RayGenerator(config, index, pool, log_dir, placement_group))
        self._batches: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="generator-fleet", daemon=True)
        self._jobs: deque[Job] = deque()
        self._members: list[Member] = []
        self._lives: list[asyncio.Task[None]] = []
        self._closing = False
        self._delivered_at = time.monotonic()
        self.awake = asyncio.Event()
        """Cleared while the generators sleep."""
        self.awake.set()
        self.push: Push | None = None
        """The weights that generators serve with; None for those of the checkpoint."""
        self.agreed: CanaryRun | None = None
        """The canary to which the learner has agreed last; see `agree`."""

    def __enter__(self) -> GeneratorFleet:
        """Start all generators; `wait_started` and every call that needs them waits until they are ready."""
        self._thread.start()
        self._call(self._start_members(), GRACE_S)
        return self

    def __exit__(self, *error: object) -> None:
        """End all generators and everything that they started."""
        self._closing = True
        try:
            self._call(self._stop_members(), SHUTDOWN_S + GRACE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(GRACE_S)

    # ---- for the driver --------------------------------------------------------------------------------------------

    def wait_started(self) -> list[GeneratorInfo]:
        """Wait for all first starts.

        Raises:
            FleetError: one failed or took longer than `rollout.start_timeout_s`, or two hold the same GPU.
        """
        return self._call(self._all_started(), self._config.rollout.start_timeout_s + GRACE_S)

    def rollout(self, specs: Sequence[GroupSpec]) -> list[Group]:
        """Roll out prompts and return their groups in the same order.

        Raises:
            FleetError: no generator is left, or nothing comes back any more.
        """
        return self.submit(specs).all()

    def submit(self, specs: Sequence[GroupSpec], *, first: bool = False) -> Batch:
        """Hand out prompts without waiting for their groups, behind those that still wait or `first` of all."""
        self.wait_started()
        # The longest that a working fleet can be silent: a group dies at its deadline in every attempt, and before
        # each new one a generator starts and loads the weights.
        attempt_s = 2 * self._config.rollout.episode_timeout_s + GRACE_S
        silence_s = ATTEMPTS * (attempt_s + self._recovery_s + GRACE_S)
        batch = Batch(specs, silence_s, lambda: self._delivered_at)
        self._loop.call_soon_threadsafe(self._take_on, batch, [Job(spec, batch.deliver) for spec in specs], first)
        return batch

    def push_weights(self, push: Push) -> float:
        """Have every generator load a version, and every one that is (re)started later before it takes work.

        A generator that fails is replaced, and its successor loads them. Those that sleep wake for it.

        Returns:
            Seconds that it took.

        Raises:
            FleetError: not one generator that runs could load it; with the first one's reason.
        """
        self.wait_started()
        started = time.perf_counter()
        self._call(self._push(push), self._config.rollout.push_timeout_s + 2 * GRACE_S)
        return time.perf_counter() - started

    def sleep(self) -> None:
        """Have every generator give up its GPU's memory until `wake` or `push_weights`; no group may be under way.

        One that is just starting does so first. One that cannot is ended; what is ended, or dies meanwhile, is started
        again when the others wake.

        Raises:
            FleetError: it takes longer than starting, loading and checking a generator may.
        """
        self.wait_started()
        rollout = self._config.rollout
        self._call(self._sleep(), self._recovery_s + rollout.turn_timeout_s + rollout.push_timeout_s + 4 * GRACE_S)

    def wake(self) -> None:
        """Have every generator that sleeps serve again with the weights that it holds; who cannot is replaced.

        Raises:
            FleetError: they do not answer.
        """
        rollout = self._config.rollout
        self._call(self._wake(), rollout.push_timeout_s + rollout.turn_timeout_s + 3 * GRACE_S)

    def canary(self) -> list[CanaryRun]:
        """Let every generator that serves make the canary with the weights it holds.

        Raises:
            FleetError: none could.
        """
        self.wait_started()
        return self._call(self._canary(), self._recovery_s + self._config.rollout.turn_timeout_s + 2 * GRACE_S)

    def agree(self, run: CanaryRun) -> None:
        """Hold generators to a canary of these weights to which the learner has agreed.

        Who has these weights and has not made it, or loads them later, makes it before the next group that it takes;
        who sleeps, when it wakes. One that makes another of it is replaced.

        Raises:
            FleetError: they do not answer.
        """
        self._call(self._agree(run), self._config.rollout.turn_timeout_s + 2 * GRACE_S)

    def status(self) -> list[MemberStatus]:
        """How the generators are."""
        return [
            MemberStatus(m.index, m.health.state, m.health.restarts, m.episodes, m.health.reason) for m in self._members
        ]

    # ---- for the members (see `Desk`), in the loop's thread ---------------------------------------------------------

    def finished(self, job: Job, group: Group) -> None:
        """Deliver a group."""
        self._deliver(job, group)
        self._hand_out()

    def failed(self, job: Job, reason: str) -> None:
        """Give a group to another generator, or give it up."""
        job.failures.append(reason)
        spec = job.spec
        if len(job.failures) < ATTEMPTS:
            if not self._closing:
                logger.warning("Group %s is done again: %s", spec.group_id, reason)
            self._jobs.appendleft(job)
        else:
            failures = [f"generator: {reason}"] * spec.group_size
            self._deliver(job, Group(spec.group_id, spec.sample, spec.frame_budget, [], failures))
        self._hand_out()

    def changed(self) -> None:
        """Go on handing out; report where that can never happen again."""
        self._hand_out()
        if all(life.done() for life in self._lives):
            for batch in self._batches:
                batch.deliver(FleetError(f"No generator is left. {self._summary()}"))

    # ---- in the loop's thread --------------------------------------------------------------------------------------

    def _deliver(self, job: Job, group: Group) -> None:
        self._delivered_at = time.monotonic()
        job.deliver(group)

    def _take_on(self, batch: Batch, jobs: list[Job], first: bool) -> None:
        self._batches.add(batch)
        if first:
            self._jobs.extendleft(reversed(jobs))
        else:
            self._jobs.extend(jobs)
        self.changed()

    def _hand_out(self) -> None:
        """Give waiting groups to the generators with the fewest episodes, as far as there is room."""
        while self._jobs and not self._closing:
            able = [m for m in self._members if m.health.serving and not m.reserved and m.owed is None]
            member = min(able, key=lambda m: m.episodes, default=None)
            job = self._jobs[0]
            # A group that is larger than what may be in flight goes to a generator that has nothing else.
            room = 0 if job.last_attempt else self._config.rollout.concurrency - job.spec.group_size
            if member is None or (member.episodes > 0 and member.episodes > room):
                return
            member.assign(self._jobs.popleft())

    async def _start_members(self) -> None:
        for index in range(self._config.rollout.generators):
            self._members.append(Member(index, self._start, self, self._config))
        self._lives = [self._loop.create_task(member.run()) for member in self._members]
        for life in self._lives:
            life.add_done_callback(lambda _: self.changed())

    async def _stop_members(self) -> None:
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)

    async def _all_started(self) -> list[GeneratorInfo]:
        try:
            infos = await asyncio.gather(*(asyncio.shield(member.started) for member in self._members))
        except RuntimeError as error:
            raise FleetError(f"The generators could not be started. {error}") from error
        owners: dict[tuple[str, str], int] = {}
        for info in infos:
            for gpu in info.gpus:
                other = owners.setdefault((info.node_id, gpu), info.index)
                if other != info.index:
                    raise FleetError(
                        f"Generators {other} and {info.index} both hold GPU {gpu} of {info.host}: something overrides "
                        "CUDA_VISIBLE_DEVICES (is RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES set?)."
                    )
        return infos

    async def _sleep(self) -> None:
        self.awake.clear()
        await asyncio.gather(*(member.sleep() for member in self._members))

    async def _agree(self, run: CanaryRun) -> None:
        self.agreed = run
        await asyncio.gather(*(member.check() for member in self._members))

    async def _wake(self) -> None:
        self.awake.set()
        await asyncio.gather(*(member.wake() for member in self._members))

    async def _push(self, push: Push) -> None:
        self.push = push
        self.awake.set()
        results = await asyncio.gather(*(member.load(push) for member in self._members), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors and True not in results:
            raise FleetError(f"No generator could load version {push.version} of the weights. {errors[0]}")

    @property
    def _recovery_s(self) -> float:
        """Seconds in which a generator that died is started again and has loaded the weights."""
        return self._config.rollout.start_timeout_s + self._config.rollout.push_timeout_s

    async def _until_serving(self) -> None:
        """Wait for a generator that serves: the only one may just be starting again."""
        deadline = self._loop.time() + self._recovery_s
        while not any(member.health.serving for member in self._members):
            if all(life.done() for life in self._lives) or self._loop.time() > deadline:
                raise FleetError(f"No generator serves. {self._summary()}")
            await asyncio.sleep(POLL_S)

    async def _canary(self) -> list[CanaryRun]:
        await self._until_serving()
        runs = await asyncio.gather(*(member.canary() for member in self._members))
        found = [run for run in runs if run is not None]
        if not found:
            raise FleetError(f"No generator made the canary. {self._summary()}")
        return found

    def _summary(self) -> str:
        return " ".join(
            f"Generator {m.index} is {m.state} after {m.restarts} restarts{f' ({m.reason})' if m.reason else ''}."
            for m in self.status()
        )

    def _call(self, work: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        """Run something in the loop's thread and wait for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise FleetError(f"The generators did not answer within {timeout_s:g} s. {self._summary()}") from error
