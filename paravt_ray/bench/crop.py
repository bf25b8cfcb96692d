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
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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


@dataclass(frozen=True)
class BenchRow:
    """One comparison, in crops per second."""

    workload: str
    ours: float
    peer_name: str
    peer: float
    goal: float
    """Smallest ratio that counts as reached."""

    @property
    def ratio(self) -> float:
        """Ours over the peer's."""
        return self.ours / self.peer


def main() -> int:
    """Measure and print a table; 1 where a goal was missed."""
    rows = bench_crop(workers=max(1, (os.cpu_count() or 2)))
    print(f"{'workload':44} {'ours/s':>8} {'peer/s':>8} {'ratio':>6} {'goal':>5}  peer")
    for row in rows:
        print(f"{row.workload:44} {row.ours:8.1f} {row.peer:8.1f} {row.ratio:6.2f} {row.goal:5.1f}  {row.peer_name}")
    return int(any(row.ratio < row.goal for row in rows))


def bench_crop(workers: int) -> list[BenchRow]:
    """Measure the group workload and unique windows with `workers` processes on either side."""
    import ray

    ray.init(address="local", include_dashboard=False, num_cpus=workers, log_to_driver=False)
    context = multiprocessing.get_context("spawn")
    try:
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(workers, mp_context=context) as processes:
            clip = Path(folder) / "clip.mp4"
            _say(f"Encoding a clip: {CLIP_S} s, 640x360, H.264, a keyframe every 10 s ...")
            _write_clip(clip)
            list(processes.map(_fetch, _unique(clip, "warm", 1)[: 2 * workers]))  # imports
            pool = CropPool(workers=workers, num_cpus=1)
            with asyncio.Runner() as runner:
                return _measure(clip, pool, runner, processes)
    finally:
        ray.shutdown()


def _measure(clip: Path, pool: CropPool, runner: asyncio.Runner, processes: ProcessPoolExecutor) -> list[BenchRow]:
    at_once: list[float] = []
    one_by_one: list[float] = []
    fetched: list[float] = []
    unique: list[float] = []
    bare: list[float] = []
    for index in range(ROUNDS):
        _say(f"Round {index + 1} of {ROUNDS} ...")
        group = _groups(clip, f"group{index}")
        at_once.append(_rate(group, lambda w: runner.run(_all_at_once(pool, w))))
        one_by_one.append(_rate(_groups(clip, f"late{index}"), lambda w: runner.run(_rollout_by_rollout(pool, w))))
        fetched.append(_rate(group, lambda w: list(processes.map(_fetch, w))))
        single = _unique(clip, f"unique{index}", CLIPS)
        unique.append(_rate(single, lambda w: runner.run(_all_at_once(pool, w))))
        bare.append(_rate(single, lambda w: list(processes.map(_decode, w))))
    names = "qwen_vl_utils.fetch_video", "bare decode loop (PyAV)"
    shape = f"{ROLLOUTS} rollouts x {WINDOWS} windows x {CLIPS} clips"
    return [
        BenchRow(f"{shape}, at once", _median(at_once), names[0], _median(fetched), 5.0),
        BenchRow(f"{shape}, in turn", _median(one_by_one), names[0], _median(fetched), 5.0),
        BenchRow(f"{len(single)} unique windows", _median(unique), names[1], _median(bare), 0.9),
    ]


_median = statistics.median


def _rate(windows: Sequence[Window], work: Callable[[Sequence[Window]], object]) -> float:
    started = time.perf_counter()
    work(windows)
    return len(windows) / (time.perf_counter() - started)


def _copies(clip: Path, name: str, count: int) -> list[str]:
    paths = [clip.with_name(f"{name}-{i}.mp4") for i in range(count)]
    for path in paths:
        os.link(clip, path)
    return [str(path) for path in paths]


def _groups(clip: Path, name: str) -> list[Window]:
    """The calls of one group for each clip: rollout after rollout, window for window nearly the same."""
    rng = random.Random(name)
    windows = []
    for video in _copies(clip, name, CLIPS):
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
    windows = [Window(video, start, start + 10) for video in _copies(clip, name, copies) for start in starts]
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


def _write_clip(path: Path) -> None:
    """A camera panning over a textured ground, with sensor noise: costs as much to decode as an ordinary film."""
    import av

    width, height, rate = 640, 360, 25
    rng = np.random.default_rng(0)
    coarse = rng.integers(40, 216, size=(height // 4, width // 4)).repeat(8, axis=0).repeat(8, axis=1)
    ground = (coarse + rng.integers(-20, 20, size=coarse.shape)).clip(0, 255).astype(np.uint8)
    noise = rng.integers(0, 8, size=(8, height, width), dtype=np.uint8)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=rate, options={"g": "250", "crf": "23", "preset": "fast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(CLIP_S * rate):
            x, y = int(width / 2 * (1 + np.sin(i / 60))), int(height / 2 * (1 + np.cos(i / 85)))
            grey = np.minimum(ground[y : y + height, x : x + width], 247) + noise[i % 8]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(grey), format="gray")
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
