"""The one renderer: messages to token ids, for SFT, RL, evaluation and `paravt ask` alike.

Everything is written in ChatML with Qwen's control tokens. Two rules hold everywhere:

* Text from users, files and tools never becomes a control token, whatever it contains (`encode_text`).
* A conversation only grows: later turns are encoded alone and appended (`Chat.replies`), never rendered again.

Frames of a video are rendered in one of two ways (`model.frames_as`): each as an image after its time, or two together
as Qwen3-VL's processor renders a video. In the ids that the engine is given, an image stands as one `<|image_pad|>` and
two frames of a video as one `<|video_pad|>`; the engine expands both, and `Chat.expand` does the same for SFT and for
checking that both sides agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from paravt_ray.episode import Frame
from paravt_ray.tools.offered import DEFAULT, Tools

# With `frames_as: video`, "each after its time" is not exact: two frames together follow their mean time. There is one
# text for both all the same, since SFT data holds it before it is known how its frames will be shown, and RL must show
# what SFT showed. The tiny model was trained on these very characters.
_TASK = (
    "You answer questions about a video. You see some of its frames, each after its time. "
    "Think inside <think></think>. "
)
NO_TOOLS_SYSTEM = f"{_TASK}Then give the answer inside <answer></answer>."
"""The main agent's where there is no tool to call."""
SUBAGENT_SYSTEM = "You see the frames of one part of a video. Say briefly what they show that matters for the question."
FORCE_ANSWER = "No more calls are possible. Answer now."

THINK_PREFIX = "<think>\n"
ANSWER_TAG = "<answer>"
_RESPONSE_TAGS = ("<tool_response>", "</tool_response>")
_ASSISTANT_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

Role = Literal["system", "user", "assistant"]

FRAMES_PER_VIDEO_PAD = 2
"""Frames that Qwen3-VL's vision tower sees as one: its temporal patch."""
Picture = tuple[Frame, ...]
"""The frames that one pad stands for: one for an image pad, `FRAMES_PER_VIDEO_PAD` for a video pad."""


@dataclass(frozen=True)
class Tag:
    """A structural tag written by us, not by a user: its own token where the tokenizer has one."""

    text: str


@dataclass(frozen=True)
class Video:
    """Frames of one video, in order, each to be shown with its time. A frame that is no part of one is a picture."""

    frames: tuple[Frame, ...]


Part = str | Tag | Frame | Video


@dataclass(frozen=True)
class Message:
    """One message of a conversation: text, tags, pictures and videos in order."""

    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Reply:
    """What a call is answered with: text, and in `reply: frames` the crop's frames."""

    text: str
    frames: tuple[Frame, ...] = ()


@dataclass
class Rendered:
    """Un-expanded token ids, the frames of their pads in order, and where the assistant speaks."""

    ids: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    """True on assistant text and its end-of-turn token: the tokens that SFT puts loss on. As long as `ids`."""
    frames: list[Frame] = field(default_factory=list)
    """One for each image pad, two for each video pad: the last frame of a video twice where it has an odd number."""


def main_system(tools: Tools) -> str:
    """The main agent's system prompt: what it can call, and how each call is written."""
    if not tools:
        return NO_TOOLS_SYSTEM
    schemas = "\n".join(json.dumps(tool.schema) for tool in tools.values())
    calls = (json.dumps({"name": tool.name, "arguments": tool.example}) for tool in tools.values())
    examples = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return (
        f"{_TASK}Where the frames do not show enough, call {'the' if len(tools) == 1 else 'a'} "
        "tool; several calls in one turn are served at the same time. Otherwise give the answer inside "
        f"<answer></answer>.\n<tools>\n{schemas}\n</tools>\nA call looks like this:\n{examples}"
    )


MAIN_SYSTEM = main_system(DEFAULT)
"""The main agent's with `crop_video` alone: the prompt of the cold start."""


def question_text(question: str, videos: Sequence[str]) -> str:
    """The question with the line that names its videos, as in the released data; left alone where it is there."""
    line = f"The video path for this video is: {', '.join(Path(video).name for video in videos)}"
    return question if "The video path for this video is:" in question else f"{question}\n{line}"


def main_messages(question: str, overview: Sequence[Sequence[Frame]], tools: Tools = DEFAULT) -> list[Message]:
    """The main agent's prompt: the tools that there are, overview frames of each video, then the question."""
    user = Message("user", (*(Video(tuple(frames)) for frames in overview), f"\n{question}"))
    return [Message("system", assistant_parts(main_system(tools))), user]


def answer_prefix(think_prefix: bool) -> str:
    """What a turn is begun with, after its think prefix, to get nothing but the answer."""
    return f"</think>\n{ANSWER_TAG}" if think_prefix else ANSWER_TAG


# In the next four, `part` is what the tool says of the frames beside their window (`Tool.describe`).


def subagent_question(question: str, window: tuple[float, float], part: str = "") -> str:
    """The text of a sub-agent's prompt that follows the crop's frames."""
    return f"\nQuestion: {question}\nWhat is shown from {window[0]:g} to {window[1]:g} s{part}?"


def subagent_messages(
    question: str, window: tuple[float, float], frames: Sequence[Frame], part: str = ""
) -> list[Message]:
    """The sub-agent's prompt: the crop's frames with their true times, the question, the window in seconds."""
    user = Message("user", (Video(tuple(frames)), subagent_question(question, window, part)))
    return [Message("system", (SUBAGENT_SYSTEM,)), user]


def summary_reply(window: tuple[float, float], summary: str, note: str = "", part: str = "") -> str:
    """A served call's reply: the window in seconds, the sub-agent's summary, the tool's note if it has one."""
    return f"{window[0]:g} to {window[1]:g} s{part}: {summary}" + (f" ({note})" if note else "")


def frames_reply(window: tuple[float, float], note: str = "", part: str = "") -> str:
    """A served call's reply where the crop's frames follow: the window in seconds, the tool's note if it has one."""
    return f"{window[0]:g} to {window[1]:g} s{part}:" + (f" ({note})" if note else "") + "\n"


def error_reply(message: str) -> str:
    """A call's reply where it could not be served."""
    return f"Error: {message}"


def reply_parts(replies: Sequence[Reply], force_answer: bool) -> tuple[Part, ...]:
    """The user message that answers one turn's calls, all of them, in call order."""
    parts: list[Part] = []
    for index, reply in enumerate(replies):
        parts += ["\n"] if index else []
        shown = [Video(reply.frames)] if reply.frames else []
        parts += [Tag(_RESPONSE_TAGS[0]), f"\n{reply.text}", *shown, "\n", Tag(_RESPONSE_TAGS[1])]
    if force_answer:
        parts.append(f"\n{FORCE_ANSWER}" if replies else FORCE_ANSWER)
    return tuple(parts)


def assistant_parts(text: str) -> tuple[str | Tag, ...]:
    """Split an assistant text (SFT data) into plain text and the tags an assistant may write."""
    return _split_tags(text, _ASSISTANT_TAGS)


def user_parts(text: str) -> tuple[str | Tag, ...]:
    """Split a user text (SFT data): tool replies keep their tags, everything else is plain text."""
    return _split_tags(text, _RESPONSE_TAGS) if text.lstrip().startswith(_RESPONSE_TAGS[0]) else (text,)


def _split_tags(text: str, tags: Sequence[str]) -> tuple[str | Tag, ...]:
    pieces = re.split("(" + "|".join(map(re.escape, tags)) + ")", text)
    return tuple(Tag(piece) if piece in tags else piece for piece in pieces if piece)


def _time_text(seconds: float) -> str:
    """The time of what follows, in the notation that Qwen3-VL was trained with."""
    return f"<{seconds:.1f} seconds>"


class Chat:
    """Renders messages with one tokenizer. Cheap to build; holds no state of any conversation."""

    def __init__(self, tokenizer: Any, patch_factor: int, frames_as: str = "images") -> None:
        """Render for one tokenizer.

        Args:
            tokenizer: a Hugging Face tokenizer with Qwen's control tokens.
            patch_factor: pixels per visual token side.
            frames_as: `images` or `video` (`model.frames_as`).

        Raises:
            ValueError: a control token is missing, so the tokenizer is not one of the Qwen-VL family.
        """
        self.tokenizer = tokenizer
        self.patch_factor = patch_factor
        self._as_video = frames_as == "video"
        self._added: dict[str, int] = dict(tokenizer.get_added_vocab())
        longest_first = sorted((t for t in self._added if len(t) > 1), key=len, reverse=True)
        self._any_added = re.compile("|".join(map(re.escape, longest_first)))
        self.im_start, self.im_end = self._control("<|im_start|>"), self._control("<|im_end|>")
        self.vision_start, self.vision_end = self._control("<|vision_start|>"), self._control("<|vision_end|>")
        self.image_pad, self.video_pad = self._control("<|image_pad|>"), self._control("<|video_pad|>")
        self.vision_ids = (self.vision_start, self.vision_end, self.image_pad, self.video_pad)
        """Ids that a policy must never sample."""

    @classmethod
    def from_pretrained(cls, path: str | Path, frames_as: str = "images") -> Chat:
        """Load the tokenizer and the patch size of a checkpoint directory. Never runs code from it.

        Raises:
            ValueError: as `Chat`, or its vision tower does not take two frames together.
        """
        from transformers import AutoConfig, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        vision = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True).vision_config
        if vision.temporal_patch_size != FRAMES_PER_VIDEO_PAD:
            raise ValueError(
                f"The vision tower in {path} takes {vision.temporal_patch_size} frames together; a Qwen3-VL takes "
                f"{FRAMES_PER_VIDEO_PAD}."
            )
        return cls(tokenizer, vision.patch_size * vision.spatial_merge_size, frames_as)

    def _control(self, token: str) -> int:
        if token not in self._added:
            raise ValueError(f"The tokenizer has no {token} token: it does not belong to a Qwen vision-language model.")
        return self._added[token]

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text so that nothing in it becomes a control token.

        A literal such as `<|im_end|>` is cut after its first character and both pieces are encoded on their own, so
        that it comes out as ordinary characters.
        """
        text = text.encode("utf-8", "replace").decode()  # lone surrogates (odd file names) have no bytes to encode
        ids: list[int] = []
        begin = 0
        while (match := self._any_added.search(text, begin)) is not None:
            ids += self.tokenizer.encode(text[begin : match.start() + 1], add_special_tokens=False)
            begin = match.start() + 1
        return ids + (self.tokenizer.encode(text[begin:], add_special_tokens=False) if begin < len(text) else [])

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Render whole messages."""
        out = Rendered()
        for message in messages:
            self._message(out, message)
        return out

    def prompt(self, messages: Sequence[Message], think_prefix: bool = False) -> Rendered:
        """Render messages and the header of the assistant turn that follows."""
        out = self.render(messages)
        self._extend(out, self._header(think_prefix))
        return out

    def replies(
        self,
        replies: Sequence[Reply],
        closed: bool,
        think_prefix: bool,
        force_answer: bool,
        answer_only: bool = False,
    ) -> Rendered:
        """What is appended after an assistant turn: all replies in one user message, then one assistant header.

        `closed` says whether the turn ended with its own end-of-turn token; otherwise (it was cut at the token
        limit) one is appended, not as the policy's. With `answer_only` the next turn begins with `answer_prefix`.
        """
        out = Rendered()
        self._extend(out, ([] if closed else [self.im_end]) + self.encode_text("\n"))
        self._message(out, Message("user", reply_parts(replies, force_answer)))
        self._extend(out, self._header(think_prefix))
        self._extend(out, self._assistant(answer_prefix(think_prefix)) if answer_only else [])
        return out

    def expand(self, ids: Sequence[int], frames: Sequence[Frame]) -> list[int]:
        """Replace each pad by what it stands for: what the engine does.

        Raises:
            ValueError: as `pieces`.
        """
        return [token for piece in self.pieces(ids, frames) for token in piece]

    def pieces(self, ids: Sequence[int], frames: Sequence[Frame]) -> list[list[int]]:
        """What each of un-expanded ids becomes: itself, or what a pad stands for.

        An image pad becomes as many as its frame has visual tokens. A video pad becomes the mean time of its frames in
        text and, between vision marks, as many pads as one frame has visual tokens.

        Raises:
            ValueError: the frames are not those of the pads.
        """
        pictures = iter(self.pictures(ids, frames))
        pads = (self.image_pad, self.video_pad)
        return [self._shown(next(pictures)) if token in pads else [token] for token in ids]

    def pictures(self, ids: Sequence[int], frames: Sequence[Frame]) -> list[Picture]:
        """The frames that each pad of un-expanded ids stands for, in order.

        Raises:
            ValueError: there are more or fewer frames than the pads stand for.
        """
        sizes = {self.image_pad: 1, self.video_pad: FRAMES_PER_VIDEO_PAD}
        counts = [sizes[token] for token in ids if token in sizes]
        if sum(counts) != len(frames):
            raise ValueError(
                f"{len(frames)} frames do not match the {counts.count(1)} image pads and "
                f"{counts.count(FRAMES_PER_VIDEO_PAD)} video pads of the prompt."
            )
        remaining = iter(frames)
        return [tuple(islice(remaining, count)) for count in counts]

    def _shown(self, picture: Picture) -> list[int]:
        """What the engine makes of the pad of a picture."""
        tokens = self.visual_tokens(picture[0])
        if len(picture) == 1:
            return [self.image_pad] * tokens
        time = self.encode_text(_time_text((picture[0].time_s + picture[-1].time_s) / 2))
        return [*time, self.vision_start, *[self.video_pad] * tokens, self.vision_end]

    def visual_tokens(self, frame: Frame) -> int:
        """Visual tokens of one frame: one for each `patch_factor` x `patch_factor` pixels."""
        height, width = frame.pixels.shape[:2]
        return int(height // self.patch_factor) * int(width // self.patch_factor)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, control tokens included (the parser drops end-of-turn markers)."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def plain_text(self, ids: Sequence[int]) -> str:
        """The text of generated ids without control tokens, stripped: what a sub-agent said."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)).strip()

    def _header(self, think_prefix: bool) -> list[int]:
        header = [self.im_start, *self.encode_text("assistant\n")]
        return header + (self._assistant(THINK_PREFIX) if think_prefix else [])

    def _assistant(self, text: str) -> list[int]:
        # The forced prefix is encoded alone, so the text after it must be too, or SFT would teach other ids than RL
        # continues from.
        if text.startswith(THINK_PREFIX) and len(text) > len(THINK_PREFIX):
            return self._assistant(THINK_PREFIX) + self._assistant(text[len(THINK_PREFIX) :])
        return self._parts(assistant_parts(text))

    def _placed(self, parts: Iterable[Part]) -> Iterator[str | Tag | Picture]:
        """The same parts with a picture for each pad."""
        for part in parts:
            if isinstance(part, Frame):
                yield (part,)
            elif not isinstance(part, Video):
                yield part
            elif self._as_video:
                missing = -len(part.frames) % FRAMES_PER_VIDEO_PAD
                frames = part.frames + part.frames[-1:] * missing  # as Qwen3-VL's processor does
                for at in range(0, len(frames), FRAMES_PER_VIDEO_PAD):
                    yield frames[at : at + FRAMES_PER_VIDEO_PAD]
            else:
                for frame in part.frames:
                    yield _time_text(frame.time_s)
                    yield (frame,)

    def _parts(self, parts: Iterable[str | Tag | Picture]) -> list[int]:
        """Encode text, tags and pictures; adjacent plain texts are encoded as one."""
        ids: list[int] = []
        plain = ""
        for part in parts:
            if isinstance(part, str):
                plain += part
                continue
            ids += self.encode_text(plain) if plain else []
            plain = ""
            if isinstance(part, Tag):
                ids += [self._added[part.text]] if part.text in self._added else self.encode_text(part.text)
            elif len(part) == 1:
                ids += [self.vision_start, self.image_pad, self.vision_end]
            else:  # its marks come with its time, when it is expanded
                ids.append(self.video_pad)
        return ids + (self.encode_text(plain) if plain else [])

    def _message(self, out: Rendered, message: Message) -> None:
        header = [self.im_start, *self.encode_text(f"{message.role}\n")]
        self._extend(out, header)
        if message.role == "assistant":
            text = "".join(p if isinstance(p, str) else p.text for p in message.parts if isinstance(p, str | Tag))
            self._extend(out, [*self._assistant(text), self.im_end], trained=True)
        else:
            placed = list(self._placed(message.parts))
            out.frames += [frame for part in placed if isinstance(part, tuple) for frame in part]
            self._extend(out, [*self._parts(placed), self.im_end])
        self._extend(out, self.encode_text("\n"))

    @staticmethod
    def _extend(out: Rendered, ids: list[int], trained: bool = False) -> None:
        out.ids += ids
        out.trained += [trained] * len(ids)
