"""LoRA in the learner: an adapter of peft's on a frozen model, and the names of what is trained, pushed and stored.

Without LoRA everything is trained, and the same functions give all weights under their own names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paravt_ray.config import LearnerConfig
from paravt_ray.weights.lora import SUFFIXES

TARGETS = r"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"
"""The layers that are adapted, by their whole names: all linear ones of the language model but its output head."""
STEM = "adapter_model"
"""Of the file of tensors, as peft wants it."""

_NAME = "default"
_STORED_PREFIX = "base_model.model."


def lora_scale(config: LearnerConfig) -> float:
    """What the product of an adapter's two matrices is multiplied by."""
    return config.lora_alpha / config.lora_rank


def add_adapter(model: nn.Module, config: LearnerConfig, seed: int) -> None:
    """Freeze a model and put an adapter on it that changes nothing yet: A is drawn from `seed`, B is 0."""
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(_peft_config(config), model)


def load_adapter(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Give an adapter the tensors that `stored_adapter` named.

    Raises:
        KeyError: there is one too many or too few.
    """
    parameters = trained_parameters(model)
    with torch.no_grad():
        for name, tensor in tensors:
            parameters.pop(name.removeprefix(_STORED_PREFIX)).copy_(tensor)
    if parameters:
        raise KeyError(f"The adapter lacks {len(parameters)} tensors, such as {min(parameters)}.")


def stored_adapter(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """An adapter's tensors under the names that they have in peft's files."""
    return ((_STORED_PREFIX + name, tensor) for name, tensor in tensors)


def write_adapter_config(config: LearnerConfig, base: Path, out: Path) -> None:
    """Write peft's description of an adapter of the checkpoint `base` beside its tensors."""
    _peft_config(config, inference_mode=True, base_model_name_or_path=str(base)).save_pretrained(str(out))


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Within the block the model computes what the base computes, to the last bit.

    The adapter is multiplied by 0 instead of being passed over: peft's own switch would also change what is trained,
    which DeepSpeed has settled at its start.
    """
    from peft.helpers import rescale_adapter_scale

    with rescale_adapter_scale(model, 0.0):
        yield


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by the name under which it is pushed and stored."""
    return {name.replace(f".{_NAME}.", "."): p for name, p in model.named_parameters() if p.requires_grad}


def whole_weights(model: nn.Module) -> dict[str, tuple[nn.Parameter, ...]]:
    """By name in the checkpoint what a weight is made of: itself, or (base, A, B) where it is adapted."""
    trained = trained_parameters(model)
    found: dict[str, tuple[nn.Parameter, ...]] = {}
    for name, parameter in model.named_parameters():
        if name.replace(f".{_NAME}.", ".").endswith(SUFFIXES):
            continue
        stored = name.replace(".base_layer.", ".")
        layer = stored.removesuffix(".weight")
        found[stored] = (parameter, *(trained[layer + suffix] for suffix in SUFFIXES if layer + suffix in trained))
    return found


def _peft_config(config: LearnerConfig, **more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=TARGETS, task_type="CAUSAL_LM", **more
    )
