"""The small files that figures are drawn from: out of finished runs into the output folder, and back again."""

from __future__ import annotations

import shutil
from pathlib import Path

from paravt_ray.paradox.arms import ARMS
from paravt_ray.paradox.draw import draw
from paravt_ray.paradox.mechanism import read_records, write_records
from paravt_ray.paradox.plan import Plan, check_begun
from paravt_ray.paradox.results import MECHANISM_FILE, RUNS
from paravt_ray.tracking.run_dir import METRICS_FILE

RECORDS = ("config.yaml", METRICS_FILE)
"""Of each run."""


def mechanism_file(plan: Plan, prior: str) -> Path:
    """What was measured of a cold start."""
    return plan.folder / "cold_start" / prior / MECHANISM_FILE


def publish(plan: Plan) -> None:
    """Copy what the figures are drawn from out of the finished runs, and draw them."""
    records = []
    for prior in plan.priors():
        records += read_records(mechanism_file(plan, prior))
    plan.output.mkdir(parents=True, exist_ok=True)
    write_records(plan.output / MECHANISM_FILE, records)
    for arm in ARMS:
        if (stale := plan.output / RUNS / arm.name).exists():
            shutil.rmtree(stale)
    finished = [pair for pair in plan.runs() if plan.is_finished(*pair)]
    for arm, seed in finished:
        _copy(plan.run_dir(arm, seed), plan.output / RUNS / arm.name / f"seed_{seed}")
    if finished:
        draw(plan.output)


def restore(plan: Plan) -> int:
    """Take over from the output folder what this machine has not begun; returns the number of runs.

    A comparison that takes longer than a machine is there goes on where only its records are left.

    Raises:
        InputError: they are of runs with other settings.
    """
    found = 0
    for arm, seed in plan.runs():
        source, target = plan.output / RUNS / arm.name / f"seed_{seed}", plan.run_dir(arm, seed)
        if source.is_dir() and not target.exists():
            config = plan.settings(arm, seed)
            config.trainer.run_dir = str(source)
            check_begun(config, arm)
            _copy(source, target)
            found += 1
    if (measured := plan.output / MECHANISM_FILE).is_file():
        records = read_records(measured)
        for prior in plan.priors():
            own = [record for record in records if record.prior == prior]
            if own and not (file := mechanism_file(plan, prior)).exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                write_records(file, own)
    return found


def _copy(source: Path, target: Path) -> None:
    part = target.with_name(f"{target.name}.part")  # half a run must never be taken for a whole one
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in RECORDS:
        shutil.copyfile(source / name, part / name)
    part.rename(target)
