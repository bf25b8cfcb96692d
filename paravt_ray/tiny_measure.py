"""What the tiny model can do on held-out synthetic questions: the figures of its manifest.

Through the fleet and the agent loop of training. Answers are split by what the overview frames show: a direct answer
can only be right by seeing or by luck, and these are told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

from paravt_ray.chat import Chat
from paravt_ray.config import Config, model_directory
from paravt_ray.data.reader import read_samples
from paravt_ray.data.synth import FRAME_BUDGETS
from paravt_ray.data.synth_questions import KINDS, Question, overview_times, seen_at
from paravt_ray.data.synth_traces import summary
from paravt_ray.episode import CallRecord, CallStatus, Episode, Group
from paravt_ray.evaluation.benchmark import started_fleet
from paravt_ray.rewards import accuracy
from paravt_ray.rewards.format import format_stats
from paravt_ray.rollout.spec import GroupSpec

TEMPERATURES = (0.0, 0.7)

Figures = dict[str, float]
"""Shares in [0, 1]; those over no episode are left out."""


@dataclass(frozen=True)
class Measured:
    """One rollout and what was to be seen."""

    question: Question
    episode: Episode
    clear: bool
    """Whether every event that the answer depends on has an overview frame inside."""
    called: bool
    """Whether at least one call was served."""
    accuracy: float


def measure(config: Config, questions: Sequence[Question], logs: Path) -> dict[str, dict[str, Figures]]:
    """Ask the questions of `data.valid` at every overview budget and temperature.

    Args:
        config: names the model, the data and the agent's limits.
        questions: one for each row of `data.valid`, in its order.
        logs: folder for the engine's logs.

    Returns:
        result[temperature][slice]: for `all`, each budget (`k4`, ...) and each kind of question (`where`, ...).

    Raises:
        UserError: the engine does not start.
        ValueError: the questions are not those of the file, or a rollout failed.
    """
    chat = Chat.from_pretrained(model_directory(config), config.model.frames_as)
    with started_fleet(config, chat, logs) as fleet:
        return {f"t{t:g}": slices(roll_out(fleet, config, questions, t)) for t in TEMPERATURES}


class Fleet(Protocol):
    """What is asked of the generators."""

    def rollout(self, specs: Sequence[GroupSpec]) -> list[Group]:
        """Roll out prompts and return their groups."""
        ...


def roll_out(fleet: Fleet, config: Config, questions: Sequence[Question], temperature: float) -> list[Measured]:
    """One rollout of every question at every budget; `measure` says what is raised."""
    samples, _ = read_samples(config.data.valid, config.data.video_root, max_unusable=0.0)
    if [sample.question for sample in samples] != [question.text for question in questions]:
        raise ValueError(f"{config.data.valid} does not hold the questions that are to be measured.")
    asked = {
        f"measure/t{temperature:g}/{number}/k{frames}": (question, sample, frames)
        for number, (question, sample) in enumerate(zip(questions, samples, strict=True))
        for frames in FRAME_BUDGETS
    }
    specs = [GroupSpec(name, s, k, 1, temperature, config.trainer.seed) for name, (_, s, k) in asked.items()]
    measured: list[Measured] = []
    for group in fleet.rollout(specs):
        if group.failures:
            raise ValueError(f"A rollout of {group.group_id} failed: {group.failures[0]}")
        question, _, frames = asked[group.group_id]
        measured += [_measured(question, episode, frames) for episode in group.episodes]
    return measured


def _measured(question: Question, episode: Episode, frames: int) -> Measured:
    times = overview_times(question.clip, frames)
    clear = all(seen_at(event, times) is not None for event in question.needed)
    called = any(record.status is CallStatus.SERVED for record in episode.call_records)
    score = accuracy(episode.answer or "", question.answer, question.question_type)
    return Measured(question, episode, clear, called, score)


def slices(measured: Sequence[Measured]) -> dict[str, Figures]:
    """Figures over `all`, by budget and by kind of question."""
    found = {"all": _figures(measured)}
    found |= {f"k{k}": _figures([m for m in measured if m.episode.frame_budget == k]) for k in FRAME_BUDGETS}
    return found | {kind: _figures([m for m in measured if m.question.kind == kind]) for kind in KINDS}


def _figures(measured: Sequence[Measured]) -> Figures:
    formats = {id(m): format_stats(m.episode) for m in measured}
    values: dict[str, list[float]] = {}

    def add(name: str, value: Callable[[Measured], float], rows: Sequence[Measured]) -> None:
        if rows:
            values[name] = [value(row) for row in rows]

    direct = [m for m in measured if not m.called]
    add("accuracy", lambda m: m.accuracy, measured)
    add("accuracy_called", lambda m: m.accuracy, [m for m in measured if m.called])
    add("accuracy_direct_visible", lambda m: m.accuracy, [m for m in direct if m.clear])
    add("accuracy_direct_hidden", lambda m: m.accuracy, [m for m in direct if not m.clear])
    add("usage_rate", lambda m: m.called, measured)
    add("usage_rate_visible", lambda m: m.called, [m for m in measured if m.clear])
    add("usage_rate_hidden", lambda m: m.called, [m for m in measured if not m.clear])
    add("compliance", lambda m: formats[id(m)].compliance, measured)
    add("think_closed", lambda m: formats[id(m)].think_closed, measured)
    add("answer_closed", lambda m: formats[id(m)].answer_closed, measured)
    add("calls_closed", lambda m: bool(formats[id(m)].calls_closed), [m for m in measured if m.episode.call_records])
    summaries = [(m.question, record) for m in measured for record in m.episode.call_records if _asked(m, record)]
    if summaries:
        values["summary_exact"] = [_exact(question, record) for question, record in summaries]
    return {name: round(fmean(numbers), 4) for name, numbers in values.items()}


def _asked(measured: Measured, record: CallRecord) -> bool:
    """Whether a served call looked into exactly one of the question's windows."""
    return record.status is CallStatus.SERVED and record.window in measured.question.windows


def _exact(question: Question, record: CallRecord) -> float:
    window = next(w for w in question.windows if w == record.window)
    return float(record.reply.endswith(f": {summary(question.clip, window)}"))
