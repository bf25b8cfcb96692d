"""A node of the cluster is lost in mid-run, with a generator and all tool workers on it: the run goes on, whole.

Real: the cluster's nodes (on one machine), the fleet, the crop pool and its decoders, the agent loop, rewards, and the
loop of `paravt train`. The model's words come from a script, and the learner only waits.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from scripted_actor import ScriptedHandle
from waiting import wait_for

from paravt_ray.bench._simulated import SimulatedLearner
from paravt_ray.bench._trainer import BenchTrainer
from paravt_ray.bench._workload import bench_config, question, synth_clips
from paravt_ray.config import Config, model_directory
from paravt_ray.rollout.fleet import GeneratorFleet
from paravt_ray.rollout.frames import crop_pool
from paravt_ray.tracking.run_dir import RunDir, read_metrics
from tool_workers.pool import CropPool

PROMPTS, GROUP_SIZE, STEPS = 4, 4, 3
NOTICED_SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""Ray's head misses a node after 2 s; by default it takes some 20 s."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head that has no room for actors; the test adds the nodes."""
    head = {
        "num_cpus": 0,
        "include_dashboard": False,
        "object_store_memory": 200 << 20,
        "_system_config": NOTICED_SOON,
    }
    made = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def add_node(cluster: Cluster, cpus: int) -> tuple[Any, str]:
    """A node and its id."""
    before = {node["NodeID"] for node in ray.nodes()}
    node = cluster.add_node(num_cpus=cpus, object_store_memory=100 << 20)
    (added,) = {node["NodeID"] for node in ray.nodes()} - before
    return node, added


def settings(folder: Path) -> Config:
    config = bench_config(model_directory(Config()), folder / "run")
    config.rollout.generators, config.rollout.prompts_per_step, config.rollout.group_size = 2, PROMPTS, GROUP_SIZE
    config.rollout.concurrency = 2 * GROUP_SIZE
    config.rollout.turn_timeout_s, config.rollout.episode_timeout_s = 30.0, 120.0
    config.tools.crop_timeout_s = 20.0
    return config


def decoders_under(node: Any, pool: CropPool) -> int:
    """How many of the pool's decoders run on a node."""
    raylet = node.all_processes["raylet"][0].process.pid
    below = {child.pid for child in psutil.Process(raylet).children(recursive=True)}
    stats = asyncio.run(pool.stats())
    return sum(worker.decoder_pid in below for worker in stats)


@pytest.mark.slow
def test_a_node_with_a_generator_and_all_tool_workers_is_lost(cluster: Cluster, tmp_path: Path, database: Path) -> None:
    config = settings(tmp_path)
    clips = synth_clips(tmp_path, 2)
    samples = [question(clips[number % 2], number) for number in range(PROMPTS * STEPS)]
    lost, lost_id = add_node(cluster, cpus=config.tools.workers + 1)
    pool = crop_pool(config, patch_factor=32)  # the only node with room
    kept, kept_id = add_node(cluster, cpus=config.tools.workers + 3)
    nodes = [lost_id, kept_id]

    with RunDir(config) as run:

        def start(index: int) -> ScriptedHandle:
            return ScriptedHandle(config, index, pool, run.logs, nodes[index], turn_s=0.5)

        with ExitStack() as stack:
            fleet = stack.enter_context(GeneratorFleet(config, pool, run.logs, start))
            assert [info.node_id for info in fleet.wait_started()] == nodes
            learner = SimulatedLearner(update_s=0.1)
            trainer = stack.enter_context(BenchTrainer(config, samples, run, fleet, learner))
            trainer.step(1, [])
            assert decoders_under(lost, pool) == config.tools.workers

            def lose_the_node() -> None:
                wait_for(lambda: fleet.status()[0].episodes > 0, "work for the first generator", 30)
                time.sleep(0.7)  # its first calls are being served
                cluster.remove_node(lost, allow_graceful=False)

            loss = threading.Thread(target=lose_the_node)
            loss.start()
            trainer.step(2, [])
            loss.join(30)
            assert not loss.is_alive()
            wait_for(lambda: [m.state for m in fleet.status()] == ["serving"] * 2, "the generator's return", 90)
            assert fleet.status()[0].restarts >= 1  # more where Ray offers the lost node once again
            assert fleet.status()[1].restarts == 0
            trainer.step(3, [])
            assert decoders_under(kept, pool) == config.tools.workers
        pool.close()

    for line in read_metrics(run.metrics_file):
        assert (line["rollout/episodes"], line["rollout/failed"]) == (PROMPTS * GROUP_SIZE, 0)
        assert line["tool/call_rate"] == 4.0
        assert line["tool/error_rate"] == 0.0, "no call was lost with the workers"
    for step in range(1, STEPS + 1):
        records = [json.loads(text) for text in run.episodes_file(step).read_text().splitlines()]
        assert [(r["group"], r["index"]) for r in records] == [
            (f"{step}/{number}", index) for number in range(PROMPTS) for index in range(GROUP_SIZE)
        ]
        assert {r["policy_version"] for r in records} == {step - 1}
