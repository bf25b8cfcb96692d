"""Chunked log-probs and entropies against the plain computation: values, gradients, memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paravt_ray.algorithm.logprobs import chunked_logprobs


def plain_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = ((hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def head_inputs(positions: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, width, generator=random).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=random).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (positions,), generator=random)


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use", ["logprobs", "entropies", "both"])
def test_chunked_logprobs_equal_plain_ones(chunk: int, dtype: torch.dtype, use: str) -> None:
    hidden, weight, targets = head_inputs(32, 16, 301, dtype)
    factor = torch.linspace(-1, 1, 32)
    results = []
    for logprobs, entropies in (
        chunked_logprobs(hidden, weight, targets, 0.7, chunk),
        plain_logprobs(hidden, weight, targets, 0.7),
    ):
        outcome = {"logprobs": logprobs, "entropies": entropies, "both": logprobs + 0.3 * entropies}[use]
        gradients = torch.autograd.grad((outcome * factor).sum(), (hidden, weight))
        results.append((logprobs.detach(), entropies.detach(), *(g.float() for g in gradients)))
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    for chunked, plain in zip(*results, strict=True):
        torch.testing.assert_close(chunked, plain, **tolerance)
    assert results[0][0].dtype == torch.float32


def test_chunked_logprobs_pass_gradcheck() -> None:
    hidden, weight, targets = head_inputs(5, 3, 7, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: chunked_logprobs(h, w, targets, 1.3, 2), (hidden, weight))


def test_chunked_logprobs_with_frozen_inputs_and_no_positions() -> None:
    hidden, weight, targets = head_inputs(4, 3, 7, torch.float32)
    chunked_logprobs(hidden, weight.detach(), targets, 1.0, 2)[0].sum().backward()
    assert hidden.grad is not None
    chunked_logprobs(hidden.detach(), weight, targets, 1.0, 2)[0].sum().backward()
    assert weight.grad is not None
    assert not chunked_logprobs(hidden.detach(), weight.detach(), targets, 1.0, 2)[0].requires_grad
    logprobs, entropies = chunked_logprobs(hidden[:0], weight, targets[:0], 1.0, 2)
    assert len(logprobs) == len(entropies) == 0
    logprobs.sum().backward()


def test_temperature_scales_logits() -> None:
    hidden, weight, targets = torch.tensor([[1.0]]), torch.tensor([[1.0], [0.0]]), torch.tensor([0])
    logprobs, entropies = chunked_logprobs(hidden, weight, targets, 0.5, 8)
    p = 1 / (1 + math.exp(-2))
    assert logprobs.item() == pytest.approx(math.log(p))
    assert entropies.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))


def peak_elements(positions: int, vocabulary: int, chunk: int) -> int:
    """Elements of the largest tensor that a forward and backward pass creates."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(
                [largest, *(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor))]
            )
            return out

    hidden, weight, targets = head_inputs(positions, 2, vocabulary, torch.float32)
    with Watch():
        logprobs, entropies = chunked_logprobs(hidden, weight, targets, 1.0, chunk)
        (logprobs.sum() + entropies.sum()).backward()
    return largest


def test_no_tensor_holds_more_logits_than_a_chunk() -> None:
    assert peak_elements(256, 1000, 16) == 16 * 1000
