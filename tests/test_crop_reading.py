"""Right frames at right times on files of every kind: the numbers drawn into the frames say which frames they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import clips
import numpy as np
import pytest

import tool_workers
from tool_workers import Crop

COUNTED = {"h264-avi-b", "h264-bare", "mpeg1-ps", "mpeg2-ps"}
"""Files whose container gives no or wrong presentation times: frame n is at start + n / rate."""
QUICK = ["h264", "h264-open-gop", "h264-vfr", "h264-ts", "hevc-open-gop", "av1", "vp9-altref", "mpeg4-asp-avi"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clips")


def truth(clip: clips.Clip, name: str) -> list[tuple[int, float]]:
    """(number, seconds) of all frames."""
    frames = clips.linear_truth(clip.path)
    if name in COUNTED:
        start = tool_workers.probe(clip.path).start_time
        return [(i, start + i / 25) for i in range(len(frames))]
    return frames


def expected(frames: list[tuple[int, float]], start: float, end: float, fps: float) -> list[tuple[int, float]]:
    """The documented rule, spelled out: which frames a crop of the window holds."""
    first, last = frames[0][1], frames[-1][1]
    points = [k / fps for k in range(int(start * fps) - 1, int(end * fps) + 2) if start - 1e-6 <= k / fps < end - 1e-6]
    half = 0.5 / fps
    if not points:
        points, half = [(start + end) / 2], (end - start) / 2
    chosen = {}
    for point in points:
        if not first - 1e-6 <= point:
            continue
        begins = [f for f in frames if point - 1e-5 <= f[1] < point + half - 1e-5]
        shown = [f for f in frames if f[1] <= point + 1e-5]
        number, time = begins[0] if begins else shown[-1]
        chosen[time] = number
    inside = {time: number for time, number in chosen.items() if time < end} or chosen
    assert last >= first
    return [(number, time) for time, number in sorted(inside.items())]


def check(crop: Crop, wanted: list[tuple[int, float]]) -> None:
    assert len(crop) == len(crop.frames) == len(wanted)
    assert [clips.read_number(frame) for frame in crop.frames] == [number for number, _ in wanted]
    assert np.allclose(crop.timestamps, [time for _, time in wanted], atol=1e-3, rtol=0)
    assert all(clips.is_upright(frame) for frame in crop.frames)


def check_windows(path: Path, frames: list[tuple[int, float]]) -> None:
    """Crops at the clip's edges, across its keyframes, denser and sparser than its frames, and shorter than one."""
    start, end = frames[0][1], frames[-1][1]
    span = end - start or 0.04
    per_second = 1.0 if span < 1000 else 0.01
    for low, high, density in [
        (0.0, 0.1, 50.0),
        (0.28, 0.45, 25.0),
        (0.45, 0.6, 7.0),
        (0.87, 1.01, 50.0),
        (0.1, 0.9, 2.0),
        (0.5, 0.5001, 1.0),
    ]:
        window = start + low * span, start + high * span
        fps = density * per_second
        crop = tool_workers.crop(path, *window, fps=fps, max_frames=10_000)
        wanted = expected(frames, window[0], min(window[1], tool_workers.probe(path).end_time), fps)
        check(crop, wanted)


@pytest.mark.parametrize("name", sorted(clips.RECIPES))
def test_every_frame_is_the_right_one(name: str, folder: Path) -> None:
    clip = clips.make(name, folder)
    frames = truth(clip, name)
    info = tool_workers.probe(clip.path)
    assert info.damage == ""
    assert info.start_time == pytest.approx(frames[0][1], abs=1e-3)
    assert frames[-1][1] < info.end_time
    if name not in ("h264-edit-list", "h264-slides", "hours"):
        assert info.duration == pytest.approx(frames[-1][1] - frames[0][1], rel=0.1, abs=0.1)
    check_windows(clip.path, frames)
    for count in (1, 3, 8):
        overview = tool_workers.overview(clip.path, count)
        assert 1 <= len(overview) <= count
        times = {round(time, 3): number for number, time in frames}
        assert [clips.read_number(f) for f in overview.frames] == [times[round(t, 3)] for t in overview.timestamps]


def test_the_drawn_numbers_are_those_that_were_written(folder: Path) -> None:
    """The oracle itself: what is read back by plain decoding is what the generator put in, at the times it put in."""
    clip = clips.make("h264-vfr", folder)
    assert clips.linear_truth(clip.path) == [(i, pytest.approx(t)) for i, t in enumerate(clip.times)]


def test_frames_are_right_while_all_cores_are_busy(folder: Path) -> None:
    """Readers that decode with threads of their own have returned wrong frames on busy machines, without an error."""
    made = [(clip := clips.make(name, folder), truth(clip, name)) for name in QUICK]
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        for clip, frames in made:
            check_windows(clip.path, frames)
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def test_an_overview_takes_what_the_clip_has(folder: Path) -> None:
    clip = clips.encode(clips.Recipe(frames=31), folder / "31.mp4")
    assert [clips.read_number(f) for f in tool_workers.overview(clip.path, 32).frames] == list(range(31))
    assert [clips.read_number(f) for f in tool_workers.overview(clip.path, 64).frames] == list(range(31))
    one = clips.make("h264-one-frame", folder)
    assert len(tool_workers.overview(one.path, 64)) == 1


def test_an_overview_of_hours_decodes_only_keyframes(folder: Path) -> None:
    """K frames of a clip of hours must not cost K half groups of pictures."""
    clip = clips.make("hours", folder)
    overview = tool_workers.overview(clip.path, 8)
    centres = (np.arange(8) + 0.5) * 1800
    assert np.all(overview.timestamps <= centres + 1e-6)
    assert np.all(overview.timestamps > centres - 450)
    assert all(time % 360 == 0 for time in overview.timestamps)  # a keyframe every 30 frames of 12 s


def test_a_window_without_a_new_frame_shows_the_one_on_display(folder: Path) -> None:
    clip = clips.make("h264-slides", folder)
    crop = tool_workers.crop(clip.path, 12.0, 20.0)
    assert crop.timestamps.tolist() == [10.0]
    assert clips.read_number(crop.frames[0]) == 2
    assert "on display since 10.000 s" in crop.note


def test_windows_are_clamped_and_say_so(folder: Path) -> None:
    clip = clips.make("h264-late", folder)
    crop = tool_workers.crop(clip.path, 0.0, 6.5)
    assert crop.timestamps.tolist() == [5.0, 6.0]
    assert "clamped to 5.000 s to 6.500 s" in crop.note
    assert tool_workers.crop(clip.path, 5.5, 6.5).note == ""


@pytest.mark.parametrize(
    ("start", "end"), [(3.0, 3.0), (3.0, 2.0), (4.0, 9.0), (-5.0, 0.0), (float("nan"), 2.0), (0.0, float("inf"))]
)
def test_bad_windows(start: float, end: float, folder: Path) -> None:
    clip = clips.make("h264", folder)
    with pytest.raises(tool_workers.ToolError) as error:
        tool_workers.crop(clip.path, start, end)
    assert error.value.kind == "bad_window"
    assert "0.000 s to 4.000 s" in error.value.message


def test_a_replaced_file_is_another_file(folder: Path) -> None:
    """Frames of a file that was overwritten must not come from the cache of the old one."""
    path = folder / "replaced.mp4"
    clips.encode(clips.Recipe(frames=30), path)
    before = tool_workers.crop(path, 0.0, 1.0, fps=25.0, max_frames=100)
    path.write_bytes(
        clips.encode(clips.Recipe(frames=60, ticks=range(0, 120, 2)), folder / "new.mp4").path.read_bytes()
    )
    after = tool_workers.crop(path, 0.0, 1.0, fps=25.0, max_frames=100)
    assert len(before) == 25
    assert len(after) == 13
