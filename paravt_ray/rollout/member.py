"""One place in the fleet: the generator that fills it now, its work, its death and its successor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from paravt_ray.config import Config
from paravt_ray.episode import Group
from paravt_ray.rollout.canary import CanaryRun, check_successor
from paravt_ray.rollout.generator import GeneratorInfo
from paravt_ray.rollout.handle import GeneratorDiedError, GeneratorHandle
from paravt_ray.rollout.health import Health, State
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.weights.push import Push, WeightError

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
"""Seconds between two questions for a sign of life, and the deadline of one."""
SUSPECT_S = 60.0
"""Seconds without a sign of life after which a generator is replaced."""
GRACE_S = 30.0
"""Seconds that a generator has, beyond its own deadline, to say that it missed it."""
SHUTDOWN_S = 15.0
POLL_S = 0.2
ATTEMPTS = 3
"""Times that a group is tried; it may be the group that kills its generators."""


@dataclass(eq=False)
class Job:
    """A group to be rolled out, delivered exactly once however many generators die over it."""

    spec: GroupSpec
    deliver: Callable[[Group], None]
    """Takes the finished group."""
    failures: list[str] = field(default_factory=list)
    """A reason for each attempt that failed."""

    @property
    def last_attempt(self) -> bool:
        """Whether it is given up if it fails once more. It is made alone, so that who kills a generator kills no other
        group's last chance with it."""
        return len(self.failures) == ATTEMPTS - 1


class Desk(Protocol):
    """Where members get the current weights and hand in their work."""

    push: Push | None
    """The current weights; None for those of the checkpoint."""
    agreed: CanaryRun | None
    """What a generator with the weights of its version made of the canary, and the learner agreed to."""
    awake: asyncio.Event
    """Cleared while generators sleep. Their GPUs are another's then, and none may start there."""

    def finished(self, job: Job, group: Group) -> None:
        """A group is done."""
        ...

    def failed(self, job: Job, reason: str) -> None:
        """An attempt at a group came to nothing."""
        ...

    def changed(self) -> None:
        """A member can take more work than before."""
        ...


class Member:
    """Keeps one generator running: starts it, gives it the current weights, watches it, replaces it when it dies."""

    def __init__(self, index: int, start: Callable[[int], GeneratorHandle], desk: Desk, config: Config) -> None:
        """`start` makes the generator of a given index."""
        self.index, self._start, self._desk, self._config = index, start, desk, config
        self.health = Health(config.rollout.max_restarts, SUSPECT_S, time.monotonic)
        self.episodes = 0
        """In flight."""
        self.reserved = False
        """Whether a group makes its last attempt here, alone."""
        self.started: asyncio.Future[GeneratorInfo] = asyncio.get_running_loop().create_future()
        """The first start: where the generator runs, or why it does not."""
        self._handle: GeneratorHandle | None = None
        self._loaded: Push | None = None
        self._checked: int | None = None
        """The version of the weights with which it made the canary last."""
        self._death = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading = asyncio.Lock()
        self._news = asyncio.Event()
        """Set when there is a push, and when there will be none, since the fleet goes to sleep."""

    async def run(self) -> None:
        """Live until cancelled or retired."""
        while True:
            self._death.clear()
            try:
                await self._desk.awake.wait()
                self._handle = self._start(self.index)
                await self._live(self._handle)
            except asyncio.CancelledError:
                await self._end()
                raise
            except Exception as error:  # whatever ends a generator's life, it is replaced
                self.health.died(_reason(error))
            if self._handle is not None:
                self._handle.kill()
            await self._drop_work()
            self._handle = self._loaded = self._checked = None
            logger.warning("Generator %d died: %s", self.index, self.health.reason)
            if not self.started.done():
                self.started.set_exception(RuntimeError(self.health.reason))
                self.health.retire()
                return
            if not self.health.restart():
                return

    @property
    def owed(self) -> CanaryRun | None:
        """The canary that was agreed on, where it holds those weights and has not made it: it takes no group before."""
        agreed = self._desk.agreed
        if agreed is None or self._loaded is None or self._loaded.version != agreed.version:
            return None
        return None if self._checked == agreed.version else agreed

    def assign(self, job: Job) -> None:
        """Take on a group."""
        assert self._handle is not None
        self.episodes += job.spec.group_size
        self.reserved = job.last_attempt
        task = asyncio.get_running_loop().create_task(self._roll_out(self._handle, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def load(self, push: Push) -> bool:
        """Load pushed weights, which the desk already shows; a failure costs the generator its life.

        Returns:
            False where it does not run now; it loads them before it serves again.

        Raises:
            WeightError: it could not load them.
        """
        self._news.set()
        if not self.health.loadable:  # it starts or catches up, with the desk's weights of then; nobody waits for that
            return False
        async with self._loading:
            handle = self._handle
            if handle is None or not self.health.loadable:
                return False
            if self._loaded is push:  # it has just caught up by itself
                return True
            try:
                await self._load(handle, push)
            except GeneratorDiedError as error:  # no fault of the weights; its successor loads them
                self._die(handle, _reason(error))
                return False
            except Exception as error:  # typed for the caller; the generator is replaced whatever it was
                self._die(handle, _reason(error))
                raise WeightError(f"Generator {self.index}: {_reason(error)}") from error
            return True

    async def sleep(self) -> None:
        """Give up the GPU's memory, after its start where it is just starting; one that fails to is ended for it."""
        self._news.set()
        while (handle := self._handle) is not None and self.health.state is not State.ASLEEP:
            if self.health.loadable:
                await self._exchange(handle, handle.sleep, self.health.slept)
            else:  # it starts, or it is being ended
                await asyncio.sleep(POLL_S)

    async def wake(self) -> None:
        """Serve again with the weights that it holds, and make the canary that it owes; who fails to is replaced."""
        if self._handle is not None and self.health.state is State.ASLEEP:
            await self._exchange(self._handle, self._handle.wake, self.health.awoke)
            await self.check()

    async def _exchange(
        self, handle: GeneratorHandle, ask: Callable[[], Awaitable[None]], done: Callable[[], None]
    ) -> None:
        try:
            async with self._loading, asyncio.timeout(self._config.rollout.push_timeout_s + GRACE_S):
                await ask()
            done()
        except Exception as error:  # it is replaced, whatever it was
            self._die(handle, _reason(error))

    async def canary(self) -> CanaryRun | None:
        """Let it generate the canary; None where it does not serve, or dies of it."""
        handle = self._handle
        if handle is None or not self.health.serving:
            return None
        try:
            return await self._canary(handle)
        except Exception as error:  # it is replaced, whatever it was
            self._die(handle, _reason(error))
            return None

    async def check(self) -> None:
        """Make the canary that it owes; who sleeps or starts does so later, and who fails is replaced."""
        handle = self._handle
        if handle is None or self.owed is None or self.health.state not in (State.SERVING, State.SUSPECT):
            return
        try:
            await self._check(handle)
        except Exception as error:  # it is replaced, whatever it was
            self._die(handle, _reason(error))
        else:
            self._desk.changed()

    async def _check(self, handle: GeneratorHandle) -> None:
        if (owed := self.owed) is not None:
            check_successor(await self._canary(handle), owed, self._config.model.dtype)

    async def _canary(self, handle: GeneratorHandle) -> CanaryRun:
        async with asyncio.timeout(self._config.rollout.turn_timeout_s + GRACE_S):
            run = await handle.canary()
        self._checked = run.version
        return run

    async def _live(self, handle: GeneratorHandle) -> None:
        """Start, then serve until death."""
        timeout_s = self._config.rollout.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                info = await handle.ready()
        except TimeoutError as error:
            raise GeneratorDiedError(
                f"It was not ready within rollout.start_timeout_s={timeout_s:g} s: the cluster has no room for it, or "
                "its engine hangs while it starts (see its log)."
            ) from error
        self.health.ready()
        await self._catch_up(handle, info.version)
        if not self.started.done():
            self.started.set_result(info)
        self._desk.changed()
        watch = asyncio.get_running_loop().create_task(self._watch(handle))
        try:
            await self._death.wait()
        finally:
            watch.cancel()

    async def _catch_up(self, handle: GeneratorHandle, version: int) -> None:
        """Load the current weights, whichever those are by the time they are loaded."""
        if self._desk.push is None:
            self.health.loaded(version, version)
        while not self.health.serving:
            self._news.clear()
            push = self._desk.push
            assert push is not None
            try:
                async with self._loading:
                    await self._load(handle, push)
            except WeightError as error:
                # The learner frees a version when it publishes the next one, which is pushed soon after.
                logger.warning("Generator %d waits for the next push: %s", self.index, error)
                if not await self._next_push():
                    raise

    async def _next_push(self) -> bool:
        """False where none comes: not in time, or not before this generator sleeps, as the others are about to."""
        awake = self._desk.awake
        if awake.is_set():
            try:
                async with asyncio.timeout(self._config.rollout.start_timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return False
        return awake.is_set()

    async def _load(self, handle: GeneratorHandle, push: Push) -> None:
        async with asyncio.timeout(self._config.rollout.push_timeout_s + GRACE_S):
            version = await handle.update_weights(push)
        self._loaded = push
        await self._check(handle)
        current = self._desk.push
        self.health.loaded(version, current.version if current else version)

    async def _watch(self, handle: GeneratorHandle) -> None:
        while not self._death.is_set():
            await asyncio.sleep(HEARTBEAT_S)
            if not self._loading.locked():  # an engine that loads weights cannot answer; loading has its own deadline
                await self._ask(handle)

    async def _ask(self, handle: GeneratorHandle) -> None:
        try:
            async with asyncio.timeout(2 * HEARTBEAT_S):
                await handle.health(HEARTBEAT_S)
        except TimeoutError:
            self.health.missed(f"It gave no sign of life for {SUSPECT_S:g} s.")
            if not self.health.alive:
                self._death.set()
        except Exception as error:  # it answered that it is broken, or is gone
            self._die(handle, _reason(error))
        else:
            self.health.answered()
            self._desk.changed()

    async def _roll_out(self, handle: GeneratorHandle, job: Job) -> None:
        rollout = self._config.rollout
        # Preparing a group and its episodes have this deadline each.
        timeout_s = 2 * rollout.episode_timeout_s + GRACE_S
        try:
            async with asyncio.timeout(timeout_s):
                group = await handle.rollout_group(job.spec)
            if group.failures and not self._loading.locked():
                await self._ask(handle)
        except TimeoutError:
            failure = f"It did not return a group within {timeout_s:g} s."
            self._die(handle, failure)
        except GeneratorDiedError as error:
            failure = str(error)
            self._die(handle, failure)
        except asyncio.CancelledError:
            failure = self.health.reason or "The fleet was closed."
        except Exception as error:  # the group's own fault, as far as can be seen
            failure = _reason(error)
        else:
            failure = "" if self.health.alive else self.health.reason
        self.episodes -= job.spec.group_size
        self.reserved = False
        if failure:
            self._desk.failed(job, failure)
        else:
            self._desk.finished(job, group)

    def _die(self, handle: GeneratorHandle, reason: str) -> None:
        if handle is self._handle:  # not its successor's fault
            self.health.died(reason)
            self._death.set()

    async def _drop_work(self) -> None:
        """Cancel what is in flight; each task hands its group back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end(self) -> None:
        await self._drop_work()
        handle = self._handle
        if handle is None:
            return
        with contextlib.suppress(Exception):  # it may be dead, hang or not have started: it is killed next
            async with asyncio.timeout(SHUTDOWN_S):
                await handle.shutdown()
        handle.kill()


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
