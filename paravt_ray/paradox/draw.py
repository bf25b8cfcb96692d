"""`paravt paradox --draw FOLDER`: figures and tables from the records in a folder, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paravt_ray.paradox.arms import BY_NAME, CONTRAST, FIGURE
from paravt_ray.paradox.results import Comparison, read_comparison
from paravt_ray.paradox.tables import tables
from paravt_ray.report.figure import Curve, figure
from paravt_ray.tracking.run_dir import replace_file


def draw(folder: Path) -> list[Path]:
    """Write `figure.svg`, `contrast.svg` (where there is a weak prior) and `tables.md`; return the files.

    Raises:
        InputError: the folder holds no comparison, or a damaged or unfair one.
    """
    found = read_comparison(folder)
    texts = {"figure.svg": figure(_curves(found, FIGURE), "The parts of PARA-GRPO over RL steps")}
    if any(arm.startswith("weak_") for arm in found.runs):
        texts["contrast.svg"] = figure(_curves(found, CONTRAST), "A strong and a weak tool prior over RL steps")
    texts["tables.md"] = tables(found)
    for name, text in texts.items():
        replace_file(folder / name, text)
    return [folder / name for name in texts]


def _curves(found: Comparison, arms: Sequence[str]) -> list[Curve]:
    """Of those arms that have runs."""
    return [(BY_NAME[arm].label, found.runs[arm]) for arm in arms if arm in found.runs]
