"""Divergence from a reference policy, estimated on sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token (Schulman 2020, joschu.net/blog/kl-approx.html).

    With d = reference - policy log-prob: `k1` = -d, `k2` = d^2 / 2, `k3` = exp(d) - 1 - d.

    With `kl_placement: reward`, `kl_coefficient` times the sum over an episode's trained tokens, less its group's mean,
    comes off the finished advantages (`advantages.episode_advantages`): a group whose rewards are equal has that alone,
    and its strength is relative to advantages of unit spread, not to rewards.

    In the loss, `k1` would be without effect: its gradient is 0 in expectation (Tang & Munos, arXiv 2506.09477).

    Args:
        logprobs: any shape, under the policy that sampled the tokens.
        reference_logprobs: the same shape.
        estimator: one of the three.

    Raises:
        ValueError: for an unknown estimator.
    """
    difference = reference_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(difference) - difference
    raise ValueError(f"Unknown KL estimator '{estimator}'.")
