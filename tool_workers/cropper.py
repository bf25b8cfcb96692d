"""Answers calls from a cache and one decoder process. Knows nothing of Ray: the worker actors and `crop()` use it."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from tool_workers.cache import FileId, ShotCache, ShotKey
from tool_workers.calls import Call, FrameCall, ProbeCall, answer
from tool_workers.decoder import DecoderProcess, DecoderStartError, Job, Result
from tool_workers.planning import Plan, Target
from tool_workers.records import Crop, ErrorKind, ToolError, VideoInfo
from tool_workers.shot import Shot

_KNOWN_FILES = 4096
_NEAR_S = 5.0
"""A target this close to one that must be decoded is decoded along with it."""
_STRIKES = 3
"""Calls in a row that hang or crash the decoder on one file before the file is refused."""
_REFUSAL_S = 600.0
"""How long it is refused."""


class Cropper:
    """One decoder, one cache. `cached` may be called from any thread, `serve` from one at a time."""

    def __init__(self, timeout_s: float, cache_bytes: int) -> None:
        """`timeout_s`: deadline for the decoding of one call, whatever it takes: looks, retries, a decoder's start."""
        self._timeout_s = timeout_s
        self._cache = ShotCache(cache_bytes)
        self._infos: OrderedDict[FileId, VideoInfo] = OrderedDict()
        self._strikes: dict[FileId, list[tuple[float, ToolError]]] = {}
        self._lock = threading.Lock()  # guards the three above
        self.decoder = DecoderProcess()
        self.bytes_read = 0
        self.frames_decoded = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes in the cache now."""
        return self._cache.bytes

    def cached(self, call: Call) -> Crop | VideoInfo | None:
        """Answer the call if that needs no decoding, else return None.

        Raises:
            ToolError: what can be told without decoding: not_found, bad_window, a refused file, known damage.
        """
        file = _identify(call.video)
        with self._lock:
            self._refuse_if_struck(file)
            info = self._infos.get(file)
            if info is None:
                return None
            if isinstance(call, ProbeCall):
                return info
            plan = call.plan(info)
            shots = [self._cache.get(ShotKey(file, target, call.limits)) for target in plan.targets]
        known = [shot for shot in shots if shot is not None]
        return answer(call, plan, known) if len(known) == len(shots) else None

    def serve(self, call: Call, neighbours: Iterable[Call] = ()) -> Crop | VideoInfo:
        """Answer the call, and decode in the same pass what waiting calls on the same video will need nearby.

        Raises:
            ToolError: of any kind but overloaded and closed.
        """
        deadline = time.monotonic() + self._timeout_s
        file = _identify(call.video)
        with self._lock:
            self._refuse_if_struck(file)
        info = self._info(file, deadline)
        if isinstance(call, ProbeCall):
            return info
        plan = call.plan(info)
        shots = self._known(file, plan.targets, call)
        missing = [target for target in plan.targets if target not in shots]
        if missing:
            extra = self._worthwhile(file, info, call, plan, missing, neighbours)
            ordered = tuple(sorted({*missing, *extra}))
            result = self._decode(Job(file.path, ordered, call.limits, frozenset(extra)), file, deadline)
            decoded = {t: shot for t, shot in zip(ordered, result.shots, strict=True) if shot is not None}
            with self._lock:
                for target, shot in decoded.items():
                    if shot.pixels is not None:  # a problem may pass, such as that of a disk that did not answer
                        self._cache.put(ShotKey(file, target, call.limits), shot)
            shots |= {target: decoded[target] for target in missing}
        return answer(call, plan, [shots[target] for target in plan.targets])

    def examine(self, video: str) -> VideoInfo:
        """Read the whole file and return what it is, with what is wrong anywhere in it in `damage`.

        Raises:
            ToolError: where it cannot be read at all.
        """
        deadline = time.monotonic() + self._timeout_s
        return self._decode(Job(video, thorough=True), _identify(video), deadline).info

    def stop(self) -> None:
        """End the decoder process."""
        self.decoder.stop()

    def _info(self, file: FileId, deadline: float) -> VideoInfo:
        with self._lock:
            info = self._infos.get(file)
        if info is None:
            info = self._decode(Job(file.path), file, deadline).info
            with self._lock:
                self._infos[file] = info
                while len(self._infos) > _KNOWN_FILES:
                    self._infos.popitem(last=False)
        return info

    def _known(self, file: FileId, targets: Iterable[Target], call: FrameCall) -> dict[Target, Shot]:
        with self._lock:
            found = ((target, self._cache.get(ShotKey(file, target, call.limits))) for target in targets)
            return {target: shot for target, shot in found if shot is not None}

    def _worthwhile(
        self,
        file: FileId,
        info: VideoInfo,
        call: FrameCall,
        plan: Plan,
        missing: Sequence[Target],
        neighbours: Iterable[Call],
    ) -> set[Target]:
        """Return targets of waiting and of similar calls that the decoder passes on its way to the missing ones."""
        wanted = set(plan.nearby)
        for other in neighbours:
            if isinstance(other, ProbeCall) or other.video != call.video or other.limits != call.limits:
                continue
            try:
                wanted.update(other.plan(info).targets)
            except ToolError:
                continue  # its own turn will tell its caller
        times = [target.time for target in missing]
        near = [target for target in wanted.difference(missing) if _distance(target.time, times) <= _NEAR_S]
        return set(near) - self._known(file, near, call).keys()

    def _decode(self, job: Job, file: FileId, deadline: float) -> Result:
        """Run the job by the deadline of its call; a decoder that died is replaced and the job tried once more."""
        try:
            try:
                result = self.decoder.run(job, max(0.0, deadline - time.monotonic()))
            except ToolError as error:
                if error.kind is not ErrorKind.WORKER_DIED or time.monotonic() >= deadline:
                    raise
                result = self.decoder.run(job, max(0.0, deadline - time.monotonic()))
        except DecoderStartError:
            raise
        except ToolError as error:
            if error.kind in (ErrorKind.TIMEOUT, ErrorKind.WORKER_DIED):
                with self._lock:
                    self._strikes.setdefault(file, []).append((time.monotonic(), error))
            raise
        with self._lock:
            self._strikes.pop(file, None)
        self.bytes_read += result.bytes_read
        self.frames_decoded += result.frames_decoded
        return result

    def _refuse_if_struck(self, file: FileId) -> None:
        strikes = self._strikes.get(file, [])
        if len(strikes) < _STRIKES:
            return
        when, error = strikes[-1]
        if time.monotonic() - when > _REFUSAL_S:
            del self._strikes[file]
            return
        raise ToolError(error.kind, f"{file.path} is refused for now: {len(strikes)} calls in a row failed. {error}")


def _distance(time_s: float, times: Sequence[float]) -> float:
    """Return the seconds to the nearest of the times, which rise."""
    place = bisect_left(times, time_s)
    return min(abs(time_s - near) for near in times[max(0, place - 1) : place + 1])


def _identify(path: str) -> FileId:
    try:
        status = Path(path).stat()
    except (OSError, ValueError) as error:
        raise ToolError(ErrorKind.NOT_FOUND, f"There is no video file {path} ({error}).") from error
    return FileId(path, status.st_mtime_ns, status.st_size)
