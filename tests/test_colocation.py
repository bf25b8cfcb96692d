"""Generators and learner on the same GPUs: who goes before who comes, who is started when, and what is refused.

Engines follow a script; the fleet, the loop and the learner are real. `test_generator.py` has the real engine's sleep.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import learning
import numpy as np
import pytest
import ray
import torch
from scripted_fleet import HANG, Fake, Script, make_config, make_fleet, make_push, make_specs, running
from scripted_loop import SAMPLES, equip, loop_config, rolled_out
from waiting import wait_for

from paravt_ray import placement
from paravt_ray.chat import Chat
from paravt_ray.cluster import demand
from paravt_ray.colocation import shared_placement, started
from paravt_ray.config import Config, ConfigError, check_config, load_config
from paravt_ray.episode import Group, TrainRow
from paravt_ray.learner import checkpoint
from paravt_ray.learner.learner import Learner
from paravt_ray.placement import PlacementError, place
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.tracking.progress import Progress
from paravt_ray.tracking.run_dir import RunDir
from paravt_ray.trainer import Trainer
from paravt_ray.weights.push import Push, WeightError

pytestmark = pytest.mark.usefixtures("quick_fleet", "one_thread")


# ---- the loop --------------------------------------------------------------------------------------------------------


@dataclass
class Gpu:
    """What was done on it, in order, and that nobody was on it who should not be."""

    fakes: list[Fake]
    done: list[str] = field(default_factory=list)
    learner: bool = False
    """Whether the learner is on it."""
    crowded: list[str] = field(default_factory=list)

    def note(self, what: str, by_learner: bool) -> None:
        """Several generators do the same one after the other; that counts once."""
        awake = any(not fake.asleep for fake in self.fakes if not fake.ended)
        if awake if by_learner else self.learner:
            self.crowded.append(what)
        if self.done[-1:] != [what]:
            self.done.append(what)


class SharingLearner:
    """Does nothing but say what it does."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._gpu.note("start", by_learner=True)
        self._gpu.learner = True

    def __enter__(self) -> SharingLearner:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def offload(self) -> None:
        self._gpu.note("offload", by_learner=True)
        self._gpu.learner = False

    def reload(self) -> None:
        self._gpu.note("reload", by_learner=True)
        self._gpu.learner = True

    def update(self, rows: list[TrainRow]) -> dict[str, float]:
        self._gpu.note("update", by_learner=True)
        return {}

    def publish(self, version: int) -> Push:
        self._gpu.note("publish", by_learner=True)
        return make_push(version)

    def logprobs(self, rows: list[TrainRow]) -> list[np.ndarray]:
        self._gpu.note("logprobs", by_learner=True)
        return [np.where(row.generated, -1.0, 0.0).astype(np.float32) for row in rows]

    def save(self, path: Path, state: dict[str, Any], keep: int) -> None:
        self._gpu.note("save", by_learner=True)


PUSH = ["publish", "offload", "push", "canary", "sleep", "reload", "logprobs", "offload", "wake"]


def test_one_side_leaves_before_the_other_comes_in_every_stage(tmp_path: Path, tiny_path: Path) -> None:
    """From the start to the end, with an evaluation before the first step and one after the last."""
    config = loop_config(tmp_path, rounds=0)
    config.cluster.colocate, config.trainer.steps = True, 2
    check_config(config)
    script = Script()
    gpu = Gpu(script.made)

    def group(fake: Fake, spec: GroupSpec) -> Group:
        gpu.note("evaluate" if spec.group_id.startswith("eval/") else "rollout", by_learner=False)
        return rolled_out(spec, "m", fake.version)

    def canary(fake: Fake) -> float:
        gpu.note("canary", by_learner=False)
        return -1.0

    script.group, script.canary = group, canary
    script.push = lambda fake, push: gpu.note("push", by_learner=False)
    script.sleep = lambda fake: gpu.note("sleep", by_learner=False)
    script.wake = lambda fake: gpu.note("wake", by_learner=False)
    fleet, learner = make_fleet(script, config), partial(SharingLearner, gpu)
    with RunDir(config) as run, started(fleet, learner, shared=True) as handover:  # type: ignore[arg-type]
        trainer = Trainer(config, tiny_path, SAMPLES, run, Progress(2))
        equip(trainer, handover)
        trainer.push()
        trainer.run(SAMPLES[:1])
    train, save = ["rollout", "sleep", "reload", "update", *PUSH], ["sleep", "reload", "save", "offload", "wake"]
    assert gpu.done == ["sleep", "start", *PUSH, "evaluate", *train, *save, *train, "evaluate", *save]
    assert gpu.crowded == []
    assert sorted(version for fake in script.made for version in fake.served_with) == [0, 0, 0, 0, 1, 1, 1, 2]


# ---- the fleet -------------------------------------------------------------------------------------------------------


def states(fleet: Any) -> list[str]:
    return [status.state for status in fleet.status()]


def test_a_push_wakes_and_so_does_waking() -> None:
    script = Script(group=lambda fake, spec: 0.001)
    with running(script, make_config()) as fleet:
        for version, wake in ((0, fleet.wake), (3, lambda: fleet.push_weights(make_push(3)))):
            fleet.sleep()
            fleet.sleep()  # who sleeps stays as he is
            assert states(fleet) == ["asleep", "asleep"] and all(fake.asleep for fake in script.made)
            wake()
            assert states(fleet) == ["serving", "serving"]
            assert {run.version for run in fleet.canary()} == {version}
            assert len(fleet.rollout(make_specs(4))) == 4


def test_a_generator_that_dies_in_its_sleep_starts_when_the_others_wake_and_loads_what_they_have() -> None:
    script = Script(group=lambda fake, spec: 0.002)
    with running(script, make_config()) as fleet:
        fleet.sleep()
        script.made[0].die()
        wait_for(lambda: fleet.status()[0].restarts == 1, "the restart")
        wait_for(lambda: fleet.status()[0].state == "starting", "the start")
        fleet.sleep()  # nobody waits for it
        assert len(script.made) == 2, "it was started on a GPU that is another's"
        fleet.push_weights(make_push(5))
        wait_for(lambda: states(fleet) == ["serving", "serving"], "the return")
        fleet.rollout(make_specs(20))
    assert {version for fake in script.made for version in fake.served_with} == {5}
    assert [fake.index for fake in script.made] == [0, 1, 0]


@pytest.mark.parametrize("asleep", [False, True])
def test_a_generator_that_starts_too_late_for_the_canary_makes_it_before_it_takes_work(asleep: bool) -> None:
    """It died in its sleep and starts while the others make theirs; awake or asleep, it misses the learner's verdict.

    Its first successor does not hold the weights, the second one does.
    """
    others_are_done = asyncio.Event()

    def canary(fake: Fake) -> float:
        if fake.version == 5:
            others_are_done.set()
        return -2.0 if fake.life == 1 else -1.0

    def ready(fake: Fake) -> asyncio.Event | None:
        return others_are_done if fake.life == 1 else None

    script = Script(ready=ready, canary=canary, canary_s=0.05, group=lambda fake, spec: 0.002)
    with running(script, make_config()) as fleet:
        fleet.push_weights(make_push(4))
        fleet.agree(fleet.canary()[0])
        fleet.sleep()
        script.made[0].die()
        wait_for(lambda: fleet.status()[0].restarts == 1, "the restart")
        fleet.push_weights(make_push(5))
        (run,) = fleet.canary()
        if asleep:
            fleet.sleep()
            assert states(fleet) == ["asleep", "asleep"]
        else:
            wait_for(lambda: states(fleet) == ["serving", "serving"], "the return")
        fleet.agree(run)
        batch = fleet.submit(make_specs(8))
        fleet.wake()
        assert len(batch.all()) == 8
        wait_for(lambda: states(fleet) == ["serving", "serving"], "the second return")
        fleet.rollout(make_specs(20))
    lives = [fake for fake in script.made if fake.index == 0]
    assert [(fake.version, bool(fake.groups)) for fake in lives] == [(4, False), (5, False), (5, True)]


def test_a_generator_that_is_just_starting_goes_to_sleep_when_it_has_started() -> None:
    """Half started it would hold the GPU's memory."""
    script = Script(ready=lambda fake: 0.2 * fake.life, group=lambda fake, spec: 0.001)
    with running(script, make_config()) as fleet:
        fleet.push_weights(make_push(1))
        script.made[0].die()
        wait_for(lambda: len(script.made) == 3, "the restart")
        fleet.sleep()
        assert states(fleet) == ["asleep", "asleep"]
        assert script.made[2].version == 1
        fleet.wake()
        assert len(fleet.rollout(make_specs(4))) == 4


@pytest.mark.parametrize("state", ["starting", "needs_weights"])
def test_a_generator_that_finds_no_weights_does_not_hold_up_those_who_go_to_sleep(state: str) -> None:
    """It would wait for a push, and the driver, before it pushes, for it; it is ended, and starts when they wake."""
    others_sleep = asyncio.Event()

    def push(fake: Fake, push: Push) -> None:
        if fake.life == 1:
            raise WeightError("can no longer be read")

    def ready(fake: Fake) -> asyncio.Event | None:
        return others_sleep if fake.life == 1 and state == "starting" else None

    script = Script(ready=ready, push=push, sleep=lambda fake: others_sleep.set())
    config = make_config()
    config.rollout.start_timeout_s = 20.0
    with running(script, config) as fleet:
        fleet.push_weights(make_push(1))
        script.made[0].die()
        wait_for(lambda: len(script.made) == 3 and states(fleet)[0] == state, "the restart")
        started = time.monotonic()
        fleet.sleep()
        assert time.monotonic() - started < 10.0
        assert len(script.made) == 3 and script.made[2].ended
        fleet.wake()
        wait_for(lambda: states(fleet) == ["serving", "serving"], "the return")
        assert script.made[3].version == 1


def fails(fake: Fake) -> None:
    if fake.life == 0 and fake.index == 1:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("action", [fails, lambda fake: HANG if fake.life == 0 and fake.index == 1 else None])
@pytest.mark.parametrize("stage", ["sleep", "wake"])
def test_a_generator_that_fails_to_sleep_or_to_wake_is_replaced(stage: str, action: Callable[[Fake], Any]) -> None:
    script = Script(group=lambda fake, spec: 0.001, **{stage: action})
    config = make_config()
    config.rollout.push_timeout_s = 0.05
    with running(script, config) as fleet:
        fleet.sleep()
        assert script.made[1].ended == (stage == "sleep"), "what does not sleep must not stay on the GPU"
        assert len(script.made) == 2
        fleet.wake()
        wait_for(lambda: states(fleet) == ["serving", "serving"], "the return")
        assert fleet.status()[1].restarts == 1
        assert len(fleet.rollout(make_specs(4))) == 4


# ---- the learner -----------------------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [{"zero_stage": 2}, {"zero_stage": 3, "offload_optimizer": True}]


def make_learner(path: Path, settings: dict[str, Any]) -> Learner:
    config = learning.make_config(**settings)
    config.algorithm.kl_coefficient = 0.05
    return learning.make_learner(path, config, reference_path=path)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_learner_that_was_away_is_what_it_was_and_goes_on(
    tiny_path: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """To the last bit: weights, what the reference says, and the optimizer's state as a checkpoint has it."""
    rows = learning.make_rows(Chat.from_pretrained(tiny_path))
    learner = make_learner(tiny_path, settings)

    def state(name: str) -> dict[str, np.ndarray]:
        out = tmp_path / name / "step_000001"
        learner.save(out, {"step": 1}, keep=1)
        stored = [checkpoint.read_tensors(out / part) for part in (checkpoint.MODEL, checkpoint.OPTIMIZER)]
        found = {name: tensor.float().numpy() for tensors in stored for name, tensor in tensors}
        return found | {f"reference {row}": values for row, values in learner.reference_logprobs(rows).items()}

    learner.update(rows)
    before = state("before")
    learner.offload()
    learner.reload()
    assert learning.largest_difference(before, state("after")) == 0
    again = learner.update(rows)
    moved = learning.largest_difference(learning.weights(learner), {n: before[n] for n in learning.weights(learner)})
    learner.close()
    assert again["train/grad_norm"] > 0 and moved > 1e-3, "the second step moves what the engine publishes"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only on a GPU is there memory to be left")
@pytest.mark.parametrize(
    "settings",
    [*SETTINGS, {"zero_stage": 2, "offload_optimizer": True}, {"zero_stage": 2, "lora_rank": 2}],
    ids=str,
)
def test_a_learner_that_is_away_leaves_the_gpu_empty(tiny_path: Path, settings: dict[str, Any]) -> None:
    rows = learning.make_rows(Chat.from_pretrained(tiny_path))
    learner = make_learner(tiny_path, settings)
    learner.update(rows)
    before = torch.cuda.memory_allocated()
    learner.offload()
    away = torch.cuda.memory_allocated()
    learner.reload()
    learner.update(rows)
    learner.close()
    assert away < before / 10


# ---- placement and configuration -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[None]:
    """A cluster that has them by its own account: Ray hands them out by number, whether they are there or not."""
    options = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 80 << 20}
    ray.init(address="local", num_cpus=4, num_gpus=2, **options)
    yield
    ray.shutdown()


def test_a_rank_and_its_generator_see_one_gpu_and_no_two_pairs_the_same(two_gpus: None) -> None:

    class Actor:
        def gpus(self) -> list[str]:
            found: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            return found

    config = Config()
    config.cluster.colocate, config.rollout.generators, config.learner.ranks = True, 1, 2
    with shared_placement(config) as group:
        start = ray.remote(Actor).options
        actors = [start(**place(group, index, share=0.5)).remote() for index in (0, 1, 1)]
        first, second, sharer = ray.get([actor.gpus.remote() for actor in actors], timeout=60)
    assert sorted((first, second)) == [["0"], ["1"]]
    assert sharer == second


def test_a_cluster_without_room_for_all_pairs_is_told_what_decides_their_number(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more generators than ranks, fewer ranks need no less."""
    monkeypatch.setattr(placement, "PLACEMENT_TIMEOUT_S", 0.5)
    config = Config()
    config.cluster.colocate, config.rollout.generators, config.learner.ranks = True, 8, 4
    with (
        pytest.raises(
            PlacementError, match=r"no room for 8 pairs.*Lower rollout\.generators and learner\.ranks, the larger"
        ),
        shared_placement(config),
    ):
        pass


def test_shared_gpus_are_as_many_as_the_larger_side_needs() -> None:
    config = load_config(Path(__file__).parent.parent / "configs" / "paragrpo_8b.yaml")
    assert sum(bundle.gpus for bundle in demand(config, on_gpus=True)) == 8
    before = sum(bundle.cpus for bundle in demand(config, on_gpus=True))
    config.cluster.colocate = True
    assert sum(bundle.gpus for bundle in demand(config, on_gpus=True)) == 4
    assert sum(bundle.cpus for bundle in demand(config, on_gpus=True)) == before
    assert sum(bundle.gpus for bundle in demand(config, on_gpus=False)) == 0
    config.rollout.generators, config.learner.ranks = 2, 6
    assert sum(bundle.gpus for bundle in demand(config, on_gpus=True)) == 6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.staleness=1"], r"rollout\.staleness is 1, but must be 0"),
        (["rollout.tensor_parallel=2"], r"rollout\.tensor_parallel is 2, but must be 1"),
        (["learner.zero_stage=1"], r"needs learner\.zero_stage=2, or 3"),
        (["learner.zero_stage=3"], r"needs learner\.zero_stage=2, or 3"),
        (["learner.zero_stage=3", "learner.offload_optimizer=true", "learner.lora_rank=4"], r"learner\.lora_rank=0"),
    ],
)
def test_what_cannot_share_gpus_is_one_sentence(tmp_path: Path, overrides: list[str], message: str) -> None:
    file = tmp_path / "shared.yaml"
    file.write_text("cluster: {colocate: true}\n")
    load_config(file)
    load_config(file, ["learner.zero_stage=3", "learner.offload_optimizer=true"])
    with pytest.raises(ConfigError, match=message):
        load_config(file, overrides)
