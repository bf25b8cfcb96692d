"""What is pushed: where the bytes of one version of the weights lie, and what they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paravt_ray.errors import UserError

BACKEND = "paravt_memory"
"""Name under which our receiver is registered with vLLM."""


class WeightError(UserError):
    """A version of the weights could not be published, transferred or loaded."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, by the name that it has in the checkpoint."""

    name: str
    dtype: str
    """`float32`, `bfloat16`, ..."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the memory."""


@dataclass(frozen=True)
class Adapter:
    """What pushed tensors are to be merged into, where they are a LoRA adapter's."""

    scale: float
    """Of the product of its two matrices, before it is added to the base's weight."""
    base: str
    """Digest of the base's checkpoint (`manifest.checkpoint_digest`)."""


@dataclass(frozen=True)
class Push:
    """One version of the weights, complete, in memory that its publisher holds. Small: the bytes are not in it."""

    version: int
    node_id: str
    """Ray's id of the node on which `path` can be opened."""
    path: str
    nbytes: int
    digest: str
    """xxh3-64 of all bytes, in hexadecimal."""
    tensors: tuple[TensorEntry, ...]
    adapter: Adapter | None = None
    """None where the tensors are all weights of the model."""

    def update_info(self, path: str) -> dict[str, Any]:
        """What a receiver is told, in plain types; `path` is where it can open the bytes."""
        entries = [[entry.name, entry.dtype, list(entry.shape), entry.offset] for entry in self.tensors]
        adapter = asdict(self.adapter) if self.adapter else None
        return {"path": path, "nbytes": self.nbytes, "digest": self.digest, "tensors": entries, "adapter": adapter}
