"""One worker of the pool: a Ray actor with a bounded queue in front of one decoder process."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from tool_workers.calls import Call
from tool_workers.cropper import Cropper
from tool_workers.records import Crop, ErrorKind, ToolError, VideoInfo
from tool_workers.stats import Latencies, WorkerStats, resident_bytes

WAITS = 2
"""Deadlines that a call may wait in the queue: the call before it may hang for one without costing it its own."""

_NEIGHBOURS = 64
"""Waiting calls on the same video that are considered when one is decoded for."""


@dataclass(frozen=True)
class WorkerSettings:
    """How one worker runs."""

    timeout_s: float
    """A call decodes at most this long, and waits at most twice this long for its turn."""
    cache_bytes: int
    queue_limit: int


@dataclass
class _Waiting:
    call: Call
    reply: asyncio.Future[Crop | VideoInfo]
    since: float


class CropWorker:
    """The actor. Errors are returned, not raised: they are replies, with nothing of Ray around them."""

    def __init__(self, slot: int, settings: WorkerSettings) -> None:
        self._slot = slot
        self._settings = settings
        self._cropper = Cropper(settings.timeout_s, settings.cache_bytes)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        self._queue: deque[_Waiting] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._calls = 0
        self._hits = 0
        self._errors: Counter[str] = Counter()
        self._latencies = Latencies()

    async def serve(self, call: Call) -> Crop | VideoInfo | ToolError:
        """Answer one call."""
        started = time.perf_counter()
        self._calls += 1
        try:
            reply = self._cropper.cached(call)
            if reply is not None:
                self._hits += 1
            else:
                reply = await self._enqueue(call, started)
        except ToolError as error:
            self._errors[error.kind.value] += 1
            return error
        finally:
            self._latencies.add(time.perf_counter() - started)
        return reply

    async def stats(self) -> WorkerStats:
        """Return the counters since this worker started."""
        decoder = self._cropper.decoder
        return WorkerStats(
            slot=self._slot,
            pid=os.getpid(),
            calls=self._calls,
            cache_hits=self._hits,
            errors=dict(self._errors),
            queue_depth=len(self._queue),
            latency_p50=self._latencies.percentile(50),
            latency_p95=self._latencies.percentile(95),
            latency_p99=self._latencies.percentile(99),
            bytes_read=self._cropper.bytes_read,
            frames_decoded=self._cropper.frames_decoded,
            cache_bytes=self._cropper.cache_bytes,
            decoder_pid=decoder.pid,
            decoder_starts=decoder.started,
            decoder_resident_bytes=decoder.resident_bytes,
            resident_bytes=resident_bytes(),
        )

    async def _enqueue(self, call: Call, since: float) -> Crop | VideoInfo:
        if len(self._queue) >= self._settings.queue_limit:
            raise ToolError(
                ErrorKind.OVERLOADED,
                f"Worker {self._slot} has {len(self._queue)} calls waiting, its limit; "
                "start more workers, raise the limit, or ask less at once.",
            )
        waiting = _Waiting(call, asyncio.get_running_loop().create_future(), since)
        self._queue.append(waiting)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._work())
        return await waiting.reply

    async def _work(self) -> None:
        """Serve the queue, oldest call first, until it is empty."""
        loop = asyncio.get_running_loop()
        while self._queue:
            waiting = self._queue.popleft()
            if waiting.reply.done():  # its caller has given up
                continue
            waited = time.perf_counter() - waiting.since
            if waited > WAITS * self._settings.timeout_s:
                message = f"The call waited {waited:.1f} s for worker {self._slot}; more workers would shorten that."
                waiting.reply.set_exception(ToolError(ErrorKind.TIMEOUT, message))
                continue
            same_video = (other.call for other in self._queue if other.call.video == waiting.call.video)
            neighbours = list(islice(same_video, _NEIGHBOURS))
            try:
                reply = await loop.run_in_executor(self._thread, self._cropper.serve, waiting.call, neighbours)
            except Exception as error:  # handed to the caller that it belongs to; the queue goes on
                _finish(waiting, error)
            else:
                _finish(waiting, reply)
            if neighbours:
                self._answer_cached(waiting.call.video)

    def _answer_cached(self, video: str) -> None:
        """Answer the waiting calls that the last decode has satisfied too."""
        for waiting in [w for w in self._queue if w.call.video == video and not w.reply.done()]:
            try:
                reply = self._cropper.cached(waiting.call)
            except ToolError as error:
                _finish(waiting, error)
            else:
                if reply is not None:
                    self._hits += 1
                    _finish(waiting, reply)
        self._queue = deque(w for w in self._queue if not w.reply.done())


def _finish(waiting: _Waiting, reply: Crop | VideoInfo | Exception) -> None:
    if waiting.reply.done():
        return
    if isinstance(reply, Exception):
        waiting.reply.set_exception(reply)
    else:
        waiting.reply.set_result(reply)
