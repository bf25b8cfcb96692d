"""The size of a returned frame: a multiple of the model's patches, within pixel bounds, in the source's aspect."""

from __future__ import annotations

import math

from tool_workers.records import Limits


def check_limits(limits: Limits) -> None:
    """Raise ValueError for bounds that no frame can meet."""
    smallest = limits.patch_factor**2
    if limits.patch_factor < 1 or limits.max_pixels < smallest:
        raise ValueError(
            f"max_pixels is {limits.max_pixels}, less than one patch of {limits.patch_factor}x{limits.patch_factor} "
            f"({smallest} pixels); raise max_pixels or lower patch_factor."
        )
    if limits.min_pixels > limits.max_pixels:
        raise ValueError(f"min_pixels ({limits.min_pixels}) is more than max_pixels ({limits.max_pixels}).")


def fit_size(width: int, height: int, limits: Limits) -> tuple[int, int]:
    """Return (width, height) to which a frame of the given size is resized.

    The rule of Qwen's image processors (round both sides to the factor, scale into the bounds), extended to shapes so
    long that theirs leaves the bounds: a frame of this size passes through such a processor unchanged.
    """
    factor = limits.patch_factor
    fitted_w = max(factor, round(width / factor) * factor)
    fitted_h = max(factor, round(height / factor) * factor)
    if fitted_w * fitted_h > limits.max_pixels:
        scale = math.sqrt(limits.max_pixels / (width * height))
        fitted_w = max(factor, math.floor(width * scale / factor) * factor)
        fitted_h = max(factor, math.floor(height * scale / factor) * factor)
    elif fitted_w * fitted_h < limits.min_pixels:
        scale = math.sqrt(limits.min_pixels / (width * height))
        fitted_w = math.ceil(width * scale / factor) * factor
        fitted_h = math.ceil(height * scale / factor) * factor
    if fitted_w * fitted_h > limits.max_pixels:  # one side was raised to a whole patch: the other pays for it
        if fitted_w >= fitted_h:
            fitted_w = max(factor, limits.max_pixels // fitted_h // factor * factor)
        else:
            fitted_h = max(factor, limits.max_pixels // fitted_w // factor * factor)
    return fitted_w, fitted_h
