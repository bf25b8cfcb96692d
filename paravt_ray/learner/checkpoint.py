"""Checkpoints on disk: whole or not at all, and independent of the number of ranks and the ZeRO stage.

step_000012/
    model/            Hugging Face format: loads in transformers and vLLM as it is; with LoRA the adapter is merged in
    adapter/          with LoRA alone: the adapter in peft's format, which training goes on from
    optimizer/        float32 moments (and master weights, if the model is bfloat16) of what is trained, by name
    learner.json      optimizer steps done, learning-rate schedule, LoRA's settings
    state.json        what the caller gave: data position and the like
    COMPLETE          written last; a directory without it does not count

A checkpoint is built under another name, forced to disk, renamed, and then marked. Whatever moment the process is
killed at, older checkpoints are untouched and the new one is either complete or ignored.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from paravt_ray.errors import InputError, UserError
from paravt_ray.weights.manifest import stored_tensors

COMPLETE = "COMPLETE"
MODEL, ADAPTER, OPTIMIZER = "model", "adapter", "optimizer"
LEARNER_FILE, STATE_FILE = "learner.json", "state.json"
SHARD_BYTES = 4 << 30
"""Largest file of tensors; also what writing one needs in memory."""

_STEP = re.compile(r"step_(\d{6,})")
_BESIDE_WEIGHTS = (".json", ".jinja", ".txt", ".model")
"""Configuration, tokenizer, processor, chat template."""
_OF_A_RUN = ("mlflow.json", "manifest.json")
"""Of the run that made the source, where its directory is a run's: not the new model's."""


class CheckpointError(InputError):
    """There is no usable checkpoint where one was expected."""


class CheckpointWriteError(UserError):
    """A checkpoint could not be written; older ones are untouched."""


def latest_complete(directory: Path) -> Path | None:
    """The complete checkpoint with the highest step in `directory`, or None."""
    return max(_complete(directory), key=_step, default=None)


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints, and whatever an interrupted save left behind."""
    kept = sorted(_complete(directory), key=_step)[-keep:]
    for path in directory.iterdir():
        if (_STEP.fullmatch(path.name) or path.name.startswith(".step_")) and path not in kept:
            # The mark first: a removal that is interrupted must not leave half a checkpoint that looks whole.
            (path / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(path)


def _complete(directory: Path) -> list[Path]:
    return [p for p in directory.glob("step_*") if _STEP.fullmatch(p.name) and (p / COMPLETE).is_file()]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to fill; on success it becomes `path` and is marked complete.

    Raises:
        CheckpointWriteError: the disk is full or cannot be written.
    """
    building, replaced = (path.with_name(f".{path.name}.{suffix}") for suffix in ("building", "replaced"))
    try:
        for leftover in (building, replaced):
            if leftover.exists():
                shutil.rmtree(leftover)
        building.mkdir(parents=True)
        yield building
        _sync_tree(building)
        if path.exists():
            (path / COMPLETE).unlink(missing_ok=True)
            path.rename(replaced)
        building.rename(path)
        _sync(path.parent)
        (path / COMPLETE).touch()
        _sync(path / COMPLETE)
        _sync(path)
        if replaced.exists():
            shutil.rmtree(replaced)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        reason = getattr(error, "strerror", None) or error
        raise CheckpointWriteError(
            f"The checkpoint {path} could not be written ({reason}); older checkpoints are untouched."
        ) from error


def write_model(tensors: Iterable[tuple[str, Tensor]], source: Path, out: Path, write: bool = True) -> None:
    """Write weights and copy configuration, tokenizer and processor from the checkpoint `source`.

    Args:
        tensors: (name, tensor) as in the checkpoint; walked through to the end also where nothing is written.
        source: the checkpoint directory that the model came from.
        out: created.
        write: whether this process writes (rank 0) or only takes part in gathering.
    """
    dtype = write_tensors(tensors, out, "model", write)
    if not write:
        return
    for file in source.iterdir():
        if file.suffix in _BESIDE_WEIGHTS and not file.name.endswith((".index.json", *_OF_A_RUN)):
            shutil.copyfile(file, out / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_json(out / "config.json", config)


def replace_model(directory: Path, write: Callable[[Path], None]) -> None:
    """Put a model's files straight into a directory that holds other things too, the configuration last.

    Without `config.json` nothing takes the directory for a checkpoint, so one that is half replaced is never loaded.

    Args:
        directory: exists.
        write: fills the directory that it is given, such as `Learner.save_model`.
    """
    building = directory / ".model.building"
    if building.exists():
        shutil.rmtree(building)
    write(building)
    _sync_tree(building)
    for old in (directory / "config.json", *directory.glob("model*.safetensors*")):
        old.unlink(missing_ok=True)
    for file in sorted(building.iterdir(), key=lambda f: f.name == "config.json"):
        file.rename(directory / file.name)
    building.rmdir()
    _sync(directory)


def write_tensors(
    tensors: Iterable[tuple[str, Tensor]], out: Path, stem: str, write: bool = True
) -> torch.dtype | None:
    """Write tensors to safetensors files of at most SHARD_BYTES with an index, as transformers does.

    Returns the dtype of the last one.
    """
    from safetensors.torch import save_file

    if write:
        out.mkdir(parents=True, exist_ok=True)
    shard: dict[str, Tensor] = {}
    files: list[tuple[Path, list[str]]] = []
    total = size = 0
    dtype: torch.dtype | None = None

    def flush() -> None:
        nonlocal size
        if shard:
            file = out / f"{stem}-{len(files) + 1:05d}.safetensors"
            save_file(shard, file, metadata={"format": "pt"})
            files.append((file, list(shard)))
        shard.clear()
        size = 0

    for name, tensor in tensors:
        if not write:
            continue
        if size + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size, total, dtype = size + tensor.nbytes, total + tensor.nbytes, tensor.dtype
    if not write:
        return None
    flush()
    if len(files) == 1:
        files[0][0].rename(out / f"{stem}.safetensors")
        return dtype
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(files, start=1):
        final = out / f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
        file.rename(final)
        weight_map |= dict.fromkeys(names, final.name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(out / f"{stem}.safetensors.index.json", index)
    return dtype


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all safetensors files of a directory, one at a time.

    Raises:
        CheckpointError: there is none.
    """
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory} holds no safetensors files.")
    yield from stored_tensors(directory)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON object."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"The checkpoint file {file} cannot be read: {error}") from error
    return content


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What the caller stored in a complete checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    if not (checkpoint / COMPLETE).is_file():
        raise CheckpointError(f"{checkpoint} is no complete checkpoint: it has no file {COMPLETE}.")
    return read_json(checkpoint / STATE_FILE)


def _sync_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
