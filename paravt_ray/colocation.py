"""Generators and learner on the same GPUs (`cluster.colocate`): their places, and how one hands them to the other.

One side leaves a GPU before the other comes, in this order:

    rollouts -> engines sleep -> the learner's states come -> update, publish
             -> they leave -> engines wake: their weights, the pushed ones over them, then the KV cache -> canary
             -> engines sleep -> the learner's states come -> its log-probs of the canary -> they leave -> engines wake

A sleeping engine keeps its weights in the CPU's memory (vLLM's sleep level 1), so that it can wake without a push.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray.util.placement_group import PlacementGroup, remove_placement_group

from paravt_ray.config import Config
from paravt_ray.learner.actor import LearnerGroup
from paravt_ray.placement import reserve, shared_places
from paravt_ray.rollout.fleet import GeneratorFleet
from paravt_ray.weights.push import Push


@contextmanager
def shared_placement(config: Config) -> Iterator[PlacementGroup | None]:
    """A place for generator i and learner rank i together, on one GPU, for each i; None where each has its own.

    Raises:
        PlacementError: the cluster has no room for them.
    """
    if not config.cluster.colocate:
        yield None
        return
    lower = "rollout.generators and learner.ranks, the larger of which counts,"
    group = reserve(shared_places(config), 2, "pairs of a generator and a learner rank", lower)
    try:
        yield group
    finally:
        remove_placement_group(group)


@contextmanager
def started(fleet: GeneratorFleet, start_learner: Callable[[], LearnerGroup], shared: bool) -> Iterator[Handover]:
    """Start both sides, at the same time or, on the same GPUs, one after the other; leaving ends them.

    Args:
        fleet: not entered yet.
        start_learner: starts it and waits for it.
        shared: whether they are on the same GPUs.

    Raises:
        FleetError: the generators did not start or go to sleep.
        LearnerError: the learner did not start.
    """
    with fleet:
        if shared:
            fleet.sleep()  # the learner starts on GPUs that they have left, as they started on empty ones
        with start_learner() as learner:
            yield Handover(fleet, learner, shared)


class Handover:
    """Hands the GPUs from one side to the other. Where they are not shared, both always compute, and nothing is done.

    The learner has them when this is made: engines have started, and sleep. What fails is a FleetError or a
    LearnerError, of the side that did not go or come in time.
    """

    def __init__(self, fleet: GeneratorFleet, learner: LearnerGroup, shared: bool) -> None:
        """`shared`: whether generators and learner are on the same GPUs."""
        self.fleet, self.learner, self._shared = fleet, learner, shared

    def to_learner(self) -> None:
        """Let the learner compute; no group may be under way."""
        if self._shared:
            self.fleet.sleep()
            self.learner.reload()

    def to_generators(self, push: Push | None = None) -> None:
        """Let generators sample, with the weights of `push` where it is given, else with those that they hold."""
        if self._shared:
            self.learner.offload()
        if push is not None:
            self.fleet.push_weights(push)  # wakes those that sleep
        elif self._shared:
            self.fleet.wake()
