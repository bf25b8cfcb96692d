"""What goes into the service and what comes out: videos, crops, and errors with a kind that callers can act on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class ErrorKind(StrEnum):
    """Why a call got no frames."""

    NOT_FOUND = "not_found"  # there is no such file, or it is no regular file
    UNREADABLE = "unreadable"  # no container or codec that can be read
    NO_VIDEO = "no_video"  # readable, but without a video stream (audio, cover art)
    EMPTY = "empty"  # a video stream without a single frame
    DAMAGED = "damaged"  # the frames asked for cannot be decoded without errors
    BAD_WINDOW = "bad_window"  # reversed, empty, not finite, or wholly outside the clip
    TIMEOUT = "timeout"  # decoding, or waiting for a worker, took longer than the deadline
    WORKER_DIED = "worker_died"  # the process that served the call died, more than once
    OVERLOADED = "overloaded"  # the worker's queue is full
    CLOSED = "closed"  # the pool was shut down


class ToolError(Exception):
    """A call that could not be served: `kind` for programs, the message for people and models."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(kind, message)  # both in `args`, so that it survives pickling
        self.kind = ErrorKind(kind)
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class VideoInfo:
    """What is known of a video. Times are seconds on the source's own clock, which need not start at 0."""

    start_time: float
    """Presentation time of the first frame."""
    end_time: float
    """End of the last frame's display, as found in the file and not as its header claims."""
    fps: float
    """Average frames per second; 0.0 for a single frame."""
    width: int
    """Pixels as displayed: rotation and the shape of pixels are applied."""
    height: int
    frames: int
    """As the container counts them, else estimated from duration and rate."""
    codec: str
    container: str
    damage: str = ""
    """What is wrong with the file, as far as a look at its beginning and end shows; empty for nothing."""

    @property
    def duration(self) -> float:
        """Seconds from the first frame to the end of the last."""
        return self.end_time - self.start_time


@dataclass(frozen=True)
class Crop:
    """Frames of one window (or overview) of a video."""

    frames: NDArray[np.uint8]
    """[T, H, W, 3] RGB, read-only where they came through an object store."""
    timestamps: NDArray[np.float64]
    """[T] presentation times in seconds of the source, strictly rising."""
    note: str = ""
    """What a reader of the frames should know: a clamped window, frames left out for damage. Empty for nothing."""

    def __len__(self) -> int:
        return len(self.timestamps)


@dataclass(frozen=True)
class Limits:
    """Bounds on the size of a returned frame."""

    max_pixels: int
    min_pixels: int
    patch_factor: int
    """Height and width are multiples of it (vision patch size x merge size)."""
