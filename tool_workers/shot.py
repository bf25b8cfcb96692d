"""One target's frame, as it travels from the decoder to the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Shot:
    """What there is for one target: a frame, or the problem that stands in its place."""

    time: float
    """Presentation time in seconds of the source."""
    pixels: NDArray[np.uint8] | None
    """[H, W, 3] RGB."""
    problem: str = ""
