"""`paravt data synth`: a synthetic long-video task, small enough to learn on two cores.

Written into one folder: the clips, questions for reinforcement learning (`train.parquet`, `valid.parquet`), and
conversations for the supervised cold start (`sft_reading.parquet`, `sft_looking.parquet`, `sft_overviews.parquet`,
`sft_prior.parquet`, `sft_weak_prior.parquet`, `sft_train.parquet`, `sft_calling.parquet`, `sft_valid.parquet`).
Training and held-out rows are about different clips. All follows from the seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from paravt_ray.data.synth_looking import LONG_OVERVIEWS, looking_trace, overview_trace
from paravt_ray.data.synth_questions import KINDS, Question, draw_question, overview_times, seen_at
from paravt_ray.data.synth_reading import reading_trace
from paravt_ray.data.synth_traces import Calling, Message, Style, main_trace, subagent_trace
from paravt_ray.data.synth_video import Clip, plan_clip, write_clip
from paravt_ray.errors import InputError

FRAME_BUDGETS = (4, 8, 16, 32, 64)
BUDGET_ODDS = (0.30, 0.22, 0.20, 0.16, 0.12)
"""Shares of the overview budgets in the conversations: small ones are cheap, and the hard case."""
SUBAGENT_SHARE = 0.35
READING_SHARE = 0.3
"""Of the exercises in looking: those in reading, which are not to be forgotten."""
EXERCISE_SHARE = 0.35
"""Of the prior's conversations: exercises like those of `sft_looking`."""
WEAK = Calling(odds=0.05)
"""Hardly any calls: the conversations of the weak tool prior."""
READY = Calling(odds=1.3, needless=0.4)
"""Calls also where the overview would do: what calling and skipping are worth can then be compared at every budget."""
LONG_BUDGET_ODDS = (0.18, 0.18, 0.14, 0.14, 0.36)
"""The same where the longest overview has to be read as surely as the others."""
OVERVIEW_SHARE = 0.25
"""Of the conversations that call readily: exercises like those of `sft_overviews`, which are not to be forgotten."""
HABIT_SHARE = 0.18
"""Of them: conversations in the `code` style, so that its habits compete with the format that is learned."""
MOST_CLIPS = 1000
"""Clips are named by three digits."""


@dataclass(frozen=True)
class SynthSizes:
    """How much to make."""

    train_clips: int = 64
    valid_clips: int = 24
    questions_per_clip: int = 8
    reading_conversations: int = 1000
    looking_conversations: int = 1000
    overview_conversations: int = 1000
    prior_conversations: int = 4000
    sft_conversations: int = 2000
    calling_conversations: int = 2000
    valid_conversations: int = 200


@dataclass(frozen=True)
class SynthReport:
    """What was made."""

    folder: Path
    rows: dict[str, int]
    """Rows of each parquet file."""
    visible: dict[int, float]
    """By overview budget: share of the training questions of which every event has an overview frame inside."""

    def lines(self) -> list[str]:
        """The report for people."""
        files = ", ".join(f"{name} ({rows} rows)" for name, rows in self.rows.items())
        shares = ", ".join(f"{share:.0%} with {frames}" for frames, share in self.visible.items())
        return [f"Wrote {files} to {self.folder}.", f"Questions answerable from the overview frames alone: {shares}."]


def run(out: str, seed: int) -> int:
    """`paravt data synth`."""
    print("\n".join(synthesize(Path(out), seed).lines()))
    return 0


def synthesize(out_dir: Path, seed: int = 0, sizes: SynthSizes | None = None) -> SynthReport:
    """Make clips, questions and conversations in `out_dir`, which is created.

    Raises:
        InputError: more clips are asked for than there are names.
    """
    sizes = sizes or SynthSizes()
    if not (sizes.train_clips > 0 and sizes.valid_clips > 0 and sizes.train_clips + sizes.valid_clips <= MOST_CLIPS):
        raise InputError(f"There must be clips for training and for holding out, {MOST_CLIPS} in all at most.")
    out_dir.mkdir(parents=True, exist_ok=True)
    train, valid = plan_clips(seed, sizes)
    _write_clips([*train, *valid], out_dir)
    questions = {
        "train": draw_questions(train, sizes.questions_per_clip, seed=[seed, 1]),
        "valid": held_out_questions(seed, sizes),
    }
    conversations = {
        "sft_reading": draw_reading(sizes.reading_conversations, seed=[seed, 6]),
        "sft_looking": draw_looking(train, sizes.looking_conversations, seed=[seed, 7]),
        "sft_overviews": draw_overviews(train, sizes.overview_conversations, seed=[seed, 9]),
        "sft_prior": draw_conversations(train, "code", sizes.prior_conversations, seed=[seed, 3]),
        "sft_weak_prior": draw_conversations(train, "code", sizes.prior_conversations, [seed, 3], WEAK),
        "sft_train": draw_conversations(train, "json", sizes.sft_conversations, seed=[seed, 4]),
        "sft_calling": draw_calling(train, sizes.calling_conversations, seed=[seed, 8]),
        "sft_valid": draw_conversations(valid, "json", sizes.valid_conversations, seed=[seed, 5]),
    }
    rows: dict[str, int] = {}
    for name, asked in questions.items():
        rows[name] = _write_rows(out_dir / f"{name}.parquet", [_question_row(question) for question in asked])
    for name, messages in conversations.items():
        rows[name] = _write_rows(out_dir / f"{name}.parquet", [{"messages": json.dumps(m)} for m in messages])
    return SynthReport(out_dir, rows, visible_shares(questions["train"]))


def plan_clips(seed: int, sizes: SynthSizes) -> tuple[list[Clip], list[Clip]]:
    """The clips for training and those held out."""
    rng = np.random.default_rng([seed, 0])
    numbers = rng.permutation(MOST_CLIPS)[: sizes.train_clips + sizes.valid_clips]
    clips = [plan_clip(f"v{number:03d}.mp4", int(rng.integers(2**31))) for number in numbers]
    return clips[: sizes.train_clips], clips[sizes.train_clips :]


def held_out_questions(seed: int, sizes: SynthSizes) -> list[Question]:
    """The questions of `valid.parquet`, in its order, with what has to be seen to answer them."""
    return draw_questions(plan_clips(seed, sizes)[1], sizes.questions_per_clip, seed=[seed, 2])


def draw_questions(clips: Sequence[Clip], per_clip: int, seed: Sequence[int]) -> list[Question]:
    """Questions about each clip, all kinds in turn."""
    rng = np.random.default_rng(list(seed))
    return [draw_question(clip, KINDS[i % len(KINDS)], rng) for clip in clips for i in range(per_clip)]


def draw_reading(count: int, seed: Sequence[int]) -> Iterator[list[Message]]:
    """Exercises in reading."""
    rng = np.random.default_rng(list(seed))
    return (reading_trace(rng) for _ in range(count))


def draw_looking(clips: Sequence[Clip], count: int, seed: Sequence[int]) -> Iterator[list[Message]]:
    """Exercises in looking, and some in reading."""
    rng = np.random.default_rng(list(seed))
    return (_exercise(clips, rng) for _ in range(count))


def draw_overviews(clips: Sequence[Clip], count: int, seed: Sequence[int]) -> Iterator[list[Message]]:
    """Exercises in looking at whole clips, mostly in many frames."""
    rng = np.random.default_rng(list(seed))
    return (overview_trace(clips[int(rng.integers(len(clips)))], LONG_OVERVIEWS, rng) for _ in range(count))


def _exercise(clips: Sequence[Clip], rng: np.random.Generator) -> list[Message]:
    if rng.random() < READING_SHARE:
        return reading_trace(rng)
    return looking_trace(clips[int(rng.integers(len(clips)))], rng)


def draw_conversations(
    clips: Sequence[Clip],
    style: Style,
    count: int,
    seed: Sequence[int],
    calling: Calling | None = None,
    budget_odds: Sequence[float] = BUDGET_ODDS,
) -> Iterator[list[Message]]:
    """Conversations of main agents and sub-agents about random clips; in the `code` style also exercises."""
    rng = np.random.default_rng(list(seed))
    for _ in range(count):
        clip = clips[int(rng.integers(len(clips)))]
        if style == "code" and rng.random() < EXERCISE_SHARE:
            yield _exercise(clips, rng)
            continue
        question = draw_question(clip, KINDS[int(rng.integers(len(KINDS)))], rng)
        if rng.random() < SUBAGENT_SHARE:
            yield subagent_trace(question, question.windows[int(rng.integers(len(question.windows)))])
        else:
            yield main_trace(question, int(rng.choice(FRAME_BUDGETS, p=budget_odds)), style, rng, calling)


def draw_calling(clips: Sequence[Clip], count: int, seed: Sequence[int]) -> Iterator[list[Message]]:
    """Conversations that call readily, some of them in the prior's style, and exercises in looking at whole clips."""
    rng = np.random.default_rng(list(seed))
    sources = (
        draw_overviews(clips, count, seed=[*seed, 0]),
        draw_conversations(clips, "code", count, [*seed, 1], READY, LONG_BUDGET_ODDS),
        draw_conversations(clips, "json", count, [*seed, 2], READY, LONG_BUDGET_ODDS),
    )
    odds = (OVERVIEW_SHARE, HABIT_SHARE, 1 - OVERVIEW_SHARE - HABIT_SHARE)
    return (next(sources[int(rng.choice(len(sources), p=odds))]) for _ in range(count))


def visible_shares(questions: Sequence[Question]) -> dict[int, float]:
    """By overview budget: the share of questions of which every event has an overview frame inside."""
    shares = {}
    for frames in FRAME_BUDGETS:
        times = {question.clip.name: overview_times(question.clip, frames) for question in questions}
        seen = [all(seen_at(e, times[q.clip.name]) is not None for e in q.needed) for q in questions]
        shares[frames] = float(np.mean(seen))
    return shares


def _write_clips(clips: Sequence[Clip], folder: Path) -> None:
    # A fresh interpreter per worker: forking a process in which libraries have started threads can hang it.
    with ProcessPoolExecutor(min(len(clips), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(write_clip, clips, [folder] * len(clips), chunksize=4))


def _question_row(question: Question) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"<video>\n{question.text}"}],
        "videos": [{"video": question.clip.name}],
        "extra_info": json.dumps({"answer": question.answer, "question_type": question.question_type}),
    }


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> int:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return len(rows)
