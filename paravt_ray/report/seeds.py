"""Runs of one training that differ in the seed: what else may differ, and what is drawn of none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paravt_ray.errors import InputError
from paravt_ray.report.source import RunData

Settings = Mapping[str, Any]
"""Values by dotted configuration key."""

# Where runs are written, how often they are kept, and what no run reads.
_FREE = ("trainer.seed", "trainer.run_dir", "trainer.resume", "trainer.save_every", "trainer.keep_checkpoints")
_FREE_SECTIONS = ("paradox", "tracking", "cluster", "eval", "sft")


def trained_with(config: Settings) -> dict[str, Any]:
    """The settings that are the same in all runs of one training."""
    return {key: value for key, value in config.items() if key not in _FREE and key.split(".")[0] not in _FREE_SECTIONS}


def difference(one: Settings, other: Settings) -> str:
    """Keys that both have with other values, the first three of them; empty where there is none."""
    different = [key for key in sorted(one.keys() & other.keys()) if one[key] != other[key]]
    return ", ".join(f"{key}: {one[key]} and {other[key]}" for key in different[:3])


def check_whole(run: RunData) -> None:
    """Refuse a run that a picture could not show, or only in part and without a word.

    Raises:
        InputError: a file of it is damaged, or no step is finished.
    """
    if run.notes:
        raise InputError(f"{run.path} is damaged. {' '.join(run.notes)}")
    if not any(step > 0 for step in run.steps):
        raise InputError(f"{run.path} has no finished step yet: leave it out.")


def check_seeds(runs: Sequence[RunData]) -> None:
    """Refuse runs of one folder that are not one training with several seeds.

    Raises:
        InputError: naming two of them and what differs.
    """
    first = runs[0]
    for run in runs[1:]:
        if different := difference(trained_with(first.config), trained_with(run.config)):
            raise InputError(
                f"{first.path} and {run.path} lie in one folder, which makes one curve, and differ in more than the "
                f"seed ({different}). Put each training into a folder of its own."
            )
