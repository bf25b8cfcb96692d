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
    TOOL_NAME,
    error_reply,
    subagent_question,
    summary_reply,
)
from paravt_ray.data.synth_questions import LETTERS, Kind, Question, overview_times, seen_at, span
from paravt_ray.data.synth_video import COLOURS, Clip, Event, Window

Style = Literal["json", "code"]

CALL_ODDS: dict[Kind, float] = {"where": 0.7, "what": 0.35, "when": 0.6, "which": 0.35}
"""How often a trace looks closer where the overview does not show what is asked for; otherwise it guesses."""
NEEDLESS_CALL_ODDS = 0.08
"""How often a trace looks closer although the overview shows it."""
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
    """What a sub-agent should say of a window: the colour and the first and last whole second that shows it."""
    event = clip.event_in(window)
    if event is None:
        return "nothing"
    shown = [second for second in crop_seconds(window) if event.start <= second < event.end]
    return f"{event.colour} from {shown[0]} to {shown[-1]}"


def crop_seconds(window: Window, max_frames: int = 16) -> list[int]:
    """Seconds of the frames that the crop service returns at one frame a second for a window of whole seconds."""
    length = window[1] - window[0]
    count = min(length, max_frames)
    return [window[0] + int((i + 0.5) * length / count) for i in range(count)]


def main_trace(question: Question, frames: int, style: Style, rng: np.random.Generator) -> list[Message]:
    """The main agent's whole conversation about one question, with one or two rounds of calls or none."""
    return _Writer(question, frames, style, rng).write()


@dataclass
class _Writer:
    """Writes one conversation."""

    question: Question
    frames: int
    style: Style
    rng: np.random.Generator
    known: dict[Window, str | None] = field(default_factory=dict)
    """What was found out of each window so far: a colour, None for nothing."""

    def write(self) -> list[Message]:
        times = overview_times(self.question.clip, self.frames)
        messages = main_prompt(self.question, self.frames)
        seen = {event: seen_at(event, times) for event in self.question.needed}
        clear = all(time is not None for time in seen.values())
        odds = NEEDLESS_CALL_ODDS if clear else CALL_ODDS[self.question.kind]
        looks = self.rng.random() < odds
        thought = self._overview_thought(seen)
        if not looks:
            return [*messages, self._answer(thought if clear else f"{thought}, guess", self._blind_answer(seen))]
        messages.append(self._calls(f"{thought}, look closer", self.question.windows))
        return [*messages, *self._after(self.question.windows, first=True)]

    def _overview_thought(self, seen: dict[Event, float | None]) -> str:
        if self.question.kind in ("where", "when"):
            event, time = next(iter(seen.items()))
            return (
                f"{event.colour} not seen" if time is None else f"{event.colour} at {time:.1f} in {span(event.window)}"
            )
        return self._by_window({event.window: event.colour for event, time in seen.items() if time is not None})

    def _by_window(self, colours: dict[Window, str]) -> str:
        return ", ".join(f"{span(w)}: {colours.get(w, 'not seen')}" for w in self.question.windows)

    def _blind_answer(self, seen: dict[Event, float | None]) -> str:
        """The answer from the overview alone, with guesses where it shows nothing."""
        kind, question = self.question.kind, self.question
        if kind == "which":
            guesses = [str(colour) for colour in self.rng.permutation(list(COLOURS))]
            return ", ".join(guesses.pop() if time is None else event.colour for event, time in seen.items())
        event, time = next(iter(seen.items()))
        if kind == "when":
            window = event.window if time is not None else self._any(question.windows)
            return f"[{window[0]}, {window[1]}]"
        return question.answer if time is not None else LETTERS[int(self.rng.integers(len(question.options)))]

    def _after(self, called: Sequence[Window], first: bool) -> list[Message]:
        """Replies to calls, and what follows them."""
        fails = self.rng.random() < ERROR_ODDS
        failed = [window for window in called if fails and self.rng.random() < 0.5]
        forced = not first or self.rng.random() < FORCED_ODDS
        self.known |= {w: self._colour(w) for w in called if w not in failed}
        replies = [self._reply(window, window in failed) for window in called]
        user = text_message("user", "\n".join(replies) + (f"\n{FORCE_ANSWER}" if forced else ""))
        if self._found():
            return [user, self._answer(self._final_thought(), self._final_answer())]
        if forced or not failed:
            blind = self._blind_answer({e: self._known_time(e) for e in self.question.needed})
            return [user, self._answer("not found, guess", blind)]
        return [user, self._calls("error, look closer", failed), *self._after(failed, first=False)]

    def _reply(self, window: Window, failed: bool) -> str:
        if failed:
            return _response(error_reply(self._any(ERRORS)))
        return _response(summary_reply(window, summary(self.question.clip, window)))

    def _colour(self, window: Window) -> str | None:
        event = self.question.clip.event_in(window)
        return event.colour if event else None

    def _known_time(self, event: Event) -> float | None:
        return event.start if event.window in self.known else None

    def _found(self) -> bool:
        return all(event.window in self.known for event in self.question.needed)

    def _final_thought(self) -> str:
        event = self.question.needed[0]
        if self.question.kind == "where":
            return f"{event.colour} in {span(event.window)}"
        if self.question.kind == "when":
            return summary(self.question.clip, event.window)
        return self._by_window({e.window: e.colour for e in self.question.needed})

    def _final_answer(self) -> str:
        if self.question.kind != "when":
            return self.question.answer
        words = summary(self.question.clip, self.question.needed[0].window).split()
        return f"[{words[2]}, {words[4]}]"

    def _answer(self, thought: str, answer: str) -> Message:
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
            lines = [f'{TOOL_NAME}(video_path="{name}", start_time={a}, end_time={b})' for a, b in windows]
            calls = [f"<tool_code>\n{line}\n</tool_code>" for line in lines]
            close = self._any(("", "</think>\n"))
            return text_message("assistant", f"{THINK_PREFIX}{thought}\n{close}" + "\n".join(calls))
        arguments = [{"video_path": name, "start_time": a, "end_time": b} for a, b in windows]
        objects = [json.dumps({"name": TOOL_NAME, "arguments": argument}) for argument in arguments]
        calls = [f"<tool_call>\n{line}\n</tool_call>" for line in objects]
        return text_message("assistant", f"{THINK_PREFIX}{thought}\n</think>\n" + "\n".join(calls))

    def _any(self, items: Sequence[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]


def _response(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


def text_message(role: str, text: str) -> Message:
    """A message of text alone."""
    return {"role": role, "content": [text_part(text)]}
