"""Short text-only exercises in reading: copying, finding a letter, drawing the conclusion from reports.

What a language model brings along from its pretraining, a tiny one has to learn first. These conversations cost a
fifth of one with frames, and every token of their replies teaches copying, on which all other skills rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paravt_ray.chat import summary_reply
from paravt_ray.data.synth_questions import LETTERS, span, spans
from paravt_ray.data.synth_traces import NOTHING, Message, report_lines, text_message
from paravt_ray.data.synth_video import COLOURS, GRID_SECONDS, Window

LATEST = 600
"""Seconds."""


def reading_trace(rng: np.random.Generator) -> list[Message]:
    """One exercise as a conversation."""
    request, reply = draw_exercise(rng)
    return [text_message("user", request), text_message("assistant", reply)]


def draw_exercise(rng: np.random.Generator) -> tuple[str, str]:
    """A request and its reply."""
    exercises: tuple[Callable[[np.random.Generator], tuple[str, str]], ...] = (_repeat, _find, _find, _conclude)
    return exercises[int(rng.integers(len(exercises)))](rng)


def draw_windows(rng: np.random.Generator, count: int) -> list[Window]:
    """Different windows in order of time."""
    starts = sorted(int(cell) * GRID_SECONDS for cell in rng.permutation(LATEST // GRID_SECONDS)[:count])
    return [(start, start + GRID_SECONDS) for start in starts]


def _repeat(rng: np.random.Generator) -> tuple[str, str]:
    """Copy a list of mixed things."""
    windows = [span(window) for window in draw_windows(rng, 3)]
    things = [*windows, *_colours(rng, 3), f"v{rng.integers(1000):03d}.mp4"]
    text = ", ".join(things[int(i)] for i in rng.permutation(len(things))[: int(rng.integers(3, 7))])
    return f"Repeat: {text}", text


def _find(rng: np.random.Generator) -> tuple[str, str]:
    """From colours to their letters: those of options, or of lines on windows as the main agent writes them."""
    colours = _colours(rng, 4)
    if rng.random() < 0.5:
        named: Sequence[str] = colours
        lines = "\n".join(f"{letter}. {colour}" for letter, colour in zip(LETTERS, colours, strict=True))
    else:
        windows = draw_windows(rng, 4)
        named, lines = spans(windows), report_lines(windows, colours)
    order = [int(i) for i in rng.permutation(4)]
    asked = ", ".join(colours[i] for i in order)
    return f"{lines}\nWhich are {asked}?", "\n".join(f"so {colours[i]} {LETTERS[i]}. {named[i]}" for i in order)


def _conclude(rng: np.random.Generator) -> tuple[str, str]:
    """Put reports of windows under their letters, then answer: what the main agent does after its calls."""
    windows = draw_windows(rng, int(rng.integers(2, 5)))
    colours = _colours(rng, len(windows))
    chosen = int(rng.integers(len(windows)))
    found = [c if i == chosen or rng.random() < 0.7 else NOTHING for i, c in enumerate(colours)]
    asked = "\n".join(f"{letter}. {span(window)}" for letter, window in zip(LETTERS, windows, strict=False))
    reports = "\n".join(summary_reply(window, finding) for window, finding in zip(windows, found, strict=True))
    lines = report_lines(windows, found)
    kind = int(rng.integers(3))
    if kind == 0:
        seen = [colour for colour in found if colour != NOTHING]
        return f"Which colours are shown in these parts?\n{asked}\n{reports}", f"{lines}\n{', '.join(seen)}"
    conclusion = f"{lines}\nso {colours[chosen]} {LETTERS[chosen]}. {span(windows[chosen])}\n"
    if kind == 1:
        return f"When is the {colours[chosen]} shape shown?\n{asked}\n{reports}", f"{conclusion}{list(windows[chosen])}"
    return f"Where is the {colours[chosen]} shape shown?\n{asked}\n{reports}", f"{conclusion}{LETTERS[chosen]}"


def _colours(rng: np.random.Generator, count: int) -> list[str]:
    names: Sequence[str] = list(COLOURS)
    return [names[int(i)] for i in rng.permutation(len(names))[:count]]
