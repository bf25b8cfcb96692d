"""Crops without Ray: the same frames, from one decoder process that belongs to the calling process."""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path
from typing import cast

from tool_workers.calls import Call, CropCall, OverviewCall, ProbeCall
from tool_workers.cropper import Cropper
from tool_workers.records import Crop, Limits, VideoInfo

PATCH_FACTOR = 32
"""Qwen3-VL's: vision patches of 16 pixels, merged two by two."""
MIN_PIXELS = 784
MAX_PIXELS = 50176
TIMEOUT_S = 30.0
_CACHE_BYTES = 256 << 20


def crop(
    video: str | Path,
    start_time: float,
    end_time: float,
    *,
    fps: float = 1.0,
    max_frames: int = 16,
    max_pixels: int = MAX_PIXELS,
) -> Crop:
    """Return the frames of a window at `fps` frames a second, at most `max_frames`, evenly chosen.

    Frames stand at multiples of 1/fps of the source's clock (`tool_workers.planning.plan_crop`), come resized, and
    carry their own presentation times. Times are seconds.

    Raises:
        ToolError: with the kind that says why there are no frames.
        ValueError: for settings that no video could satisfy.
    """
    call = CropCall(str(video), start_time, end_time, fps, max_frames, Limits(max_pixels, MIN_PIXELS, PATCH_FACTOR))
    return cast(Crop, _serve(call))


def overview(video: str | Path, count: int, *, max_pixels: int = MAX_PIXELS) -> Crop:
    """Return up to `count` frames spread evenly over the whole clip (`tool_workers.planning.plan_overview`).

    Raises:
        ToolError: with the kind that says why there are no frames.
        ValueError: for settings that no video could satisfy.
    """
    return cast(Crop, _serve(OverviewCall(str(video), count, Limits(max_pixels, MIN_PIXELS, PATCH_FACTOR))))


def probe(video: str | Path) -> VideoInfo:
    """Return what the video is.

    Raises:
        ToolError: with the kind that says why it cannot be read.
    """
    return cast(VideoInfo, _serve(ProbeCall(str(video))))


class _Local:
    """This process's decoder. A forked child must not talk to its parent's."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()  # one decoder: one call at a time
        self.cropper = Cropper(TIMEOUT_S, _CACHE_BYTES)
        atexit.register(self.stop)

    def stop(self) -> None:
        if os.getpid() == self.pid:
            self.cropper.stop()


_local: _Local | None = None


def _serve(call: Call) -> Crop | VideoInfo:
    global _local  # noqa: PLW0603 - the one decoder of the process, started at first use
    if _local is None or _local.pid != os.getpid():
        _local = _Local()
    with _local.lock:
        return _local.cropper.serve(call)
