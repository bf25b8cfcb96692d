"""The table that every bench ends with, and how both sides of a comparison are measured in turn."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Row:
    """One comparison."""

    what: str
    ours: float
    peer: float
    """The other side's figure, or the limit."""
    peer_name: str
    goal: float
    """Smallest ratio that counts as reached."""
    unit: str
    """Of both figures."""
    less_is_better: bool = False

    @property
    def ratio(self) -> float:
        """How many times better ours is: ours over the peer's, or the other way round where less is better."""
        return self.peer / self.ours if self.less_is_better else self.ours / self.peer

    @property
    def reached(self) -> bool:
        """Whether the goal is reached."""
        return self.ratio >= self.goal


def show(rows: Sequence[Row], settings: Sequence[str]) -> int:
    """Print the settings and the table; 1 where a goal was missed, otherwise 0."""
    print("\n".join(settings))
    width = max(len(row.what) for row in rows)
    print(f"{'':{width}}  {'ours':>8}  {'peer':>8}  {'unit':10}  {'ratio':>6}  {'goal':>5}         peer or limit")
    for row in rows:
        figures = f"{_figure(row.ours):>8}  {_figure(row.peer):>8}  {row.unit:10}  {row.ratio:6.2f}  {row.goal:5.2f}"
        print(f"{row.what:{width}}  {figures}  {'' if row.reached else 'missed':6} {row.peer_name}")
    return int(not all(row.reached for row in rows))


def in_turn(rounds: int, *sides: Callable[[int], float]) -> list[float]:
    """Measure all sides one after the other, round after round, so that whatever slows the machine slows them all.

    Args:
        rounds: that count. One more comes before them, to warm up.
        sides: each is called with the number of the round and returns its figure.

    Returns:
        The median of each side.
    """
    figures: list[list[float]] = [[] for _ in sides]
    for index in range(rounds + 1):
        say(f"Round {index} of {rounds} ..." if index else "Warming up ...")
        for side, found in zip(sides, figures, strict=True):
            found.append(side(index))
    return [statistics.median(found[1:]) for found in figures]


def machine(*packages: str) -> str:
    """One line on where the figures come from: cores, and the versions of those packages that are installed."""
    installed = (f"{name} {found}" for name in packages if (found := _version(name)))
    return ", ".join([f"{len(os.sched_getaffinity(0))} cores", *installed])


def say(text: str) -> None:
    """Tell the person who waits what goes on."""
    print(text, file=sys.stderr, flush=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _figure(value: float) -> str:
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{decimals}f}"
