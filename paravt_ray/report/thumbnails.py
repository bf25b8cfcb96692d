"""Small pictures of what the model saw, decoded again from the videos where they still exist, for some trajectories."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paravt_ray.report.source import RunData
from paravt_ray.report.trajectories import PromptGroup, Video, calls_of, shares
from tool_workers import Crop, ToolError, crop, overview, probe

MAX_GROUPS = 8
MAX_BYTES = 4 << 20
"""Of the pictures of one run."""
MAX_SECONDS = 60.0
"""No further video is opened after that."""
PIXELS = 128 * 128
"""Of one picture, at most."""
QUALITY = 70
_SAME_S = 0.002
"""Records hold times to the millisecond."""


@dataclass
class Pictures:
    """A run's pictures: each frame once, however many trajectories show it."""

    jpegs: list[str] = field(default_factory=list)
    """Base64."""
    size: int = 0
    """Bytes of them all."""
    _known: dict[tuple[str, float], int] = field(default_factory=dict)

    def add(self, video: str, time_s: float, pixels: NDArray[np.uint8]) -> int:
        """Keep a frame and return its index."""
        key = (video, time_s)
        if key not in self._known:
            jpeg = _jpeg(pixels)
            self._known[key] = len(self.jpegs)
            self.jpegs.append(jpeg)
            self.size += len(jpeg)
        return self._known[key]


def take_pictures(run: RunData, groups: Sequence[PromptGroup]) -> Pictures:
    """Decode the frames of the first groups that still have their videos, and put the pictures' indices into them.

    Only pictures of the very moments that a record names are shown: what cannot be decoded, and a video that was
    replaced by another one since, is left without.
    """
    pictures = Pictures()
    started, done = time.monotonic(), 0
    for group in groups:
        if done == MAX_GROUPS or pictures.size > MAX_BYTES or time.monotonic() - started > MAX_SECONDS:
            break
        counts = shares(group.frame_budget or 0, len(group.videos))
        found = [_overview(video, count, pictures) for video, count in zip(group.videos, counts, strict=True)]
        done += any(found)
        for call in [call for episode in group.episodes for call in calls_of(episode)]:
            video = group.videos[call["video"]] if call["video"] is not None else None
            if video is not None and video.exact and call["window"]:
                call["pictures"] = _crop(run, video, call, pictures)
    return pictures


def _overview(video: Video, count: int, pictures: Pictures) -> bool:
    """Set a video's true bounds and its overview's pictures; False where the file is gone or is another one."""
    try:
        info = probe(video.path)
        taken = overview(video.path, count, max_pixels=PIXELS) if count else None
    except ToolError:
        return False
    if any(not info.start_time - _SAME_S <= time_s <= info.end_time + _SAME_S for time_s in video.overview):
        return False
    video.start, video.end, video.exact = info.start_time, info.end_time, True
    video.pictures = _matching(video.path, taken, video.overview, pictures) if taken is not None else []
    return True


def _crop(run: RunData, video: Video, call: dict[str, Any], pictures: Pictures) -> list[int | None]:
    fps, most = run.number("tools.crop_fps", 1.0), int(run.number("tools.crop_max_frames", 16.0))
    start, end = call["window"]
    try:
        taken = crop(video.path, start, end, fps=fps, max_frames=most, max_pixels=PIXELS)
    except (ToolError, ValueError):  # ValueError: settings in the file that no run can have had
        return []
    return _matching(video.path, taken, call["frames"], pictures)


def _matching(path: str, taken: Crop, times: Sequence[float], pictures: Pictures) -> list[int | None]:
    """The picture of each recorded moment; None where that moment did not come back."""
    found = dict(zip(taken.timestamps.tolist(), taken.frames, strict=True))
    result: list[int | None] = []
    for time_s in times:
        near = min(found, key=lambda other: abs(other - time_s))
        same = abs(near - time_s) <= _SAME_S
        result.append(pictures.add(path, near, found[near]) if same else None)
    return result


def _jpeg(pixels: NDArray[np.uint8]) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=QUALITY)
    return base64.b64encode(buffer.getvalue()).decode()
