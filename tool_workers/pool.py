"""The pool: worker actors, the supervisor that replaces them, and the client that callers hold.

Calls go straight from the caller to a worker. The supervisor is asked only which worker serves a stretch of video (once
for each) and to replace a worker that died or hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from tool_workers.calls import Call, CropCall, OverviewCall, ProbeCall
from tool_workers.local import MAX_PIXELS, MIN_PIXELS, PATCH_FACTOR, TIMEOUT_S
from tool_workers.records import Crop, ErrorKind, Limits, ToolError, VideoInfo
from tool_workers.stats import WorkerStats, pool_metrics
from tool_workers.worker import WAITS, CropWorker, WorkerSettings

_STRETCH_S = 32.0
"""Windows whose centres lie in the same stretch of a video go to the same worker, which then decodes them together."""
_REMEMBERED = 4096
"""Stretches whose worker is remembered."""
_ATTEMPTS = 3
"""Workers that may die under a call before it is given up."""
_GRACE_S = 10.0
"""Seconds beyond its deadlines after which a worker that has not answered counts as hung."""
_SUPERVISOR_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 120.0

Stretch = tuple[str, int]


@dataclass(frozen=True)
class PoolSettings:
    """What the supervisor needs to start workers."""

    workers: int
    num_cpus: float
    worker: WorkerSettings


@dataclass(frozen=True)
class _Seat:
    """A worker in its slot; the generation counts the workers that the slot has had."""

    slot: int
    generation: int
    actor: Any


class Supervisor:
    """The actor that owns the workers."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._seats = [self._start(slot, 0) for slot in range(settings.workers)]
        self._slots: OrderedDict[Stretch, int] = OrderedDict()
        self._loads = [0] * settings.workers

    def _start(self, slot: int, generation: int) -> _Seat:
        options = {
            "num_cpus": self._settings.num_cpus,
            "max_restarts": 0,
            # Beyond the queue's limit calls must still reach the worker, to be refused there with the reason.
            "max_concurrency": self._settings.worker.queue_limit + 256,
        }
        actor = ray.remote(CropWorker).options(**options).remote(slot, self._settings.worker)
        return _Seat(slot, generation, actor)

    async def seat(self, stretch: Stretch) -> _Seat:
        """Return the worker that serves this stretch of a video: always the same, chosen by least load."""
        slot = self._slots.pop(stretch, None)
        if slot is None:
            slot = self._loads.index(min(self._loads))
            self._loads[slot] += 1
        self._slots[stretch] = slot
        if len(self._slots) > _REMEMBERED:
            self._loads[self._slots.popitem(last=False)[1]] -= 1
        return self._seats[slot]

    async def replace(self, slot: int, generation: int) -> _Seat:
        """Put a new worker in the slot, unless somebody else had that generation replaced already."""
        seat = self._seats[slot]
        if seat.generation == generation:
            ray.kill(seat.actor)
            seat = self._seats[slot] = self._start(slot, generation + 1)
        return seat

    async def seats(self) -> list[_Seat]:
        """Return all the workers."""
        return list(self._seats)


class CropPool:
    """Turns (video, window) into frames. Give it to as many actors and tasks as you like: it pickles.

    All methods are for asyncio; hundreds of calls may be in flight. Every call ends, with its frames or with a
    ToolError, within three times `timeout_s` and the time it takes to replace workers that die under it.
    """

    def __init__(
        self,
        *,
        workers: int = 4,
        timeout_s: float = TIMEOUT_S,
        cache_mb: int = 512,
        queue_limit: int = 1024,
        patch_factor: int = PATCH_FACTOR,
        min_pixels: int = MIN_PIXELS,
        num_cpus: float = 1.0,
    ) -> None:
        """Start the pool on the Ray cluster that this process is connected to.

        Args:
            workers: Worker actors, each with one decoder process that uses one core.
            timeout_s: A call decodes at most this long, and waits at most twice this long for its turn.
            cache_mb: Decoded frames that one worker keeps, in MiB.
            queue_limit: Calls that may wait for one worker; further ones are refused as `overloaded`.
            patch_factor: Height and width of all frames are multiples of it.
            min_pixels: Smaller frames are enlarged to it.
            num_cpus: Ray CPUs that each worker reserves.

        Raises:
            RuntimeError: where the cluster cannot start that many workers.
        """
        self._timeout_s = timeout_s
        self._patch_factor = patch_factor
        self._min_pixels = min_pixels
        settings = PoolSettings(workers, num_cpus, WorkerSettings(timeout_s, cache_mb << 20, queue_limit))
        actor = ray.remote(Supervisor).options(num_cpus=0, max_restarts=-1, max_task_retries=-1)
        self._supervisor: Any = actor.remote(settings)
        self._known: OrderedDict[Stretch, _Seat] = OrderedDict()
        self._wait_for_workers(settings)

    def _wait_for_workers(self, settings: PoolSettings) -> None:
        try:
            seats = ray.get(self._supervisor.seats.remote(), timeout=_SUPERVISOR_TIMEOUT_S)
            pings = [seat.actor.stats.remote() for seat in seats]
            _, missing = ray.wait(pings, num_returns=len(pings), timeout=_START_TIMEOUT_S)
        except BaseException:
            ray.kill(self._supervisor)
            raise
        if missing:
            self.close()
            raise RuntimeError(
                f"{len(missing)} of {settings.workers} crop workers did not start in {_START_TIMEOUT_S:g} s. They ask "
                f"for {settings.workers * settings.num_cpus:g} CPUs; the cluster has "
                f"{ray.cluster_resources().get('CPU', 0):g}, of which {ray.available_resources().get('CPU', 0):g} are "
                "free. Ask for fewer workers, or for less than one CPU each."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what this process has learnt of the workers: the next one asks the supervisor."""
        return self.__dict__ | {"_known": OrderedDict()}

    async def crop(
        self,
        video: str | Path,
        start_time: float,
        end_time: float,
        *,
        fps: float = 1.0,
        max_frames: int = 16,
        max_pixels: int = MAX_PIXELS,
    ) -> Crop:
        """Return the frames of a window; see `tool_workers.crop`."""
        call = CropCall(str(video), start_time, end_time, fps, max_frames, self._limits(max_pixels))
        centre = (start_time + end_time) / 2
        stretch = int(centre // _STRETCH_S) if abs(centre) < 1e9 else 0
        return cast(Crop, await self._serve(call, stretch))

    async def overview(self, video: str | Path, count: int, *, max_pixels: int = MAX_PIXELS) -> Crop:
        """Return frames spread evenly over the whole clip; see `tool_workers.overview`."""
        return cast(Crop, await self._serve(OverviewCall(str(video), count, self._limits(max_pixels)), 0))

    async def probe(self, video: str | Path) -> VideoInfo:
        """Return what the video is; see `tool_workers.probe`."""
        return cast(VideoInfo, await self._serve(ProbeCall(str(video)), 0))

    async def stats(self) -> list[WorkerStats]:
        """Return the counters of every worker that answers; one that is being replaced is left out."""
        seats = await self._ask(self._supervisor.seats.remote())
        replies = await asyncio.gather(
            *(asyncio.wait_for(seat.actor.stats.remote(), _GRACE_S) for seat in seats), return_exceptions=True
        )
        return [reply for reply in replies if isinstance(reply, WorkerStats)]

    async def metrics(self) -> dict[str, float]:
        """Return the pool's counters as flat numbers."""
        return pool_metrics(await self.stats())

    def close(self) -> None:
        """End the pool and all its processes. Calls in flight end with an error."""
        with contextlib.suppress(RayActorError):
            for seat in ray.get(self._supervisor.seats.remote(), timeout=_SUPERVISOR_TIMEOUT_S):
                ray.kill(seat.actor)
            ray.kill(self._supervisor)

    def _limits(self, max_pixels: int) -> Limits:
        return Limits(max_pixels, min(self._min_pixels, max_pixels), self._patch_factor)

    async def _serve(self, call: Call, stretch: int) -> Crop | VideoInfo:
        key = (call.video, stretch)
        for _ in range(_ATTEMPTS):
            seat = await self._seat(key)
            try:
                reply = await asyncio.wait_for(seat.actor.serve.remote(call), (WAITS + 1) * self._timeout_s + _GRACE_S)
            except TimeoutError:
                await self._replace(seat)
                raise ToolError(
                    ErrorKind.TIMEOUT, f"Worker {seat.slot} did not answer for {call.video} and was replaced."
                ) from None
            except (ActorDiedError, ActorUnavailableError):
                await self._replace(seat)
                continue
            if isinstance(reply, ToolError):
                raise reply
            return cast(Crop | VideoInfo, reply)
        raise ToolError(ErrorKind.WORKER_DIED, f"{_ATTEMPTS} workers died, one after the other, under {call.video}.")

    async def _seat(self, key: Stretch) -> _Seat:
        seat = self._known.get(key)
        if seat is None:
            seat = await self._ask(self._supervisor.seat.remote(key))
            self._known[key] = seat
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return seat

    async def _replace(self, seat: _Seat) -> None:
        """Have the worker replaced and forget it."""
        for key in [key for key, known in self._known.items() if known == seat]:
            del self._known[key]
        await self._ask(self._supervisor.replace.remote(seat.slot, seat.generation))

    async def _ask(self, reference: Any) -> Any:
        try:
            return await asyncio.wait_for(reference, _SUPERVISOR_TIMEOUT_S)
        except RayActorError as error:
            raise ToolError(ErrorKind.CLOSED, f"The crop pool is closed ({type(error).__name__}).") from error
        except TimeoutError as error:
            raise ToolError(ErrorKind.CLOSED, "The crop pool's supervisor does not answer.") from error
