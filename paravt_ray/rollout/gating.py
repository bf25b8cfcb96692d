"""Frame-budget gating and seeds: draws that are the same in every process, on every machine, after every restart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence


def stable_hash(*parts: str | int) -> int:
    """A number in [0, 2^63) that depends on the parts alone; Python's own `hash` is salted per process."""
    text = json.dumps(parts, ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def draw_frame_budget(seed: int, sample_id: str, epoch: int, budgets: Sequence[int]) -> int:
    """K, the overview frames of one prompt: uniform over `budgets`, shared by the prompt's whole group.

    Clamped to the frames that the clip has where they are taken, not here.

    Raises:
        ValueError: there are no budgets.
    """
    if not budgets:
        raise ValueError("There are no frame budgets to draw from: set rollout.frame_budgets.")
    return budgets[stable_hash("frame_budget", seed, sample_id, epoch) % len(budgets)]
