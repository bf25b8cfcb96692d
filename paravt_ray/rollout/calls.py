"""Serving the calls of one episode: tools and sub-agents at the same time, replies in call order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paravt_ray.chat import Chat, Message, Reply, error_reply, frames_reply, subagent_messages, summary_reply
from paravt_ray.config import RolloutConfig
from paravt_ray.episode import CallRecord, CallStatus, InvalidTrajectoryError, ToolCall, Trajectory
from paravt_ray.rollout.engine import EngineError
from paravt_ray.rollout.frames import GroupFrames
from paravt_ray.rollout.gating import stable_hash
from paravt_ray.rollout.sampler import ContextFullError, Sampler
from paravt_ray.tools.tool import BadCallError, Request
from tool_workers.records import ErrorKind, ToolError

logger = logging.getLogger(__name__)

# What the model is told. Details, which name files of this machine, go to the log.
TOO_MANY_IN_TURN = "Only so many calls are served in one turn."
TOO_MANY_IN_EPISODE = "No more calls are served."
TOO_SLOW = "The crop took longer than allowed."
NOT_READABLE = "This part of the video cannot be read."
NO_SUMMARY = "This part of the video could not be described."


@dataclass
class Answer:
    """A call's record and what the model is shown for it."""

    record: CallRecord
    reply: Reply


@dataclass
class CallServer:
    """Serves one episode's calls and remembers what was asked for."""

    chat: Chat
    sampler: Sampler
    frames: GroupFrames
    rollout: RolloutConfig
    question: str
    seed_parts: tuple[str | int, ...]
    """What distinguishes this episode's draws from all others'."""
    counted: int = 0
    """Calls of the episode that could be parsed, up to now."""
    known: dict[Request, Answer] = field(default_factory=dict)
    """What was served."""

    async def serve(self, calls: Sequence[ToolCall], turn: int) -> list[Answer]:
        """Answer all calls of one turn, in their order; it takes as long as the slowest of them."""
        admitted = self._admit(calls)
        running: dict[Request, asyncio.Task[Answer]] = {}
        async with asyncio.TaskGroup() as tasks:
            for position, (call, outcome) in enumerate(zip(calls, admitted, strict=True)):
                if isinstance(outcome, _Admitted) and outcome.request not in self.known | running:
                    seed = stable_hash(*self.seed_parts, turn, position + 1)
                    running[outcome.request] = tasks.create_task(self._run(call, outcome, seed))
        fresh = {request: task.result() for request, task in running.items()}
        answers = [
            outcome if isinstance(outcome, Answer) else _settle(call, (self.known | fresh)[outcome.request])
            for call, outcome in zip(calls, admitted, strict=True)
        ]
        # What failed may be asked for again in a later turn.
        self.known |= {r: answer for r, answer in fresh.items() if answer.record.status is CallStatus.SERVED}
        return answers

    def _admit(self, calls: Sequence[ToolCall]) -> list[Answer | _Admitted]:
        """Decide for each call whether it is run; those that are not are answered at once.

        Calls that cannot be run do not count towards the caps: a bad one never costs a good one.
        """
        in_turn = 0
        cap = 1 if self.rollout.dispatch == "sequential" else self.rollout.max_calls_per_turn
        outcomes: list[Answer | _Admitted] = []
        for call in calls:
            try:
                if not call.ok:
                    raise BadCallError(call.error or "The call cannot be run.")
                request, note = self.frames.resolve(call)
            except BadCallError as error:
                outcomes.append(_refusal(call, CallStatus.INVALID, str(error)))
                continue
            if in_turn >= cap:
                outcomes.append(_refusal(call, CallStatus.OVER_CAP, TOO_MANY_IN_TURN))
            elif self.counted >= self.rollout.max_calls_per_episode:
                outcomes.append(_refusal(call, CallStatus.OVER_CAP, TOO_MANY_IN_EPISODE))
            else:
                in_turn += 1
                self.counted += 1
                outcomes.append(_Admitted(request, note))
        return outcomes

    async def _run(self, call: ToolCall, admitted: _Admitted, seed: int) -> Answer:
        """Get the frames that one call asks for and have them described."""
        started = time.monotonic()
        request, span = admitted.request, admitted.request.span
        part = self.frames.tools[request.tool].describe(request)
        record = CallRecord(call, CallStatus.FAILED, "", video=request.video, window=span)
        reply = Reply(error_reply(NO_SUMMARY))
        try:
            try:
                frames, tool_note = await self.frames.of(request)
            finally:
                record.crop_s = time.monotonic() - started
            record.timestamps = tuple(frame.time_s for frame in frames)
            note = "; ".join(filter(None, (admitted.note, tool_note)))
            if self.rollout.reply == "frames":
                reply = Reply(frames_reply(span, note, part), tuple(frames))
                record.status = CallStatus.SERVED
            else:
                prompt = subagent_messages(self.question, span, frames, part)
                record.subagent, summary = await self._summarise(prompt, seed)
                if summary:
                    reply = Reply(summary_reply(span, summary, note, part))
                    record.status = CallStatus.SERVED
        except ToolError as error:
            logger.warning("%s failed on %s from %g to %g s: %s", *request[:4], error)
            reply = Reply(error_reply(TOO_SLOW if error.kind is ErrorKind.TIMEOUT else NOT_READABLE))
        except (EngineError, InvalidTrajectoryError, ContextFullError) as error:
            logger.warning("%s: the sub-agent on %s from %g to %g s failed: %s", *request[:4], error)
        record.reply = reply.text
        record.latency_s = time.monotonic() - started
        return Answer(record, reply)

    async def _summarise(self, prompt: Sequence[Message], seed: int) -> tuple[Trajectory, str]:
        """A sub-agent's own trajectory and its summary, which may be empty."""
        trajectory = Trajectory()
        generation = await self.sampler.extend(
            trajectory, self.chat.prompt(prompt), self.rollout.subagent_max_new_tokens, seed
        )
        return trajectory, self.chat.plain_text(generation.token_ids)


@dataclass(frozen=True)
class _Admitted:
    """A call that is run."""

    request: Request
    note: str
    """On what was clamped."""


def _refusal(call: ToolCall, status: CallStatus, message: str) -> Answer:
    reply = Reply(error_reply(message))
    return Answer(CallRecord(call, status, reply.text), reply)


def _settle(call: ToolCall, first: Answer) -> Answer:
    """The answer of a call whose request was run for `first`: its own, or a repetition for a duplicate."""
    if first.record.call is call:
        return first
    served = first.record.status is CallStatus.SERVED
    status = CallStatus.DUPLICATE if served else first.record.status
    return Answer(replace(first.record, call=call, status=status, latency_s=0.0, crop_s=0.0), first.reply)
