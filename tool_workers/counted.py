"""Frames of files without usable presentation times: found by counting from the first frame on, at the stated rate.

Such are AVI files with reordered frames, some MPEG program streams, and bare streams without a container. Their frames
have no times but their numbers, which only decoding from the start gives. It is slow, and right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tool_workers.decoding import Decoder
from tool_workers.planning import Target
from tool_workers.records import VideoInfo
from tool_workers.shot import Shot
from tool_workers.source import Source

_EPSILON = 1e-4
"""Frames; absorbs the rounding of times to microseconds."""


def counted_shots(
    source: Source, decoder: Decoder, info: VideoInfo, targets: Sequence[Target], size: tuple[int, int]
) -> list[Shot]:
    """Return a shot for each target by decoding from the beginning of the file."""
    numbers = [_number(target, info) for target in targets]
    pixels = {}
    errors: dict[int, str] = {}
    source.reopen()
    last = max(numbers)
    broken = math.inf
    for number, frame in enumerate(decoder.frames(source.untimed_packets(), errors)):
        if (errors or frame.is_corrupt) and broken == math.inf:
            broken = number  # a frame may have been lost: from here on the count is no evidence
        if number in numbers:
            pixels[number] = decoder.convert(frame, size)
        if number >= last:
            break
    shots = []
    for number in numbers:
        time = info.start_time + number / info.fps
        if number >= broken:
            shots.append(Shot(time, None, f"the file is damaged before {time:.3f} s and its frames cannot be counted"))
        elif number not in pixels:
            shots.append(Shot(time, None, f"no frame at {time:.3f} s"))
        else:
            shots.append(Shot(time, pixels[number]))
    return shots


def _number(target: Target, info: VideoInfo) -> int:
    """Return the number of the frame that stands for the target at a constant rate."""
    position = (target.time - info.start_time) * info.fps
    begins = math.ceil(position - _EPSILON)
    if begins < position + target.after * info.fps - _EPSILON:
        return min(max(begins, 0), info.frames - 1)
    return min(max(math.floor(position + _EPSILON), 0), info.frames - 1)
