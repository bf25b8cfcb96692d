"""One episode as text: its turns as they happen, its calls on a time line."""

from __future__ import annotations

import re
import sys
from typing import TextIO

from paravt_ray.episode import CallRecord, Episode, TurnRecord
from paravt_ray.rollout.agent import Observer

BAR_WIDTH = 48
END_REASONS = {
    "no_answer": "It ended with neither a call nor an answer.",
    "length": "It ran out of tokens (rollout.max_new_tokens, model.context_length).",
    "invalid_streak": "It was ended: too many turns in a row whose calls cannot be run (rollout.max_invalid_turns).",
}
"""Why there may be no answer, by `Episode.end_reason`."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext)\|>\s*$")


def printable(text: str) -> str:
    """Text without what would move a terminal's cursor, change its colours or its direction of writing."""
    return _CONTROL.sub("\ufffd", text)


def turn_text(record: TurnRecord, think_prefix: bool) -> str:
    """A turn as it was rendered, forced prefix included, without its end-of-turn token."""
    prefix = "<think>\n" if think_prefix else ""
    return prefix + _END_OF_TURN.sub("", record.turn.text).rstrip()


def clock(seconds: float) -> str:
    """Seconds as m:ss.f or h:mm:ss.f."""
    minutes, rest = divmod(round(seconds, 1), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02d}:{rest:04.1f}" if hours else f"{minutes}:{rest:04.1f}"


def bar(window: tuple[float, float], clip: tuple[float, float], width: int = BAR_WIDTH) -> str:
    """Where a window lies in a clip, both in seconds, as a line of `width` characters."""
    length = max(clip[1] - clip[0], 1e-9)
    first = min(width - 1, max(0, int((window[0] - clip[0]) / length * width)))
    last = min(width - 1, max(first, int((window[1] - clip[0]) / length * width - 1e-9)))
    return "·" * first + "█" * (last - first + 1) + "·" * (width - 1 - last)


def call_lines(number: int, record: CallRecord, clip: tuple[float, float]) -> list[str]:
    """One call: where it looked, what became of it, what it was answered."""
    shown = bar(record.window, clip) if record.window else " " * BAR_WIDTH
    window = f"{clock(record.window[0])} to {clock(record.window[1])}" if record.window else "no window"
    took = f", {record.latency_s:.1f} s" if record.latency_s else ""
    frames = f", {len(record.timestamps)} frames" if record.timestamps else ""
    head = f"  {number:>2} |{shown}| {window}  {record.status.value}{frames}{took}"
    return [head, *(f"       {line}" for line in printable(record.reply).splitlines())]


class Narrator(Observer):
    """Prints the turns of a single episode as they happen."""

    def __init__(self, clip: tuple[float, float], think_prefix: bool, out: TextIO | None = None) -> None:
        """`clip` is the first and last second of the video that the time lines stand for."""
        self._clip, self._think_prefix, self._out = clip, think_prefix, out or sys.stdout
        self._turns = 0

    def generated(self, index: int, turn: TurnRecord) -> None:
        """Print what the main agent said."""
        self._turns += 1
        forced = ", an answer was demanded" if turn.forced else ""
        calls = f", calls the tool {len(turn.turn.calls)} x" if turn.turn.calls and not turn.forced else ""
        self._say(f"\n── Turn {self._turns} ({turn.end - turn.start} tokens, {turn.seconds:.1f} s{forced}{calls})")
        self._say(printable(turn_text(turn, self._think_prefix)))

    def served(self, index: int, turn: TurnRecord) -> None:
        """Print what became of the turn's calls."""
        start, end = map(clock, self._clip)
        self._say(f"\n     {start}{end:>{BAR_WIDTH + 2 - len(start)}}")
        for number, record in enumerate(turn.calls, start=1):
            self._say("\n".join(call_lines(number, record, self._clip)))

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def outcome(episode: Episode) -> str:
    """The answer, or why there is none, in a sentence."""
    if episode.answer is not None:
        return printable(episode.answer)
    return f"There is no answer. {END_REASONS.get(episode.end_reason, '')}".rstrip()
