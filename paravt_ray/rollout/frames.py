"""Frames for one group: its overview and what its calls ask for, from the crop service, each stored once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from paravt_ray.config import Config
from paravt_ray.episode import Frame, ToolCall
from paravt_ray.tools.offered import Tools
from paravt_ray.tools.tool import BadCallError, Bounds, CropService, Request
from tool_workers.records import Crop, ErrorKind, ToolError, VideoInfo

if TYPE_CHECKING:
    from tool_workers.pool import CropPool


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


@dataclass
class GroupFrames:
    """The crop service as the episodes of one group see it."""

    service: CropService
    config: Config
    videos: tuple[str, ...]
    """Absolute paths."""
    tools: Tools
    patch_factor: int
    """Sides of all frames are multiples of it (`Chat.patch_factor`)."""
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

    async def of(self, request: Request) -> tuple[list[Frame], str]:
        """The frames of one call and the tool's note on them.

        Raises:
            ToolError: there are none, or not in time.
        """
        settings, tool = self.config.tools, self.tools[request.tool]
        max_pixels = self.config.model.crop_max_pixels
        bounds = Bounds(settings.crop_fps, settings.crop_max_frames, max_pixels, self.patch_factor)
        crop = await tool.frames(request, self.service, bounds)
        return self._frames(request.video, crop, tool.frame_key(request)), crop.note

    def resolve(self, call: ToolCall) -> tuple[Request, str]:
        """What a call that could be parsed asks for, clamped, and a note where that changed it.

        The video argument only chooses among the episode's videos, by base name; a single video is always meant.

        Raises:
            BadCallError: an unknown video, or nothing of it.
        """
        assert call.name is not None
        video = self._choose(call.video)
        return self.tools[call.name].resolve(call, video, self.infos[video])

    def _choose(self, name: str | None) -> str:
        if len(self.videos) == 1:
            return self.videos[0]
        by_name = {PurePosixPath(video).name: video for video in self.videos}
        wanted = PurePosixPath((name or "").replace("\\", "/")).name
        if wanted not in by_name:
            raise BadCallError(f"There is no such video; the videos are: {', '.join(by_name)}.")
        return by_name[wanted]

    def _frames(self, video: str, crop: Crop, made: str = "") -> list[Frame]:
        """The crop's frames, each stored once; `made` tells them from the video's own (`Tool.frame_key`)."""
        if not len(crop):
            raise ToolError(ErrorKind.EMPTY, f"The crop service returned no frame of {video}.")
        frames = []
        for pixels, time in zip(crop.frames, crop.timestamps.tolist(), strict=True):
            key = f"{video}@{time!r}/{pixels.shape[1]}x{pixels.shape[0]}" + (f"/{made}" if made else "")
            frames.append(self.stored.setdefault(key, Frame(pixels, time, key)))
        return frames
