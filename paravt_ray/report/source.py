"""What the report reads of a run directory. Damaged lines are counted and told, never fatal; the rest is shown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from paravt_ray.errors import InputError
from paravt_ray.tracking.run_dir import step_of

Points = list[tuple[int, float]]
"""(step, value), steps rising."""

_PASSWORD = re.compile(r"(?<=://)[^/@\s]+@")
_NO_METRICS = ("step", "time")


@dataclass
class RunData:
    """One run: its configuration, its curves, and where its trajectories lie."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    """Values by dotted key, as the file has them: also keys that this version of the program does not know."""
    steps: list[int] = field(default_factory=list)
    series: dict[str, Points] = field(default_factory=dict)
    """Finite values by metric name."""
    episode_files: list[tuple[int, Path]] = field(default_factory=list)
    """(step, file), steps rising."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what could not be read or is not shown."""

    @property
    def name(self) -> str:
        """The run directory's name."""
        return self.path.name

    def number(self, key: str, default: float) -> float:
        """A number from the configuration; the default where it has none."""
        value = finite(self.config.get(key))
        return default if value is None else value


def read_run(directory: Path) -> RunData:
    """Read a run directory; the run may still be going on.

    Raises:
        InputError: there is no such directory, or it holds no run.
    """
    path = directory.absolute()
    metrics, episodes = path / "metrics.jsonl", path / "episodes"
    if not path.is_dir():
        raise InputError(f"There is no run directory {path}.")
    if not metrics.is_file() and not (path / "config.yaml").is_file():
        raise InputError(f"{path} holds no run: there is neither a config.yaml nor a metrics.jsonl in it.")
    run = RunData(path)
    _read_config(run, path / "config.yaml")
    _read_metrics(run, metrics)
    found = ((step_of(file), file) for file in episodes.glob("*.jsonl")) if episodes.is_dir() else ()
    run.episode_files = sorted((step, file) for step, file in found if step is not None)
    return run


def json_lines(file: Path, limit: int | None = None) -> Iterator[dict[str, Any] | None]:
    """The object on each whole line of a file's first `limit` bytes; None for a line that holds none."""
    taken = 0
    with file.open("rb") as stream:
        for line in stream:
            taken += len(line)
            if not line.endswith(b"\n") or (limit is not None and taken > limit):
                return  # still being written, or enough
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            yield value if isinstance(value, dict) else None


def _read_config(run: RunData, file: Path) -> None:
    # Not `load_config`: a run of an older version must still be shown, and nothing that a file from elsewhere says
    # (an interpolation of an environment variable) may be looked up.
    try:
        tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except Exception as error:  # OmegaConf passes on whatever its YAML reader raises
        run.notes.append(f"config.yaml cannot be read: {str(error).splitlines()[0] if str(error) else error!r}")
        return
    for section, values in tree.items() if isinstance(tree, dict) else ():
        for key, value in values.items() if isinstance(values, dict) else ():
            shown = _PASSWORD.sub("", value) if isinstance(value, str) else value
            run.config[f"{section}.{key}"] = shown


def _read_metrics(run: RunData, file: Path) -> None:
    by_step: dict[int, dict[str, Any]] = {}
    unreadable = 0
    for line in json_lines(file) if file.is_file() else ():
        if line is not None and type(line.get("step")) is int:
            by_step[line["step"]] = line  # a step that was done again replaces its first time
        else:
            unreadable += 1
    if unreadable:
        run.notes.append(f"{unreadable} lines of metrics.jsonl cannot be read and are left out.")
    run.steps = sorted(by_step)
    for step in run.steps:
        for name, value in by_step[step].items():
            if name not in _NO_METRICS and (number := finite(value)) is not None:
                run.series.setdefault(name, []).append((step, number))


def finite(value: object) -> float | None:
    """A finite number as a float; None for anything else, such as a boolean or a NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON knows integers of any size
        return None
    return number if math.isfinite(number) else None
