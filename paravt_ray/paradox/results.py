"""A comparison as it lies on the disk, read and checked.

FOLDER/runs/ARM/seed_0/{config.yaml,metrics.jsonl}    of every finished run, as `paravt train` wrote them
FOLDER/mechanism.jsonl                                 what the cold starts do, measured before any arm was run
FOLDER/{figure.svg,contrast.svg,tables.md}             drawn from these alone
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from paravt_ray.errors import InputError
from paravt_ray.paradox.arms import ARMS, check_same, shared
from paravt_ray.paradox.mechanism import GroupRecord, read_records
from paravt_ray.report.seeds import check_whole
from paravt_ray.report.source import RunData, read_run

RUNS, MECHANISM_FILE = "runs", "mechanism.jsonl"
LAST = 10
"""Steps at the end of a run whose mean counts as where it has come to."""
NO_ZEROS = "tool/width"
"""Is 0 in a step without calls, which says nothing about their width."""
ValueOf = Callable[[RunData], float | None]
"""One number of a run; None where it has none."""

# 97.5 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with the half of its 95 % interval (Student's t); None where there is only one seed."""

    value: float
    half: float | None


@dataclass
class Comparison:
    """All finished runs and what was measured before them."""

    runs: dict[str, list[RunData]] = field(default_factory=dict)
    """By arm, seeds rising; arms without a finished run are left out."""
    records: list[GroupRecord] = field(default_factory=list)

    def estimate(self, arm: str, value_of: ValueOf) -> Estimate | None:
        """A value over the arm's seeds, without those that have none; None where none has."""
        values = [value for run in self.runs.get(arm, []) if (value := value_of(run)) is not None]
        if not values:
            return None
        if len(values) == 1:
            return Estimate(values[0], None)
        return Estimate(fmean(values), _T975[min(len(values), 10) - 2] * stdev(values) / len(values) ** 0.5)


def read_comparison(folder: Path) -> Comparison:
    """Read what is there.

    Raises:
        InputError: there is no run, a file is damaged, or the runs differ in more than what their arms switch.
    """
    found = Comparison()
    for arm in ARMS:
        directories = [path for path in (folder / RUNS / arm.name).glob("seed_*") if path.name[5:].isdecimal()]
        runs = [read_run(path) for path in sorted(directories, key=lambda path: int(path.name[5:]))]
        if runs:
            found.runs[arm.name] = runs
    if not found.runs:
        raise InputError(f"{folder} holds no comparison: there is no {RUNS}/ARM/seed_N with a run in it.")
    _check(found)
    if (folder / MECHANISM_FILE).is_file():
        found.records = read_records(folder / MECHANISM_FILE)
    return found


def _check(found: Comparison) -> None:
    common: dict[str, Any] = {}
    first = ""
    for arm in ARMS:
        for run in found.runs.get(arm.name, []):
            name = f"{arm.name}/{run.name}"
            check_whole(run)
            wrong = [key for key, value in arm.settings.items() if run.config.get(key) != value]
            if wrong:
                raise InputError(f"{run.path} is no run of its arm: {wrong[0]} is {run.config.get(wrong[0])}.")
            own = shared(run.config, arm)
            first = first or name
            check_same(common, own, (first, name))
            common = own | common


def at_end(metric: str, *, last: int | None = LAST) -> ValueOf:
    """The mean of a training metric over a run's last steps; over all of them where `last` is None."""

    def value(run: RunData) -> float | None:
        first = run.steps[-1] - last if last is not None else 0
        values = [v for step, v in run.series.get(metric, []) if step > first and (v or metric != NO_ZEROS)]
        return fmean(values) if values else None

    return value


def at_step(metric: str, step: int) -> ValueOf:
    """A metric at one step."""
    return lambda run: dict(run.series.get(metric, [])).get(step)


def final(metric: str) -> ValueOf:
    """A metric at the last step."""
    return lambda run: dict(run.series.get(metric, [])).get(run.steps[-1])
