"""Many callers on one crop pool for a long time, with or without processes killed under it.

`python tests/soak_crop.py CALLS [kill]` prints what the replies were, and the workers' memory and descriptors on the
way. Every frame of every reply is checked against the number drawn into it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import clips

from tool_workers import Crop, CropPool, ToolError

RECIPES = {
    "a.mp4": clips.Recipe(options={"g": "30"}),
    "b.mkv": clips.Recipe("libx265", options={"x265-params": "log-level=none:keyint=25"}),
    "c.webm": clips.Recipe("libvpx-vp9", options={"g": "50", "cpu-used": "8"}),
    "d.ts": clips.Recipe(options={"g": "25"}),
}
SAMPLES = 10


@dataclass(frozen=True)
class Sample:
    """All workers and their decoders at one moment."""

    calls: int
    bytes: int
    """Private memory, the frame caches excluded."""
    files: int
    """Open descriptors."""


@dataclass
class Report:
    """What became of the calls."""

    seconds: float = 0.0
    replies: Counter[str] = field(default_factory=Counter)
    """`served`, or the kind of the error."""
    kills: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{sum(self.replies.values())} calls in {self.seconds:.1f} s: {dict(self.replies)}"]
        if self.kills:
            lines.append(f"killed meanwhile: {dict(self.kills)}")
        lines += [f"after {s.calls:6} calls: {s.bytes / 2**20:6.1f} MiB, {s.files} descriptors" for s in self.samples]
        return "\n".join(lines)


def check(crop: Crop, numbers: dict[float, int]) -> None:
    """Every frame shows the number that belongs to its time."""
    assert [clips.read_number(f) for f in crop.frames] == [numbers[round(t, 3)] for t in crop.timestamps]


async def soak(pool: CropPool, videos: dict[Path, dict[float, int]], *, calls: int, callers: int, kill: bool) -> Report:
    """Have `callers` make `calls` calls between them. Raises AssertionError on a wrong frame."""
    report = Report()
    started = time.monotonic()
    hunt = asyncio.create_task(_kill(pool, random.Random(99), report.kills)) if kill else None
    share = calls // callers // SAMPLES
    for part in range(SAMPLES):
        seeds = range(part * callers, (part + 1) * callers)
        await asyncio.gather(*(_call(pool, videos, random.Random(seed), share, report) for seed in seeds))
        report.samples.append(await _sample(pool, sum(report.replies.values())))
    if hunt:
        hunt.cancel()
    report.seconds = time.monotonic() - started
    return report


async def _call(
    pool: CropPool, videos: dict[Path, dict[float, int]], rng: random.Random, count: int, report: Report
) -> None:
    for _ in range(count):
        path = rng.choice(list(videos))
        start = rng.uniform(0, 3.5)
        try:
            crop = await pool.crop(path, start, start + rng.uniform(0.1, 2), fps=rng.choice([1, 5]))
        except ToolError as error:
            report.replies[error.kind.value] += 1
        else:
            check(crop, videos[path])
            report.replies["served"] += 1


async def _kill(pool: CropPool, rng: random.Random, kills: Counter[str]) -> None:
    while True:
        await asyncio.sleep(rng.uniform(0.5, 1.5))
        for worker in rng.sample(await pool.stats(), 1):
            victim = rng.choice(["worker", "decoder", "decoder"])
            pid = worker.pid if victim == "worker" else worker.decoder_pid
            try:
                if pid:
                    os.kill(pid, signal.SIGKILL)
                    kills[victim] += 1
            except ProcessLookupError:
                continue


async def _sample(pool: CropPool, calls: int) -> Sample:
    workers = await pool.stats()
    pids = [pid for worker in workers for pid in (worker.pid, worker.decoder_pid) if pid]
    memory = sum(w.resident_bytes + w.decoder_resident_bytes - w.cache_bytes for w in workers)
    return Sample(calls, memory, sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids))


def main() -> None:
    """Run from the command line."""
    import ray

    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        paths = [clips.encode(recipe, Path(folder) / name).path for name, recipe in RECIPES.items()]
        videos = {path: {round(t, 3): number for number, t in clips.linear_truth(path)} for path in paths}
        pool = CropPool(workers=2, cache_mb=8)
        print(asyncio.run(soak(pool, videos, calls=int(sys.argv[1]), callers=40, kill="kill" in sys.argv)))
        pool.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
