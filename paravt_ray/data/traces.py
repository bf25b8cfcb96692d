"""`paravt data traces`: sequential tool traces become parallel ones, for the supervised cold start.

A sequential trace looks at one window a turn and is shown its frames. What it becomes, as in the paper:

    system      the project's own prompt
    user        the video and the question, with the line that names the video
    assistant   the first turn's thinking, then all calls at once
    user        all replies, in call order, each a text
    assistant   the last turn's thinking and the answer

A reply that was frames becomes what the trace says about them: the thinking of the turn after it, without its
sentences on what to do next. A text reply stays as it is. A window that was looked at twice is kept once.
Conversations without calls are passed on untouched.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow
import pyarrow.parquet

from paravt_ray.chat import MAIN_SYSTEM, THINK_PREFIX, error_reply, question_text, summary_reply
from paravt_ray.config import RolloutConfig
from paravt_ray.data.reader import DataError, split_fragment
from paravt_ray.episode import Turn
from paravt_ray.parsing import parse_turn
from paravt_ray.tools.crop_video import CROP_VIDEO

Message = dict[str, Any]

MOST_CALLS = RolloutConfig().max_calls_per_turn
SUMMARY_CHARS = 2000
"""Longest summary: about what a sub-agent may say (`rollout.subagent_max_new_tokens`)."""

_RESPONSE = re.compile(r"<tool_response>(.*?)(?:</tool_response>|\Z)", re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_INTENT = re.compile(
    r"\b(?:let(?:\s+(?:me|us)|['’]s)|i(?:['’]ll|\s+(?:will|should|need|want|must|have\s+to)))\b|\bnext,", re.IGNORECASE
)


class UnusableTraceError(Exception):
    """A trace that cannot be converted; the message is the reason, the same words for every trace like it."""


@dataclass
class TracesReport:
    """What became of the conversations of one file."""

    merged: int = 0
    untouched: int = 0
    """Conversations without calls."""
    left_out: Counter[str] = field(default_factory=Counter)
    """By reason."""

    def lines(self) -> list[str]:
        """The report for people."""
        lines = [f"{self.merged} traces merged into one parallel turn; {self.untouched} conversations have no calls."]
        return lines + [f"Left out: {count} x {reason}." for reason, count in self.left_out.most_common()]


@dataclass(frozen=True)
class _Look:
    """One call of a trace and what came back."""

    video: str
    """Base name."""
    start: float
    """Seconds."""
    end: float
    reply: str


def run(parquet: str, output: str) -> int:
    """`paravt data traces`: 0 if any conversation could be written."""
    report = convert(Path(parquet), Path(output))
    print("\n".join(report.lines()))
    print(f"Wrote {output}.")
    return 0


def convert(parquet: Path, output: Path) -> TracesReport:
    """Write a copy of a file of conversations (column `messages`) with its sequential traces merged.

    Raises:
        DataError: the file cannot be read, has no such column, or no conversation could be used.
    """
    try:
        table = pyarrow.parquet.read_table(parquet)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{parquet} cannot be read as a parquet file: {str(error).splitlines()[0]}") from error
    if "messages" not in table.column_names:
        raise DataError(f"{parquet} has the columns {', '.join(table.column_names)}, but no messages.")
    report = TracesReport()
    kept: list[int] = []
    written: list[str] = []
    for index, messages in enumerate(table.column("messages").to_pylist()):
        try:
            written.append(json.dumps(_converted(messages, report), ensure_ascii=False))
            kept.append(index)
        except UnusableTraceError as error:
            report.left_out[str(error)] += 1
    if not kept:
        raise DataError(f"No conversation of {parquet} can be used. {' '.join(report.lines()[1:])}")
    # As JSON text, one of the two released forms: a column of lists could not hold the new parts in its old type.
    column = pyarrow.array(written, type=pyarrow.string())
    table = table.take(kept)
    table = table.set_column(table.column_names.index("messages"), "messages", column)
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f"{output.name}.part")
    pyarrow.parquet.write_table(table, part)
    part.replace(output)
    return report


def _converted(messages: Any, report: TracesReport) -> list[Message]:
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except json.JSONDecodeError:
            messages = None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UnusableTraceError("the messages are no list of {role, content}")
    turns = [parse_turn(_text(message)) for message in messages if message.get("role") == "assistant"]
    if not any(turn.calls for turn in turns):
        report.untouched += 1
        return messages
    merged = merge_trace(messages)
    report.merged += 1
    return merged


def merge_trace(messages: Sequence[Message]) -> list[Message]:
    """One conversation with calls as one with all of them in its first turn; one that is so already is only rendered.

    Args:
        messages: OpenAI style: {role, content}, a content being a text or a list of parts.

    Raises:
        UnusableTraceError: it is no question, calls, replies, ..., answer.
    """
    spoken = [message for message in messages if message.get("role") != "system"]
    if len(spoken) < 4 or [m.get("role") for m in spoken] != ["user", "assistant"] * (len(spoken) // 2):
        raise UnusableTraceError("user and assistant do not take turns up to an answer")
    turns = [parse_turn(_text(message)) for message in spoken[1::2]]
    last = turns[-1]
    if last.answer is None:
        raise UnusableTraceError("the last turn gives no answer")
    asked, videos = _asked(spoken[0])
    looks: dict[tuple[str, float, float], _Look] = {}
    for turn, replies, following in zip(turns[:-1], spoken[2::2], turns[1:], strict=True):
        for look in _looks(turn, replies, following, videos):
            window = (look.video, look.start, look.end)
            if window not in looks or looks[window].reply.startswith(error_reply("")):  # asked again after an error
                looks[window] = look
    if len(looks) > MOST_CALLS:
        raise UnusableTraceError(f"more than {MOST_CALLS} calls")
    return [
        _message("system", MAIN_SYSTEM),
        asked,
        _message("assistant", _calling_turn((turns[0].think or "").strip(), list(looks.values()))),
        _message("user", "\n".join(f"<tool_response>\n{look.reply}\n</tool_response>" for look in looks.values())),
        _message("assistant", f"{THINK_PREFIX}{(last.think or '').strip()}\n</think>\n<answer>{last.answer}</answer>"),
    ]


def _looks(turn: Turn, replies: Message, following: Turn, videos: Sequence[str]) -> Iterator[_Look]:
    """A turn's calls, each with its reply as text; `videos` are the base names that there are."""
    found = [text.strip() for text in _RESPONSE.findall(_text(replies))]
    if not turn.calls or not all(call.ok for call in turn.calls):
        raise UnusableTraceError("a turn before the last has no call, or one that cannot be run")
    if len(found) != len(turn.calls):
        raise UnusableTraceError("there is not one reply for each call")
    frames = any(part.get("type") in ("image_url", "video_url") for part in _parts(replies))
    if frames and len(turn.calls) > 1:
        raise UnusableTraceError("several calls are answered with frames at once, so no text tells them apart")
    for call, text in zip(turn.calls, found, strict=True):
        assert call.start_time is not None and call.end_time is not None
        reply = text
        if frames:
            summary = observed(following.think or "")
            if not summary:
                raise UnusableTraceError("nothing is said of the frames of a reply")
            reply = summary_reply((call.start_time, call.end_time), summary)
        yield _Look(PurePosixPath(call.video or videos[0]).name, call.start_time, call.end_time, reply)


def observed(think: str) -> str:
    """The sentences of a thinking text that say what was seen, without those on what to do next; cut at a sentence."""
    kept = ""
    for sentence in _SENTENCE.split(think.strip()):
        if not sentence or _INTENT.search(sentence):
            continue
        if len(kept) + 1 + len(sentence) > SUMMARY_CHARS:
            break
        kept = f"{kept} {sentence}".strip()
    return kept


def _calling_turn(think: str, looks: Sequence[_Look]) -> str:
    windows = " and ".join(f"{look.start:g} to {look.end:g} s" for look in looks)
    plan = f"{think}\nLook at {windows}{' at once' if len(looks) > 1 else ''}.".strip()
    arguments = [{"video_path": look.video, "start_time": look.start, "end_time": look.end} for look in looks]
    objects = [json.dumps({"name": CROP_VIDEO.name, "arguments": argument}) for argument in arguments]
    return f"{THINK_PREFIX}{plan}\n</think>\n" + "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


def _asked(message: Message) -> tuple[Message, list[str]]:
    """The question as the renderer writes it (its parts, and the line that names the videos), and the videos' names."""
    parts = _parts(message)
    urls = [part["video_url"]["url"] for part in parts if part.get("type") == "video_url"]
    names = [PurePosixPath(split_fragment(url)[0]).name for url in urls]
    texts = [index for index, part in enumerate(parts) if part.get("type") == "text"]
    if not names or not texts:
        raise UnusableTraceError("the first message asks nothing about a video")
    asked = dict(parts[texts[-1]])
    if not any("The video path for this video is:" in parts[index]["text"] for index in texts):
        asked["text"] = question_text(asked["text"], names)
    return {"role": "user", "content": [*parts[: texts[-1]], asked, *parts[texts[-1] + 1 :]]}, names


def _text(message: Message) -> str:
    return "".join(part["text"] for part in _parts(message) if part.get("type") == "text")


def _parts(message: Message) -> list[dict[str, Any]]:
    """The parts of a content, without the empty fields that parts have in a column of lists."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise UnusableTraceError("a content is no list of parts")
    parts = [{name: value for name, value in part.items() if value is not None} for part in content]
    if not all(isinstance(part.get("text"), str) for part in parts if part.get("type") == "text"):
        raise UnusableTraceError("a part of type text holds none")
    return parts


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text}]}
