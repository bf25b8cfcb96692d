"""The agent loop: one prompt rolled out by the main agent, its calls served, until every episode has ended.

    overview -> turn -> calls (crop -> sub-agent, all at once) -> replies -> turn -> ... -> answer

A rollout that breaks (engine error, deadline, tokens that do not line up) is dropped with its reason; the others of
its group go on. It is never scored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paravt_ray.chat import Chat, Rendered, answer_prefix, main_messages, question_text
from paravt_ray.config import Config
from paravt_ray.episode import CallStatus, Episode, Frame, Group, InvalidTrajectoryError, Trajectory, TurnRecord
from paravt_ray.parsing import parse_turn
from paravt_ray.rollout.calls import CallServer
from paravt_ray.rollout.engine import Engine, EngineError
from paravt_ray.rollout.frames import GroupFrames
from paravt_ray.rollout.gating import stable_hash
from paravt_ray.rollout.sampler import ContextFullError, Sampler
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.tools.offered import load_tools
from paravt_ray.tools.tool import CropService
from tool_workers.records import ToolError

logger = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

_FAILURE_KINDS: dict[type[Exception], str] = {
    ToolError: "tool",
    EngineError: "engine",
    InvalidTrajectoryError: "invalid_trajectory",
    ContextFullError: "context",
}


class Observer:
    """Sees the turns of a group as they happen; this one looks away."""

    def generated(self, index: int, turn: TurnRecord) -> None:
        """Episode `index` has generated a turn; its calls are not served yet."""

    def served(self, index: int, turn: TurnRecord) -> None:
        """All calls of the turn are answered (`turn.calls`)."""


async def run_group(
    engine: Engine, pool: CropService, chat: Chat, config: Config, spec: GroupSpec, *, observer: Observer | None = None
) -> Group:
    """Roll out one prompt `spec.group_size` times at once. Never raises for what happens to a rollout.

    Returns:
        The episodes in order of their index. `failures` holds `KIND: what happened` for each rollout that is missing;
        KIND is `tool`, `engine`, `timeout`, `invalid_trajectory`, `context` or `fault` (an error in our own code,
        whose traceback is in the log).
    """
    rollout = config.rollout
    tools = load_tools(config.tools.offered)
    frames = GroupFrames(pool, config, spec.sample.videos, tools, chat.patch_factor)
    sampler = Sampler(engine, chat, spec.temperature, config.model.context_length, rollout.turn_timeout_s)
    task = _Task(spec, config, chat, sampler, frames, observer or Observer())
    failure = await _guarded(task.prepare(), rollout.episode_timeout_s)
    if isinstance(failure, str):
        outcomes: list[Episode | str] = [failure] * spec.group_size
    else:
        episodes = (_Rollout(task, index).run() for index in range(spec.group_size))
        outcomes = await asyncio.gather(*(_guarded(episode, rollout.episode_timeout_s) for episode in episodes))
    return Group(
        spec.group_id,
        spec.sample,
        spec.frame_budget,
        episodes=[outcome for outcome in outcomes if isinstance(outcome, Episode)],
        failures=[outcome for outcome in outcomes if isinstance(outcome, str)],
    )


async def _guarded(work: Coroutine[Any, Any, Outcome], timeout_s: float) -> Outcome | str:
    """What the work returns, or why there is nothing, as `KIND: what happened`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        return f"timeout: The episode took longer than rollout.episode_timeout_s={timeout_s:g} s."
    except Exception as error:  # whatever it is, it must not cost the other rollouts of the group
        kind = next((name for type_, name in _FAILURE_KINDS.items() if isinstance(error, type_)), None)
        if kind is not None:
            return f"{kind}: {error}"
        logger.exception("A rollout failed through an error in the program.")
        return f"fault: {type(error).__name__}: {error}"


@dataclass
class _Task:
    """What the episodes of one group share."""

    spec: GroupSpec
    config: Config
    chat: Chat
    sampler: Sampler
    frames: GroupFrames
    observer: Observer
    overview: list[list[Frame]] = field(default_factory=list)
    """Frames of each video that has a share of K."""
    prompt: Rendered = field(default_factory=Rendered)

    async def prepare(self) -> None:
        """Take the overview and render the prompt, once for all episodes."""
        sample = self.spec.sample
        self.overview = await self.frames.overview(self.spec.frame_budget)
        tools = self.frames.tools if self.config.rollout.max_tool_turns > 0 else {}
        messages = main_messages(question_text(sample.question, sample.videos), self.overview, tools)
        self.prompt = self.chat.prompt(messages, self.config.rollout.think_prefix)


class _Rollout:
    """One episode in the making."""

    def __init__(self, task: _Task, index: int) -> None:
        spec = task.spec
        self.task, self.index = task, index
        self.trajectory = Trajectory()
        self.turns: list[TurnRecord] = []
        self.started = 0.0
        self.seed_parts = (spec.seed, spec.group_id, spec.epoch, index)
        self.server = CallServer(
            task.chat, task.sampler, task.frames, task.config.rollout, spec.sample.question, self.seed_parts
        )

    async def run(self) -> Episode:
        """Take turns until the episode has ended."""
        self.started, started_at = time.monotonic(), time.time()
        suffix = self.task.prompt
        end_reason = None
        while end_reason is None:
            try:
                turn = await self._take_turn(suffix)
            except ContextFullError:
                if not self.turns:
                    raise
                end_reason = "length"
                break
            end_reason = _end_reason(turn)
            if end_reason is None:
                suffix = await self._serve_calls(turn)
                end_reason = "invalid_streak" if self._invalid_streak() else None
        self.trajectory.check()
        task = self.task
        return Episode(
            sample=task.spec.sample,
            group_id=task.spec.group_id,
            index=self.index,
            frame_budget=task.spec.frame_budget,
            trajectory=self.trajectory,
            turns=self.turns,
            overview_times=[frame.time_s for frames in task.overview for frame in frames],
            think_prefix=task.config.rollout.think_prefix,
            end_reason=end_reason,
            seconds=time.monotonic() - self.started,
            started_at=started_at,
        )

    async def _take_turn(self, suffix: Rendered) -> TurnRecord:
        """Append what comes before the turn and the turn itself to the trajectory."""
        rollout, chat = self.task.config.rollout, self.task.chat
        started = time.monotonic()
        seed = stable_hash(*self.seed_parts, len(self.turns), 0)
        limit = self._answer_limit()
        begun = "" if limit is None else answer_prefix(rollout.think_prefix)
        generation = await self.task.sampler.extend(self.trajectory, suffix, limit or rollout.max_new_tokens, seed)
        record = TurnRecord(
            turn=parse_turn(begun + chat.decode(generation.token_ids), rollout.think_prefix, self.task.frames.tools),
            start=len(self.trajectory) - len(generation.token_ids),
            end=len(self.trajectory),
            finish_reason=generation.finish_reason,
            forced=len(self.turns) == rollout.max_tool_turns,
            seconds=time.monotonic() - started,
            started_s=started - self.started,
        )
        self.turns.append(record)
        self.task.observer.generated(self.index, record)
        return record

    async def _serve_calls(self, record: TurnRecord) -> Rendered:
        """Serve a turn's calls; return what is appended before the next turn: all replies, then one header."""
        rollout, chat = self.task.config.rollout, self.task.chat
        answers = await self.server.serve(record.turn.calls, turn=len(self.turns) - 1)
        record.calls = [answer.record for answer in answers]
        self.task.observer.served(self.index, record)
        return chat.replies(
            [answer.reply for answer in answers],
            closed=self.trajectory.token_ids[-1] == chat.im_end,
            think_prefix=rollout.think_prefix,
            force_answer=len(self.turns) == rollout.max_tool_turns,
            answer_only=self._answer_limit() is not None,
        )

    def _answer_limit(self) -> int | None:
        """Tokens of the coming turn, if it is a forced answer with a limit of its own, too short for thinking."""
        forced = 0 < len(self.turns) == self.task.config.rollout.max_tool_turns
        return self.task.spec.answer_tokens if forced else None

    def _invalid_streak(self) -> bool:
        """Whether the last `max_invalid_turns` turns held nothing but calls that cannot be run."""
        limit = self.task.config.rollout.max_invalid_turns
        last = self.turns[-limit:]
        return len(last) == limit and all(r.status is CallStatus.INVALID for turn in last for r in turn.calls)


def _end_reason(record: TurnRecord) -> str | None:
    """Why the episode ends with this turn; None where its calls are to be served.

    Calls come before an answer in the same turn: whoever asks has not made up their mind.
    """
    turn, cut = record.turn, record.finish_reason == "length"
    if turn.calls and not record.forced:
        return None
    if turn.answer is not None and (turn.answer_closed or not cut):
        return "answered"
    return "length" if cut else "no_answer"
