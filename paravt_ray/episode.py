"""The records that flow through the system, in the order in which they come into being.

    Sample -> (Trajectory, Turn, ToolCall, CallRecord) -> Episode -> Group

Units: times are seconds of the source video; token ids are the engine's own and are never derived again from text.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

QuestionType = Literal["mcq", "tvg", "oe"]
"""Multiple choice (a letter), temporal grounding (a window in seconds), open-ended (free text)."""

NOT_GENERATED = -1
"""Policy version of tokens that no policy produced: prompts, tool replies, forced prefixes."""


class InvalidTrajectoryError(RuntimeError):
    """Token ids, masks, log-probs or frames of one trajectory do not line up; that one sample is dropped, counted."""


@dataclass(frozen=True)
class Sample:
    """One question about one or more videos, as read from the data set."""

    sample_id: str
    question: str
    videos: tuple[str, ...]
    """Absolute paths. A model only ever chooses among them by base name."""
    answer: str
    question_type: QuestionType

    def content(self) -> list[Any]:
        """What makes it this sample, as JSON: the same id may be asked anew. Where its videos lie does not matter."""
        return [self.sample_id, self.question, self.answer, self.question_type, [Path(v).name for v in self.videos]]


@dataclass(frozen=True)
class ToolCall:
    """One attempted call as it stands in the model's text; `ok` says whether it can be run."""

    ok: bool
    name: str | None
    start_time: float | None
    end_time: float | None
    error: str | None
    raw: str
    video: str | None = None
    """The video argument, never used as a path: its base name chooses among the episode's videos."""
    style: Literal["json", "code"] = "json"
    closed: bool = True
    """Whether the call's closing tag was there."""
    detail: Hashable = None
    """What the tool read beside window and video; None for `crop_video`."""


@dataclass(frozen=True)
class Turn:
    """One assistant turn, parsed."""

    text: str
    think: str | None
    """The text of the thinking part, also when it was never closed; None where there is none."""
    think_opened: bool
    think_closed: bool
    calls: tuple[ToolCall, ...]
    answer: str | None
    """Text inside the last `<answer>` after thinking, stripped; None where there is none or it is empty."""
    answer_closed: bool


class CallStatus(StrEnum):
    """What became of a call."""

    SERVED = "served"
    DUPLICATE = "duplicate"  # asks for the same as an earlier call of the episode: answered from it
    INVALID = "invalid"  # could not be parsed, unknown tool, bad arguments
    OVER_CAP = "over_cap"  # more calls than a turn or an episode may make
    FAILED = "failed"  # the tool or the sub-agent answered with an error or not in time


@dataclass
class CallRecord:
    """A call and what was really done for it; rewards are computed from these, never from text."""

    call: ToolCall
    status: CallStatus
    reply: str
    """The text between `<tool_response>` tags that the model was shown."""
    video: str | None = None
    """Absolute path of the video that was cropped."""
    window: tuple[float, float] | None = None
    """The window that was cropped, after clamping, in seconds."""
    timestamps: tuple[float, ...] = ()
    """Seconds of the frames that the crop returned."""
    latency_s: float = 0.0
    """Until the reply was there: the crop, then the sub-agent."""
    crop_s: float = 0.0
    """The crop's part of it."""
    subagent: Trajectory | None = None
    """The sub-agent's own trajectory; shared, not copied, by duplicates."""


class Frame:
    """One video frame with its place in the source. Compared and hashed by `key`, so equal frames are stored once."""

    __slots__ = ("key", "pixels", "time_s")

    def __init__(self, pixels: NDArray[np.uint8], time_s: float, key: str) -> None:
        """`pixels` uint8 [H, W, 3] RGB, `time_s` seconds, `key` unique for (video, presentation time, size,
        what a tool made of it)."""
        self.pixels = pixels
        self.time_s = time_s
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Frame({self.key}, {self.time_s:.3f}s, {self.pixels.shape})"


@dataclass
class Trajectory:
    """One append-only token sequence with everything the learner needs; all lists have the same length T.

    Written only by `append_prompt` and `append_generated`. `prompt_ids` holds one image pad for a frame, or one video
    pad for two, as they are handed to the engine; `token_ids` holds the engine's own expanded ids, the only truth.
    """

    token_ids: list[int] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    """True where the policy sampled the token: these carry loss."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability under the sampling distribution (temperature applied); 0.0 where not generated."""
    versions: list[int] = field(default_factory=list)
    """Of the weights: for each sampled token the oldest that had a part in its turn; NOT_GENERATED elsewhere."""
    frames: list[Frame] = field(default_factory=list)
    """Frames in the order of their pads; the last of an odd number of a video's frames stands twice (`Rendered`)."""
    prompt_ids: list[int] = field(default_factory=list)
    """The same sequence with un-expanded pads, as sent to the engine for the next turn."""

    def append_prompt(self, expanded_ids: list[int], prompt_ids: list[int], frames: list[Frame]) -> None:
        """Append tokens that the policy did not sample: a prompt, replies, a forced prefix."""
        self.token_ids += expanded_ids
        self.generated += [False] * len(expanded_ids)
        self.logprobs += [0.0] * len(expanded_ids)
        self.versions += [NOT_GENERATED] * len(expanded_ids)
        self.prompt_ids += prompt_ids
        self.frames += frames

    def append_generated(self, ids: list[int], logprobs: list[float], version: int) -> None:
        """Append a turn that the policy sampled; `version` is the oldest of the weights that had a part in it.

        Raises:
            InvalidTrajectoryError: where there is not one log-prob for each token.
        """
        if len(ids) != len(logprobs):
            raise InvalidTrajectoryError(f"{len(ids)} tokens came with {len(logprobs)} log-probs.")
        self.token_ids += ids
        self.generated += [True] * len(ids)
        self.logprobs += logprobs
        self.versions += [version] * len(ids)
        self.prompt_ids += ids

    def check(self) -> None:
        """Raise InvalidTrajectoryError unless all per-token lists have the same length."""
        lengths = {len(self.token_ids), len(self.generated), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise InvalidTrajectoryError(f"Token lists of different lengths: {sorted(lengths)}.")

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class TurnRecord:
    """One assistant turn of an episode: where it stands in the trajectory, its parse, its calls."""

    turn: Turn
    start: int
    """Index in `Trajectory.token_ids` of the first generated token."""
    end: int
    """One past the last generated token."""
    finish_reason: str
    """The engine's: `stop` (end-of-turn token) or `length`."""
    calls: list[CallRecord] = field(default_factory=list)
    forced: bool = False
    """True for the forced answer turn, in which calls are not run."""
    seconds: float = 0.0
    """Wall time of its generation; calls have their own latencies."""
    started_s: float = 0.0
    """Seconds from the episode's start to the turn's."""


@dataclass
class Rewards:
    """One episode's rewards: the parts and the total that the learner sees."""

    total: float
    accuracy: float
    format: float
    anchor: float
    tool: float


@dataclass
class Episode:
    """One rollout of one sample, whole."""

    sample: Sample
    group_id: str
    index: int
    """Position in the group."""
    frame_budget: int
    """K: overview frames asked for. The same for the whole group."""
    trajectory: Trajectory
    turns: list[TurnRecord]
    overview_times: list[float]
    """Seconds of the overview frames, at most K of them."""
    think_prefix: bool
    """Whether every turn began with the forced tokens `<think>\\n`."""
    end_reason: str
    """`answered`, `no_answer`, `length`, `invalid_streak`, ..."""
    seconds: float = 0.0
    rewards: Rewards | None = None
    started_at: float = 0.0
    """Seconds since 1970."""

    @property
    def answer(self) -> str | None:
        """The final answer: that of the last turn."""
        return self.turns[-1].turn.answer if self.turns else None

    @property
    def call_records(self) -> list[CallRecord]:
        """All calls in order."""
        return [record for turn in self.turns for record in turn.calls]

    @property
    def policy_version(self) -> int:
        """The oldest weights that sampled any of its tokens."""
        return min((v for v in self.trajectory.versions if v != NOT_GENERATED), default=NOT_GENERATED)


@dataclass
class Group:
    """The rollouts of one prompt: the unit of advantages, consumed whole."""

    group_id: str
    sample: Sample
    frame_budget: int
    episodes: list[Episode]
    failures: list[str] = field(default_factory=list)
    """A reason for each rollout that is missing."""


@dataclass(kw_only=True)
class TrainRow:
    """One sequence as the learner trains on it. Arrays have the trajectory's length T."""

    token_ids: NDArray[np.int64]  # [T]
    generated: NDArray[np.bool_]  # [T] tokens that carry loss
    advantages: NDArray[np.float32]  # [T] 0 where not generated
    behaviour_logprobs: NDArray[np.float32]  # [T] the generator's
    frames: list[Frame]
    reference_logprobs: NDArray[np.float32] | None = None  # [T] the reference policy's, where it was asked already
    group_index: int = 0
    sequence_index: int = 0
    """Rows of one episode (main agent, sub-agents) share it."""

    @classmethod
    def of(cls, trajectory: Trajectory, group_index: int = 0, sequence_index: int = 0) -> TrainRow:
        """The row of one trajectory, with advantages of 0.

        Raises:
            InvalidTrajectoryError: its lists do not line up.
        """
        trajectory.check()
        return cls(
            token_ids=np.asarray(trajectory.token_ids, dtype=np.int64),
            generated=np.asarray(trajectory.generated, dtype=np.bool_),
            advantages=np.zeros(len(trajectory), dtype=np.float32),
            behaviour_logprobs=np.asarray(trajectory.logprobs, dtype=np.float32),
            frames=trajectory.frames,
            group_index=group_index,
            sequence_index=sequence_index,
        )
