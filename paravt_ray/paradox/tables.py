"""The comparison in numbers, in Markdown: the mechanism, the arms beside the paper's, held-out accuracy by K."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from paravt_ray.evaluation.tables import PAPER, Score
from paravt_ray.paradox.arms import ARMS, BY_NAME
from paravt_ray.paradox.mechanism import TAGS, GroupRecord, gap_within, pooled, tag_survival
from paravt_ray.paradox.results import LAST, Comparison, Estimate, ValueOf, at_end, at_step, final

START = "cold start"
# Names of the arms in `evaluation.tables.PAPER`.
_PAPER_ROWS = {
    START: "+ SFT",
    "grpo": "+ SFT + GRPO",
    "anchoring": "+ Exploration Anchoring only",
    "gating": "+ nFrames Gating only",
    "para_grpo": "full PARA-GRPO",
    "no_tool_reward": "- R_tool",
    "no_unclosed_penalty": "- unclosed penalty",
    "sequential": "sequential dispatch",
}
PAPER_TRAINING = {
    START: (0.13, 2.50),
    "grpo": (0.13, 0.02),
    "anchoring": (0.35, 0.19),
    "gating": (0.10, 1.36),
    "para_grpo": (0.41, 0.21),
    "no_tool_reward": (0.33, 0.04),
    "no_unclosed_penalty": (0.36, 0.27),
}
"""f and kappa (ParaVT, arXiv 2605.20342, 8B models)."""
_PAPER_SPLITS = {"videomme": "VideoMME", "lvbench": "LVBench", "mlvu": "MLVU"}
_BY_K = "eval/accuracy/k"

_HEAD = """\
<!-- Made from the records beside this file by `paravt paradox --draw FOLDER`; do not edit. -->

# The comparison in numbers
"""
_GAPS = """\
Rollouts of the cold start as GRPO samples them, by the overview budget K. `within`: mean difference in reward between
calling and skipping, over the questions that got both, which is what GRPO's advantages see. In brackets the 95 %
bootstrap interval over questions and, behind it, their number.
"""
_TAGS = "Share of rollouts that close their tags (calls: of those that attempt one), by sampling temperature.\n"
_TRAINING = f"""\
f is the mean format reward over all steps, as in the paper; everything else is the mean over the last {LAST} steps.
kappa: valid calls per rollout; width: valid calls per turn that makes one; the tags: share of sampled rollouts that
close them (calls: of those that attempt one). Arms without anchoring give another format reward than those with it, so
compare arms by their tags and by the share of well-formed rollouts. The cold start is the first step of GRPO, sampled
before any update. Intervals: 95 %, Student's t over seeds; there is none where only one seed has the value.
"""
_HELD_OUT = """\
Greedy, each question at every K; accuracy reward in %, after the last step; the cold start: before GRPO's first step.
Intervals: 95 %, Student's t over seeds; they do not cover the choice of questions. Right: the paper's 8B models on real
benchmarks. Answers scored in a run: """


def tables(found: Comparison) -> str:
    """The whole page."""
    parts = [_HEAD]
    for prior in dict.fromkeys(record.prior for record in found.records):
        parts += _mechanism(prior, [record for record in found.records if record.prior == prior])
    parts += ["## Training\n", _TRAINING, _training(found)]
    scored = [count for own in found.runs.values() for run in own if (count := final("eval/scored")(run)) is not None]
    if scored:
        counts = " to ".join(f"{count:g}" for count in sorted({min(scored), max(scored)}))
        parts += ["## Held-out questions\n", f"{_HELD_OUT}{counts}.\n", _held_out(found)]
    missing = [arm.label for arm in ARMS if arm.name not in found.runs]
    if missing:
        parts.append(f"Not run: {', '.join(missing)}.\n")
    return "\n".join(parts)


def _mechanism(prior: str, records: Sequence[GroupRecord]) -> list[str]:
    def at(sweep: str, key: str) -> dict[float, list[GroupRecord]]:
        chosen = [record for record in records if record.sweep == sweep]
        values = sorted({getattr(record, key) for record in chosen})
        return {value: [record for record in chosen if getattr(record, key) == value] for value in values}

    gaps = []
    for budget, own in at("budget", "budget").items():
        shares = [f"{fmean(v):.2f} ({len(v)})" if v else "– (0)" for v in pooled(own, "accuracy")]
        gaps.append([f"{budget}", *shares, *(_score(gap_within(own, reward)) for reward in ("accuracy", "total"))])
    tags = [
        [f"{temperature:g}", *(_score(tag_survival(own, tag)) for tag in TAGS)]
        for temperature, own in at("temperature", "temperature").items()
    ]
    sampled = ", ".join(
        f"{r:g}" for r in sorted({record.temperature for record in records if record.sweep == "budget"})
    )
    failed = sum(record.failed for record in records)
    return [
        f"## Before training: the {prior} prior\n",
        f"{_GAPS}Temperature {sampled}; rollouts without an episode or a reward: {failed}.\n",
        _table(["K", "called (n)", "skipped (n)", "within, accuracy", "within, total reward"], gaps),
        _TAGS,
        _table(["temperature", *(f"`{tag}`" for tag in TAGS.values())], tags),
    ]


def _training(found: Comparison) -> str:
    metrics = ("tool/call_rate", "tool/width", "format/think_closed", "format/calls_closed", "format/answer_closed")
    head = ["", "seeds", "f", "paper", "kappa", "paper", "width", *(f"`{tag}`" for tag in TAGS.values()), "well-formed"]

    def row(name: str, label: str, arm: str, f: ValueOf, value_of: Callable[[str], ValueOf]) -> list[str]:
        paper = [f"{value:.2f}" for value in PAPER_TRAINING.get(name, ())] or ["", ""]
        kappa, *rest = (_estimate(found.estimate(arm, value_of(metric))) for metric in (*metrics, "format/compliance"))
        return [label, f"{len(found.runs[arm])}", _estimate(found.estimate(arm, f)), paper[0], kappa, paper[1], *rest]

    rows = []
    if "grpo" in found.runs:
        rows.append(row(START, START, "grpo", at_step("reward/format", 1), lambda metric: at_step(metric, 1)))
    trained = [arm for arm in ARMS if arm.name in found.runs and not arm.checkpoint_of]
    f = at_end("reward/format", last=None)
    return _table(head, [*rows, *(row(arm.name, arm.label, arm.name, f, at_end) for arm in trained)])


def _held_out(found: Comparison) -> str:
    names = {name for own in found.runs.values() for run in own for name in run.series if name.startswith(_BY_K)}
    budgets = sorted(int(name.removeprefix(_BY_K)) for name in names)
    metrics = [*(f"{_BY_K}{budget}" for budget in budgets), "eval/accuracy/overall"]
    head = ["", *(f"K={budget}" for budget in budgets), "all", "calls", *_PAPER_SPLITS.values()]

    def row(name: str, label: str, arm: str, value_of: Callable[[str], ValueOf]) -> list[str]:
        paper = PAPER.get(_PAPER_ROWS.get(name, ""), {})
        shown = [_estimate(found.estimate(arm, value_of(metric)), percent=True) for metric in metrics]
        calls = _estimate(found.estimate(arm, value_of("eval/tool/call_rate")))
        return [label, *shown, calls, *(f"{paper[split]:.1f}" if split in paper else "" for split in _PAPER_SPLITS)]

    rows = [row(START, START, "grpo", lambda metric: at_step(metric, 0))] if "grpo" in found.runs else []
    return _table(head, [*rows, *(row(name, BY_NAME[name].label, name, final) for name in found.runs)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _estimate(estimate: Estimate | None, *, percent: bool = False) -> str:
    if estimate is None:
        return "–"
    scale, digits = (100, 1) if percent else (1, 2)
    half = "" if estimate.half is None else f" ± {scale * estimate.half:.{digits}f}"
    return f"{scale * estimate.value:.{digits}f}{half}"


def _score(score: Score | None) -> str:
    if score is None:
        return "–"
    # One question says nothing about how questions differ.
    interval = f" [{score.low:.2f}, {score.high:.2f}]" if score.count > 1 else ""
    return f"{score.value:.2f}{interval} {score.count}"
