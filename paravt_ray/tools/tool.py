"""What a tool is, and what its file needs for it.

A call passes through the methods of its tool in this order:

    read        what the model wrote          -> Arguments, checked
    resolve     Arguments and a video         -> Request, clamped to what there is; equal requests are one call
    frames      Request                       -> frames, from the crop service
    describe    Request                       -> words for it, in the sub-agent's question and in the reply

All else is the same for every tool and is not its business: which video is meant, the caps, duplicates, deadlines, the
sub-agent, the order of the replies, rewards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from paravt_ray.episode import ToolCall
from paravt_ray.timestamps import to_seconds
from tool_workers.records import Crop, VideoInfo


class BadCallError(ValueError):
    """A call that cannot be run; the message is the sentence that the model is shown, and names no file."""


class CropService(Protocol):
    """What is asked of `tool_workers.CropPool`; every call ends in time, with frames or a ToolError."""

    async def probe(self, video: str) -> VideoInfo:
        """What is known of a video."""
        ...

    async def crop(
        self, video: str, start_time: float, end_time: float, *, fps: float, max_frames: int, max_pixels: int
    ) -> Crop:
        """Frames of one window in seconds."""
        ...

    async def overview(self, video: str, count: int, *, max_pixels: int) -> Crop:
        """At most `count` frames spread over the whole clip."""
        ...


@dataclass(frozen=True)
class Bounds:
    """What the frames of one call may be."""

    fps: float
    max_frames: int
    max_pixels: int
    """Of one frame."""
    patch_factor: int
    """Height and width of a frame are multiples of it."""


@dataclass(frozen=True)
class Arguments:
    """What a call says, checked as far as that can be done without its video."""

    start_time: float
    """Seconds."""
    end_time: float
    video: str | None
    """Chooses among the episode's videos by its base name, and is never used as a path."""
    detail: Hashable = None
    """What else the tool has to know. It travels between processes, so keep to numbers, texts and tuples of them."""


class Request(NamedTuple):
    """What a call asks for, after clamping: calls with equal requests are the same call and are served once."""

    tool: str
    video: str
    """Absolute path."""
    start: float
    """Seconds."""
    end: float
    detail: Hashable = None
    """As in `Arguments`."""

    @property
    def span(self) -> tuple[float, float]:
        """Start and end in seconds."""
        return self.start, self.end


class Tool(ABC):
    """One tool. It keeps no state: one object serves all episodes of a process at the same time."""

    schema: ClassVar[Mapping[str, Any]]
    """What the model is told: `name`, `description` and `parameters`, a JSON schema. Calls that are written as code may
    give their arguments without names, in the order of `properties`."""
    example: ClassVar[Mapping[str, Any]]
    """The arguments of the call that the model is shown as an example."""

    @property
    def name(self) -> str:
        """What the model calls it."""
        return str(self.schema["name"])

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its arguments, in order."""
        return tuple(self.schema["parameters"]["properties"])

    @abstractmethod
    def read(self, arguments: Mapping[str, Any]) -> Arguments:
        """Check what the model wrote: any JSON values, or none at all.

        Raises:
            BadCallError: something is missing, has the wrong type, or is not finite and in bounds.
        """

    def resolve(self, call: ToolCall, video: str, info: VideoInfo) -> tuple[Request, str]:
        """What a call that could be read asks for, clamped to the clip, and a note where that changed it.

        Args:
            call: with the `Arguments` in its fields.
            video: absolute path of the video that is meant.
            info: what is known of it.

        Raises:
            BadCallError: the window is wholly outside the clip.
        """
        assert call.start_time is not None and call.end_time is not None
        start, end = max(call.start_time, info.start_time), min(call.end_time, info.end_time)
        clip = f"the clip spans {info.start_time:.1f} to {info.end_time:.1f} s"
        if start >= end:
            raise BadCallError(f"The window is outside the video: {clip}.")
        clamped = (start, end) != (call.start_time, call.end_time)
        return Request(self.name, video, start, end, call.detail), f"clamped: {clip}" if clamped else ""

    @abstractmethod
    async def frames(self, request: Request, service: CropService, bounds: Bounds) -> Crop:
        """The frames that the call is answered with.

        Raises:
            ToolError: as the crop service raises it.
        """

    def frame_key(self, request: Request) -> str:
        """What tells its frames from the video's own of the same times and size: frames with equal keys are stored, and
        seen by the model, once. Empty only where they are the video's own."""
        return f"{self.name}{request.detail!r}"

    def describe(self, request: Request) -> str:
        """What follows the window's times where the frames are spoken of, as `, upper left quarter`."""
        return ""


def read_window(arguments: Mapping[str, Any]) -> tuple[float, float]:
    """`start_time` and `end_time` (or `start` and `end`) in seconds, in the notations of `timestamps`.

    Raises:
        BadCallError: one is missing or no time, or the window is empty or reversed.
    """
    times = []
    for key, alias in (("start_time", "start"), ("end_time", "end")):
        if key not in arguments and alias not in arguments:
            raise BadCallError(f"The argument {key} is missing.")
        try:
            times.append(to_seconds(arguments.get(key, arguments.get(alias))))
        except ValueError as error:
            raise BadCallError(f"{key} {error}.") from error
    start, end = times
    if start >= end:
        raise BadCallError(f"start_time ({start:g}) must be smaller than end_time ({end:g}).")
    return start, end


def read_video(arguments: Mapping[str, Any]) -> str | None:
    """`video_path` (or `video`) as text, None where it is left out.

    Raises:
        BadCallError: it is no text.
    """
    video = arguments.get("video_path", arguments.get("video"))
    if video is not None and not isinstance(video, str):
        raise BadCallError("video_path must be a string.")
    return video


def read_number(arguments: Mapping[str, Any], name: str, low: float, high: float) -> float:
    """A number from `low` to `high`.

    Raises:
        BadCallError: it is missing, no number (a boolean is none), not finite, or out of bounds.
    """
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN is not
        raise BadCallError(f"{name} must be a number from {low:g} to {high:g}.")
    return float(value)
