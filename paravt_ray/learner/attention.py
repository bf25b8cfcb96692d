"""Attention over packed sequences: many sequences in one row of tokens, none of them padded.

A micro-batch is one row of tokens, so that no layer computes on padding; only attention has to know where a sequence
ends. Sequences that begin alike (the rollouts of one prompt) stand in the row as a *family*: the common prefix once,
then what each goes on with, which attends to the prefix and to itself. Sequences of the same length that lie next to
each other are computed in one call, which matters most for the vision tower (a frame attends to itself only, and all
frames of a micro-batch mostly have one size).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

# transformers hands whole packed rows only to implementations with "flash" in their name; others get one call a frame.
PACKED_ATTENTION = "paravt_packed_flash"

CPU_BLOCK = 256
"""Query positions of one call where a prefix is shared: torch's CPU kernel computes all that a mask hides.

The backward pass keeps every call's keys and mask: on a CPU, memory grows with the square of what follows a prefix.
"""


class Family(NamedTuple):
    """Consecutive tokens of sequences that begin alike; most families have no common prefix."""

    prefix: int
    """Tokens that all have in common."""
    runs: tuple[tuple[int, int], ...]
    """What follows it, of consecutive sequences, as (how many, length of each)."""

    @property
    def sizes(self) -> list[int]:
        """Tokens of its parts: the prefix, if there is one, then each run."""
        return [*([self.prefix] if self.prefix else []), *(count * length for count, length in self.runs)]


def family(lengths: Sequence[int], prefix: int = 0) -> Family:
    """The family of sequences with these lengths after their common prefix, in this order."""
    return Family(prefix, tuple((len(list(group)), length) for length, group in groupby(lengths)))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Sequence[Family] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of a packed row.

    `query` [1, H, T, D], `key` and `value` [1, H_kv, T, D]; `cu_seq_lens_q` says how T is cut. Causal where the module
    is, as it has to be where a prefix is shared. Returns [1, T, H, D], as transformers' attention functions do.
    """
    if cu_seq_lens_q is None or attention_mask is not None:
        raise ValueError("Packed attention needs the sequence lengths, and no mask.")
    causal = bool(getattr(module, "is_causal", False))
    grouped = query.shape[1] != key.shape[1]
    # One split, not a slice for each run, and no index: the backward of either fills a tensor as large as the row.
    sizes = [size for family in cu_seq_lens_q for size in family.sizes]
    parts = zip(*(torch.split(x.squeeze(0), sizes, dim=1) for x in (query, key, value)), strict=True)
    outputs: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
        """Sequences of one length [n, H, L, D], which go on from a prefix [n, H_kv, P, D] where there is one."""
        if prefix is None:
            return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=grouped)
        keys, values = prefix
        block = CPU_BLOCK if q.device.type == "cpu" else q.shape[2]
        done = []
        for queries, more_keys, more_values in zip(*(torch.split(x, block, dim=2) for x in (q, k, v)), strict=True):
            keys, values = torch.cat([keys, more_keys], dim=2), torch.cat([values, more_values], dim=2)
            bias = causal_lower_right(queries.shape[2], keys.shape[2])
            done.append(scaled_dot_product_attention(queries, keys, values, bias, scale=scaling, enable_gqa=grouped))
        return torch.cat(done, dim=2)

    def run(count: int, prefix: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Take the next tokens of the row as `count` sequences; returns their keys and values."""
        # [H, n * L, D] -> [n, H, L, D]
        q, k, v = (x.reshape(x.shape[0], count, -1, x.shape[-1]).transpose(0, 1) for x in next(parts))
        if prefix is not None:
            prefix = prefix[0].expand(count, -1, -1, -1), prefix[1].expand(count, -1, -1, -1)
        outputs.append(attend(q, k, v, prefix).transpose(1, 2).flatten(0, 1))  # [n * L, H, D]
        return k, v

    for prefix, runs in cu_seq_lens_q:
        shared = run(1, None) if prefix else None
        for count, _length in runs:
            run(count, shared)
    return torch.cat(outputs).unsqueeze(0), None


def use_packed_attention(model: Any) -> None:
    """Switch a Qwen3-VL model (text and vision) to packed attention; its forward then needs the sequence lengths."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
    model.config._attn_implementation = PACKED_ATTENTION
