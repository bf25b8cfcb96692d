"""Which curves the page shows, under which names, and the figures at its top."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import fmean

from paravt_ray.report.curves import Line, Range, bar_chart, format_value, line_chart, reach_of
from paravt_ray.report.source import Points, RunData

RUN_CLASSES = ("a", "b")
"""Style class of the first and of the second run."""

Names = tuple[tuple[str, str], ...]
"""(metric, what it is called)."""

FIGURE: Names = (
    ("reward/accuracy", "Accuracy reward"),
    ("reward/format", "Format reward"),
    ("tool/call_rate", "Tool calls per sample"),
)
"""The three panels of the paper's figure."""

_REWARD: Names = (
    ("reward/total", "Total reward"),
    ("reward/tool", "Tool reward"),
    ("reward/anchor", "Anchor (inside format)"),
)
_SPEED: Names = (
    ("rollout/staleness", "Staleness, versions"),
    ("rollout/tokens_per_s", "Rollout, tokens/s"),
    ("train/tokens_per_s", "Training, tokens/s"),
    ("rollout/new_tokens", "Sampled tokens per step"),
    ("time/step", "Step, s"),
    ("sync/seconds", "Weight push, s"),
)
_HELD_OUT: Names = (
    ("eval/reward/accuracy", "Accuracy"),
    ("eval/format/compliance", "Well-formed episodes"),
    ("eval/tool/call_rate", "Tool calls per question"),
)
_FOLDED: tuple[tuple[str, Names], ...] = (
    (
        "Format",
        (
            ("format/compliance", "Well-formed episodes"),
            ("format/think_closed", "Thinking closed"),
            ("format/answer_closed", "Answer closed"),
            ("format/calls_closed", "Calls closed"),
        ),
    ),
    (
        "Tool use",
        (
            ("tool/usage_rate", "Episodes that call"),
            ("tool/width", "Calls per calling turn"),
            ("tool/error_rate", "Calls answered with an error"),
            ("rollout/duplicate_rate", "Repeated calls"),
            ("tool/latency_p50", "Call latency, median, s"),
            ("tool/latency_p95", "Call latency, 95th percentile, s"),
        ),
    ),
    (
        "Episodes",
        (
            ("rollout/episodes", "Episodes per step"),
            ("rollout/failed", "Failed rollouts per step"),
            ("rollout/turns", "Turns per episode"),
        ),
    ),
    (
        "Learning",
        (
            ("train/loss", "Loss"),
            ("train/kl", "KL to the reference"),
            ("train/entropy", "Entropy, nats"),
            ("train/clip_fraction", "Clipped tokens"),
            ("train/grad_norm", "Gradient norm"),
            ("train/lr", "Learning rate"),
            ("train/logp_gap", "Generator and learner, gap of log-probs"),
        ),
    ),
)
_STAGES = ("rollout", "reward", "train", "sync")
_OTHER = "everything else"

_HEADLINE: Names = (
    ("eval/reward/accuracy", "Accuracy on held-out questions"),
    ("reward/accuracy", "Accuracy reward"),
    ("reward/format", "Format reward"),
    ("format/compliance", "Well-formed episodes"),
    ("tool/call_rate", "Tool calls per sample"),
    ("reward/total", "Total reward"),
    ("rollout/tokens_per_s", "Rollout, tokens/s"),
    ("time/step", "Step, s"),
    ("rollout/staleness", "Staleness, versions"),
    ("train/loss", "Loss"),
)


def curves_html(runs: Sequence[RunData]) -> str:
    """All sections with curves; a metric that no section names stands in the last one, so that nothing is hidden."""
    all_steps = [step for run in runs for step in run.steps]
    if not all_steps:
        return "<p>No step is finished yet.</p>"
    steps = (min(all_steps), max(all_steps))
    open_ones = (FIGURE, _HELD_OUT, _REWARD, _SPEED)
    named = {metric for names in (*open_ones, *(names for _, names in _FOLDED)) for metric, _ in names}
    others = sorted({metric for run in runs for metric in run.series} - named - {f"time/{stage}" for stage in _STAGES})
    evaluated = [metric for metric in others if metric.startswith("eval/")]
    further = [metric for metric in others if metric not in evaluated]
    parts = [
        _legend(runs),
        _section("The paper's figure", _panels(runs, FIGURE, steps), is_open=True),
        _section("Held-out questions", _panels(runs, _HELD_OUT, steps), is_open=True),
        _section("Reward", _panels(runs, _REWARD, steps), is_open=True),
        _section("Time, speed, staleness", _stage_charts(runs, steps) + _panels(runs, _SPEED, steps), is_open=True),
        *(_section(title, _panels(runs, names, steps)) for title, names in _FOLDED),
        _section("Held-out questions, all metrics", _panels(runs, _plainly(evaluated), steps)),
        _section("Further metrics", _panels(runs, _plainly(further), steps)),
    ]
    return "\n".join(filter(None, parts))


def _section(title: str, charts: Sequence[str], is_open: bool = False) -> str:
    if not charts:
        return ""
    head = f"<summary><h3>{escape(title)}</h3> <small>{len(charts)}</small></summary>"
    return f'<details class="section"{" open" * is_open}>{head}<div class="charts">{"".join(charts)}</div></details>'


def headline_html(runs: Sequence[RunData]) -> str:
    """A table: how each run began and where it stands, as means over the first and the last tenth of its steps."""
    rows = []
    for metric, title in _HEADLINE:
        if any(metric in run.series for run in runs):
            cells = "".join(_begin_and_end(run.series.get(metric, [])) for run in runs)
            rows.append(f"<tr><th>{escape(title)}</th>{cells}</tr>")
    if not rows:
        return ""
    heads = "".join(
        f'<th colspan="2"><i class="key {css}"></i>{escape(_clean(run.name))}</th>'
        for css, run in zip(RUN_CLASSES, runs, strict=False)
    )
    columns = "<th>first tenth</th><th>last tenth</th>" * len(runs)
    return (
        f'<div class="wide"><table class="numbers"><thead><tr><td></td>{heads}</tr><tr><td></td>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _begin_and_end(points: Points) -> str:
    if not points:
        return "<td>–</td><td>–</td>"
    tenth = max(1, len(points) // 10)
    begin, end = (fmean(value for _, value in part) for part in (points[:tenth], points[-tenth:]))
    return f"<td>{format_value(begin)}</td><td><b>{format_value(end)}</b></td>"


def _legend(runs: Sequence[RunData]) -> str:
    keys = "".join(
        f'<span><i class="key {css}"></i>{escape(_clean(run.name))}</span>'
        for css, run in zip(RUN_CLASSES, runs, strict=False)
    )
    reach = max(reach_of(len(run.steps)) for run in runs)
    bold = f"<span>Thin: each step. Bold: mean over {2 * reach + 1} steps.</span>" if reach else ""
    return f'<p class="legend">{keys if len(runs) > 1 else ""}{bold}</p>'


def _panels(runs: Sequence[RunData], names: Names, steps: Range) -> list[str]:
    """A chart for each metric that a run has; the values of the last step stand above the curves."""
    charts = []
    for metric, title in names:
        lines = [
            Line(css, _clean(run.name), run.series[metric])
            for css, run in zip(RUN_CLASSES, runs, strict=False)
            if metric in run.series
        ]
        if lines:
            last = "".join(f'<b class="value {line.css}">{format_value(line.points[-1][1])}</b>' for line in lines)
            charts.append(
                f'<figure class="chart"><figcaption><span>{escape(title)} <code>{escape(_clean(metric))}</code></span>'
                f"<output>{last}</output></figcaption>{line_chart(title, lines, steps)}</figure>"
            )
    return charts


def _stage_charts(runs: Sequence[RunData], steps: Range) -> list[str]:
    """For each run a chart of where a step's seconds go; all on one scale."""
    stages = [(run, layers) for run in runs if (layers := _stage_layers(run))]
    top = max((value for run, _ in stages for _, value in run.series["time/step"]), default=0.0)
    keys = "".join(f'<span><i class="key {_css(name)}"></i>{name}</span>' for name in (*_STAGES, _OTHER))
    charts = []
    for run, layers in stages:
        title = f"Seconds, {_clean(run.name)}" if len(runs) > 1 else "Seconds"
        charts.append(
            f'<figure class="chart"><figcaption><span>{escape(title)} <code>time/*</code></span></figcaption>'
            f'{bar_chart("Seconds per stage", layers, steps, top)}<p class="legend">{keys}</p></figure>'
        )
    return charts


def _stage_layers(run: RunData) -> list[Line]:
    """One layer for each stage and one for the rest of the step; none where steps were not timed."""
    whole = run.series.get("time/step", [])
    by_stage = {stage: dict(run.series.get(f"time/{stage}", [])) for stage in _STAGES}
    if not whole or not any(by_stage.values()):
        return []
    layers = [
        Line(_css(stage), stage, [(step, values.get(step, 0.0)) for step, _ in whole])
        for stage, values in by_stage.items()
    ]
    spent = {step: sum(values.get(step, 0.0) for values in by_stage.values()) for step, _ in whole}
    return [*layers, Line(_css(_OTHER), _OTHER, [(step, max(0.0, value - spent[step])) for step, value in whole])]


def _css(stage: str) -> str:
    return f"stage-{stage.partition(' ')[0]}"


def _plainly(metrics: Sequence[str]) -> Names:
    """Metrics under names made from their own."""
    return tuple((metric, metric.partition("/")[2].replace("/", ", ").replace("_", " ")) for metric in metrics)


def _clean(text: str) -> str:
    """Without lone surrogates (an odd file name), which have no UTF-8 form."""
    return text.encode("utf-8", "replace").decode()
