"""Rows, configurations and learners for the learner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paravt_ray.chat import Chat, Message, assistant_parts, main_messages
from paravt_ray.config import Config, LearnerConfig
from paravt_ray.episode import Frame, TrainRow
from paravt_ray.learner.actor import free_port
from paravt_ray.learner.learner import Learner
from paravt_ray.learner.schedule import LrSchedule


def make_config(**learner: Any) -> Config:
    """float32, no ZeRO, a large learning rate so that differences show; `learner` overrides."""
    config = Config()
    config.model.dtype = "float32"
    config.algorithm.kl_coefficient = 0.0
    config.learner = replace(LearnerConfig(lr=1e-2, zero_stage=0, timeout_s=120), **learner)
    return config


def make_learner(path: Path, config: Config, steps: int = 10, **more: Any) -> Learner:
    """A learner of one rank in this process; close it."""
    schedule = LrSchedule.from_config(config.learner, steps)
    return Learner(config, path, schedule, rendezvous=f"tcp://127.0.0.1:{free_port()}", **more)


def make_frame(number: int, height: int = 32, width: int = 32) -> Frame:
    """A frame of noise that depends on its number and size alone."""
    noise = np.random.default_rng([number, height, width]).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Frame(noise, float(number), f"v{number}/{height}x{width}")


def make_row(chat: Chat, frames: Sequence[Frame], answer: str, group: int = 0, sequence: int = 0) -> TrainRow:
    """A conversation with one assistant turn, all of whose tokens count as generated, with made-up advantages."""
    prompt = chat.prompt(main_messages("which?", [frames])) if frames else chat.prompt([Message("user", ("which?",))])
    reply = chat.render([Message("assistant", assistant_parts(answer))])
    said = [token for token, trained in zip(reply.ids, reply.trained, strict=True) if trained]
    ids = np.asarray([*chat.expand(prompt.ids, prompt.frames), *said], np.int64)
    generated = np.arange(len(ids)) >= len(ids) - len(said)
    noise = np.random.default_rng([group, sequence, len(ids)])
    return TrainRow(
        token_ids=ids,
        generated=generated,
        advantages=np.where(generated, noise.normal(), 0).astype(np.float32),
        behaviour_logprobs=np.where(generated, -noise.uniform(4, 6, len(ids)), 0).astype(np.float32),
        frames=prompt.frames,
        group_index=group,
        sequence_index=sequence,
    )


def make_rows(chat: Chat) -> list[TrainRow]:
    """Three groups: shared frames of one size, frames of several sizes, and text alone; lengths differ."""
    small, wide = [make_frame(i) for i in range(4)], [make_frame(9, 64, 96), make_frame(10, 32, 64)]
    return [
        make_row(chat, small, "<think>\nred</think><answer>A</answer>", 0, 0),
        make_row(chat, small, "<answer>B</answer>", 0, 1),
        make_row(chat, small[:2], "seconds", 0, 1),
        make_row(chat, wide, "<answer>blue and the red video</answer>", 1, 2),
        make_row(chat, [*wide, *small[2:]], "<think>\nno", 1, 3),
        make_row(chat, [], "<answer>C</answer>", 2, 4),
        make_row(chat, [], "<answer>[1, 2]</answer> the video", 2, 5),
    ]


def weights(learner: Learner) -> dict[str, np.ndarray]:
    """All weights, copied."""
    return {name: tensor.float().numpy().copy() for name, tensor in learner.named_tensors()}


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Largest absolute difference between two sets of weights."""
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)
