"""An open video file as a stream of packets, each with its presentation time and what speaks against its soundness."""

from __future__ import annotations

import logging
import math
import re
import stat
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av

from tool_workers.records import ErrorKind, ToolError

UNTIMED_CONTAINERS = frozenset({"avi", "mpeg", "mpegvideo", "h264", "hevc", "m4v", "h263", "vc1", "obu"})
"""Containers without a presentation time for each frame: libavformat makes them up, and sometimes gets them wrong."""
_FROM_THE_START = UNTIMED_CONTAINERS - {"avi"}
"""Those of them in which only what is read from the beginning gets the right times: after a jump into the middle of an
MPEG program stream, the rest of a torn frame takes the next frame's time, and all that follow are late by some. An AVI
has an index of all frames."""

_READ_ERRORS = 16
"""Unreadable packets in a row after which the rest of the file counts as lost."""
_HOLE = bytes(64)
"""More zeros in a row than any sound packet of the codecs below holds: a part of the file that was never written."""
_HOLE_CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d"})
_UNIT_HOLE = bytes(8)
"""The same for H.264 and HEVC where lengths stand before the units. A unit never holds three zeros in a row, and a
length begins with three at most. So the end of a packet that is blank is seen, which decoders take for padding."""
_UNIT_FORMATS = ("mov", "matroska")
_EPSILON_S = 1e-6


class Entry(NamedTuple):
    """One packet, in decode order."""

    packet: Any
    pts: int
    """Presentation time in units of the stream's time base; the decode time where the container has no other."""
    key: bool
    problem: str
    """Why the packet's data is not sound, or data before it is missing; empty for nothing."""


class Source:
    """The first real video stream of one file."""

    def __init__(self, path: str) -> None:
        """Open the file.

        Raises:
            ToolError: not_found, unreadable or no_video.
        """
        # libav reports many a damage only as a log line at level ERROR (see `damage_logged`); none is printed.
        av.logging.set_level(av.logging.ERROR)
        av.logging.set_skip_repeated(False)  # the same file may be read twice, and be damaged both times
        logging.getLogger("libav").setLevel(logging.CRITICAL + 1)
        self.path = path
        self.bytes_read = 0
        self.problems: list[str] = []
        """What could not be read since the last seek."""
        self._open()

    def _open(self) -> None:
        self.container = _open_container(self.path)
        try:
            self.stream = _video_stream(self.container, self.path)
        except ToolError:
            self.container.close()
            raise
        self.context = self.stream.codec_context
        self.context.thread_count = 1
        self.base: Fraction = self.stream.time_base
        self.format: str = self.container.format.name
        self.untimed = self.format in UNTIMED_CONTAINERS
        self._index_offset: int | None = None
        self._continuity = re.compile(rf"Continuity check failed for pid {self.stream.id}\b")

    def close(self) -> None:
        """Close the file."""
        self.container.close()

    def reopen(self) -> None:
        """Go to the very beginning, also in containers that cannot seek there."""
        self.container.close()
        self.problems = []
        self._open()

    def seek(self, pts: int) -> None:
        """Go to a keyframe at or before `pts`, as far as the container can tell; else to the beginning."""
        if self.format in _FROM_THE_START:
            self.reopen()
            return
        self.problems = []
        try:
            self.container.seek(pts, backward=True, stream=self.stream)
        except av.FFmpegError:
            self.reopen()

    def entries(self) -> Iterator[Entry]:
        """Yield the packets from here to the end of the file; what cannot be read goes to `problems`."""
        held: Entry | None = None  # until what follows shows that the data was read in step
        failures = 0
        lost = ""
        while failures < _READ_ERRORS:
            try:
                for packet, told in self._packets():
                    problem, lost = told or lost, ""
                    if held:
                        yield held._replace(problem=held.problem or problem)
                        held = None
                    if packet.size:
                        failures = 0
                        self.bytes_read += packet.size
                        pts = packet.pts if packet.pts is not None else packet.dts
                        if pts is not None:
                            held = Entry(packet, pts, packet.is_keyframe, problem or self._problem(packet))
                    elif problem:
                        self.problems.append("the file ends early")
                break
            except av.FFmpegError as error:
                failures += 1
                lost = f"the file cannot be read on ({describe(error)})"
                self.problems.append(lost)
        if held:
            yield held

    def untimed_packets(self) -> Iterator[Any]:
        """Yield all the packets from here to the end of the file, whether they have times or not."""
        for packet, _ in self._packets():
            if packet.size:
                self.bytes_read += packet.size
                yield packet

    def ticks(self, seconds: float) -> int:
        """Convert seconds to units of the time base."""
        return round(seconds / self.base)

    def floor(self, seconds: float) -> int:
        """Return the last tick at or before a time that is exact to a microsecond."""
        return math.floor((seconds + _EPSILON_S) / self.base)

    def ceil(self, seconds: float) -> int:
        """Return the first tick at or after a time that is exact to a microsecond."""
        return math.ceil((seconds - _EPSILON_S) / self.base)

    def seconds(self, ticks: int) -> float:
        """Convert units of the time base to seconds."""
        return float(ticks * self.base)

    def _packets(self) -> Iterator[tuple[Any, str]]:
        """Yield each packet, and what the demuxer had to say against the data that it read on the way."""
        packets = self.container.demux(self.stream)
        transport = self.format == "mpegts"
        while True:
            logged = errors_logged()
            if transport:  # it tells of lost transport packets in a debug message only
                av.logging.set_level(av.logging.DEBUG)
            try:
                with av.logging.Capture() as messages:
                    packet = next(packets, None)
            finally:
                if transport:
                    av.logging.set_level(av.logging.ERROR)
            if packet is None:
                return
            problem = "errors in the container" if damage_logged(logged, self.format) else ""
            if transport and any(self._continuity.search(text) for _, _, text in messages):
                problem = "data was lost in transmission"
            yield packet, problem

    def _problem(self, packet: Any) -> str:
        """Return what speaks against the packet itself."""
        if packet.is_corrupt:
            return "data was lost in transmission"
        if self.context.name in _HOLE_CODECS:
            data = bytes(packet)
            units = self.context.name in ("h264", "hevc") and self.format.startswith(_UNIT_FORMATS)
            if (_UNIT_HOLE if units else _HOLE) in (data.rstrip(b"\0") if self.format == "mpegts" else data):
                return "a part of the file is blank"
        if self.format == "avi":
            index = self.stream.index_entries
            place = index.search_timestamp(packet.dts, any_frame=True) if packet.dts is not None else -1
            if place >= 0:
                offset = packet.pos - index[place].pos
                self._index_offset = offset if self._index_offset is None else self._index_offset
                if offset != self._index_offset:
                    return "the file is not as its index says"
        return ""


def errors_logged() -> int:
    """Return how many errors libav has logged so far."""
    return int(av.logging.get_last_error()[0])


def damage_logged(since: int, component: str) -> bool:
    """Whether that demuxer or decoder has logged an error since then, other than on supplemental information."""
    count, last = av.logging.get_last_error()
    return bool(count > since and last and last[1] == component and "SEI" not in last[2])


def describe(error: Exception) -> str:
    """Return a library's error as a phrase, with what it logged about it."""
    log = getattr(error, "log", None)
    text = getattr(error, "strerror", None) or str(error)
    return f"{text} ({log[2].strip()})" if log else text


def because(problems: Sequence[str]) -> str:
    """Return the newest of the problems as the end of a sentence."""
    return f": {problems[-1]}" if problems else ""


def _open_container(path: str) -> Any:
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError) as error:
        raise ToolError(ErrorKind.NOT_FOUND, f"There is no video file {path} ({error}).") from error
    if not stat.S_ISREG(mode):
        raise ToolError(ErrorKind.NOT_FOUND, f"{path} is not a regular file.")
    try:
        # "file:" and the whitelist: neither a name nor a playlist in the file ever leads to the network.
        return av.open(f"file:{path}", options={"protocol_whitelist": "file"}, metadata_errors="replace")
    except (av.FFmpegError, ValueError) as error:
        raise ToolError(ErrorKind.UNREADABLE, f"{path} cannot be opened as a video: {describe(error)}.") from error


def _video_stream(container: Any, path: str) -> Any:
    cover = av.stream.Disposition.attached_pic
    streams = [s for s in container.streams.video if not s.disposition & cover]
    if not streams:
        raise ToolError(ErrorKind.NO_VIDEO, f"{path} holds no video stream.")
    if streams[0].codec_context is None:
        raise ToolError(ErrorKind.UNREADABLE, f"There is no decoder for the video in {path}.")
    for other in container.streams:
        if other.index != streams[0].index:
            other.discard = av.stream.Discard.all
    return streams[0]
