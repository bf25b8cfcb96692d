"""`paravt bench crop`: the crop service against the per-call path of `qwen_vl_utils` and against a bare decode loop.

Both sides use the same number of processes, the same files and windows, in turn, in one run; each figure is the median
of the rounds. Every round reads its own copies of the clip (hard links), so that nothing is left in any cache.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paravt_ray.bench._table import Row, machine, say, show
from paravt_ray.bench._workload import links, write_film
from tool_workers import CropPool

ROUNDS = 3
CLIPS = 3
CLIP_S = 60
ROLLOUTS = 8
WINDOWS = 4
"""Calls of one rollout; the rollouts of a group ask for nearly the same ones."""
FPS, MAX_FRAMES, MAX_PIXELS, MIN_PIXELS = 1.0, 16, 50176, 1024


@dataclass(frozen=True)
class Window:
    """One crop call."""

    video: str
    start: float
    end: float


def main() -> int:
    """Measure and print a table; 1 where a goal was missed."""
    workers = max(1, (os.cpu_count() or 2))
    settings = [
        machine("decord", "av", "qwen-vl-utils"),
        f"Clips of {CLIP_S} s, 640x360, H.264, a keyframe every 10 s; up to {MAX_FRAMES} frames a crop at {FPS:g} a "
        f"second; {workers} processes on either side; median of {ROUNDS} rounds.",
    ]
    return show(bench_crop(workers), settings)


def bench_crop(workers: int) -> list[Row]:
    """Measure the group workload and unique windows with `workers` processes on either side."""
    import ray

    ray.init(address="local", include_dashboard=False, num_cpus=workers, log_to_driver=False)
    context = multiprocessing.get_context("spawn")
    try:
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(workers, mp_context=context) as processes:
            clip = Path(folder) / "clip.mp4"
            say("Encoding a clip ...")
            write_film(clip, CLIP_S)
            list(processes.map(_fetch, _unique(clip, "warm", 1)[: 2 * workers]))  # imports
            pool = CropPool(workers=workers, num_cpus=1)
            with asyncio.Runner() as runner:
                return _measure(clip, pool, runner, processes)
    finally:
        ray.shutdown()


def _measure(clip: Path, pool: CropPool, runner: asyncio.Runner, processes: ProcessPoolExecutor) -> list[Row]:
    at_once: list[float] = []
    one_by_one: list[float] = []
    fetched: list[float] = []
    unique: list[float] = []
    bare: list[float] = []
    decord: list[float] = []
    for index in range(ROUNDS):
        say(f"Round {index + 1} of {ROUNDS} ...")
        group = _groups(clip, f"group{index}")
        at_once.append(_rate(group, lambda w: runner.run(_all_at_once(pool, w))))
        one_by_one.append(_rate(_groups(clip, f"late{index}"), lambda w: runner.run(_rollout_by_rollout(pool, w))))
        fetched.append(_rate(group, lambda w: list(processes.map(_fetch, w))))
        single = _unique(clip, f"unique{index}", CLIPS)
        unique.append(_rate(single, lambda w: runner.run(_all_at_once(pool, w))))
        bare.append(_rate(single, lambda w: list(processes.map(_decode, w))))
        decord.append(_rate(single, lambda w: list(processes.map(_decode_with_decord, w))))
    names = "qwen_vl_utils.fetch_video", "bare decode loop (PyAV)", "bare decode loop (decord)"
    shape = f"{ROLLOUTS} rollouts x {WINDOWS} windows x {CLIPS} clips"
    return [
        Row(f"{shape}, at once", _median(at_once), _median(fetched), names[0], 5.0, "crops/s"),
        Row(f"{shape}, in turn", _median(one_by_one), _median(fetched), names[0], 5.0, "crops/s"),
        Row(f"{len(single)} unique windows", _median(unique), _median(bare), names[1], 0.9, "crops/s"),
        Row(f"{len(single)} unique windows", _median(unique), _median(decord), names[2], 0.9, "crops/s"),
    ]


_median = statistics.median


def _rate(windows: Sequence[Window], work: Callable[[Sequence[Window]], object]) -> float:
    started = time.perf_counter()
    work(windows)
    return len(windows) / (time.perf_counter() - started)


def _groups(clip: Path, name: str) -> list[Window]:
    """The calls of one group for each clip: rollout after rollout, window for window nearly the same."""
    rng = random.Random(name)
    windows = []
    for video in links(clip, name, CLIPS):
        anchors = [rng.uniform(2, CLIP_S - 18) for _ in range(WINDOWS)]
        for _ in range(ROLLOUTS):
            for anchor in anchors:
                start = anchor + rng.uniform(-1.5, 1.5)
                windows.append(Window(video, start, start + rng.uniform(8, 14)))
    return windows


def _unique(clip: Path, name: str, copies: int) -> list[Window]:
    """Windows of 10 s, each in another group of pictures, no two alike."""
    rng = random.Random(name)
    starts = [10 * k + rng.uniform(0, 4) for k in range(CLIP_S // 10 - 1)]
    windows = [Window(video, start, start + 10) for video in links(clip, name, copies) for start in starts]
    rng.shuffle(windows)
    return windows


async def _all_at_once(pool: CropPool, windows: Sequence[Window]) -> None:
    await asyncio.gather(*(_crop(pool, window) for window in windows))


async def _rollout_by_rollout(pool: CropPool, windows: Sequence[Window]) -> None:
    """The clips at the same time, but within a group each rollout's calls only after the last one's are answered."""

    async def group(calls: Sequence[Window]) -> None:
        for i in range(0, len(calls), WINDOWS):
            await _all_at_once(pool, calls[i : i + WINDOWS])

    size = ROLLOUTS * WINDOWS
    await asyncio.gather(*(group(windows[i : i + size]) for i in range(0, len(windows), size)))


async def _crop(pool: CropPool, window: Window) -> None:
    await pool.crop(window.video, window.start, window.end, fps=FPS, max_frames=MAX_FRAMES, max_pixels=MAX_PIXELS)


def _fetch(window: Window) -> int:
    """The peer's call. Frames stay in its process: handing them over is not charged to it."""
    from qwen_vl_utils.vision_process import fetch_video

    request: dict[str, Any] = {"video": window.video, "video_start": window.start, "video_end": window.end}
    request |= {"fps": FPS, "min_frames": 2, "max_frames": MAX_FRAMES}
    request |= {"min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS}
    return len(fetch_video(request, image_patch_size=16))


def _decode(window: Window) -> int:
    """The limit: open, seek, decode, convert the same frames to the same size; nothing else, frames stay here."""
    import av

    times = np.arange(np.ceil(window.start * FPS), np.ceil(window.end * FPS)) / FPS
    taken = 0
    with av.open(window.video) as container:
        stream: Any = container.streams.video[0]
        stream.codec_context.thread_count = 1
        container.seek(int(times[0] / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            if frame.time >= times[taken] - 1e-6:
                frame.reformat(width=288, height=160, format="rgb24").to_ndarray()
                taken += 1
                if taken == min(len(times), MAX_FRAMES):
                    break
    return taken


def _decode_with_decord(window: Window) -> int:
    """The same with decord: the frames of the same times, at the source's size, without resizing them."""
    import decord

    times = np.arange(np.ceil(window.start * FPS), np.ceil(window.end * FPS)) / FPS
    reader = decord.VideoReader(window.video, num_threads=1)
    indices = (times[:MAX_FRAMES] * reader.get_avg_fps()).round().astype(int).tolist()
    return len(reader.get_batch(indices).asnumpy())
