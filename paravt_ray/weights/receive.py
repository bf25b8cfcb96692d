"""The receiving end: loads a pushed version into a running vLLM engine, through vLLM's own weight-transfer interface.

vLLM imports this module in each of its processes (entry point `vllm.general_plugins`).
"""

from __future__ import annotations

import functools
import mmap
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from paravt_ray.weights.lora import check_adapter, merge_into
from paravt_ray.weights.manifest import (
    Shapes,
    check_shapes,
    checkpoint_digest,
    checkpoint_shapes,
    some,
    stored_tensors,
)
from paravt_ray.weights.push import BACKEND, WeightError


@functools.cache
def register() -> None:
    """Make the receiver known to vLLM; bind the life of an engine's processes to the process that started them."""
    WeightTransferEngineFactory.register_engine(BACKEND, MemoryReceiver)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent.sentinel,), name="die-with-parent", daemon=True).start()


def _die_with(sentinel: int) -> None:
    # A generator that is killed outright cannot stop its engine, which would go on holding memory, cores and GPU.
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class MemoryInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped here
    """Nothing has to be agreed on beforehand."""


@dataclass
class MemoryUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`Push.update_info`."""

    path: str
    nbytes: int
    digest: str
    tensors: list[list[Any]]
    """[name, dtype, shape, offset in bytes] each."""
    adapter: dict[str, Any] | None
    """The fields of `Adapter`; None where the tensors are all weights of the model."""

    def shapes(self) -> Shapes:
        """The shape of each tensor by name."""
        return {name: tuple(shape) for name, _, shape, _ in self.tensors}


class MemoryReceiver(WeightTransferEngine[MemoryInit, MemoryUpdate]):  # type: ignore[misc]
    """Reads a version from shared memory and reloads the model with it layer by layer.

    Nothing is loaded unless names, shapes and bytes are exactly those expected; a failure while loading clears the
    half-open update, so that the next one starts afresh.

    An adapter is merged into the base that the engine's checkpoint holds, read anew from the disk (in practice from the
    system's page cache): no second copy of the base is kept in memory, only the matrix that is merged at the moment.
    """

    init_info_cls = MemoryInit
    update_info_cls = MemoryUpdate

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        self._parameters = frozenset(name for name, _ in model.named_parameters())

    def init_transfer_engine(self, init_info: MemoryInit) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Open an update."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: MemoryUpdate) -> None:
        """Check a version, then load it.

        Raises:
            WeightError: names, shapes or bytes are not what they should be, or a parameter got no value.
        """
        try:
            loaded = self.model.load_weights(self._weights(update_info))
            if missing := sorted(self._parameters - loaded):
                raise WeightError(f"The pushed weights set no value for {some(missing)} of the engine's model.")
        except BaseException:
            self._abandon()
            raise

    def finish_weight_update(self) -> None:
        """Close the update: from here on the engine answers with the new weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._refresh_tied_head()

    def shutdown(self) -> None:
        """Nothing to release."""

    def _weights(self, update: MemoryUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights of a version, after everything about it was checked."""
        directory = Path(self.model_config.model)
        stored, adapter = checkpoint_shapes(directory), update.adapter
        if adapter is None:
            check_shapes(stored, update.shapes())
            return _tensors(_open(update), update.tensors)
        check_adapter(stored, update.shapes())
        if (base := _base_digest(directory)) != adapter["base"]:
            raise WeightError(
                f"The adapter was trained on another base: the engine's checkpoint {directory} has the digest {base}, "
                f"the learner's {adapter['base']}. Learner and generators must load the same model.path."
            )
        tensors = dict(_tensors(_open(update), update.tensors))
        return merge_into(stored_tensors(directory), tensors, adapter["scale"], self.device)

    def _abandon(self) -> None:
        # Layers that wait for more tensors would count those of the next update on top of the ones they have, and
        # take it for complete too early. Emptied layers get their old tensors back.
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)

    def _refresh_tied_head(self) -> None:
        # An output head that shares the embedding's tensor has nothing of its own to load and is passed over by the
        # reload; on CPU it computes with a packed copy of that tensor, which would stay at the old weights.
        language_model = getattr(self.model, "language_model", self.model)
        head = getattr(language_model, "lm_head", None)
        if self.model_config.hf_text_config.tie_word_embeddings and head is not None:
            head.quant_method.process_weights_after_loading(head)


@functools.cache
def _base_digest(directory: Path) -> str:
    # Once in the life of an engine: it reads the whole checkpoint.
    return checkpoint_digest(directory)


def _open(update: MemoryUpdate) -> mmap.mmap:
    try:
        with Path(update.path).open("rb") as stream:
            memory = mmap.mmap(stream.fileno(), update.nbytes, access=mmap.ACCESS_COPY)  # torch wants it writable
    except (OSError, ValueError) as error:
        raise WeightError(
            f"The pushed weights can no longer be read ({error}): the learner has ended or replaced them."
        ) from error
    if (digest := xxhash.xxh3_64_hexdigest(memory)) != update.digest:
        raise WeightError(f"The pushed weights arrived damaged: digest {digest} instead of {update.digest}.")
    return memory


def _tensors(memory: mmap.mmap, entries: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype_name, shape, offset in entries:
        dtype: torch.dtype = getattr(torch, dtype_name)
        numel = int(torch.Size(shape).numel())
        yield name, torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset).view(shape)
