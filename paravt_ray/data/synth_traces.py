"""Traces for the supervised cold start: what a good (or merely typical) agent would write for synthetic questions.

Two styles. `json` is the project's own format. `code` stands for the habits that a model brings along from its
pretraining: calls written as code, thinking and answers closed in other ways or not at all. A model that learns
`code` first and `json` after it, briefly, can use tools and keeps their format only as long as it is not sampled hot.

Whether a trace calls the tool or guesses where nothing was seen is drawn by lot: the model learns the odds, which is
what reinforcement learning then has to improve on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from paravt_ray.chat import (
    FORCE_ANSWER,
    MAIN_SYSTEM,
    SUBAGENT_SYSTEM,
    THINK_PREFIX,
    error_reply,
    subagent_question,
    summary_reply,
)
from paravt_ray.data.synth_questions import LETTERS, Kind, Question, overview_times, seen_at, span, spans
from paravt_ray.data.synth_video import COLOURS, Clip, Window
from paravt_ray.tools.crop_video import CROP_VIDEO

Style = Literal["json", "code"]

CALL_ODDS: dict[Kind, float] = {"where": 0.7, "what": 0.35, "when": 0.6, "which": 0.35}
"""How often a trace looks closer where the overview does not show what is asked for; otherwise it guesses."""
ERROR_ODDS = 0.08
"""How often a trace's calls are answered with an error, each with even odds."""
FORCED_ODDS = 0.4
"""How often the replies come with the demand to answer now."""
ERRORS = (  # as the rollout and the parser word them
    "Only so many calls are served in one turn.",
    "The crop took longer than allowed.",
    "This part of the video cannot be read.",
    "The call is not valid JSON.",
    "The JSON object is cut off.",
)

NOTHING = "nothing"
"""What a sub-agent says of a window without an event."""

Message = dict[str, Any]


def text_part(text: str) -> dict[str, Any]:
    """An OpenAI-style text part."""
    return {"type": "text", "text": text}


def video_part(clip: Clip, fragment: str) -> dict[str, Any]:
    """An OpenAI-style video part; `frames=16` asks for an overview, `t=30,45` for a crop."""
    return {"type": "video_url", "video_url": {"url": f"{clip.name}#{fragment}"}}


def main_prompt(question: Question, frames: int) -> list[Message]:
    """The main agent's prompt, as `chat.main_messages` renders it from the frames themselves."""
    user = [video_part(question.clip, f"frames={frames}"), text_part(f"\n{question.text}")]
    return [text_message("system", MAIN_SYSTEM), {"role": "user", "content": user}]


def subagent_trace(question: Question, window: Window) -> list[Message]:
    """A sub-agent's whole conversation about one window."""
    crop = video_part(question.clip, f"t={window[0]},{window[1]}")
    user = [crop, text_part(subagent_question(question.text, window))]
    return [
        text_message("system", SUBAGENT_SYSTEM),
        {"role": "user", "content": user},
        text_message("assistant", summary(question.clip, window)),
    ]


def summary(clip: Clip, window: Window) -> str:
    """What a sub-agent should say of a window: the colour that it shows."""
    event = clip.event_in(window)
    return event.colour if event else NOTHING


def report_lines(windows: Sequence[Window], findings: Sequence[str]) -> str:
    """One line for each window that is asked about, between its letter and again its letter where there are several.

    What follows a colour is then its letter: to conclude from the lines is to continue one of them.
    """
    if len(windows) == 1:
        return f"{span(windows[0])}: {findings[0]}"
    lines = zip(LETTERS, windows, findings, strict=False)
    return "\n".join(f"{letter}. {span(window)}: {finding} {letter}" for letter, window, finding in lines)


def crop_seconds(window: Window, max_frames: int = 16) -> list[float]:
    """Seconds of the frames that the crop service returns at one frame a second for a window of whole seconds."""
    length = window[1] - window[0]
    count = min(length, max_frames)
    return [float(window[0] + int((i + 0.5) * length / count)) for i in range(count)]


@dataclass(frozen=True)
class Calling:
    """How readily the main agents of a set of conversations call the tool."""

    odds: float = 1.0
    """Multiplies the odds of a call."""
    needless: float = 0.08
    """How often a trace looks closer although the overview shows what is asked for, before `odds`."""


def main_trace(
    question: Question, frames: int, style: Style, rng: np.random.Generator, calling: Calling | None = None
) -> list[Message]:
    """The main agent's whole conversation about one question, with one or two rounds of calls or none."""
    return _Writer(question, frames, style, rng, calling or Calling()).write()


@dataclass
class _Writer:
    """Writes one conversation."""

    question: Question
    frames: int
    style: Style
    rng: np.random.Generator
    calling: Calling
    known: dict[Window, str] = field(default_factory=dict)
    """What was found out of each window so far: a colour or `NOTHING`."""

    def write(self) -> list[Message]:
        question = self.question
        times = overview_times(question.clip, self.frames)
        events = [event for window in question.windows if (event := question.clip.event_in(window))]
        self.known = {event.window: event.colour for event in events if seen_at(event, times) is not None}
        thought = self._lines("not seen")
        odds = self.calling.needless if self._found() else CALL_ODDS[question.kind]
        looks = self.rng.random() < self.calling.odds * odds
        messages = main_prompt(question, self.frames)
        if not looks:
            return [*messages, self._answer(thought)]
        messages.append(self._calls(f"{thought}\nlook closer", question.windows))
        self.known = {}
        return [*messages, *self._after(question.windows, first=True)]

    def _after(self, called: Sequence[Window], first: bool) -> list[Message]:
        """Replies to calls, and what follows them."""
        fails = self.rng.random() < ERROR_ODDS
        failed = [window for window in called if fails and self.rng.random() < 0.5]
        forced = not first or self.rng.random() < FORCED_ODDS
        self.known |= {w: summary(self.question.clip, w) for w in called if w not in failed}
        replies = [self._reply(window, window in failed) for window in called]
        user = text_message("user", "\n".join(replies) + (f"\n{FORCE_ANSWER}" if forced else ""))
        thought = self._lines("error")
        if self._found() or forced:
            return [user, self._answer(thought)]
        return [user, self._calls(f"{thought}\nlook closer", failed), *self._after(failed, first=False)]

    def _reply(self, window: Window, failed: bool) -> str:
        if failed:
            return _response(error_reply(self._any(ERRORS)))
        return _response(summary_reply(window, summary(self.question.clip, window)))

    def _found(self) -> bool:
        return all(event.window in self.known for event in self.question.needed)

    def _lines(self, unknown: str) -> str:
        """What is known of each window, under its letter where it has one."""
        windows = self.question.windows
        return report_lines(windows, [self.known.get(window, unknown) for window in windows])

    def _answer(self, thought: str) -> Message:
        kind, question = self.question.kind, self.question
        if kind == "which":
            guesses = [str(colour) for colour in self.rng.permutation(list(COLOURS))]
            colours = [self.known.get(event.window) or guesses.pop() for event in question.needed]
            return self._close(thought, ", ".join(colours))
        options = question.options if kind == "what" else spans(question.windows)
        right = question.needed[0].colour if kind == "what" else span(question.needed[0].window)
        chosen = options.index(right) if self._found() else int(self.rng.integers(len(options)))
        found = f"so {question.needed[0].colour}" if self._found() else "guess"
        conclusion = f"{found} {LETTERS[chosen]}. {options[chosen]}"
        answer = str(list(question.windows[chosen])) if kind == "when" else LETTERS[chosen]
        return self._close(f"{thought}\n{conclusion}", answer)

    def _close(self, thought: str, answer: str) -> Message:
        text = f"{THINK_PREFIX}{thought}\n</think>\n<answer>{answer}</answer>"
        if self.style == "code":
            text = self._any(
                (
                    f"{THINK_PREFIX}{thought}\nAnswer: {answer}",
                    f"{THINK_PREFIX}{thought}\n<answer>{answer}",
                    f"{THINK_PREFIX}{thought}\n</think>\n{answer}",
                    f"{THINK_PREFIX}{thought}\n</think>\nAnswer: {answer}",
                )
            )
        return text_message("assistant", text)

    def _calls(self, thought: str, windows: Sequence[Window]) -> Message:
        name = self.question.clip.name
        if self.style == "code":
            lines = [f'{CROP_VIDEO.name}(video_path="{name}", start_time={a}, end_time={b})' for a, b in windows]
            calls = [f"<tool_code>\n{line}\n</tool_code>" for line in lines]
            close = self._any(("", "</think>\n"))
            return text_message("assistant", f"{THINK_PREFIX}{thought}\n{close}" + "\n".join(calls))
        arguments = [{"video_path": name, "start_time": a, "end_time": b} for a, b in windows]
        objects = [json.dumps({"name": CROP_VIDEO.name, "arguments": argument}) for argument in arguments]
        calls = [f"<tool_call>\n{line}\n</tool_call>" for line in objects]
        return text_message("assistant", f"{THINK_PREFIX}{thought}\n</think>\n" + "\n".join(calls))

    def _any(self, items: Sequence[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]


def _response(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


def text_message(role: str, text: str) -> Message:
    """A message of text alone."""
    return {"role": role, "content": [text_part(text)]}
