"""The pool under fire: many callers, dead and hung workers, full queues. Every call is answered."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import clips
import pytest
import ray
from soak_crop import RECIPES, check, soak

from tool_workers import Crop, CropPool, ErrorKind, ToolError
from tool_workers import pool as pool_module
from tool_workers.stats import WorkerStats, pool_metrics


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, dict[float, int]]:
    """Clips, each with the number of the frame at every time."""
    folder = tmp_path_factory.mktemp("clips")
    made = [clips.encode(recipe, folder / name).path for name, recipe in RECIPES.items()]
    return {path: {round(time, 3): number for number, time in clips.linear_truth(path)} for path in made}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", include_dashboard=False, num_cpus=4, object_store_memory=200 << 20)
    yield
    ray.shutdown()


@asynccontextmanager
async def running(**settings: object) -> AsyncIterator[CropPool]:
    pool = CropPool(**({"workers": 2, "timeout_s": 20.0, "num_cpus": 0.5} | settings))  # type: ignore[arg-type]
    try:
        yield pool
    finally:
        pool.close()


async def decoder_pids(pool: CropPool) -> list[int]:
    return [worker.decoder_pid for worker in await pool.stats() if worker.decoder_pid]


def test_a_group_of_rollouts_is_served_from_a_few_decodes(videos: dict[Path, dict[float, int]]) -> None:
    async def run() -> None:
        async with running() as pool:
            rng = random.Random(0)
            path = next(iter(videos))
            windows = [(s + rng.uniform(0, 0.3), s + 1 + rng.uniform(0, 0.3)) for _ in range(8) for s in (0, 1, 2, 2.5)]
            crops = await asyncio.gather(*(pool.crop(path, *window, fps=5) for window in windows))
            for crop in crops:
                check(crop, videos[path])
                assert not crop.frames.flags.owndata  # a view of the object store
            metrics = await pool.metrics()
            assert metrics["calls"] == 32
            assert metrics["errors"] == 0
            assert metrics["cache_hit_rate"] > 0.6
            assert metrics["frames_decoded"] < 400  # 32 calls of their own would decode more than 1,000

    asyncio.run(run())


def test_overview_probe_and_errors_travel_through_actors(videos: dict[Path, dict[float, int]]) -> None:
    """A pool is handed to an actor, which awaits it there."""

    @ray.remote(num_cpus=0)
    class Agent:
        async def overview(self, pool: CropPool, video: str) -> Crop:
            return await pool.overview(video, 4)

        async def fail(self, pool: CropPool, video: str) -> tuple[str, str]:
            try:
                await pool.crop(video, 0, 1)
            except ToolError as error:
                return error.kind, error.message
            return "", ""

    async def run() -> None:
        async with running() as pool:
            agent = Agent.remote()
            path = next(iter(videos))
            overview = await agent.overview.remote(pool, str(path))
            check(overview, videos[path])
            assert overview.timestamps.tolist() == [0.48, 1.48, 2.48, 3.48]
            assert (await pool.probe(path)).frames == 100
            kind, message = await agent.fail.remote(pool, "/nowhere.mp4")
            assert kind == "not_found"
            assert "/nowhere.mp4" in message
            with pytest.raises(ToolError) as error:
                await pool.crop(path, 50, 60)
            assert error.value.kind is ErrorKind.BAD_WINDOW
            with pytest.raises(ValueError, match="max_frames"):
                await pool.crop(path, 0, 1, max_frames=0)

    asyncio.run(run())


def test_a_hung_decode_costs_only_its_own_call(videos: dict[Path, dict[float, int]]) -> None:
    async def run() -> None:
        async with running(workers=1, timeout_s=3.0) as pool:
            paths = list(videos)
            await pool.probe(paths[0])
            (pid,) = await decoder_pids(pool)
            os.kill(pid, signal.SIGSTOP)
            hung = asyncio.create_task(pool.crop(paths[0], 0, 1))
            await asyncio.sleep(0.3)
            others = [asyncio.create_task(pool.crop(path, 1, 3)) for path in paths[1:]]
            with pytest.raises(ToolError) as error:
                await hung
            assert error.value.kind is ErrorKind.TIMEOUT
            for path, other in zip(paths[1:], others, strict=True):
                check(await other, videos[path])
            check(await pool.crop(paths[0], 0, 1), videos[paths[0]])

    asyncio.run(run())


def test_a_full_queue_refuses_with_the_reason(videos: dict[Path, dict[float, int]]) -> None:
    async def run() -> None:
        async with running(workers=1, timeout_s=3.0, queue_limit=2) as pool:
            path = next(iter(videos))
            await pool.probe(path)
            (pid,) = await decoder_pids(pool)
            os.kill(pid, signal.SIGSTOP)
            calls = [pool.crop(path, 0.1 * i, 0.1 * i + 1) for i in range(8)]
            replies = await asyncio.gather(*calls, return_exceptions=True)
            kinds = Counter(reply.kind if isinstance(reply, ToolError) else "served" for reply in replies)
            assert kinds == {"overloaded": 5, "timeout": 1, "served": 2}
            refusal = next(r for r in replies if isinstance(r, ToolError) and r.kind is ErrorKind.OVERLOADED)
            assert "2 calls waiting" in refusal.message

    asyncio.run(run())


def test_killed_workers_and_supervisors_are_replaced(videos: dict[Path, dict[float, int]]) -> None:
    async def run() -> None:
        async with running() as pool:
            path = next(iter(videos))
            for worker in await pool.stats():
                os.kill(worker.pid, signal.SIGKILL)
            check(await pool.crop(path, 0, 2), videos[path])
            ray.kill(pool._supervisor, no_restart=False)
            check(await pool.crop(path, 1, 3), videos[path])
            assert len(await pool.stats()) == 2

    asyncio.run(run())


def test_a_worker_that_does_not_answer_is_replaced(
    videos: dict[Path, dict[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor itself is stopped, not only its decoder."""
    monkeypatch.setattr(pool_module, "_GRACE_S", 1.0)

    async def run() -> None:
        async with running(workers=1, timeout_s=1.0) as pool:
            path = next(iter(videos))
            (worker,) = await pool.stats()
            os.kill(worker.pid, signal.SIGSTOP)
            with pytest.raises(ToolError) as error:
                await pool.crop(path, 0, 2)
            assert error.value.kind is ErrorKind.TIMEOUT
            for _ in range(20):  # the new worker may itself take a few of these short deadlines to start
                try:
                    check(await pool.crop(path, 0, 2), videos[path])
                    break
                except ToolError:
                    continue
            else:
                pytest.fail("the worker was not replaced")

    asyncio.run(run())


def test_a_cluster_too_small_is_an_error_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_START_TIMEOUT_S", 5.0)
    with pytest.raises(RuntimeError, match=r"crop workers did not start .* ask for 50 CPUs; the cluster has 4"):
        CropPool(workers=50)


def test_a_closed_pool_says_so(videos: dict[Path, dict[float, int]]) -> None:
    async def run() -> None:
        async with running() as pool:
            pass
        with pytest.raises(ToolError) as error:
            await pool.crop(next(iter(videos)), 0, 1)
        assert error.value.kind is ErrorKind.CLOSED

    asyncio.run(run())


@pytest.mark.slow
def test_two_thousand_calls_while_workers_are_killed_at_random(videos: dict[Path, dict[float, int]]) -> None:
    """Every call is answered, right or with a typed error; nothing is lost, and memory stays flat."""

    async def run() -> None:
        async with running(cache_mb=8) as pool:
            report = await soak(pool, videos, calls=2000, callers=40, kill=True)
            print(report)
            assert sum(report.replies.values()) == 2000
            assert set(report.replies) <= {"served", "worker_died"}
            assert report.replies["served"] > 1900
            assert report.kills["worker"] >= 1
            assert report.kills["decoder"] >= 1
            assert report.samples[-1].bytes < report.samples[0].bytes + (60 << 20)
            assert report.samples[-1].files <= report.samples[0].files + 8  # a decoder's connection, open clips
            assert all(worker.cache_bytes <= 8 << 20 for worker in await pool.stats())
            assert all(worker.queue_depth == 0 for worker in await pool.stats())

    asyncio.run(run())


def test_pool_metrics_sum_up_the_workers() -> None:
    def worker(slot: int, calls: int, errors: dict[str, int], p95: float) -> WorkerStats:
        return WorkerStats(slot, 1, calls, calls // 2, errors, 1, 0.1, p95, 0.3, 10, 5, 7, None, 1, 0, 0)

    metrics = pool_metrics([worker(0, 6, {"timeout": 1}, 0.2), worker(1, 4, {"timeout": 1, "damaged": 1}, 0.5)])
    assert metrics["calls"] == 10
    assert metrics["error_rate"] == pytest.approx(0.3)
    assert metrics["errors_timeout"] == 2
    assert metrics["cache_hit_rate"] == 0.5
    assert metrics["latency_p95"] == 0.5
    assert pool_metrics([])["error_rate"] == 0.0
