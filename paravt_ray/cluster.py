"""Being connected to a Ray cluster: one that runs already, or one on this machine for the length of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from paravt_ray.config import Config
from paravt_ray.errors import UserError
from paravt_ray.placement import shared_places
from paravt_ray.rewards.actor import REWARD_ACTOR_CPUS
from paravt_ray.rollout.generator import actor_options
from paravt_ray.tracking.logs import link_ray_logs

LOCAL_CPUS = 16
"""Logical CPUs of a cluster that a run starts itself, where its actors do not ask for more."""


class ClusterError(UserError):
    """There is no usable Ray cluster."""


@dataclass(frozen=True)
class Bundle:
    """What one actor asks of one machine."""

    actor: str
    cpus: float
    gpus: float


def demand(config: Config, on_gpus: bool) -> list[Bundle]:
    """What each actor of a run asks for."""
    generator, gpu = actor_options(config, on_gpus), 1.0 if on_gpus else 0.0
    ranks = [Bundle("learner rank", 1.0, gpu)] * config.learner.ranks
    engines = [Bundle("generator", generator["num_cpus"], generator["num_gpus"])] * config.rollout.generators
    pairs = [Bundle("learner rank with generator", 2.0, gpu)] * shared_places(config)
    return [
        *(pairs if config.cluster.colocate else ranks + engines),
        *[Bundle("tool worker", 1.0, 0.0)] * config.tools.workers,
        *[Bundle("reward actor", REWARD_ACTOR_CPUS, 0.0)] * config.reward.workers,
    ]


def local_cpus(config: Config) -> int:
    """Logical CPUs of a cluster that the run starts itself: enough for its actors, which share the real cores."""
    asked = sum(bundle.cpus for bundle in demand(config, on_gpus=False))
    return config.cluster.cpus or max(LOCAL_CPUS, math.ceil(asked))


@contextmanager
def connected(config: Config, logs: Path) -> Iterator[None]:
    """Connect to `cluster.address`, or start a cluster here and end it with the block.

    Args:
        config: the run's.
        logs: of the run directory; Ray's logs of this machine are linked there.

    Raises:
        ClusterError: no cluster answers at the address, or none can be started here.
    """
    where = config.cluster.address
    try:
        if where:
            context = ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
        else:
            context = ray.init(
                address="local",
                num_cpus=local_cpus(config),
                object_store_memory=int(config.cluster.object_store_gb * 2**30),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        place = f"at cluster.address={where}" if where else "on this machine"
        raise ClusterError(f"No Ray cluster could be reached or started {place}: {error}") from error
    try:
        link_ray_logs(logs, Path(context.address_info["session_dir"]))
        yield
    finally:
        ray.shutdown()
