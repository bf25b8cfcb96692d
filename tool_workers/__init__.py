"""A video-crop service: (video, window) in, exact frames out. See docs/crop_service.md.

`crop`, `overview` and `probe` work in any process; `CropPool` serves many callers from Ray actors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tool_workers.local import crop, overview, probe
from tool_workers.records import Crop, ErrorKind, ToolError, VideoInfo

if TYPE_CHECKING:
    from tool_workers.pool import CropPool

__all__ = ["Crop", "CropPool", "ErrorKind", "ToolError", "VideoInfo", "crop", "overview", "probe"]


def __getattr__(name: str) -> Any:
    """Import what needs Ray only when it is used."""
    if name == "CropPool":
        from tool_workers.pool import CropPool

        return CropPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
