"""Bringing pushed bytes to another node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from paravt_ray.weights.push import Push, WeightError
from paravt_ray.weights.send import memory_path, node_id, write_all

CHUNK_BYTES = 256 * 2**20


@asynccontextmanager
async def local_bytes(push: Push, timeout_s: float) -> AsyncIterator[str]:
    """Give a path under which this node can open the bytes while the block lasts.

    On the publisher's node that is its own memory. On any other the bytes come through Ray's object store, chunk by
    chunk, into memory of this process.

    Raises:
        WeightError: the publisher's node does not answer in time, or memory does not suffice.
    """
    if push.node_id == node_id():
        yield push.path
        return
    descriptor = os.memfd_create(f"paravt-weights-{push.version}-copy", os.MFD_CLOEXEC)
    try:
        await _copy(push, descriptor, timeout_s)
        yield memory_path(descriptor)
    finally:
        os.close(descriptor)


async def _copy(push: Push, descriptor: int, timeout_s: float) -> None:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(push.node_id, soft=False)
    read = ray.remote(read_chunk).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
    try:
        async with asyncio.timeout(timeout_s):
            for offset in range(0, push.nbytes, CHUNK_BYTES):
                chunk: NDArray[np.uint8] = await read.remote(push.path, offset, CHUNK_BYTES)
                await asyncio.to_thread(write_all, descriptor, chunk.data)
    except (RayError, TimeoutError) as error:
        reason = f"not done within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        raise WeightError(
            f"Version {push.version} of the weights could not be read from the learner's node: {reason}"
        ) from error


def read_chunk(path: str, offset: int, size: int) -> NDArray[np.uint8]:
    """Read up to `size` bytes; runs on the publisher's node."""
    return np.fromfile(path, np.uint8, count=size, offset=offset)
