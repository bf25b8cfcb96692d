"""An example of a tool from outside the package: `zoom`, a part of the picture, larger than `crop_video` shows it.

All of it is in this file, and one line of a configuration offers it: `tools.offered: [crop_video, zoom:ZOOM]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np

from paravt_ray.episode import ToolCall
from paravt_ray.tools.tool import (
    Arguments,
    BadCallError,
    Bounds,
    CropService,
    Request,
    Tool,
    read_number,
    read_video,
    read_window,
)
from tool_workers import Crop, VideoInfo

SMALLEST = 0.1
"""Of the picture's width and height: a smaller part would ask for frames of more than a hundred times the bound."""

Part = tuple[float, float, float, float]


class Zoom(Tool):
    """The detail of its calls is (x, y, width, height), of its requests (left, top, right, bottom): shares of the
    picture, from its upper left corner."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "zoom",
        "description": "Look closely at a part of the picture, for a part of the video.",
        "parameters": {
            "type": "object",
            "properties": {
                "video_path": {"type": "string"},
                "start_time": {"type": "number", "description": "seconds"},
                "end_time": {"type": "number", "description": "seconds"},
                "x": {"type": "number", "description": "left edge, 0 to 1"},
                "y": {"type": "number", "description": "upper edge, 0 to 1"},
                "width": {"type": "number", "description": "0.1 to 1"},
                "height": {"type": "number", "description": "0.1 to 1"},
            },
            "required": ["video_path", "start_time", "end_time", "x", "y", "width", "height"],
        },
    }
    example: ClassVar[Mapping[str, Any]] = {
        "video_path": "x.mp4", "start_time": 30, "end_time": 45, "x": 0.5, "y": 0, "width": 0.5, "height": 0.5,
    }  # fmt: skip

    def read(self, arguments: Mapping[str, Any]) -> Arguments:
        corner = (read_number(arguments, "x", 0, 1), read_number(arguments, "y", 0, 1))
        size = (read_number(arguments, "width", SMALLEST, 1), read_number(arguments, "height", SMALLEST, 1))
        return Arguments(*read_window(arguments), read_video(arguments), detail=(*corner, *size))

    def resolve(self, call: ToolCall, video: str, info: VideoInfo) -> tuple[Request, str]:
        request, note = super().resolve(call, video, info)
        x, y, width, height = cast(Part, call.detail)
        if max(x, y) > 1 - SMALLEST:
            raise BadCallError("The part is outside the picture.")
        part = (round(x, 3), round(y, 3), round(min(x + width, 1), 3), round(min(y + height, 1), 3))
        cut = "cut at the picture's edge" if x + width > 1 or y + height > 1 else ""
        return request._replace(detail=part), "; ".join(filter(None, (note, cut)))

    async def frames(self, request: Request, service: CropService, bounds: Bounds) -> Crop:
        left, top, right, bottom = cast(Part, request.detail)
        share = (right - left) * (bottom - top)
        whole = await service.crop(
            request.video,
            *request.span,
            fps=bounds.fps,
            max_frames=bounds.max_frames,
            max_pixels=int(bounds.max_pixels / share),
        )
        height, width = whole.frames.shape[1:3]
        rows, columns = _patches(top, bottom, height, bounds), _patches(left, right, width, bounds)
        return replace(whole, frames=np.ascontiguousarray(whole.frames[:, rows, columns]))

    def describe(self, request: Request) -> str:
        left, top, right, bottom = cast(Part, request.detail)
        return f", x {left:g} to {right:g}, y {top:g} to {bottom:g}"


def _patches(low: float, high: float, side: int, bounds: Bounds) -> slice:
    """All whole patches that a stretch of a side touches."""
    factor = bounds.patch_factor
    return slice(math.floor(low * side / factor) * factor, math.ceil(high * side / factor) * factor)


ZOOM = Zoom()
