"""Several ranks on Ray: together they compute what one rank computes, and none is waited for for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from learning import largest_difference, make_config, make_frame, make_learner, make_row, weights

from paravt_ray import placement
from paravt_ray.chat import Chat
from paravt_ray.episode import TrainRow
from paravt_ray.learner import actor
from paravt_ray.learner.actor import LearnerGroup
from paravt_ray.learner.checkpoint import CheckpointWriteError, read_tensors
from paravt_ray.learner.learner import LearnerError
from paravt_ray.placement import PlacementError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=200 << 20)
    yield
    ray.shutdown()


def group_weights(group: LearnerGroup, out: Path) -> dict[str, np.ndarray]:
    group.save_model(out)
    return {name: tensor.numpy() for name, tensor in read_tensors(out)}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_ranks_learn_what_one_learns(
    cluster: None, tiny_path: Path, tiny_chat: Chat, tiny_rows: list[TrainRow], tmp_path: Path, stage: int
) -> None:
    config = make_config(zero_stage=stage, ranks=2, micro_batch_tokens=700)
    config.algorithm.kl_coefficient = 0.05
    alone = make_learner(tiny_path, make_config())
    with LearnerGroup(config, tiny_path) as group:
        expected = alone.logprobs(tiny_rows)
        for index, found in enumerate(group.logprobs(tiny_rows)):
            np.testing.assert_allclose(found, expected[index], atol=1e-5)
        group.add_reference_logprobs(tiny_rows)
        assert all(np.allclose(row.reference_logprobs, expected[i], atol=1e-5) for i, row in enumerate(tiny_rows))

        # One rank sees text alone while the other has frames; then one has nothing at all to do.
        mixed = [
            make_row(tiny_chat, [], "<answer>C</answer> the video " * 20, 0),
            make_row(tiny_chat, [make_frame(1)], "A", 1),
        ]
        for batch in (tiny_rows, mixed, tiny_rows[:1]):
            together, one = group.update(batch), alone.update(batch)
            for key in ("loss", "entropy", "logp_gap", "grad_norm", "clip_fraction"):
                assert together[f"train/{key}"] == pytest.approx(one[f"train/{key}"], rel=1e-3, abs=1e-6), key
        assert largest_difference(group_weights(group, tmp_path / "model"), weights(alone)) < 3e-4
        alone.close()

        # A checkpoint of two ranks is gone on from on one.
        group.save(tmp_path / "step_000003", {"step": 3}, keep=1)
        push = group.publish(3)
        assert push.version == 3 and [e.name for e in push.tensors] == [n for n, _ in read_tensors_in_order(tiny_path)]
        group.update(tiny_rows)
        expected_weights = group_weights(group, tmp_path / "again")
    resumed = make_learner(tiny_path, make_config(), resume=tmp_path / "step_000003")
    resumed.update(tiny_rows)
    assert largest_difference(weights(resumed), expected_weights) < 3e-4
    resumed.close()


@pytest.mark.slow
def test_a_rank_without_rows_asks_the_sharded_reference_with_the_others(
    cluster: None, tiny_path: Path, tiny_rows: list[TrainRow]
) -> None:
    """The reference's layers are gathered from all ranks: if one of them does not ask, the others wait for ever.

    Nor may it depend on whether a rank's own rows bring the reference's log-probs along.
    """
    config = make_config(zero_stage=3, ranks=2, micro_batch_tokens=700)
    config.algorithm.kl_coefficient, config.algorithm.kl_placement = 0.05, "loss"
    config.algorithm.kl_estimator = "k3"
    with LearnerGroup(config, tiny_path) as group:
        unasked = replace(tiny_rows[0], reference_logprobs=None)
        asked = replace(tiny_rows[1], reference_logprobs=tiny_rows[1].behaviour_logprobs)
        for batch in ([unasked], [asked], [unasked, asked], [unasked]):
            metrics = group.update(batch)
    assert metrics["train/kl"] > 0


def read_tensors_in_order(path: Path) -> list[tuple[str, torch.Tensor]]:
    from transformers import Qwen3VLForConditionalGeneration

    return list(Qwen3VLForConditionalGeneration.from_pretrained(path).named_parameters())


@pytest.mark.slow
def test_a_rank_that_fails_dies_or_is_late_ends_the_call_and_is_named(
    cluster: None, tiny_path: Path, tiny_rows: list[TrainRow], tmp_path: Path
) -> None:
    with LearnerGroup(make_config(ranks=2), tiny_path) as group:
        pids = [ray.get(a.__ray_call__.remote(lambda _: os.getpid())) for a in group._actors]
        group.update(tiny_rows)

        # Idle ranks leave the cores alone.
        spent = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
        time.sleep(1.0)
        assert sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids) - spent < 0.1

        # Rank 1 is gone while rank 0 waits for it in a collective.
        os.kill(pids[1], 9)
        with pytest.raises(LearnerError, match="rank 1 died in `update`"):
            group.update(tiny_rows)
        with pytest.raises(LearnerError, match="closed"):
            group.update(tiny_rows)
        wait_until_gone(pids)


@pytest.mark.slow
def test_a_rank_that_is_late_is_ended_and_named(cluster: None, tiny_path: Path, tiny_rows: list[TrainRow]) -> None:
    with LearnerGroup(make_config(), tiny_path) as group:
        pid = ray.get(group._actors[0].__ray_call__.remote(lambda _: os.getpid()))
        group._timeout_s = 0.01
        with pytest.raises(LearnerError, match=r"rank 0 of 1 did not finish `update` within learner\.timeout_s"):
            group.update(tiny_rows)
        wait_until_gone([pid])


def test_errors_that_are_meant_for_people_come_out_of_a_rank_as_they_are(cluster: None) -> None:
    @ray.remote
    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(CheckpointWriteError, match=r"^disk full$"):
        actor._raise_failure(fail.remote(CheckpointWriteError("disk full")), 1, "save")
    with pytest.raises(LearnerError, match="rank 1 failed in `save`: KeyError: 'x'"):
        actor._raise_failure(fail.remote(KeyError("x")), 1, "save")


def test_a_cluster_without_room_is_told_with_demand_and_supply(
    cluster: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "PLACEMENT_TIMEOUT_S", 1.0)
    with pytest.raises(PlacementError, match=r"no room for 50 learner ranks.*'CPU': 4"):
        LearnerGroup(make_config(ranks=50), tiny_path)


def test_two_ranks_on_one_gpu_are_refused() -> None:
    actor._refuse_shared(["cpu", "cpu"])
    actor._refuse_shared(["GPU-1", "GPU-2"])
    with pytest.raises(LearnerError, match="same GPU"):
        actor._refuse_shared(["GPU-1", "GPU-1"])


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived the failure"
        time.sleep(0.1)
