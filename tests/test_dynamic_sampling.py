"""Dynamic sampling in the real loop: prompts, fleet, advantages and records; generators and learner follow a script."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from scripted_fleet import Fake, Script, make_config, make_push, make_specs, running
from scripted_loop import PROMPTS, SAMPLES, SIZE, equip, loop_config, rolled_out
from waiting import wait_for

from paravt_ray.colocation import Handover
from paravt_ray.config import Config
from paravt_ray.data.reader import SampleStream
from paravt_ray.episode import Group, Rewards, TrainRow
from paravt_ray.learner.learner import LearnerError
from paravt_ray.learner.rows import has_signal
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.tracking.progress import Progress
from paravt_ray.tracking.run_dir import RunDir, read_metrics
from paravt_ray.trainer import Trainer, TrainingError

ORDER = [drawn.sample.sample_id for drawn in SampleStream(SAMPLES, seed=0).take(len(SAMPLES))]


@dataclass
class ScriptedLearner:
    """Keeps what it is given."""

    batches: list[list[TrainRow]] = field(default_factory=list)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By step, as a checkpoint gives them back."""

    def update(self, rows: list[TrainRow]) -> dict[str, float]:
        self.batches.append(rows)
        return {}

    def save(self, path: Path, state: dict[str, Any], keep: int) -> None:
        self.states[state["step"]] = json.loads(json.dumps(state))


class ScriptedTrainer(Trainer):
    """`Trainer` with scripted actors; weights are a number that the generators hold."""

    def push(self) -> dict[str, float]:
        self.fleet.push_weights(make_push(self.version))
        return {}


@dataclass
class Loop:
    """A run whose n-th prompt comes out as the n-th letter of `kinds` says, and the last letter from then on."""

    kinds: str
    trainer: ScriptedTrainer
    learner: ScriptedLearner
    specs: dict[str, GroupSpec] = field(default_factory=dict)
    """What the generators were asked, by group id."""

    def do(self, *steps: int) -> None:
        for step in steps:
            self.trainer.step(step, [])

    def metrics(self, step: int) -> dict[str, float]:
        return next(line for line in read_metrics(self.trainer.run_dir.metrics_file) if line["step"] == step)

    def records(self, step: int) -> list[dict[str, Any]]:
        lines = self.trainer.run_dir.episodes_file(step).read_text().splitlines()
        return [json.loads(line) for line in lines]

    def consumed(self, step: int) -> dict[str, int]:
        """The places in the order of samples that a step's groups have, by group id."""
        return {record["group"]: ORDER.index(record["sample"]["sample_id"]) for record in self.records(step)}

    def trained(self) -> list[int]:
        """Sequences that the learner got in each step."""
        return [len(batch) for batch in self.learner.batches]


@contextmanager
def looping(config: Config, model: Path, kinds: str, resume: dict[str, Any] | None = None) -> Iterator[Loop]:
    def group(fake: Fake, spec: GroupSpec) -> Group:
        loop.specs[spec.group_id] = spec
        kind = kinds[min(ORDER.index(spec.sample.sample_id), len(kinds) - 1)]
        return rolled_out(spec, kind, fake.version)

    with RunDir(config) as run, running(Script(group=group), config) as fleet:
        trainer = ScriptedTrainer(config, model, SAMPLES, run, Progress(config.trainer.steps))
        learner = ScriptedLearner()
        equip(trainer, Handover(fleet, learner, shared=False))  # type: ignore[arg-type]
        if resume is not None:
            trainer.version = resume["step"]
            trainer.prompts.restore(resume["stream"], trainer.version)
        loop = Loop(kinds, trainer, learner)
        trainer.push()
        yield loop


# ---- a step ----------------------------------------------------------------------------------------------------------


def test_groups_without_signal_are_replaced_until_the_step_is_full(tmp_path: Path, tiny_path: Path) -> None:
    """Of 3 prompts one has signal, of 2 further ones one, then one more: 3 are trained, and all 6 are told of."""
    with looping(loop_config(tmp_path, rounds=5), tiny_path, "rmrrmm") as loop:
        loop.do(1)
        assert loop.consumed(1) == {f"1/{number}": number for number in range(6)}
        assert loop.trained() == [3 * SIZE]
        assert all(row.advantages.any() for row in loop.learner.batches[0])
        metrics = loop.metrics(1)
        assert (metrics["rollout/resampled"], metrics["rollout/trained_groups"]) == (3, 3)
        assert metrics["rollout/episodes"] == len(loop.records(1)) == 6 * SIZE
        assert metrics["reward/accuracy"] == pytest.approx((3 * 0.5 + 3 * 1.0) / 6), "not of those with signal alone"


def test_when_the_rounds_are_used_up_what_there_is_is_trained(tmp_path: Path, tiny_path: Path) -> None:
    with looping(loop_config(tmp_path, rounds=2), tiny_path, "mr") as loop:
        loop.do(1)
        assert loop.trained() == [1 * SIZE]
        assert loop.metrics(1)["rollout/resampled"] == 2 + 2
        assert loop.learner.states[1]["stream"]["position"] == PROMPTS + 4


def test_where_nothing_has_signal_the_step_moves_nothing_and_the_run_goes_on(tmp_path: Path, tiny_path: Path) -> None:
    with looping(loop_config(tmp_path, rounds=2), tiny_path, "r") as loop:
        loop.do(1)
        assert loop.trained() == [PROMPTS * SIZE]
        assert not any(row.advantages.any() for row in loop.learner.batches[0])


def test_groups_that_lost_too_many_are_replaced_too(tmp_path: Path, tiny_path: Path) -> None:
    with looping(loop_config(tmp_path, rounds=1), tiny_path, "lgmm") as loop:
        loop.do(1)
        assert loop.trained() == [3 * SIZE]
        assert loop.metrics(1)["rollout/failed"] == 3 + 4
        assert [record["failed"] for record in loop.records(1) if "failed" in record] == ["engine: no answer"] * 7


def test_a_step_without_one_complete_group_is_an_error(tmp_path: Path, tiny_path: Path) -> None:
    with (
        looping(loop_config(tmp_path, rounds=2), tiny_path, "g") as loop,
        pytest.raises(TrainingError, match="engine: no answer"),
    ):
        loop.do(1)


def test_after_an_update_that_failed_nothing_is_pushed_or_saved(tmp_path: Path, tiny_path: Path) -> None:
    """It may have reached the learner's weights."""

    def fails(rows: list[TrainRow]) -> dict[str, float]:
        raise LearnerError("The gradient has the norm inf.")

    with looping(loop_config(tmp_path, rounds=0), tiny_path, "m") as loop:
        loop.do(1)
        loop.learner.update = fails  # type: ignore[method-assign]
        with pytest.raises(LearnerError):
            loop.do(2)
        assert {run.version for run in loop.trainer.fleet.canary()} == {1}
        assert list(loop.learner.states) == [1]


def test_off_nothing_is_replaced(tmp_path: Path, tiny_path: Path) -> None:
    with looping(loop_config(tmp_path, rounds=0), tiny_path, "mrrr") as loop:
        loop.do(1)
        assert loop.trained() == [PROMPTS * SIZE]
        assert "rollout/resampled" not in loop.metrics(1)
        assert loop.learner.states[1]["stream"]["position"] == PROMPTS


def test_a_full_step_asks_nothing_further(tmp_path: Path, tiny_path: Path) -> None:
    with looping(loop_config(tmp_path, rounds=3), tiny_path, "m") as loop:
        loop.do(1, 2)
        assert loop.metrics(2)["rollout/resampled"] == 0
        assert loop.learner.states[2]["stream"]["position"] == 2 * PROMPTS


# ---- staleness and resuming ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("staleness", "stage"), [(0, "time/rollout"), (1, "time/step")])
def test_tokens_per_second_are_over_the_time_in_which_generators_work(
    tmp_path: Path, tiny_path: Path, staleness: int, stage: str
) -> None:
    """With staleness, a driver that finds its groups ready waits for nothing, and would divide by nothing."""
    with looping(loop_config(tmp_path, rounds=0, staleness=staleness), tiny_path, "m") as loop:
        loop.do(1)
        metrics = loop.metrics(1)
        assert metrics["rollout/tokens_per_s"] == pytest.approx(metrics["rollout/new_tokens"] / metrics[stage])
        assert metrics["time/step"] > 1.001 * metrics["time/rollout"], "the two can be told apart"


def test_further_prompts_are_answered_by_the_current_policy(tmp_path: Path, tiny_path: Path) -> None:
    """Prompts asked ahead may be older than the learner, those in place of groups without signal are not."""
    with looping(loop_config(tmp_path, rounds=3, staleness=2), tiny_path, "mmmmmmmrrrrm") as loop:
        loop.do(1, 2, 3)
        further = [record for record in loop.records(3) if int(record["group"].split("/")[1]) >= PROMPTS]
        assert further
        assert {record["policy_version"] for record in further} == {2}
        assert min(record["policy_version"] for record in loop.records(3)) == 0


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_resumed_run_repeats_nothing_and_skips_nothing(tmp_path: Path, tiny_path: Path, staleness: int) -> None:
    """From the checkpoint of every step, the rest of the run asks what the unbroken run asked, step by step."""
    kinds = "rmrrmmmrrmrmrrm"
    with looping(loop_config(tmp_path / "whole", 3, staleness), tiny_path, kinds) as whole:
        whole.do(1, 2, 3, 4, 5)
        asked = {step: whole.consumed(step) for step in range(1, 6)}
        assert whole.metrics(1)["rollout/resampled"] > 0
    places = sorted(place for groups in asked.values() for place in groups.values())
    assert places == list(range(len(places))), "each once, without a gap"
    for last in range(1, 5):
        config = loop_config(tmp_path / f"from_{last}", 3, staleness)
        with looping(config, tiny_path, kinds, copy.deepcopy(whole.learner.states[last])) as rest:
            rest.do(*range(last + 1, 6))
            assert {step: rest.consumed(step) for step in range(last + 1, 6)} == {
                step: asked[step] for step in range(last + 1, 6)
            }


def test_a_run_resumed_with_another_staleness_skips_nothing_either(tmp_path: Path, tiny_path: Path) -> None:
    with looping(loop_config(tmp_path / "ahead", 3, 2), tiny_path, "rmrrmmm") as ahead:
        ahead.do(1)
        done = set(ahead.consumed(1).values())
        assert max(done) >= 3 * PROMPTS, "further prompts come from behind those that are asked ahead"
    config = loop_config(tmp_path / "synchronous", 0)
    with looping(config, tiny_path, "m", ahead.learner.states[1]) as rest:
        rest.do(2, 3, 4, 5)
        later = {place for step in range(2, 6) for place in rest.consumed(step).values()}
    assert done | later == set(range(len(done) + 4 * PROMPTS)) and not done & later


def test_prompts_in_place_of_others_do_not_wait_for_those_asked_ahead() -> None:
    script = Script(group=lambda fake, spec: 0.5 if spec.group_id == "g0" else 0.001)
    with running(script, make_config(generators=1, concurrency=4)) as fleet:
        fleet.wait_started()
        ahead = fleet.submit(make_specs(4))
        wait_for(lambda: script.made[0].groups, "the first group")
        further = [replace(spec, group_id=f"further/{spec.group_id}") for spec in make_specs(2)]
        assert [group.group_id for group in fleet.submit(further, first=True).all()] == ["further/g0", "further/g1"]
        assert len(ahead.all()) == 4
    assert script.made[0].groups == ["g0", "further/g0", "further/g1", "g1", "g2", "g3"]


# ---- what signal is --------------------------------------------------------------------------------------------------


def group_of(*rewards: tuple[float, float]) -> Group:
    """A group of episodes with these (accuracy, format) rewards."""
    spec = GroupSpec("g", SAMPLES[0], 4, len(rewards), 1.0, 0)
    group = rolled_out(spec, "r", 0)
    for episode, (accurate, formatted) in zip(group.episodes, rewards, strict=True):
        episode.rewards = Rewards(accurate + formatted, accurate, formatted, 0.0, 0.0)
    return group


@pytest.mark.parametrize(
    ("rewards", "structural", "whole"),
    [
        ([(1.0, 0.5), (1.0, 0.5)], False, False),
        ([(1.0, 0.5), (0.0, 0.5)], True, True),
        ([(1.0, 0.5), (1.0, 0.6)], True, True),
        ([(0.1 + 0.2, 0.5), (0.3, 0.5), (0.3, 0.5)], False, False),
        ([(1.0, 0.0), (0.0, 1.0)], True, False),
        ([(1.0, 0.5)], False, False),
        ([], False, False),
    ],
)
def test_signal_is_what_gives_an_advantage(rewards: list[tuple[float, float]], structural: bool, whole: bool) -> None:
    """With a format advantage of its own, equal totals of different parts teach something; rounding never does."""
    config = Config()
    config.algorithm.anchoring_scope = "structural"
    assert has_signal(group_of(*rewards), config) is structural
    config.algorithm.anchoring_scope = "all"
    assert has_signal(group_of(*rewards), config) is whole


def test_format_without_weight_is_no_signal() -> None:
    config = Config()
    config.reward.format_weight = 0.0
    assert not has_signal(group_of((1.0, 0.5), (1.0, 0.6)), config)
