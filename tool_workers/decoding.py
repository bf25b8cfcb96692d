"""From packets to frames: decodes the frames asked for, from the keyframes that they depend on, and only sound ones."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import av
import numpy as np
from av.sidedata.sidedata import Type
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray

from tool_workers.shot import Shot
from tool_workers.source import Entry, Source, damage_logged, errors_logged

_SCALING = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
_FLAGS_FRAMES = frozenset({"h264"})
"""Decoders that mark all frames with errors in them: their log, which holds harmless errors too, is not needed."""


class DisorderError(Exception):
    """The decoder's order of frames contradicts their presentation times."""


class Decoder:
    """Decodes the packets of one source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._reformatter = VideoReformatter()
        self.frames_decoded = 0

    def shots(
        self, entries: Sequence[Entry], wanted: Iterable[int], size: tuple[int, int], *, skip: bool
    ) -> tuple[dict[int, Shot], set[int]]:
        """Return the wanted frames (by presentation time) at `size` = (width, height), and the times of all delivered.

        A frame is missing in the reply if the decoder did not deliver it, or not safely, and reported no error. With
        `skip`, every frame is decoded from the last keyframe at or before it, and frames that nothing refers to are
        left out: this changes no other frame. Without, everything is decoded from the first entry on.

        Raises:
            DisorderError: where the container's times are made up, and wrong.
        """
        found: dict[int, Shot] = {}
        delivered: set[int] = set()
        wanted = set(wanted)
        for run in _runs(entries, wanted) if skip else [entries]:
            bad: dict[int, str] = {i: entry.problem for i, entry in enumerate(run) if entry.problem}
            pixels = self._decode(run, wanted, size, bad, delivered, skip=skip)
            if skip and run[0].pts not in delivered and not run[0].packet.is_discard:
                continue  # the decoder took longer to get going than the keyframe promised: what follows is not safe
            for i, entry in enumerate(run):
                if entry.pts not in wanted:
                    continue
                time = self._source.seconds(entry.pts)
                if problem := _taint(run, i, bad):
                    found[entry.pts] = Shot(time, None, f"the frame at {time:.3f} s is damaged ({problem})")
                elif entry.pts in pixels:
                    found[entry.pts] = Shot(time, pixels[entry.pts])
                elif bad:
                    found[entry.pts] = Shot(time, None, f"the frame at {time:.3f} s was lost to damage near it")
        return found, delivered

    def frames(self, packets: Iterable[Any], errors: dict[int, str], keep: set[int] | None = None) -> Iterator[Any]:
        """Yield the frames of the packets; indices of packets in error go to `errors`.

        `keep`: presentation times of frames to decode even if nothing refers to them; None for all.
        """
        context = self._source.context
        context.flush_buffers()
        for index, packet in enumerate((*packets, None)):
            if keep is not None:
                needed = packet is None or (packet.pts if packet.pts is not None else packet.dts) in keep
                context.skip_frame = "DEFAULT" if needed else "NONREF"
            logged = errors_logged()
            try:
                frames = context.decode(packet)
            except EOFError:
                frames = []
            except av.FFmpegError as error:
                errors.setdefault(index, error.strerror or type(error).__name__)
                continue
            if context.name not in _FLAGS_FRAMES and damage_logged(logged, context.name):
                errors.setdefault(index, "errors in the data")
            self.frames_decoded += len(frames)
            yield from frames
        context.skip_frame = "DEFAULT"
        context.flush_buffers()

    def convert(self, frame: Any, size: tuple[int, int]) -> NDArray[np.uint8]:
        """Return the frame as displayed, at `size` = (width, height): [H, W, 3] RGB."""
        matrix = display_matrix(frame)
        width, height = size[::-1] if matrix.transposed else size
        scaled = self._reformatter.reformat(
            frame, width=width, height=height, format="rgb24", interpolation=_SCALING, threads=1
        )
        return matrix.apply(np.asarray(scaled.to_ndarray(), dtype=np.uint8))

    def _decode(
        self,
        run: Sequence[Entry],
        wanted: set[int],
        size: tuple[int, int],
        bad: dict[int, str],
        delivered: set[int],
        *,
        skip: bool,
    ) -> dict[int, NDArray[np.uint8]]:
        order = {entry.pts: i for i, entry in enumerate(run)}
        pixels: dict[int, NDArray[np.uint8]] = {}
        last: int | None = None
        for frame in self.frames([entry.packet for entry in run], bad, wanted if skip else None):
            if frame.pts is None or (last is not None and frame.pts <= last):
                if self._source.untimed:
                    raise DisorderError
                bad.setdefault(order.get(frame.pts, 0), "presentation times run backwards")
            else:
                last = frame.pts
                delivered.add(last)
            if frame.is_corrupt and frame.pts in order:
                bad.setdefault(order[frame.pts], "errors in the data")
            if frame.pts in wanted and frame.pts in order:
                pixels[frame.pts] = self.convert(frame, size)
        return pixels


class DisplayMatrix:
    """How a stored picture is turned or mirrored for display."""

    def __init__(self, a: int, b: int, c: int, d: int) -> None:
        """A stored point (x, y) is displayed at (a x + c y, b x + d y)."""
        self.transposed = abs(b) + abs(c) > abs(a) + abs(d)
        self._mirror_x = (c if self.transposed else a) < 0
        self._mirror_y = (b if self.transposed else d) < 0

    def apply(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Turn [H, W, 3] pixels as stored into pixels as displayed."""
        if self.transposed:
            pixels = pixels.transpose(1, 0, 2)
        return np.ascontiguousarray(pixels[:: -1 if self._mirror_y else 1, :: -1 if self._mirror_x else 1])


def display_matrix(frame: Any) -> DisplayMatrix:
    """Return the frame's display matrix; one that changes nothing where it has none."""
    data = frame.side_data.get(Type.DISPLAYMATRIX)
    if data is None:
        return DisplayMatrix(1, 0, 0, 1)
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(data))
    return DisplayMatrix(a, b, c, d)


def _runs(entries: Sequence[Entry], wanted: Iterable[int]) -> list[Sequence[Entry]]:
    """Cut out what must be decoded for the wanted frames: from a keyframe to the last wanted frame it leads to."""
    position = {entry.pts: i for i, entry in enumerate(entries)}
    spans: list[tuple[int, int]] = []
    for last in sorted(position[pts] for pts in wanted if pts in position):
        first = _fresh(entries, last)
        while spans and first <= spans[-1][1]:
            first = min(first, spans.pop()[0])
        spans.append((first, last))
    return [entries[first : last + 1] for first, last in spans]


def _fresh(entries: Sequence[Entry], index: int) -> int:
    """Return the index of the keyframe that decoding must start from to get the frame at `index` right."""
    pts = entries[index].pts
    return next((i for i in range(index, -1, -1) if entries[i].key and entries[i].pts <= pts), 0)


def _taint(run: Sequence[Entry], index: int, bad: dict[int, str]) -> str:
    """Return the problem of a packet that the frame may have been predicted from, or of its own; empty for none.

    Frames displayed before the keyframe they follow in the file are no part of what comes after it.
    """
    if not bad:
        return ""
    fresh = _fresh(run, index)
    return next((p for i, p in sorted(bad.items()) if fresh <= i <= index and run[i].pts >= run[fresh].pts), "")
