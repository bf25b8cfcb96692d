"""What a checkpoint on the disk holds, and whether pushed tensors are the same."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paravt_ray.weights.push import WeightError

if TYPE_CHECKING:
    from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
_SHOWN = 3


def checkpoint_shapes(directory: Path) -> Shapes:
    """Names and shapes in a checkpoint's safetensors files, read from their headers alone.

    Raises:
        WeightError: the directory holds no such file.
    """
    shapes: Shapes = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    if not shapes:
        raise WeightError(f"{directory} holds no *.safetensors file to compare pushed weights with.")
    return shapes


def stored_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all safetensors files of a directory, read one at a time."""
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (no mapping)
                yield name, stored.get_tensor(name)


def checkpoint_digest(directory: Path) -> str:
    """xxh3-64 of the bytes of a checkpoint's safetensors files, in hexadecimal."""
    import xxhash

    digest = xxhash.xxh3_64()
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            digest.update(content)
    return digest.hexdigest()


def check_shapes(expected: Shapes, pushed: Shapes) -> None:
    """Compare names and shapes.

    Raises:
        WeightError: naming the first tensors that are missing, unknown or of another shape.
    """
    problems = []
    if missing := sorted(expected.keys() - pushed.keys()):
        problems.append(f"missing: {some(missing)}")
    if unknown := sorted(pushed.keys() - expected.keys()):
        problems.append(f"unknown: {some(unknown)}")
    different = sorted(name for name in expected.keys() & pushed.keys() if expected[name] != pushed[name])
    if different:
        name = different[0]
        problems.append(f"of another shape: {some(different)} ({pushed[name]} instead of {expected[name]})")
    if problems:
        raise WeightError(
            "The pushed weights are not those of the engine's checkpoint: " + "; ".join(problems) + ". Learner and "
            "generators must load the same model.path."
        )


def some(names: list[str]) -> str:
    """The first names and how many more there are."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
