"""Short text-only exercises in reading: copying, looking up, comparing times.

What a language model brings along from its pretraining, a tiny one has to learn first. These conversations cost a
fifth of one with frames, and every token of their replies teaches copying, on which all other skills rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paravt_ray.data.synth_questions import LETTERS, span
from paravt_ray.data.synth_traces import Message, text_message
from paravt_ray.data.synth_video import COLOURS, GRID_SECONDS, Window

LATEST = 600
"""Seconds."""


def drill_trace(rng: np.random.Generator) -> list[Message]:
    """One exercise as a conversation."""
    request, reply = draw_drill(rng)
    return [text_message("user", request), text_message("assistant", reply)]


def draw_drill(rng: np.random.Generator) -> tuple[str, str]:
    """A request and its reply."""
    drills: tuple[Callable[[np.random.Generator], tuple[str, str]], ...] = (_repeat, _option, _report, _within, _order)
    return drills[int(rng.integers(len(drills)))](rng)


def draw_windows(rng: np.random.Generator, count: int) -> list[Window]:
    """Different windows in order of time."""
    starts = sorted(int(cell) * GRID_SECONDS for cell in rng.permutation(LATEST // GRID_SECONDS - 1)[:count])
    return [(start, start + GRID_SECONDS * int(rng.integers(1, 3))) for start in starts]


def _repeat(rng: np.random.Generator) -> tuple[str, str]:
    """Copy a list of mixed things."""
    windows = [span(window) for window in draw_windows(rng, 2)]
    times = [f"{rng.uniform(0, LATEST):.1f}" for _ in range(2)]
    things = [*windows, *times, *_colours(rng, 2), f"v{rng.integers(1000):03d}.mp4"]
    text = ", ".join(things[int(i)] for i in rng.permutation(len(things))[: int(rng.integers(3, 7))])
    return f"Repeat: {text}", text


def _option(rng: np.random.Generator) -> tuple[str, str]:
    """From a letter to what it stands for, and back."""
    options = [span(w) for w in draw_windows(rng, int(rng.integers(2, 5)))] if rng.random() < 0.6 else _colours(rng, 4)
    chosen = int(rng.integers(len(options)))
    lines = "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
    if rng.random() < 0.5:
        return f"Which letter is {options[chosen]}?{lines}", LETTERS[chosen]
    return f"What is {LETTERS[chosen]}?{lines}", options[chosen]


def _report(rng: np.random.Generator) -> tuple[str, str]:
    """Find the line that names a colour."""
    windows = draw_windows(rng, int(rng.integers(2, 5)))
    colours = _colours(rng, len(windows))
    spans = [sorted(int(t) for t in rng.integers(a, b, 2)) for a, b in windows]
    shown = [f"{colour} from {a} to {b}" for colour, (a, b) in zip(colours, spans, strict=True)]
    chosen = int(rng.integers(len(windows)))
    lines = [
        f"{span(window)}: {'nothing' if i != chosen and rng.random() < 0.4 else shown[i]}"
        for i, window in enumerate(windows)
    ]
    text = "\n".join(lines)
    where = f"{colours[chosen]} in {span(windows[chosen])}"
    asked = int(rng.integers(3))
    if asked == 0:
        return f"{text}\nWhere is the {colours[chosen]} shape?", where
    if asked == 1:
        return (
            f"{text}\nWhen is the {colours[chosen]} shape shown?",
            f"{shown[chosen]}\n[{spans[chosen][0]}, {spans[chosen][1]}]",
        )
    return f"{text}\nWhat is shown from {span(windows[chosen])}?", f"{span(windows[chosen])}: {colours[chosen]}"


def _within(rng: np.random.Generator) -> tuple[str, str]:
    """Find the window that holds a moment."""
    windows = draw_windows(rng, int(rng.integers(2, 5)))
    start, end = windows[int(rng.integers(len(windows)))]
    colour = _colours(rng, 1)[0]
    moment = f"{colour} at {rng.uniform(start, end - 0.1):.1f}"
    inside = next(w for w in windows if w[0] <= float(moment.rsplit(maxsplit=1)[-1]) < w[1])
    return f"{moment}. In one of: {', '.join(map(span, windows))}?", f"{moment} in {span(inside)}"


def _order(rng: np.random.Generator) -> tuple[str, str]:
    """Copy only the windows out of a question."""
    windows = [span(window) for window in draw_windows(rng, int(rng.integers(1, 5)))]
    return f"Which parts: {', '.join(windows)}? v{rng.integers(1000):03d}.mp4", "\n".join(windows)


def _colours(rng: np.random.Generator, count: int) -> list[str]:
    names: Sequence[str] = list(COLOURS)
    return [names[int(i)] for i in rng.permutation(len(names))[:count]]
