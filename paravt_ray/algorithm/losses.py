"""Policy losses on packed or padded token tensors; sums of them over micro-batches and ranks are the whole batch's.

Every loss is `sum(weights * per_token_loss)`. The weights come from `row_weights`, computed once over the whole batch,
so the gradient does not depend on how rows are cut into micro-batches or spread over ranks. DeepSpeed averages the
gradients of its ranks: multiply the loss by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paravt_ray.algorithm.kl import kl_estimate
from paravt_ray.config import AlgorithmConfig

_LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class TokenBatch:
    """What a loss needs to know of each token. All tensors have one shape: padded [B, T], packed [T], or empty."""

    logprobs: Tensor
    """Log-probability under the policy that is trained, temperature applied; carries the gradient."""
    proximal_logprobs: Tensor
    """The same under the policy as it was before this batch's first update: the centre of the clipping."""
    behaviour_logprobs: Tensor
    """The same under the policy that sampled the token, as the generator reported it."""
    advantages: Tensor
    mask: Tensor
    """bool: tokens that are trained."""
    weights: Tensor
    """Each token's share in the loss: its row's `row_weights` entry; read under `mask` only."""
    sequence_ids: Tensor
    """int64 >= 0: which sequence a token belongs to, unique within the batch; a sequence is never split."""
    entropy: Tensor | None = None
    """Of the policy's distribution at each position; with gradient where there is an entropy bonus."""
    reference_logprobs: Tensor | None = None
    """Under the reference policy; needed for a KL term in the loss, otherwise measured if present."""


@dataclass(frozen=True)
class LossResult:
    """The loss, and detached sums over the trained tokens; divide those by `tokens`, summed over the batch."""

    loss: Tensor
    """Scalar with gradient."""
    tokens: Tensor
    clipped: Tensor
    """Tokens whose ratio is clipped: they send no gradient (`cispo`: their weight is cut)."""
    kl: Tensor
    """Against the reference by `kl_estimator`; 0 without reference."""
    entropy: Tensor
    """In nats; 0 where not given."""
    behaviour_weight: Tensor
    """Of the correction for stale generators; 1 each where proximal and behaviour policy agree."""


def row_weights(
    trained_tokens: Sequence[int] | NDArray[np.int64], aggregation: str, max_tokens: int
) -> NDArray[np.float64]:
    """Weight of each trained token of each row, for a whole batch of R rows.

    `token_mean`: 1 / all trained tokens (DAPO, arXiv 2503.14476). `sequence_mean`: 1 / (R * the row's trained tokens)
    (GRPO, arXiv 2402.03300). `dr_grpo`: 1 / (R * max_tokens), a constant (Dr. GRPO, arXiv 2503.20783).
    Rows without trained tokens do not count and get 0.

    Args:
        trained_tokens: [R].
        aggregation: one of the three.
        max_tokens: the constant of `dr_grpo`, such as `rollout.max_new_tokens`.

    Raises:
        ValueError: for an unknown aggregation.
    """
    lengths = np.asarray(trained_tokens, dtype=np.float64)
    rows = max(1, int(np.count_nonzero(lengths)))
    if aggregation == "token_mean":
        weights = np.full(len(lengths), 1.0 / max(1.0, lengths.sum()))
    elif aggregation == "sequence_mean":
        weights = 1.0 / (rows * np.maximum(lengths, 1.0))
    elif aggregation == "dr_grpo":
        weights = np.full(len(lengths), 1.0 / (rows * max_tokens))
    else:
        raise ValueError(f"Unknown aggregation '{aggregation}'.")
    return np.where(lengths > 0, weights, 0.0)


def policy_loss(batch: TokenBatch, config: AlgorithmConfig) -> LossResult:
    """Loss of one micro-batch: `ppo`, `gspo` or `cispo`, minus the entropy bonus, plus the KL term if placed here.

    Masked positions may hold anything, NaN included. With nothing to train the loss is 0 and still has its graph.

    Raises:
        ValueError: the configuration asks for a term whose tensor is missing.
    """
    mask = batch.mask
    logprobs = _under(mask, batch.logprobs)
    proximal = _under(mask, batch.proximal_logprobs).detach()
    behaviour = _under(mask, batch.behaviour_logprobs).detach()
    advantages, weights = _under(mask, batch.advantages), _under(mask, batch.weights)

    per_token, clipped = _surrogate(logprobs, proximal, advantages, batch, config)
    correction = behaviour_weights(proximal, behaviour, config)
    loss = (weights * correction * per_token).sum()

    kl = entropy = torch.zeros_like(per_token)
    in_loss = config.kl_coefficient > 0 and config.kl_placement == "loss"
    if batch.reference_logprobs is not None:
        kl = kl_estimate(logprobs, _under(mask, batch.reference_logprobs).detach(), config.kl_estimator)
        if in_loss:
            loss = loss + config.kl_coefficient * (weights * kl).sum()
    elif in_loss:
        raise ValueError("A KL term in the loss needs the reference policy's log-probs.")
    if batch.entropy is not None:
        entropy = _under(mask, batch.entropy)
        if config.entropy_coefficient != 0:
            loss = loss - config.entropy_coefficient * (weights * entropy).sum()
    elif config.entropy_coefficient != 0:
        raise ValueError("An entropy bonus needs the policy's entropies.")

    return LossResult(
        loss=loss,
        tokens=mask.sum(),
        clipped=(clipped & mask).sum(),
        kl=kl.sum().detach(),
        entropy=entropy.sum().detach(),
        behaviour_weight=_under(mask, correction).sum(),
    )


def behaviour_weights(proximal: Tensor, behaviour: Tensor, config: AlgorithmConfig) -> Tensor:
    """Importance weights from the sampling policy to the proximal one, detached, of the shape of both.

    pi_proximal / pi_behaviour of decoupled PPO (AReaL, arXiv 2505.24298). Weights above `behaviour_cap` are
    cut to it (`truncate`) or set to 0 (`mask`, which leaves denominators as they are: these are weights, not samples).
    """
    ratio = _ratio(proximal - behaviour).detach()
    if config.behaviour_correction == "mask":
        return torch.where(ratio <= config.behaviour_cap, ratio, 0.0)
    return ratio.clamp(max=config.behaviour_cap)


def _surrogate(
    logprobs: Tensor, proximal: Tensor, advantages: Tensor, batch: TokenBatch, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Loss of each token before weights, and where its ratio is clipped.

    `ppo`: clipped surrogate (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476).
    `gspo`: the same on the ratio of the sequence, its geometric mean over tokens, in the token-wise form that admits an
    advantage for each token (GSPO-token, arXiv 2507.18071). `cispo`: REINFORCE with a detached ratio cut at
    1 + clip_high (MiniMax-M1, arXiv 2506.13585).
    """
    if config.loss == "cispo":
        ratio = _ratio(logprobs - proximal).detach()
        return -ratio.clamp(max=1 + config.clip_high) * advantages * logprobs, ratio > 1 + config.clip_high
    log_ratio = logprobs - proximal
    if config.loss == "gspo":
        mean = _sequence_means(log_ratio.detach(), batch.mask, batch.sequence_ids)
        log_ratio = mean + (logprobs - logprobs.detach())
    elif config.loss != "ppo":
        raise ValueError(f"Unknown loss '{config.loss}'.")
    ratio = _ratio(log_ratio)
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    clipped = ((advantages > 0) & (ratio > 1 + config.clip_high)) | ((advantages < 0) & (ratio < 1 - config.clip_low))
    return -torch.minimum(ratio * advantages, bounded * advantages), clipped


def _under(mask: Tensor, values: Tensor) -> Tensor:
    """The values where the mask is set and 0 elsewhere, so that neither they nor their gradients matter there."""
    return torch.where(mask, values, 0.0)


def _ratio(log_ratio: Tensor) -> Tensor:
    """exp, bounded so far out that only a broken token gets there and cannot make the whole batch infinite."""
    return log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()


def _sequence_means(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Mean of `values` over each sequence's trained tokens, at each of its positions."""
    ids = torch.where(mask, sequence_ids, 0).flatten()
    zeros = values.new_zeros(int(ids.max()) + 1 if ids.numel() else 0)
    sums = zeros.index_add(0, ids, _under(mask, values).flatten())
    counts = zeros.index_add(0, ids, mask.to(values.dtype).flatten())
    return (sums / counts.clamp(min=1))[ids].view_as(values)
