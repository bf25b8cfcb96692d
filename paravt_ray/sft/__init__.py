"""Supervised cold start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paravt_ray.config import Config


def run(config: Config) -> int:
    """`paravt sft`."""
    # OpenMP reads it when torch is imported. Threads that spin while they wait are many times slower on shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from paravt_ray.sft.train import train

    print(f"The trained model is in {train(config)}.")
    return 0
