"""Tables of benchmark results: scores with confidence intervals by category, tool use, and the paper's figures beside.

Shares of right answers have Wilson's score interval (E. B. Wilson, 1927, JASA 22:209); means of other scores and
averages over tasks have a percentile bootstrap (B. Efron, 1979, Ann. Statist. 7:1). Both are at 95 % and take questions
as independent, though several may be about one video.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from paravt_ray.evaluation.results import Result

Z95 = 1.959964
"""97.5 % quantile of the normal distribution."""
RESAMPLES = 2000
GROUNDING_LEVELS = (0.3, 0.5, 0.7)
MACRO_SPLITS = ("mlvu",)
"""Splits whose headline is the mean over tasks of the accuracy within each."""

PAPER_COLUMNS = {
    "videomme": "VideoMME",
    "videomme_subtitles": "+sub",
    "longvideobench": "LongVideoBench",
    "lvbench": "LVBench",
    "mlvu": "MLVU",
    "mmvu": "MMVU",
    "charades": "Charades-STA",
}
_PAPER_ABLATIONS = {
    "base Qwen3-VL-8B": (59.9, 68.4, 33.1, 58.3),
    "+ SFT": (60.7, 69.0, 39.1, 63.7),
    "+ SFT + GRPO": (62.0, 68.6, 39.3, 64.5),
    "+ Exploration Anchoring only": (61.7, 68.7, 39.3, 64.1),
    "+ nFrames Gating only": (61.3, 68.7, 39.1, 63.6),
    "full PARA-GRPO": (62.1, 69.4, 39.8, 65.0),
    "- R_tool": (61.9, 68.5, 38.7, 64.3),
    "- unclosed penalty": (61.6, 69.0, 38.8, 64.5),
    "sequential dispatch": (61.4, 68.8, 37.5, 64.1),
}
PAPER: dict[str, dict[str, float]] = {
    setting: dict(zip(("videomme", "videomme_subtitles", "lvbench", "mlvu"), values, strict=True))
    for setting, values in _PAPER_ABLATIONS.items()
}
"""Percent by setting and split, as printed (ParaVT, arXiv 2605.20342, 8B models)."""
PAPER["base Qwen3-VL-8B"] |= {"longvideobench": 52.2, "mmvu": 68.0, "charades": 49.3}
PAPER["full PARA-GRPO"] |= {"longvideobench": 60.4, "mmvu": 68.6, "charades": 50.1}


@dataclass(frozen=True)
class Score:
    """A share or a mean in [0, 1] with its 95 % interval."""

    name: str
    count: int
    """Questions."""
    value: float
    low: float
    high: float


def scores(split: str, results: Sequence[Result]) -> list[Score]:
    """All scores of at least one result, the headline first, then those of every category."""
    chosen = [r for r in results if r.question_type == "mcq"]
    grounded = [r for r in results if r.question_type == "tvg"]
    worded = [r for r in results if r.question_type == "oe"]
    rows: list[Score] = []
    if split in MACRO_SPLITS and chosen:
        tasks = {task: [r.score for r in group] for task, group in _by_value(chosen, "task").items()}
        rows.append(bootstrap("mean over tasks", list(tasks.values())))
    if chosen:
        rows.append(wilson("accuracy", [r.score for r in chosen]))
    if grounded:
        ious = [r.score for r in grounded]
        rows.append(bootstrap("mIoU", [ious]))
        rows += [wilson(f"R@{level}", [float(iou >= level) for iou in ious]) for level in GROUNDING_LEVELS]
    if worded:
        rows.append(bootstrap("open-ended", [[r.score for r in worded]]))
    for axis in sorted({name for result in chosen for name in result.categories}):
        groups = _by_value(chosen, axis)
        if len(groups) > 1:
            rows += [wilson(f"{axis}: {value}", [r.score for r in group]) for value, group in sorted(groups.items())]
    return rows


def _by_value(results: Sequence[Result], axis: str) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        for value in result.categories.get(axis, []):
            groups.setdefault(value, []).append(result)
    return groups


def wilson(name: str, outcomes: Sequence[float]) -> Score:
    """The share of ones among zeros and ones, at least one of them."""
    count, share = len(outcomes), fmean(outcomes)
    shrink = 1.0 + Z95**2 / count
    centre = (share + Z95**2 / (2 * count)) / shrink
    half = Z95 / shrink * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return Score(name, count, share, max(0.0, centre - half), min(1.0, centre + half))


def bootstrap(name: str, groups: Sequence[Sequence[float]]) -> Score:
    """The mean over groups of the mean within each, resampled within each group; always the same draws."""
    rng = np.random.default_rng(0)
    means: list[NDArray[np.float64]] = []
    for group in groups:
        values = np.asarray(group, np.float64)
        means.append(values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1))
    low, high = np.percentile(np.mean(means, axis=0), (2.5, 97.5))
    return Score(name, sum(map(len, groups)), fmean(map(fmean, groups)), float(low), float(high))


def report(split: str, results: Sequence[Result], asked: int, failures: Mapping[str, int]) -> str:
    """The split's table in Markdown; what was not scored stands apart."""
    blocks = [f"## {split}: {len(results)} of {asked} questions scored"]
    if results:
        rows = [
            f"| {s.name} | {s.count} | {100 * s.value:.1f} | {100 * s.low:.1f} to {100 * s.high:.1f} |"
            for s in scores(split, results)
        ]
        blocks.append("\n".join(["| | questions | % | 95 % interval |", "|:--|--:|--:|:-:|", *rows]))
        blocks.append("\n".join(behaviour(results)))
    if failures:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in Counter(failures).most_common())
        blocks.append(f"Not scored: {asked - len(results)} of {asked} ({kinds}).")
    return "\n\n".join(blocks)


def behaviour(results: Sequence[Result]) -> list[str]:
    """What the model did besides being right, over at least one result, as lines."""
    attempted = sum(r.attempted_calls for r in results)
    errors = sum(r.failed_calls for r in results) / attempted if attempted else 0.0
    median, late = np.percentile([r.seconds for r in results], (50, 95))
    return [
        f"- Calls per question: {fmean(r.calls for r in results):.2f}; questions with a call: "
        f"{100 * fmean(r.calls > 0 for r in results):.1f} %; calls answered with an error: {100 * errors:.1f} %",
        f"- Without an answer (scored as wrong): {100 * fmean(r.answer is None for r in results):.1f} %",
        f"- Seconds per question: median {median:.1f}, 95th percentile {late:.1f}; "
        f"sampled tokens: mean {fmean(r.new_tokens for r in results):.0f}",
    ]


def beside_paper(label: str, found: Mapping[str, Score]) -> str:
    """The paper's figures for the 8B models with a run's own headline scores below them, in Markdown."""
    header = ["setting", *PAPER_COLUMNS.values()]
    body = [[setting, *(_cell(row.get(split)) for split in PAPER_COLUMNS)] for setting, row in PAPER.items()]
    mine = [_own_cell(found.get(split)) for split in PAPER_COLUMNS]
    lines = [header, [":--", *(["--:"] * len(PAPER_COLUMNS))], *body, [f"**{label}**", *mine]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(percent: float | None) -> str:
    return "" if percent is None else f"{percent:.1f}"


def _own_cell(score: Score | None) -> str:
    return "" if score is None else f"**{100 * score.value:.1f}** ({score.count})"
