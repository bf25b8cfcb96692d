"""Being connected to a Ray cluster: one that runs already, or one on this machine for the length of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from paravt_ray.config import Config
from paravt_ray.errors import UserError
from paravt_ray.tracking.logs import link_ray_logs

LOCAL_CPUS = 16
"""Logical CPUs of a cluster that a run starts itself: enough for its actors, whatever the machine has. They share the
real cores; `cluster.cpus` sets another number."""


class ClusterError(UserError):
    """There is no usable Ray cluster."""


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
                num_cpus=config.cluster.cpus or LOCAL_CPUS,
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
