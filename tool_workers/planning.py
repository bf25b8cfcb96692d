"""Which moments of a video a call is about. Pure arithmetic on seconds: nothing here opens a file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tool_workers.records import ErrorKind, ToolError, VideoInfo

_EPSILON_S = 1e-6
"""Times are compared to a microsecond, finer than any container's clock that matters and coarser than float noise."""
_LONG_SEGMENT_S = 4.0
"""From this length on, a segment of an overview may be represented by a keyframe near its centre."""

_MARGIN = 2
"""Points of the grid on either side of a window that count as nearby."""
_DENSE = 2
"""Up to this many times the frames asked for, the points that a window leaves out count as nearby."""


class Target(NamedTuple):
    """One moment, and which frame stands for it; the same target always means the same frame of a video.

    The first frame that begins in [time, time + after); else the last keyframe that begins in [time - before, time];
    else the frame on display at `time`.
    """

    time: float
    after: float
    before: float


@dataclass(frozen=True)
class Plan:
    """What one call needs: targets in rising order, inside the half-open window [start, end)."""

    targets: tuple[Target, ...]
    start: float
    end: float
    note: str = ""
    nearby: tuple[Target, ...] = ()
    """What a similar window would ask for: worth keeping if the decoder comes by."""


def plan_crop(info: VideoInfo, start_time: float, end_time: float, fps: float, max_frames: int) -> Plan:
    """Place targets on the grid of multiples of 1/fps of the source's clock, at most `max_frames`, evenly chosen.

    The grid does not move with the window: overlapping windows ask for the same frames. A window that holds no point
    of the grid gets its centre.

    Raises:
        ToolError: bad_window.
    """
    start, end, note = _clamp(info, start_time, end_time)
    step = 1.0 / fps
    first = math.ceil((start - _EPSILON_S) * fps)
    last = math.ceil((end - _EPSILON_S) * fps) - 1
    available = last - first + 1
    if available < 1:
        centre = round((start + end) / 2, 6)
        return Plan((Target(centre, round((end - start) / 2, 6), 0.0),), start, end, note)
    after = round(step / 2, 6)
    grid = [Target(round(k * step, 6), after, 0.0) for k in range(first - _MARGIN, last + 1 + _MARGIN)]
    count = min(available, max_frames)
    targets = tuple(grid[_MARGIN + math.floor((i + 0.5) * available / count)] for i in range(count))
    if available > _DENSE * max_frames:
        return Plan(targets, start, end, note)
    inside_clip = (t for t in grid if info.start_time <= t.time < info.end_time)
    return Plan(targets, start, end, note, nearby=tuple(t for t in inside_clip if t not in targets))


def plan_overview(info: VideoInfo, count: int) -> Plan:
    """Place targets at the centres of `count` equal segments of the clip.

    Where segments are 4 s or longer, a keyframe up to a quarter of a segment before the centre stands for it: that
    costs the decoding of one frame instead of everything since that keyframe.
    """
    segment = info.duration / count
    before = round(segment / 4, 6) if segment >= _LONG_SEGMENT_S else 0.0
    times = (info.start_time + (i + 0.5) * segment for i in range(count))
    return Plan(tuple(Target(round(time, 6), 0.0, before) for time in times), info.start_time, info.end_time)


def _clamp(info: VideoInfo, start: float, end: float) -> tuple[float, float, str]:
    clip = f"the clip spans {info.start_time:.3f} s to {info.end_time:.3f} s"
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ToolError(ErrorKind.BAD_WINDOW, f"The window {start} to {end} is not finite; {clip}.")
    window = f"The window {start:.3f} s to {end:.3f} s"
    if end <= start:
        problem = "is empty" if end == start else "ends before it starts"
        raise ToolError(ErrorKind.BAD_WINDOW, f"{window} {problem}; {clip}.")
    if start >= info.end_time or end <= info.start_time:
        raise ToolError(ErrorKind.BAD_WINDOW, f"{window} is outside the video: {clip}.")
    clamped = max(start, info.start_time), min(end, info.end_time)
    if clamped == (start, end):
        return start, end, ""
    return *clamped, f"{window} was clamped to {clamped[0]:.3f} s to {clamped[1]:.3f} s: {clip}."
