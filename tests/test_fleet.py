"""The fleet and the health of its generators, with generators that follow a script: no Ray, no vLLM, no clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_fleet import HANG, Fake, Script, make_config, make_push, make_specs, running
from waiting import wait_for

from paravt_ray.episode import Group
from paravt_ray.rollout import member
from paravt_ray.rollout.engine import EngineError
from paravt_ray.rollout.fleet import FleetError, GeneratorFleet
from paravt_ray.rollout.health import Health, IllegalTransitionError, State
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.weights.push import Push, WeightError

pytestmark = pytest.mark.usefixtures("quick_fleet")

# ---- health: a fake clock and nothing else ---------------------------------------------------------------------------


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def make_health(max_restarts: int = 2, clock: Clock | None = None) -> Health:
    return Health(max_restarts, suspect_timeout_s=60.0, clock=clock or Clock())


def test_a_generator_serves_once_it_holds_the_current_weights() -> None:
    health = make_health()
    assert health.state is State.STARTING
    health.ready()
    assert not health.serving
    health.loaded(version=3, current=4)  # a newer push came while it loaded
    assert not health.serving
    health.loaded(version=4, current=4)
    assert health.serving


def test_the_dead_never_serve_again_without_loading() -> None:
    health = make_health()
    health.ready()
    health.loaded(4, 4)
    health.died("killed")
    for event in (health.ready, lambda: health.loaded(4, 4)):
        with pytest.raises(IllegalTransitionError):
            event()
    health.answered()  # a late answer changes nothing
    assert health.state is State.DEAD
    assert health.restart()
    with pytest.raises(IllegalTransitionError):
        health.loaded(4, 4)
    health.ready()
    assert not health.serving
    assert health.restarts == 1


def test_silence_makes_suspect_then_dead() -> None:
    clock = Clock()
    health = make_health(clock=clock)
    health.ready()
    health.loaded(1, 1)
    health.missed("silent")
    assert health.state is State.SUSPECT and not health.serving
    clock.now = 59.0
    health.missed("silent")
    assert health.state is State.SUSPECT
    health.answered()
    assert health.serving and health.reason == ""
    clock.now = 100.0
    health.missed("silent")  # suspicion starts anew
    clock.now = 159.0
    health.missed("silent")
    assert health.alive
    clock.now = 160.0
    health.missed("silent")
    assert health.state is State.DEAD and health.reason == "silent"


def test_restarts_are_capped() -> None:
    health = make_health(max_restarts=2)
    for _ in range(2):
        health.died("first cause")
        health.died("its echo")
        assert health.reason == "first cause"
        assert health.restart()
    health.died("again")
    assert not health.restart()
    assert health.state is State.RETIRED
    with pytest.raises(IllegalTransitionError):
        health.restart()


ACTIONS: dict[str, Callable[[Health], Any]] = {
    "ready": lambda health: health.ready(),
    "load": lambda health: health.loaded(7, 7),
    "load_old": lambda health: health.loaded(6, 7),
    "slept": lambda health: health.slept(),
    "awoke": lambda health: health.awoke(),
    "answered": lambda health: health.answered(),
    "missed": lambda health: health.missed("silent"),
    "died": lambda health: health.died("killed"),
    "restart": lambda health: health.restart(),
}


@given(st.lists(st.sampled_from([*ACTIONS]), max_size=40))
def test_whatever_happens_only_current_weights_serve(events: list[str]) -> None:
    clock = Clock()
    health = make_health(max_restarts=99, clock=clock)
    holds_current = False
    for event in events:
        clock.now += 31.0
        try:
            ACTIONS[event](health)
        except IllegalTransitionError:
            continue
        if event in ("load", "load_old"):
            holds_current = event == "load"
        elif health.state in (State.DEAD, State.STARTING):
            holds_current = False
        assert not health.serving or holds_current


# ---- the fleet -------------------------------------------------------------------------------------------------------


def test_groups_come_back_in_order_each_once_and_work_in_flight_is_bounded() -> None:
    script = Script(group=lambda fake, spec: 0.03 if spec.group_id == "g0" else 0.005)
    specs = make_specs(40, size=4)
    with running(script, make_config(generators=3, concurrency=9)) as fleet:
        groups = fleet.rollout(specs)
    assert [group.group_id for group in groups] == [spec.group_id for spec in specs]
    assert Counter(g for fake in script.made for g in fake.groups) == Counter(spec.group_id for spec in specs)
    assert [fake.most_episodes for fake in script.made] == [8, 8, 8]  # two groups of four fit into nine


def test_a_group_larger_than_the_limit_is_still_done() -> None:
    script = Script(group=lambda fake, spec: 0.005)
    with running(script, make_config(generators=1, concurrency=2)) as fleet:
        assert len(fleet.rollout(make_specs(3, size=4))) == 3
    assert script.made[0].most_episodes == 4


def test_a_killed_generators_groups_are_redone_and_its_successor_takes_current_weights_first() -> None:
    def group(fake: Fake, spec: GroupSpec) -> float:
        if fake.index == 0 and fake.life == 0 and len(fake.groups) == 3:
            fake.die()
        return 0.01

    script = Script(group=group)
    specs = make_specs(60)
    with running(script, make_config()) as fleet:
        fleet.push_weights(make_push(7))
        groups = fleet.rollout(specs)
        wait_for(lambda: fleet.status()[0].state == "serving", "the return")
        fleet.rollout(make_specs(8))
        assert fleet.status()[0].restarts == 1
    assert [group.group_id for group in groups] == [spec.group_id for spec in specs]
    successor = next(fake for fake in script.made if fake.life == 1)
    assert successor.groups, "the successor never worked"
    assert {version for fake in script.made for version in fake.served_with} == {7}


def test_a_silent_generator_is_replaced() -> None:
    def group(fake: Fake, spec: GroupSpec) -> float:
        return HANG if fake.index == 0 and fake.life == 0 else 0.005

    def health(fake: Fake) -> None:
        if fake.index == 0 and fake.life == 0 and fake.groups:
            raise TimeoutError

    script = Script(group=group, health=health)
    with running(script, make_config()) as fleet:
        assert len(fleet.rollout(make_specs(20))) == 20
        wait_for(lambda: fleet.status()[0].restarts == 1, "the restart")


def test_a_group_that_never_returns_costs_the_generator_not_the_batch() -> None:
    script = Script(group=lambda fake, spec: HANG if (fake.index, fake.life) == (0, 0) else 0.005)
    config = make_config()
    config.rollout.episode_timeout_s = 0.1
    with running(script, config) as fleet:
        assert len(fleet.rollout(make_specs(6))) == 6


def test_groups_that_failed_on_a_broken_engine_are_redone() -> None:
    def group(fake: Fake, spec: GroupSpec) -> Any:
        broken = (fake.index, fake.life) == (0, 0)
        return Group(spec.group_id, spec.sample, 4, [], ["engine: it is dead"]) if broken else 0.01

    def health(fake: Fake) -> None:
        if (fake.index, fake.life) == (0, 0) and fake.groups:
            raise EngineError("The engine is dead.")

    script = Script(group=group, health=health)
    with running(script, make_config()) as fleet:
        groups = fleet.rollout(make_specs(12))
    assert not any(group.failures for group in groups)


def test_failures_on_a_healthy_engine_are_delivered_as_they_are() -> None:
    script = Script(group=lambda fake, spec: Group(spec.group_id, spec.sample, 4, [], ["tool: no such file"]))
    with running(script, make_config(generators=1)) as fleet:
        assert fleet.rollout(make_specs(1))[0].failures == ["tool: no such file"]
    assert script.made[0].groups == ["g0"]


@pytest.mark.parametrize("concurrency", [4, 24])
def test_a_group_that_kills_every_generator_is_given_up_and_no_other(concurrency: int) -> None:
    def group(fake: Fake, spec: GroupSpec) -> float:
        if spec.group_id == "g1":
            fake.die()
        return 0.005

    script = Script(group=group)
    with running(script, make_config(generators=3, concurrency=concurrency)) as fleet:
        groups = fleet.rollout(make_specs(6))
    assert [bool(group.failures) for group in groups] == [False, True, False, False, False, False]
    assert groups[1].failures == ["generator: killed"] * 4
    assert sum(fake.groups.count("g1") for fake in script.made) == member.ATTEMPTS


def test_an_error_in_the_program_fails_the_group_not_the_generator() -> None:
    def group(fake: Fake, spec: GroupSpec) -> float:
        if spec.group_id == "g0":
            raise ZeroDivisionError("division by zero")
        return 0.001

    script = Script(group=group)
    with running(script, make_config(generators=1)) as fleet:
        groups = fleet.rollout(make_specs(3))
    assert groups[0].failures == ["generator: division by zero"] * 4
    assert len(script.made) == 1


def test_when_no_generator_is_left_the_driver_is_told_why() -> None:
    def group(fake: Fake, spec: GroupSpec) -> float:
        fake.die()
        return 0.001

    script = Script(group=group)
    with (
        running(script, make_config(max_restarts=1)) as fleet,
        pytest.raises(FleetError, match=r"No generator is left.*after 1 restarts \(killed\)"),
    ):
        fleet.rollout(make_specs(20))
    assert len(script.made) == 4


def test_a_failed_first_start_is_an_error_at_once() -> None:
    def ready(fake: Fake) -> None:
        if fake.index == 1:
            raise ValueError("no such model")

    script = Script(ready=ready)
    with (
        running(script, make_config()) as fleet,
        pytest.raises(FleetError, match=r"could not be started\. no such model"),
    ):
        fleet.wait_started()
    assert len(script.made) == 2


def test_a_start_that_hangs_meets_its_deadline() -> None:
    script = Script(ready=lambda fake: HANG)
    config = make_config(generators=1)
    config.rollout.start_timeout_s = 0.05
    with running(script, config) as fleet, pytest.raises(FleetError, match="was not ready within"):
        fleet.rollout(make_specs(1))


def test_two_generators_on_one_gpu_are_refused() -> None:
    script = Script(gpus=lambda index: ("0",))
    with running(script, make_config()) as fleet, pytest.raises(FleetError, match="both hold GPU 0"):
        fleet.wait_started()


def test_a_generator_that_fails_a_push_is_replaced_and_loads_it() -> None:
    def push(fake: Fake, push: Push) -> None:
        if (fake.index, fake.life) == (1, 0):
            raise WeightError("arrived damaged")

    script = Script(push=push, group=lambda fake, spec: 0.002)
    with running(script, make_config()) as fleet:
        fleet.push_weights(make_push(3))
        wait_for(lambda: fleet.status()[1].state == "serving", "the return")
        fleet.rollout(make_specs(20))
        assert {run.version for run in fleet.canary()} == {3}
    assert {version for fake in script.made for version in fake.served_with} == {3}


def test_a_push_that_nobody_can_load_is_an_error_with_the_receivers_text() -> None:
    def push(fake: Fake, push: Push) -> None:
        raise WeightError("lm_head.weight is missing")

    with (
        running(Script(push=push), make_config()) as fleet,
        pytest.raises(FleetError, match=r"lm_head\.weight is missing"),
    ):
        fleet.push_weights(make_push(1))


def test_a_push_that_hangs_meets_its_deadline() -> None:
    config = make_config(generators=1)
    config.rollout.push_timeout_s = 0.05
    with running(Script(push=lambda fake, push: HANG), config) as fleet, pytest.raises(FleetError, match="version 1"):
        fleet.push_weights(make_push(1))


def test_a_generator_restarted_while_its_weights_are_replaced_waits_for_the_next() -> None:
    """The learner frees a version when it publishes the next; a generator that starts in between finds nothing."""

    def push(fake: Fake, push: Push) -> None:
        if fake.life == 1 and push.version == 1:
            raise WeightError("can no longer be read")

    script = Script(push=push, group=lambda fake, spec: 0.002)
    with running(script, make_config()) as fleet:
        fleet.push_weights(make_push(1))
        script.made[0].die()
        wait_for(lambda: fleet.status()[0].restarts == 1, "the restart")
        wait_for(lambda: fleet.status()[0].state == "needs_weights", "the vain attempt to load")
        fleet.push_weights(make_push(2))
        wait_for(lambda: fleet.status()[0].state == "serving", "the return")
        fleet.rollout(make_specs(20))
    successor = next(fake for fake in script.made if fake.life == 1)
    assert set(successor.served_with) == {2}


def test_a_restarted_generator_that_does_not_hold_the_weights_never_serves() -> None:
    """Its engine says that it loaded them; only the canary that the others passed tells that it did not."""
    script = Script(canary=lambda fake: -2.0 if fake.life == 1 else -1.0, group=lambda fake, spec: 0.002)
    with running(script, make_config(generators=1)) as fleet:
        fleet.push_weights(make_push(1))
        fleet.agree(*fleet.canary())
        script.made[0].die()
        assert len(fleet.rollout(make_specs(3))) == 3
        assert fleet.status()[0].restarts == 2
    assert [fake.groups for fake in script.made if fake.life == 1] == [[]]


def test_a_push_during_rollouts_reaches_everyone_and_loses_nothing() -> None:
    script = Script(group=lambda fake, spec: 0.01)
    with running(script, make_config()) as fleet:
        batch = fleet.submit(make_specs(30))
        for version in (1, 2, 3):
            fleet.push_weights(make_push(version))
        groups = batch.collect(30)
    assert len({group.group_id for group in groups}) == 30
    assert {fake.version for fake in script.made} == {3}


def test_a_push_and_its_canary_wait_for_the_only_generator_to_come_back() -> None:
    script = Script(ready=lambda fake: 0.3 if fake.life else 0.0, group=lambda fake, spec: 0.001)
    with running(script, make_config(generators=1)) as fleet:
        fleet.rollout(make_specs(1))
        script.made[0].die()
        wait_for(lambda: fleet.status()[0].state == "starting", "the restart")
        fleet.push_weights(make_push(5))
        assert [run.version for run in fleet.canary()] == [5]


def test_a_generator_that_dies_while_it_loads_is_no_fault_of_the_push() -> None:
    def push(fake: Fake, push: Push) -> None:
        if fake.life == 0:
            fake.die()

    script = Script(push=push, group=lambda fake, spec: 0.001)
    with running(script, make_config(generators=1)) as fleet:
        fleet.push_weights(make_push(5))
        assert [run.version for run in fleet.canary()] == [5]


def test_a_batch_is_not_silent_while_an_earlier_one_is_served() -> None:
    script = Script(group=lambda fake, spec: 0.05)
    with running(script, make_config(generators=1, concurrency=4)) as fleet:
        fleet.submit(make_specs(10))
        late = fleet.submit(make_specs(1))
        late._silence_s = 0.2  # less than the earlier batch takes
        assert len(late.all()) == 1
        late._silence_s = 0.05
        with pytest.raises(FleetError, match="No group came back"):
            late.collect(1)


def test_closing_with_work_in_flight_ends_it() -> None:
    script = Script(group=lambda fake, spec: HANG)
    with running(script, make_config(generators=1)) as fleet:
        batch = fleet.submit(make_specs(3))
        wait_for(lambda: script.made and script.made[0].groups, "the first group")
    with pytest.raises(FleetError, match="No generator is left"):
        batch.all()


def test_a_batch_that_comes_while_the_only_generator_is_being_replaced_waits_for_it() -> None:
    def ready(fake: Fake) -> float:
        return 0.1 if fake.life else 0.0

    script = Script(ready=ready, group=lambda fake, spec: 0.001)
    with running(script, make_config(generators=1)) as fleet:
        fleet.rollout(make_specs(1))
        script.made[0].die()
        wait_for(lambda: fleet.status()[0].state != "serving", "the death")
        assert len(fleet.rollout(make_specs(2))) == 2


def test_a_generator_that_cannot_even_be_made_is_an_error_at_once() -> None:
    def start(index: int) -> Fake:
        raise ValueError("no actor")

    with GeneratorFleet(make_config(), None, Path(), start) as fleet, pytest.raises(FleetError, match="no actor"):  # type: ignore[arg-type]
        fleet.wait_started()


def test_batches_do_not_take_each_others_groups() -> None:
    script = Script(group=lambda fake, spec: 0.05 if spec.group_id == "g0" else 0.002)
    first, second = make_specs(5), [replace(spec, group_id=f"second/{spec.group_id}") for spec in make_specs(20)]
    with running(script, make_config()) as fleet:
        batches = fleet.submit(first), fleet.submit(second)
        assert [group.group_id for group in batches[1].all()] == [spec.group_id for spec in second]
        assert [group.group_id for group in batches[0].all()] == [spec.group_id for spec in first]


def test_a_thousand_generators_keep_the_driver_under_one_core() -> None:
    """A generator that takes 2 s a group, 2,000 groups: the driver's own time is a fraction of that."""
    script = Script(group=lambda fake, spec: 1.0)
    config = make_config(generators=1000, concurrency=8)
    with running(script, config) as fleet:
        fleet.wait_started()
        cpu, wall = time.process_time(), time.perf_counter()
        assert len(fleet.rollout(make_specs(4000, size=4))) == 4000
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert cpu / wall < 1.0, f"{cpu:.1f} s of processor time in {wall:.1f} s"
