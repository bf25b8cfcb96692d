"""Log-probabilities and entropies from hidden states, without ever holding the logits of more than a few positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunked_logprobs(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution softmax(hidden @ head_weight.T / temperature).

    Both carry gradients to `hidden` and `head_weight`. Memory beyond the inputs and their gradients is a few times
    `chunk_tokens` * V floats, however many positions there are: the backward pass computes the logits again. Logits
    are computed in the inputs' dtype, as generators do, and everything after in float32 (float64 stays).

    Args:
        hidden: [N, H] hidden states at the positions that predict the targets.
        head_weight: [V, H]; under ZeRO-3 call this inside the forward of the module that owns it.
        targets: [N] int64 token ids.
        temperature: the sampling temperature; logits are divided by it.
        chunk_tokens: positions whose logits exist at one time.

    Returns:
        Log-probs [N] and entropies [N] in nats, float32.
    """
    outputs = _ChunkedLogprobs.apply(hidden, head_weight, targets, temperature, chunk_tokens)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], outputs)


class _ChunkedLogprobs(torch.autograd.Function):
    """Gradients with respect to the scaled logits l, with p = softmax(l) and entropy H:
    d log p_target / d l = onehot - p, and d H / d l = -p * (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=_wide(hidden.dtype), device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for part in _parts(len(targets), chunk_tokens):
            log_p = _log_softmax(hidden[part], head_weight, temperature)
            logprobs[part] = log_p.gather(-1, targets[part, None]).squeeze(-1)
            entropies[part] = -log_p.exp().mul_(log_p).sum(-1)
        ctx.save_for_backward(hidden, head_weight, targets, entropies)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, head_weight, targets, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed over all chunks in float32: bfloat16 sums would lose the small ones.
        grad_weight = torch.zeros_like(head_weight, dtype=_wide(hidden.dtype)) if ctx.needs_input_grad[1] else None
        for part in _parts(len(targets), ctx.chunk_tokens):
            log_p = _log_softmax(hidden[part], head_weight, ctx.temperature)
            p = log_p.exp()
            if grad_entropies is None:
                grad = torch.zeros_like(p)
            else:
                grad = log_p.add_(entropies[part, None]).mul_(p).mul_(-grad_entropies[part, None])
            if grad_logprobs is not None:
                grad -= p.mul_(grad_logprobs[part, None])
                grad.scatter_add_(-1, targets[part, None], grad_logprobs[part, None])
            grad_logits = grad.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ head_weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(head_weight.dtype), None, None, None


def _parts(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))


def _log_softmax(hidden: Tensor, head_weight: Tensor, temperature: float) -> Tensor:
    """[C, V] log-probabilities, at least float32."""
    logits = hidden @ head_weight.T
    return logits.to(_wide(logits.dtype)).div_(temperature).log_softmax(-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
