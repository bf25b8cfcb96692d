"""What a video is: read from the file itself where its header may be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import av

from tool_workers.decoding import Decoder, display_matrix
from tool_workers.records import ErrorKind, ToolError, VideoInfo
from tool_workers.source import Entry, Source, because

_HEAD = 64
"""Packets looked at in the beginning."""
_DEFAULT_FRAME_S = 0.04
"""Length of a frame of unknown length, such as that of a clip of one frame."""


def probe(source: Source, decoder: Decoder) -> tuple[VideoInfo, bool]:
    """Return what the video is, and whether its frames have to be counted for want of presentation times.

    Raises:
        ToolError: empty or damaged.
    """
    head = list(islice(source.entries(), _HEAD))
    if source.untimed and _disordered(head, decoder):
        return _counted_info(source, decoder), True
    times = sorted(entry.pts for entry in head if not entry.packet.is_discard)
    if not times:
        kind = ErrorKind.DAMAGED if source.problems else ErrorKind.EMPTY
        raise ToolError(kind, f"{source.path} has a video stream without frames{because(source.problems)}.")
    start = source.seconds(times[0])
    fps = _rate(source, times)
    width, height, damage = _picture(source, decoder, head)
    end, cut = _end(source, start, fps)
    info = VideoInfo(
        start_time=start,
        end_time=end,
        fps=fps,
        width=width,
        height=height,
        frames=source.stream.frames or max(1, round((end - start) * fps)),
        codec=source.context.name,
        container=source.format,
        damage="; ".join(filter(None, (damage, cut))),
    )
    return info, False


def _disordered(head: Sequence[Entry], decoder: Decoder) -> bool:
    """Whether the presentation times contradict the order in which the decoder delivers the frames."""
    times = [frame.pts for frame in decoder.frames([entry.packet for entry in head], {})]
    return not times or None in times or any(b <= a for a, b in pairwise(times))


def _counted_info(source: Source, decoder: Decoder) -> VideoInfo:
    source.reopen()
    packets: list[Any] = []
    count = 0
    for packet in source.untimed_packets():
        count += 1
        if len(packets) < _HEAD:
            packets.append(packet)
    frame = next(decoder.frames(packets, {}), None)
    if frame is None:
        kind = ErrorKind.DAMAGED if count else ErrorKind.EMPTY
        raise ToolError(kind, f"{source.path} has a video stream without a frame that can be decoded.")
    fps = float(source.stream.average_rate or source.stream.guessed_rate or 25)
    start = source.seconds(source.stream.start_time or 0)
    width, height = _displayed(source, frame)
    return VideoInfo(start, start + count / fps, fps, width, height, count, source.context.name, source.format)


def _picture(source: Source, decoder: Decoder, head: Sequence[Entry]) -> tuple[int, int, str]:
    """Return (width, height) as displayed, from the first frame that can be decoded, and what is wrong before it."""
    frame = next(decoder.frames([entry.packet for entry in head], {}), None)
    if frame is not None:
        return *_displayed(source, frame), ""
    for share in (0.25, 0.5, 0.75):
        source.seek(source.ticks(_stated_end(source, 0.0) * share))
        packets = [entry.packet for entry in islice(source.entries(), _HEAD)]
        frame = next(decoder.frames(packets, {}), None)
        if frame is not None:
            return *_displayed(source, frame), "the beginning cannot be decoded"
    raise ToolError(ErrorKind.DAMAGED, f"No frame of {source.path} can be decoded.")


def _displayed(source: Source, frame: Any) -> tuple[int, int]:
    width, height = frame.width, frame.height
    aspect = source.stream.sample_aspect_ratio or source.context.sample_aspect_ratio
    if aspect and aspect > 0:
        width = max(1, round(width * float(aspect)))
    return (height, width) if display_matrix(frame).transposed else (width, height)


def _rate(source: Source, times: Sequence[int]) -> float:
    """Return the header's average rate if the container counts frames or the first frames bear it out, else theirs."""
    span = source.seconds(times[-1] - times[0])
    measured = (len(times) - 1) / span if span > 0 else 0.0
    stated = float(source.stream.average_rate or source.stream.guessed_rate or 0)
    plausible = 0 < stated <= 1000
    if plausible and (source.stream.frames or not measured or abs(stated / measured - 1) < 0.1):
        return stated
    return measured


def _stated_end(source: Source, start: float) -> float:
    """Return the end in seconds as the header states it; `start` where it does not."""
    if source.stream.duration:
        return start + source.seconds(source.stream.duration)
    if source.container.duration:
        return max(start, float(((source.container.start_time or 0) + source.container.duration) / av.time_base))
    return start


def _end(source: Source, start: float, fps: float) -> tuple[float, str]:
    """Return the end of the last frame that is in the file, and how far that is from what the header states."""
    stated = _stated_end(source, start)
    frame_s = 1 / fps if fps else _DEFAULT_FRAME_S
    for share in (1.0, 0.9, 0.75, 0.5, 0.25, 0.0):
        if share:
            source.seek(source.ticks(start + (stated - start) * share))
        else:
            source.reopen()
        ends: list[float] = []
        keyframe = False  # without one, seeking may have missed frames that are stored before and displayed after
        for entry in source.entries():
            keyframe |= entry.key
            if not entry.packet.is_discard:
                ends.append(source.seconds(entry.pts) + (source.seconds(entry.packet.duration or 0) or frame_s))
        if ends and (keyframe or not share):
            end = max(start + frame_s, *ends)
            cut = stated - end > max(1.0, 2 * frame_s) and (share < 1.0 or source.problems)
            if not cut:
                return end, ""
            return end, f"the header states {stated - start:.3f} s, the data ends after {end - start:.3f} s"
    raise ToolError(ErrorKind.DAMAGED, f"No frames of {source.path} can be read.")
