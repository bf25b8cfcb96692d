"""Attention over packed sequences: many sequences in one row of tokens, none of them padded.

A micro-batch is one row of tokens, so that no layer computes on padding; only attention has to know where a sequence
ends. Sequences of the same length that lie next to each other are computed in one call, which matters most for the
vision tower (a frame attends to itself only, and all frames of a micro-batch mostly have one size).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

# transformers hands whole packed rows only to implementations with "flash" in their name; others get one call a frame.
PACKED_ATTENTION = "paravt_packed_flash"

Runs = tuple[tuple[int, int], ...]
"""Consecutive sequences as (how many, length of each)."""


def runs_of(lengths: Sequence[int]) -> Runs:
    """Group consecutive equal lengths."""
    return tuple((len(list(group)), length) for length, group in groupby(lengths))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Runs | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of a packed row.

    `query` [1, H, T, D], `key` and `value` [1, H_kv, T, D]; `cu_seq_lens_q` says how T is cut. Causal where the module
    is. Returns [1, T, H, D], as transformers' attention functions do.
    """
    if cu_seq_lens_q is None or attention_mask is not None:
        raise ValueError("Packed attention needs the sequence lengths, and no mask.")
    causal = bool(getattr(module, "is_causal", False))
    grouped = query.shape[1] != key.shape[1]
    outputs: list[Tensor] = []
    # One split, not a slice for each run, and no index: the backward of either fills a tensor as large as the row.
    totals = [count * length for count, length in cu_seq_lens_q]
    parts = zip(cu_seq_lens_q, *(torch.split(x.squeeze(0), totals, dim=1) for x in (query, key, value)), strict=True)
    for (count, length), *heads_first in parts:
        # [H, n * L, D] -> [n, H, L, D]
        q, k, v = (x.reshape(x.shape[0], count, length, -1).transpose(0, 1) for x in heads_first)
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [n * L, H, D]
    return torch.cat(outputs).unsqueeze(0), None


def use_packed_attention(model: Any) -> None:
    """Switch a Qwen3-VL model (text and vision) to packed attention; its forward then needs the sequence lengths."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
    model.config._attn_implementation = PACKED_ATTENTION
