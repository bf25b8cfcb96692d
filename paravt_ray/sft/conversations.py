"""Conversations from a parquet file in the released SFT format: what can be used, and why the rest cannot.

One column `messages`: a JSON string or a list of {role, content}, OpenAI style; every content is a list of parts
`text`, `video_url`, `image_url`. A video's URL may end in a media fragment (after W3C Media Fragments 1.0):
`clip.mp4#frames=16` for an overview of 16 frames, `clip.mp4#t=30,45` for the window from 30 to 45 s.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast, get_args
from urllib.parse import unquote

from paravt_ray.chat import Role
from paravt_ray.data.reader import local_path, read_rows
from paravt_ray.errors import InputError

_EXAMPLES = 3


class SkippedRowError(Exception):
    """One row that cannot be trained on: the reason (the same words for every row like it) and what it was about."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class VideoRef:
    """A part of a message that shows frames of a video."""

    path: Path
    frames: int | None = None
    """Overview frames; None (without a window): draw the number."""
    window: tuple[float, float] | None = None
    """Seconds to look at closely."""


@dataclass(frozen=True)
class ImageRef:
    """A part of a message that shows a picture."""

    path: Path


@dataclass(frozen=True)
class Turn:
    """One message."""

    role: Role
    parts: tuple[str | VideoRef | ImageRef, ...]


@dataclass(frozen=True)
class Conversation:
    """One usable row."""

    row_id: str
    turns: tuple[Turn, ...]

    def content(self) -> list[Any]:
        """What the row says and shows, as JSON; where its files lie does not matter."""
        turns = [[turn.role, *(_part_content(part) for part in turn.parts)] for turn in self.turns]
        return [self.row_id, *turns]


@dataclass
class Skipped:
    """Rows that were left out, each counted once under its reason."""

    rows: int
    """Rows of the data set."""
    limit: float
    """Share of them that may be left out."""
    path: Path
    reasons: Counter[str] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)
    examples: list[str] = field(default_factory=list)

    def add(self, row_id: str, error: SkippedRowError) -> None:
        """Count a row.

        Raises:
            InputError: too many are left out by now.
        """
        if row_id in self.ids:
            return
        self.ids.add(row_id)
        self.reasons[error.reason] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"row {row_id}: {error.reason}" + (f" ({error.detail})" if error.detail else ""))
        if len(self.ids) > self.limit * self.rows:
            raise InputError(
                f"More than sft.max_skipped={self.limit:g} of the {self.rows} rows of {self.path} cannot be used. "
                f"{self.sentence()} For example {self.examples[0]}. Mend the data or data.video_root, or allow more."
            )

    def sentence(self) -> str:
        """What was left out, in one sentence; empty for nothing."""
        if not self.ids:
            return ""
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common())
        return f"{len(self.ids)} of {self.rows} rows are left out: {reasons}."


def read_conversations(parquet: Path, video_root: str, max_skipped: float) -> tuple[list[Conversation], Skipped]:
    """Read all rows; files are looked for on the disk anew each time.

    Args:
        parquet: the file.
        video_root: where relative paths start; empty for the file's own folder.
        max_skipped: share of rows in [0, 1] that may be left out.

    Raises:
        InputError: the file cannot be read or too many rows cannot be used.
    """
    rows = read_rows(parquet, ["messages"])
    root = Path(video_root) if video_root else parquet.parent
    skipped = Skipped(len(rows), max_skipped, parquet)
    exists: dict[Path, bool] = {}
    conversations: list[Conversation] = []
    for number, row in enumerate(rows):
        row_id = str(row.get("id", number))
        try:
            turns = _turns(row["messages"], root)
            for path in (part.path for turn in turns for part in turn.parts if not isinstance(part, str)):
                if not exists.setdefault(path, path.is_file()):
                    raise SkippedRowError("a file is missing", str(path))
            conversations.append(Conversation(row_id, turns))
        except SkippedRowError as error:
            skipped.add(row_id, error)
    if not conversations:
        raise InputError(f"{parquet} holds no usable row. {skipped.sentence()}")
    return conversations, skipped


def _part_content(part: str | VideoRef | ImageRef) -> Any:
    return part if isinstance(part, str) else asdict(part) | {"path": part.path.name}


def _turns(messages: Any, root: Path) -> tuple[Turn, ...]:
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except json.JSONDecodeError as error:
            raise SkippedRowError("the messages are no JSON", str(error)) from error
    if not isinstance(messages, list) or not messages:
        raise SkippedRowError("there are no messages")
    turns = tuple(_turn(message, root) for message in messages)
    if not any(turn.role == "assistant" for turn in turns):
        raise SkippedRowError("the assistant says nothing")
    return turns


def _turn(message: Any, root: Path) -> Turn:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in get_args(Role):
        raise SkippedRowError("a message has no role system, user or assistant", str(message)[:80])
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise SkippedRowError("a content is no list of parts", str(content)[:80])
    parts = tuple(_part(part, root) for part in content)
    if role == "assistant" and not all(isinstance(part, str) for part in parts):
        raise SkippedRowError("the assistant shows pictures")
    return Turn(cast(Role, role), parts)


def _part(part: Any, root: Path) -> str | VideoRef | ImageRef:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in ("video_url", "image_url"):
        holder = part.get(kind)
        url = holder.get("url") if isinstance(holder, dict) else None
        if isinstance(url, str) and url:
            return _video(url, root) if kind == "video_url" else ImageRef(local_path(url, root))
    raise SkippedRowError("a part is no text, video_url or image_url", str(part)[:80])


def _video(url: str, root: Path) -> VideoRef:
    base, mark, fragment = url.rpartition("#")
    if not mark:
        return VideoRef(local_path(url, root))
    path = local_path(base, root)
    key, _, value = unquote(fragment).partition("=")
    try:
        if key == "frames" and int(value) > 0:
            return VideoRef(path, frames=int(value))
        if key == "t":
            start, end = (float(x) for x in value.split(","))
            if math.isfinite(start) and math.isfinite(end) and start < end:
                return VideoRef(path, window=(start, end))
    except ValueError:
        pass
    raise SkippedRowError("a video fragment is neither #frames=N nor #t=START,END", url)
