"""Which moments a call is about, and the size of its frames: arithmetic, checked on many inputs."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tool_workers.decoding import DisplayMatrix
from tool_workers.planning import plan_crop, plan_overview
from tool_workers.records import Limits, VideoInfo
from tool_workers.sizes import check_limits, fit_size


def info(start: float = 0.0, end: float = 60.0) -> VideoInfo:
    return VideoInfo(start, end, 25.0, 640, 360, 1500, "h264", "mp4")


def times(start: float, end: float, fps: float = 1.0, max_frames: int = 16) -> list[float]:
    return [target.time for target in plan_crop(info(), start, end, fps, max_frames).targets]


def test_points_of_the_grid_in_the_half_open_window() -> None:
    assert times(10, 14) == [10, 11, 12, 13]
    assert times(10.2, 14.2) == [11, 12, 13, 14]
    assert times(10, 12, fps=2) == [10, 10.5, 11, 11.5]


def test_long_windows_are_thinned_evenly() -> None:
    assert times(0, 32) == [1 + 2 * i for i in range(16)]
    assert len(times(0, 17)) == 16
    assert times(0, 60, max_frames=1) == [30]


def test_a_window_between_two_points_gets_its_centre() -> None:
    assert times(10.2, 10.8) == [10.5]


def test_overlapping_windows_share_their_targets() -> None:
    one, other = (set(plan_crop(info(), s, s + 10, 1.0, 16).targets) for s in (20.3, 21.9))
    assert len(one & other) == 9  # 22 to 30


@settings(deadline=None, max_examples=60)  # no deadline: the machine may be busy
@given(
    st.floats(-1.0, 0.99),
    st.floats(0.001, 80),
    st.floats(0.05, 50),
    st.integers(1, 64),
    st.floats(0, 100),
    st.floats(0.04, 5000),
)
def test_targets_are_inside_rise_and_respect_the_cap(
    offset: float, inside: float, fps: float, cap: int, clip_start: float, clip_length: float
) -> None:
    clip = info(clip_start, clip_start + clip_length)
    start = clip_start + offset * clip_length
    length = max(0.0, clip_start - start) + inside  # so that the window meets the clip
    plan = plan_crop(clip, start, start + length, fps, cap)
    moments = [target.time for target in plan.targets]
    assert 1 <= len(moments) <= cap
    assert all(a < b for a, b in pairwise(moments))
    assert all(plan.start - 1e-5 <= moment <= plan.end for moment in moments)
    assert clip.start_time <= plan.start < plan.end <= clip.end_time
    assert (plan.note == "") == (plan.start == start and plan.end == start + length)


def test_overviews_stand_at_the_centres_of_equal_segments() -> None:
    plan = plan_overview(info(5.0, 15.0), 4)
    assert [target.time for target in plan.targets] == [6.25, 8.75, 11.25, 13.75]
    assert {target.before for target in plan.targets} == {0.0}
    assert {target.before for target in plan_overview(info(0, 600), 10).targets} == {15.0}


@settings(deadline=None, max_examples=60)  # no deadline: the machine may be busy
@given(
    st.integers(1, 8000), st.integers(1, 8000), st.sampled_from([14, 28, 32]), st.integers(1, 64), st.integers(1, 64)
)
def test_sizes_are_whole_patches_within_bounds(width: int, height: int, factor: int, low: int, more: int) -> None:
    limits = Limits(factor * factor * (low + more), factor * factor * low, factor)
    fitted = fit_size(width, height, limits)
    assert all(side % factor == 0 and side > 0 for side in fitted)
    assert fitted[0] * fitted[1] <= limits.max_pixels
    if max(width, height) / min(width, height) < 4 and more > 3 * low:
        assert fitted[0] * fitted[1] >= limits.min_pixels


@settings(deadline=None, max_examples=60)  # no deadline: the machine may be busy
@given(st.integers(64, 4000), st.integers(64, 4000), st.integers(4, 200))
def test_a_fitted_size_fits_itself(width: int, height: int, patches: int) -> None:
    """Nobody resizes twice."""
    limits = Limits(1024 * patches, 1024, 32)
    fitted = fit_size(width, height, limits)
    assert fit_size(*fitted, limits) == fitted


@settings(deadline=None, max_examples=60)  # no deadline: the machine may be busy
@given(st.integers(64, 4000), st.floats(0.51, 1.95), st.integers(16, 200))
def test_usual_shapes_get_the_size_that_qwens_processor_gives(width: int, ratio: float, patches: int) -> None:
    limits = Limits(1024 * patches, 1024, 32)
    height = max(64, round(width * ratio))
    scale = min(1.0, math.sqrt(limits.max_pixels / (width * height)))
    rounded = round(width / 32) * 32, round(height / 32) * 32
    floored = math.floor(width * scale / 32) * 32, math.floor(height * scale / 32) * 32
    expected = rounded if rounded[0] * rounded[1] <= limits.max_pixels else floored
    assert fit_size(width, height, limits) == expected


def test_usual_sizes() -> None:
    limits = Limits(50176, 784, 32)
    assert fit_size(640, 360, limits) == (288, 160)
    assert fit_size(1080, 1920, limits) == (160, 288)
    assert fit_size(10, 10, limits) == (32, 32)
    assert fit_size(4000, 20, Limits(1024 * 8, 784, 32)) == (256, 32)
    assert fit_size(640, 360, Limits(1024, 784, 32)) == (32, 32)


@pytest.mark.parametrize("limits", [Limits(1000, 784, 32), Limits(50176, 50177, 32), Limits(50176, 784, 0)])
def test_impossible_limits_are_refused(limits: Limits) -> None:
    with pytest.raises(ValueError, match="pixels"):
        check_limits(limits)


@pytest.mark.parametrize(
    "matrix", [(a, 0, 0, d) for a in (1, -1) for d in (1, -1)] + [(0, b, c, 0) for b in (1, -1) for c in (1, -1)]
)
def test_turned_and_mirrored_pictures_are_put_upright(matrix: tuple[int, int, int, int]) -> None:
    """By the definition: a stored point (x, y), measured from the centre, is displayed at (a x + c y, b x + d y)."""
    a, b, c, d = matrix
    stored = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    shown = DisplayMatrix(a << 16, b << 16, c << 16, d << 16).apply(stored)
    height, width = shown.shape[:2]
    for row in range(4):
        for column in range(6):
            x, y = column - 2.5, row - 1.5
            place = round(b * x + d * y + (height - 1) / 2), round(a * x + c * y + (width - 1) / 2)
            assert np.array_equal(shown[place], stored[row, column])
