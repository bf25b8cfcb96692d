"""Questions about synthetic clips, in the three types that the method trains on.

All of them are answered by comparing a few windows of a long clip: with many overview frames the shape in question is
usually in one of them, with few it almost never is, and only looking into each window helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from paravt_ray.data.synth_video import COLOURS, FPS, KEYFRAME_SECONDS, SIDE, Clip, Event, Window
from paravt_ray.episode import QuestionType
from tool_workers.planning import plan_overview
from tool_workers.records import VideoInfo

_T = TypeVar("_T")

Kind = Literal["where", "what", "when", "which"]
KINDS: tuple[Kind, ...] = ("where", "what", "when", "which")
LETTERS = "ABCD"
QUESTION_TYPES: dict[Kind, QuestionType] = {"where": "mcq", "what": "mcq", "when": "tvg", "which": "oe"}


@dataclass(frozen=True)
class Question:
    """One question with its answer and what has to be seen to know it."""

    kind: Kind
    clip: Clip
    text: str
    """As the model reads it, with the line that names the video."""
    answer: str
    windows: tuple[Window, ...]
    """The windows that it names, in the order of its text."""
    options: tuple[str, ...]
    """What the letters A, B, ... stand for, in words; empty where there are none."""
    needed: tuple[Event, ...]
    """The events that the answer depends on, in order of time."""

    @property
    def question_type(self) -> QuestionType:
        """The type under which its answer is scored."""
        return QUESTION_TYPES[self.kind]


def span(window: Window) -> str:
    """A window as it is written everywhere: in questions, thoughts and tool replies."""
    return f"{window[0]} to {window[1]} s"


def spans(windows: Sequence[Window]) -> tuple[str, ...]:
    """Several windows as they are written."""
    return tuple(span(window) for window in windows)


def draw_question(clip: Clip, kind: Kind, rng: np.random.Generator) -> Question:
    """Draw one question of the given kind about a clip."""
    if kind == "what":
        return _what(clip, rng)
    if kind == "which":
        count = min(int(rng.integers(2, 4)), len(clip.events))
        events = sorted(_draw(clip.events, count, rng), key=lambda event: event.start)
        windows = tuple(event.window for event in events)
        ask = f"Which colours are shown in these parts?{_lettered(spans(windows))}\nName them in this order."
        return _question(clip, kind, ask, ", ".join(e.colour for e in events), windows, (), tuple(events))
    event = _draw(clip.events, 1, rng)[0]
    windows = _candidates(clip, event.window, rng)
    if kind == "when":
        ask = f"When is the {event.colour} shape shown?{_lettered(spans(windows))}\nAnswer as [start, end]."
        return _question(clip, kind, ask, f"[{event.start:.2f}, {event.end:.2f}]", windows, (), (event,))
    ask = f"Where is the {event.colour} shape shown?{_lettered(spans(windows))}\nAnswer with a letter."
    return _question(clip, kind, ask, LETTERS[windows.index(event.window)], windows, spans(windows), (event,))


def _what(clip: Clip, rng: np.random.Generator) -> Question:
    event = _draw(clip.events, 1, rng)[0]
    others = _draw([colour for colour in COLOURS if colour != event.colour], 3, rng)
    options = tuple(_draw([event.colour, *others], 4, rng))
    ask = f"What colour is shown from {span(event.window)}?{_lettered(options)}\nAnswer with a letter."
    return _question(clip, "what", ask, LETTERS[options.index(event.colour)], (event.window,), options, (event,))


def _question(
    clip: Clip,
    kind: Kind,
    ask: str,
    answer: str,
    windows: tuple[Window, ...],
    options: tuple[str, ...],
    needed: tuple[Event, ...],
) -> Question:
    text = f"{ask}\nThe video path for this video is: {clip.name}"
    return Question(kind, clip, text, answer, windows, options, needed)


def _candidates(clip: Clip, right: Window, rng: np.random.Generator) -> tuple[Window, ...]:
    """Two to four windows in order of time: the right one, others with other colours or with nothing."""
    others = [event.window for event in clip.events if event.window != right] + list(clip.empty)
    count = min(int(rng.integers(1, 4)), len(others))
    return tuple(sorted([right, *_draw(others, count, rng)]))


def _draw(items: Sequence[_T], count: int, rng: np.random.Generator) -> list[_T]:
    return [items[int(i)] for i in rng.permutation(len(items))[:count]]


def _lettered(options: Sequence[str]) -> str:
    return "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))


def overview_times(clip: Clip, frames: int) -> list[float]:
    """Seconds of the overview frames that the crop service returns for this clip, in order, without repeats."""
    info = VideoInfo(0.0, float(clip.duration), FPS, SIDE, SIDE, clip.duration * FPS, "h264", "mp4")
    times: list[float] = []
    for target in plan_overview(info, frames).targets:
        keyframe = target.time // KEYFRAME_SECONDS * KEYFRAME_SECONDS
        chosen = keyframe if target.time - keyframe <= target.before else int(target.time * FPS) / FPS
        times += [chosen] if chosen not in times else []
    return times


def seen_at(event: Event, times: Sequence[float]) -> float | None:
    """The first of the frame times at which an event is shown, None where no frame shows it."""
    return next((time for time in times if event.start <= time < event.end), None)
