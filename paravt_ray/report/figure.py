"""The paper's figure: accuracy reward, format reward and calls per sample over RL steps, with bands over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from statistics import fmean

from paravt_ray.report.curves import HEIGHT, WIDTH, Line, line_chart, smoothed_over
from paravt_ray.report.panels import FIGURE as PANELS
from paravt_ray.report.source import Points, RunData

COLOURS = ("#6b7280", "#d97706", "#2563eb", "#15803d")
"""Of the curves, in order."""
_MARGIN, _GAP, _HEAD = 14, 18, 84
_STYLE = """\
text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1d2126; }
.title { font-size: 15px; font-weight: 600; } .note { fill: #626a73; font-size: 11px; }
.grid { stroke: #e6e4df; } .tick { fill: #626a73; font-size: 11px; }
.tick.end { text-anchor: end; } .tick.middle { text-anchor: middle; }
polyline { fill: none; stroke-linejoin: round; } polyline.line { stroke-width: 2; } polyline.raw { display: none; }
.band { opacity: .16; }
"""


Curve = tuple[str, Sequence[RunData]]
"""What a curve is called, and its runs, which differ in the seed alone."""


def figure(curves: Sequence[Curve], title: str) -> str:
    """A self-contained SVG of at most four curves."""
    shown = [(f"c{place}", label, runs) for place, (label, runs) in enumerate(curves)]
    every = [run for _, _, runs in shown for run in runs]
    steps = [step for run in every for step in run.steps if step > 0]
    width, height = 2 * _MARGIN + 3 * WIDTH + 2 * _GAP, _HEAD + HEIGHT + _MARGIN
    colours = "".join(
        f"polyline.{css} {{ stroke: {colour}; }} polygon.{css}, rect.{css}, circle.{css} {{ fill: {colour}; }}\n"
        for css, colour in ((f"c{place}", colour) for place, colour in enumerate(COLOURS))
    )
    panels = [(name, [_line(css, label, runs, metric) for css, label, runs in shown]) for metric, name in PANELS]
    smoothing = _smoothing(line for _, lines in panels for line in lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title><style>\n{_STYLE}{colours}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text class="title" x="{_MARGIN}" y="22">{escape(title)}</text>',
        f'<text class="note" x="{width - _MARGIN}" y="22" style="text-anchor:end">'
        f"Curves: means over seeds; bands: lowest to highest.{smoothing}</text>",
        *_legend([(css, f"{label} ({_count(runs)})") for css, label, runs in shown]),
    ]
    for place, (name, lines) in enumerate(panels):
        x = _MARGIN + place * (WIDTH + _GAP)
        parts.append(f'<text x="{x + 4}" y="{_HEAD - 10}">{escape(name)}</text>')
        if any(line.points for line in lines):
            chart = line_chart(name, lines, (min(steps), max(steps)))
            parts.append(f'<svg x="{x}" y="{_HEAD}" width="{WIDTH}" height="{HEIGHT}">{chart}</svg>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _smoothing(lines: Iterable[Line]) -> str:
    """What the caption says of the moving means."""
    widths = {smoothed_over(len(line.points)) for line in lines if line.points}
    if max(widths, default=1) == 1:
        return ""
    return f" Both smoothed over {' to '.join(str(width) for width in sorted({min(widths), max(widths)}))} steps."


def _legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    marks = []
    x = float(_MARGIN)
    for css, text in entries:
        marks.append(f'<rect class="{css}" x="{x:g}" y="37" width="12" height="12" rx="2"/>')
        marks.append(f'<text x="{x + 18:g}" y="47">{escape(text)}</text>')
        x += 42 + 6.7 * len(text)
    return marks


def _count(runs: Sequence[RunData]) -> str:
    return f"{len(runs)} seeds" if len(runs) > 1 else "1 seed"


def _line(css: str, label: str, runs: Sequence[RunData], metric: str) -> Line:
    """The mean over the seeds, at the steps that all of them have, in a band from the lowest to the highest."""
    values = [dict(run.series.get(metric, [])) for run in runs]
    steps = sorted(set.intersection(*(set(own) for own in values)))
    at = [(step, [own[step] for own in values]) for step in steps]
    mean: Points = [(step, fmean(found)) for step, found in at]
    low, high = [(step, min(found)) for step, found in at], [(step, max(found)) for step, found in at]
    return Line(css, label, mean, (low, high) if len(runs) > 1 else None)
