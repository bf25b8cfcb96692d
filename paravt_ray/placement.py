"""Room on the cluster that several actors hold together, and the places in it."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paravt_ray.config import Config
from paravt_ray.errors import UserError

PLACEMENT_TIMEOUT_S = 120.0
"""How long the cluster may take to find room."""


class PlacementError(UserError):
    """The cluster has no room for what is to be started together."""


def reserve(count: int, cpus: int, what: str, lower: str) -> PlacementGroup:
    """Hold room for `count` of something, each with `cpus` CPUs and, where the cluster has GPUs, one GPU.

    Give it back with `remove_placement_group`. `lower` names the keys that the count comes from, for the error.

    Raises:
        PlacementError: there is none.
    """
    group = placement_group([{"CPU": cpus, "GPU": int(has_gpus())}] * count, strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=PLACEMENT_TIMEOUT_S)
    if not ready:
        needs = group.bundle_specs[0]
        remove_placement_group(group)
        have = {name: amount for name, amount in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        raise PlacementError(
            f"The cluster found no room for {count} {what} within {PLACEMENT_TIMEOUT_S:.0f} s: each needs {needs}, the "
            f"cluster has {have} in all. Lower {lower} or add nodes."
        )
    return group


def place(group: PlacementGroup, index: int, share: float = 1.0) -> dict[str, Any]:
    """Ray options of an actor in one of the group's places, with a share of its GPU; all actors there see the same."""
    return {
        "num_cpus": 1,
        "num_gpus": share if has_gpus() else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }


def shared_places(config: Config) -> int:
    """Places, of one GPU each, that generators and learner ranks share in pairs; whoever is more has some alone."""
    return max(config.rollout.generators, config.learner.ranks)


def has_gpus() -> bool:
    """Whether the cluster that this process is connected to has GPUs."""
    return bool(ray.cluster_resources().get("GPU", 0.0) > 0)
