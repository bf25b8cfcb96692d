"""The sending end: the learner's first rank puts a version of the weights where generators can read it.

The bytes lie in an anonymous memory file (`memfd_create`), not in `/dev/shm`: readers on the same node open it through
`/proc`, the kernel frees it when the publisher ends, however it ends, and no mount limits its size.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from paravt_ray.weights.push import Adapter, Push, TensorEntry, WeightError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_published: list[int] = []
"""The descriptor of the one version that this process holds; none before the first push."""


def publish(tensors: Iterable[tuple[str, torch.Tensor]], version: int, adapter: Adapter | None = None) -> Push:
    """Copy all tensors into memory that generators can read, in place of the version that was there before.

    The memory is sealed: nothing can change it once its digest is taken. A reader that has the previous version open
    keeps it until it is done.

    Args:
        tensors: names as in the checkpoint, each once, and whole tensors on any device.
        version: of these weights; rises with every push.
        adapter: what they are to be merged into, where they are a LoRA adapter's (`lora`).

    Raises:
        WeightError: a name comes twice, there are no tensors, or the memory does not suffice.
    """
    import xxhash

    unpublish()
    descriptor = os.memfd_create(f"paravt-weights-{version}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    digest = xxhash.xxh3_64()
    entries: list[TensorEntry] = []
    size = 0
    try:
        for name, tensor in tensors:
            padding = bytes(-size % ALIGNMENT)
            data = _bytes(tensor)
            for piece in (memoryview(padding), data):
                digest.update(piece)
                write_all(descriptor, piece)
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(TensorEntry(name, dtype, tuple(tensor.shape), size + len(padding)))
            size += len(padding) + len(data)
        if not entries or len({entry.name for entry in entries}) != len(entries):
            raise WeightError(f"Version {version} of the weights has no tensors, or one of its names comes twice.")
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    _published.append(descriptor)
    return Push(version, node_id(), memory_path(descriptor), size, digest.hexdigest(), tuple(entries), adapter)


def unpublish() -> None:
    """Free the version that this process holds, if any."""
    while _published:
        os.close(_published.pop())


def node_id() -> str:
    """Ray's id of this node; empty outside Ray, where everything is one node."""
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def memory_path(descriptor: int) -> str:
    """Where other processes of this user on this node can open a memory file of this process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all bytes.

    Raises:
        WeightError: the node has no memory left for them.
    """
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:
        raise WeightError(
            f"The weights could not be copied to shared memory ({error.strerror}): this node needs free memory for one "
            "whole copy of the model (with LoRA, of the adapter)."
        ) from error


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
