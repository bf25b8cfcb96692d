"""Curves as inline SVG, drawn here and not in the browser: pure functions of points, no styles inside, no scripts.

One unit of the drawing is about one pixel on a phone; it scales with its column on larger screens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import fmean

from paravt_ray.report.source import Points

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 8, 22
MOST_POINTS = 300
MOST_BARS = 60
_MANY = 12
"""From so many points on, a moving mean is drawn over the values."""

Range = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One curve: its class in the style sheet, what it is called, its points."""

    css: str
    label: str
    points: Points
    band: tuple[Points, Points] | None = None
    """Lower and upper edge of a band around the curve, at the curve's steps."""

    def thinned(self, most: int) -> Line:
        """The same with at most `most` points."""
        band = (in_buckets(self.band[0], most), in_buckets(self.band[1], most)) if self.band else None
        return Line(self.css, self.label, in_buckets(self.points, most), band)


def line_chart(title: str, lines: Sequence[Line], steps: Range) -> str:
    """Curves over steps: values thin, where there are many with their moving mean on top; bands below all of them.

    Args:
        title: for those who do not see the drawing.
        lines: at least one with points.
        steps: first and last step of the axis.
    """
    thinned = [line.thinned(MOST_POINTS) for line in lines if line.points]
    drawn = [points for line in thinned for points in (line.points, *(line.band or ()))]
    ticks = nice_ticks(*_value_range([value for points in drawn for _, value in points]))
    values = ticks[0], ticks[-1]
    marks = [_band(line, *line.band, steps, values) for line in thinned if line.band]
    marks += [mark for line in thinned for mark in _curve(line, steps, values)]
    spoken = "; ".join(
        f"{line.label}: {format_value(line.points[0][1])} at step {line.points[0][0]}, "
        f"{format_value(line.points[-1][1])} at step {line.points[-1][0]}"
        for line in thinned
    )
    return _drawing(f"{title} over steps. {spoken}", _grid(steps, values, ticks) + marks, steps, values)


def bar_chart(title: str, layers: Sequence[Line], steps: Range, top: float) -> str:
    """Layers stacked on each other, one bar a step, or one for the mean of several steps.

    Args:
        title: for those who do not see the drawing.
        layers: from the bottom; all with the same steps.
        steps: first and last step of the axis.
        top: largest sum of the layers.
    """
    layers = [layer.thinned(MOST_BARS) for layer in layers]
    ticks = nice_ticks(0.0, top)
    own = [step for step, _ in layers[0].points]
    distance = (own[-1] - own[0]) / max(1, len(own) - 1) or 1.0
    # Bars stand on their step: half of the first and half of the last one would lie outside.
    axis, values = (steps[0] - distance / 2, steps[1] + distance / 2), (ticks[0], ticks[-1])
    width = 0.8 * distance * (WIDTH - LEFT - RIGHT) / (axis[1] - axis[0])
    heights = [0.0] * len(own)
    bars = []
    for layer in layers:
        for place, (step, value) in enumerate(layer.points):
            low, high = _y(heights[place], values), _y(heights[place] + value, values)
            heights[place] += value
            bars.append(
                f'<rect class="bar {layer.css}" x="{_x(step, axis) - width / 2:.1f}" y="{high:.1f}" '
                f'width="{width:.1f}" height="{max(0.0, low - high):.1f}"/>'
            )
    spoken = ", ".join(f"{layer.label} {format_value(fmean(v for _, v in layer.points))}" for layer in layers)
    return _drawing(f"{title}. On average: {spoken}", _grid(axis, values, ticks) + bars, axis, values)


def in_buckets(points: Points, most: int) -> Points:
    """At most `most` points: means of about equally many neighbours, each at its middle step."""
    if len(points) <= most:
        return points
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    buckets = [points[a:b] for a, b in pairwise(edges)]
    return [(bucket[len(bucket) // 2][0], fmean(value for _, value in bucket)) for bucket in buckets]


def moving_mean(points: Points, reach: int) -> Points:
    """Each value replaced by the mean of itself and up to `reach` neighbours on both sides, equally many of them."""
    result = []
    for place, (step, _) in enumerate(points):
        near = min(reach, place, len(points) - 1 - place)
        result.append((step, fmean(value for _, value in points[place - near : place + near + 1])))
    return result


def reach_of(count: int) -> int:
    """How far the moving mean of so many points reaches to either side."""
    return 0 if count < _MANY else max(1, round(min(count, MOST_POINTS) / 20))


def smoothed_over(count: int) -> int:
    """How many steps go into a value of the moving mean that is drawn of so many points, one a step."""
    return round((2 * reach_of(count) + 1) * max(1.0, count / MOST_POINTS))


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers at equal distances that enclose the range; at least two."""
    if not high > low:
        low, high = (low - 1.0, low + 1.0) if not low else (min(low, 0.0), max(low, 0.0))
    raw = (high - low) / (most - 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def format_value(value: float) -> str:
    """A number with about three digits that matter, as people write it."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Ticks as text, with as many digits as it takes to tell neighbours apart."""
    labels = [format_value(tick) for tick in ticks]
    digits = 4
    while len(set(labels)) < len(labels) and digits < 16:
        labels = [f"{tick:.{digits}g}" for tick in ticks]
        digits += 1
    return labels


def _value_range(values: Sequence[float]) -> Range:
    """The values' range; down or up to 0 where that is not far away, so that heights can be compared."""
    low, high = min(values), max(values)
    if 0 < low < 0.5 * high:
        low = 0.0
    if 0.5 * low < high < 0:
        high = 0.0
    return low, high


def _curve(line: Line, steps: Range, values: Range) -> list[str]:
    label = escape(line.label)
    reach = reach_of(len(line.points))
    path = f'<polyline class="{"raw" if reach else "line"} {line.css}" data-label="{label}" points="%s"/>'
    marks = [path % _path(line.points, steps, values)]
    if reach:
        smooth = _path(moving_mean(line.points, reach), steps, values)
        marks.append(f'<polyline class="line {line.css}" points="{smooth}"/>')
    else:
        marks += [
            f'<circle class="dot {line.css}" cx="{_x(s, steps):.1f}" cy="{_y(v, values):.1f}" r="2.5"/>'
            for s, v in line.points
        ]
    return marks


def _band(line: Line, low: Points, high: Points, steps: Range, values: Range) -> str:
    """The area between the edges, which are smoothed as their curve is."""
    reach = reach_of(len(line.points))
    edge = [*moving_mean(low, reach), *reversed(moving_mean(high, reach))]
    return f'<polygon class="band {line.css}" points="{_path(edge, steps, values)}"/>'


def _path(points: Points, steps: Range, values: Range) -> str:
    return " ".join(f"{_x(step, steps):.1f},{_y(value, values):.2f}" for step, value in points)


def _grid(steps: Range, values: Range, ticks: Sequence[float]) -> list[str]:
    marks = []
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        y = _y(tick, values)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text class="tick end" x="{LEFT - 5}" y="{y + 3.5:.1f}">{label}</text>')
    for tick in step_ticks(*steps):
        x = _x(tick, steps)
        marks.append(f'<text class="tick middle" x="{x:.1f}" y="{HEIGHT - 6}">{tick}</text>')
    return marks


def step_ticks(first: float, last: float) -> list[int]:
    """Whole round steps within the range, a handful of them."""
    distance = max(1, round(nice_ticks(0, max(1.0, last - first), 6)[1]))
    start = math.ceil(first / distance) * distance
    return list(range(start, math.floor(last) + 1, distance))


def _drawing(spoken: str, marks: Sequence[str], steps: Range, values: Range) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(spoken)}" '
        f'data-steps="{steps[0]:g} {steps[1]:g}" data-values="{values[0]:g} {values[1]:g}" '
        f'data-margins="{LEFT} {RIGHT} {TOP} {BOTTOM}">{"".join(marks)}</svg>'
    )


def _x(step: float, steps: Range) -> float:
    width = WIDTH - LEFT - RIGHT
    length = steps[1] - steps[0]
    return LEFT + (width * (step - steps[0]) / length if length else width / 2)


def _y(value: float, values: Range) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (values[1] - value) / (values[1] - values[0])
