"""The calls that the service takes, and how one is answered from the shots of its targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tool_workers.planning import Plan, plan_crop, plan_overview
from tool_workers.records import Crop, ErrorKind, Limits, ToolError, VideoInfo
from tool_workers.shot import Shot
from tool_workers.sizes import check_limits


@dataclass(frozen=True)
class CropCall:
    """Frames of a window."""

    video: str
    start_time: float
    end_time: float
    fps: float
    max_frames: int
    limits: Limits

    def __post_init__(self) -> None:
        """Raise ValueError for settings that no video could satisfy."""
        check_limits(self.limits)
        if not 0 < self.fps <= 1000:
            raise ValueError(f"fps is {self.fps}, but must be above 0 and at most 1000.")
        if self.max_frames < 1:
            raise ValueError(f"max_frames is {self.max_frames}, but must be at least 1.")

    def plan(self, info: VideoInfo) -> Plan:
        """Raises ToolError (bad_window)."""
        return plan_crop(info, self.start_time, self.end_time, self.fps, self.max_frames)


@dataclass(frozen=True)
class OverviewCall:
    """Frames spread over the whole clip."""

    video: str
    count: int
    limits: Limits

    def __post_init__(self) -> None:
        """Raise ValueError for settings that no video could satisfy."""
        check_limits(self.limits)
        if self.count < 1:
            raise ValueError(f"count is {self.count}, but must be at least 1.")

    def plan(self, info: VideoInfo) -> Plan:
        """Never raises: every clip has an overview."""
        return plan_overview(info, self.count)


@dataclass(frozen=True)
class ProbeCall:
    """What the video is."""

    video: str


FrameCall = CropCall | OverviewCall
Call = FrameCall | ProbeCall


def answer(call: FrameCall, plan: Plan, shots: Sequence[Shot]) -> Crop:
    """Put the crop together from one shot for each target: every frame once, in order, damage told.

    Raises:
        ToolError: damaged, where no frame is left.
    """
    problems = [shot.problem for shot in shots if shot.pixels is None]
    frames = {shot.time: shot.pixels for shot in shots if shot.pixels is not None}
    if not frames:
        raise ToolError(ErrorKind.DAMAGED, f"No frame of {call.video} could be decoded: {problems[0]}.")
    inside = {time: pixels for time, pixels in frames.items() if time < plan.end}
    kept = sorted((inside or frames).items())
    notes = [plan.note] if plan.note else []
    if problems:
        notes.append(f"{len(problems)} of {len(shots)} frames are left out: {problems[0]}.")
    if kept[-1][0] < plan.start:
        notes.append(f"No frame begins in the window; this one is on display since {kept[-1][0]:.3f} s.")
    return Crop(
        frames=np.stack([pixels for _, pixels in kept]),
        timestamps=np.array([time for time, _ in kept], dtype=np.float64),
        note=" ".join(notes),
    )
