"""What several benches work on: clips, questions, a configuration, texts of known length."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from paravt_ray.chat import Chat
from paravt_ray.config import Config
from paravt_ray.data.synth_video import plan_clip, write_clip
from paravt_ray.episode import Sample
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.tools.crop_video import CROP_VIDEO

FRAME_PIXELS = 32 * 32
"""Frames of the tiny model: one visual token each."""
LONGEST_CLIP_S = 120
SHUTDOWN_S = 20.0
_WORDS = ("red", "green", "blue", "yellow", "shape", "window", "second", "from", "to", "what", "where", "when")


def bench_config(model: Path, run_dir: Path) -> Config:
    """The configuration that all benches start from: `configs/debug.yaml` in what matters for speed.

    No reference policy, no checkpoints, and a step size of 0, so that every round measures the same policy.
    """
    config = Config()
    config.model.path, config.model.dtype, config.model.context_length = str(model), "float32", 4096
    config.model.overview_max_pixels = config.model.crop_max_pixels = config.model.min_pixels = FRAME_PIXELS
    config.rollout.kv_cache_gb = 1.0
    config.rollout.prompts_per_step = config.rollout.group_size = 8
    config.rollout.temperature = 1.0
    config.rollout.gating, config.rollout.overview_frames, config.rollout.frame_budgets = False, 16, [16]
    config.tools.workers, config.tools.cache_mb = 2, 128
    config.algorithm.kl_coefficient = 0.0
    config.learner.lr, config.learner.micro_batch_tokens = 0.0, 4096
    config.trainer.run_dir, config.trainer.save_every, config.trainer.steps = str(run_dir), 0, 1_000_000
    return config


@contextmanager
def local_cluster(cpus: int = 32) -> Iterator[None]:
    """A Ray cluster on this machine; `cpus` are logical, enough for every actor of a bench."""
    import ray

    ray.init(
        address="local",
        num_cpus=cpus,
        object_store_memory=2**30,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def owned(actor: Any) -> Iterator[Any]:
    """A generator's actor that is ended, engine and all, with the block."""
    import ray
    from ray.exceptions import RayError

    try:
        yield actor
    finally:
        with suppress(RayError):  # dead, hanging (GetTimeoutError) or not started: it is killed next
            ray.get(actor.shutdown.remote(), timeout=SHUTDOWN_S)
        ray.kill(actor)


def synth_clips(folder: Path, count: int, seed: int = 0) -> list[str]:
    """Write that many clips of the synthetic task, of one to two minutes: `0.mp4`, `1.mp4`, ..."""
    paths: list[str] = []
    while len(paths) < count:
        seed += 1
        clip = plan_clip(f"{len(paths)}.mp4", seed)
        if clip.duration <= LONGEST_CLIP_S:
            paths.append(str(write_clip(clip, folder)))
    return paths


def question(video: str, number: int) -> Sample:
    """A multiple-choice question about a clip."""
    text = f"Question {number}: what colour is shown at {7 * number % 60} s?\nA. red\nB. blue\nAnswer with a letter."
    return Sample(f"s{number}", text, (video,), "A", "mcq")


def spec_of(sample: Sample, config: Config, group_id: str, group_size: int) -> GroupSpec:
    """What the generator is asked for."""
    rollout, seed = config.rollout, config.trainer.seed
    return GroupSpec(group_id, sample, rollout.overview_frames, group_size, rollout.temperature, seed)


def words(chat: Chat, tokens: int, seed: int = 0) -> str:
    """Plain text of about that many tokens, never more."""
    rng = np.random.default_rng(seed)
    text = str(rng.choice(_WORDS))
    while True:
        longer = f"{text} {rng.choice(_WORDS)}"
        if len(chat.encode_text(longer)) > tokens:
            return text
        text = longer


def call_text(window: tuple[int, int], video: str = "0.mp4") -> str:
    """One tool call as a model writes it."""
    arguments = f'{{"video_path": "{video}", "start_time": {window[0]}, "end_time": {window[1]}}}'
    return f'<tool_call>\n{{"name": "{CROP_VIDEO.name}", "arguments": {arguments}}}\n</tool_call>'


def links(film: Path, name: str, count: int) -> list[str]:
    """Hard links to a clip: to every cache they are other clips."""
    paths = [film.with_name(f"{name}-{number}.mp4") for number in range(count)]
    for path in paths:
        os.link(film, path)
    return [str(path) for path in paths]


def write_film(path: Path, seconds: int) -> None:
    """A camera panning over a textured ground, with sensor noise: costs as much to decode as an ordinary film.

    640x360, 25 frames a second, H.264, a keyframe every 10 s.
    """
    import av

    width, height, rate = 640, 360, 25
    rng = np.random.default_rng(0)
    coarse = rng.integers(40, 216, size=(height // 4, width // 4)).repeat(8, axis=0).repeat(8, axis=1)
    ground = (coarse + rng.integers(-20, 20, size=coarse.shape)).clip(0, 255).astype(np.uint8)
    noise = rng.integers(0, 8, size=(8, height, width), dtype=np.uint8)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=rate, options={"g": "250", "crf": "23", "preset": "fast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(seconds * rate):
            x, y = int(width / 2 * (1 + np.sin(i / 60))), int(height / 2 * (1 + np.cos(i / 85)))
            grey = np.minimum(ground[y : y + height, x : x + width], 247) + noise[i % 8]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(grey), format="gray")
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
