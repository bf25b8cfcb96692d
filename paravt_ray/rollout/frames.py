"""Frames for one group: its overview and its crops, taken from the crop service, each stored once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, Protocol

from paravt_ray.config import Config
from paravt_ray.episode import Frame, ToolCall
from tool_workers.records import Crop, ErrorKind, ToolError, VideoInfo

if TYPE_CHECKING:
    from tool_workers.pool import CropPool


class CropService(Protocol):
    """What the agent loop asks of `tool_workers.CropPool`; every call ends in time, with frames or a ToolError."""

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


def crop_pool(config: Config, patch_factor: int) -> CropPool:
    """Start the crop service as configured, on the Ray cluster that this process is connected to.

    Args:
        config: the run's.
        patch_factor: sides of all frames are multiples of it (`Chat.patch_factor`).
    """
    from tool_workers.pool import CropPool

    tools = config.tools
    return CropPool(
        workers=tools.workers,
        timeout_s=tools.crop_timeout_s,
        cache_mb=tools.cache_mb,
        queue_limit=tools.queue_limit,
        patch_factor=patch_factor,
        min_pixels=config.model.min_pixels,
    )


class Window(NamedTuple):
    """What a call asks for, after clamping: calls with equal windows are the same call."""

    video: str
    """Absolute path."""
    start: float
    """Seconds."""
    end: float

    @property
    def span(self) -> tuple[float, float]:
        """Start and end in seconds."""
        return self.start, self.end


class BadCallError(ValueError):
    """A call names no video of the episode or nothing inside it; the message is what the model is told."""


@dataclass
class GroupFrames:
    """The crop service as the episodes of one group see it."""

    service: CropService
    config: Config
    videos: tuple[str, ...]
    """Absolute paths."""
    infos: dict[str, VideoInfo] = field(default_factory=dict)
    stored: dict[str, Frame] = field(default_factory=dict)
    """By key: a frame that several episodes see exists, and travels, once."""

    async def overview(self, count: int) -> list[list[Frame]]:
        """For each video its share of at most `count` frames; learns the clips' lengths.

        Raises:
            ToolError: a video cannot be read, or not in time.
        """
        max_pixels = self.config.model.overview_max_pixels
        shares: list[list[Frame]] = []
        for index, video in enumerate(self.videos):
            self.infos[video] = await self.service.probe(video)
            share = count // len(self.videos) + (index < count % len(self.videos))
            if share:
                shares.append(self._frames(video, await self.service.overview(video, share, max_pixels=max_pixels)))
        return shares

    async def crop(self, window: Window) -> tuple[list[Frame], str]:
        """The frames of one window and the service's note on them.

        Raises:
            ToolError: there are none, or not in time.
        """
        tools = self.config.tools
        crop = await self.service.crop(
            *window,
            fps=tools.crop_fps,
            max_frames=tools.crop_max_frames,
            max_pixels=self.config.model.crop_max_pixels,
        )
        return self._frames(window.video, crop), crop.note

    def resolve(self, call: ToolCall) -> tuple[Window, str]:
        """The window of a call that could be parsed, clamped to the clip, and a note where that changed it.

        The video argument only chooses among the episode's videos, by base name; a single video is always meant.

        Raises:
            BadCallError: an unknown video, or a window wholly outside the clip.
        """
        assert call.start_time is not None and call.end_time is not None
        video = self._choose(call.video)
        info = self.infos[video]
        start, end = max(call.start_time, info.start_time), min(call.end_time, info.end_time)
        clip = f"the clip spans {info.start_time:.1f} to {info.end_time:.1f} s"
        if start >= end:
            raise BadCallError(f"The window is outside the video: {clip}.")
        clamped = (start, end) != (call.start_time, call.end_time)
        return Window(video, start, end), f"clamped: {clip}" if clamped else ""

    def _choose(self, name: str | None) -> str:
        if len(self.videos) == 1:
            return self.videos[0]
        by_name = {PurePosixPath(video).name: video for video in self.videos}
        wanted = PurePosixPath((name or "").replace("\\", "/")).name
        if wanted not in by_name:
            raise BadCallError(f"There is no such video; the videos are: {', '.join(by_name)}.")
        return by_name[wanted]

    def _frames(self, video: str, crop: Crop) -> list[Frame]:
        if not len(crop):
            raise ToolError(ErrorKind.EMPTY, f"The crop service returned no frame of {video}.")
        frames = []
        for pixels, time in zip(crop.frames, crop.timestamps.tolist(), strict=True):
            key = f"{video}@{time!r}/{pixels.shape[1]}x{pixels.shape[0]}"
            frames.append(self.stored.setdefault(key, Frame(pixels, time, key)))
        return frames
