"""Evaluation: the paper's benchmarks (`run`), held-out samples during training, and single questions (`ask`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paravt_ray.config import Config


def run(config: Config) -> int:
    """`paravt eval`."""
    from paravt_ray.evaluation import benchmark

    return benchmark.run(config)
