"""LoRA as it travels: what the tensors of an adapter are called, and how they become part of the base's weights.

Learner and generators merge with the same function, and always into the weights of the base: adding up what was merged
and rounded before would drift away from what is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from paravt_ray.weights.manifest import Shapes, some
from paravt_ray.weights.push import WeightError

A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
SUFFIXES = (A_SUFFIX, B_SUFFIX)
"""Behind the name of the adapted layer."""
_WEIGHT = ".weight"


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`weight + scale * b @ a` (Hu et al. 2021, equation 3), in float32 and rounded once, to the adapter's type.

    Args:
        weight: [out, in] of the base; taken in the adapter's type, in which the learner has loaded it.
        a: [rank, in].
        b: [out, rank].
        scale: alpha / rank.
    """
    return torch.addmm(weight.to(a.dtype).float(), b.float(), a.float(), alpha=scale).to(a.dtype)


def merge_into(
    base: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor], scale: float, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """The base's tensors, one at a time, the adapted ones merged on `device`; the others stay as they are."""
    for name, weight in base:
        layer = name.removesuffix(_WEIGHT)
        if layer + A_SUFFIX in adapter:
            a, b = (adapter[layer + suffix].to(device) for suffix in SUFFIXES)
            yield name, merged(weight.to(device), a, b, scale)
        else:
            yield name, weight


def check_adapter(base: Shapes, pushed: Shapes) -> None:
    """Compare an adapter's names and shapes with the checkpoint that it is to be merged into.

    Raises:
        WeightError: naming tensors that belong to no layer of it, or do not fit theirs.
    """
    unknown, unfit = [], []
    for name in sorted(pushed):
        layer = name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX)
        if layer == name or layer + _WEIGHT not in base:
            unknown.append(name)
        elif _product([pushed.get(layer + suffix, ()) for suffix in SUFFIXES]) != base[layer + _WEIGHT]:
            unfit.append(name)
    problems = [f"{what}: {some(names)}" for what, names in (("unknown", unknown), ("unfit", unfit)) if names]
    if problems:
        raise WeightError(
            f"The pushed adapter is none of the engine's checkpoint: {'; '.join(problems)}. Learner and generators "
            "must load the same model.path."
        )


def _product(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of b @ a; () where they cannot be multiplied."""
    a, b = shapes
    return (b[0], a[1]) if len(a) == len(b) == 2 and b[1] == a[0] else ()
