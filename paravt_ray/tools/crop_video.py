"""`crop_video`: the frames of a window of the video, closer together than those of the overview."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from paravt_ray.tools.tool import Arguments, Bounds, CropService, Request, Tool, read_video, read_window
from tool_workers.records import Crop


class CropVideo(Tool):
    """The paper's tool."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "crop_video",
        "description": "Look closely at a part of the video.",
        "parameters": {
            "type": "object",
            "properties": {
                "video_path": {"type": "string"},
                "start_time": {"type": "number", "description": "seconds"},
                "end_time": {"type": "number", "description": "seconds"},
            },
            "required": ["video_path", "start_time", "end_time"],
        },
    }
    example: ClassVar[Mapping[str, Any]] = {"video_path": "x.mp4", "start_time": 30, "end_time": 45}

    def read(self, arguments: Mapping[str, Any]) -> Arguments:
        """A window and a video."""
        return Arguments(*read_window(arguments), read_video(arguments))

    async def frames(self, request: Request, service: CropService, bounds: Bounds) -> Crop:
        """What the service returns for the window."""
        return await service.crop(
            request.video,
            *request.span,
            fps=bounds.fps,
            max_frames=bounds.max_frames,
            max_pixels=bounds.max_pixels,
        )

    def frame_key(self, request: Request) -> str:
        """Empty: they are the video's own."""
        return ""


CROP_VIDEO = CropVideo()
