"""From one reward per episode to one advantage per episode. Rewards are never clipped before they are normalised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paravt_ray.config import AlgorithmConfig

FloatArray = NDArray[np.float64]

# Rewards are sums of a few terms of size one: a smaller spread than this is rounding, not a difference.
_NO_SPREAD = 1e-6


@dataclass(frozen=True)
class EpisodeAdvantages:
    """Two advantages for each of N episodes; rows of sub-agents take their episode's `sequence`."""

    sequence: FloatArray
    """[N] for every generated token: of R_acc + R_tool (scope `structural`) or of the whole reward (scope `all`)."""
    format: FloatArray
    """[N] for structural tokens on top of that: of R_fmt (scope `structural`) or 0 (scope `all`)."""


def episode_advantages(
    task_rewards: Sequence[float] | FloatArray,
    format_rewards: Sequence[float] | FloatArray,
    group_ids: Sequence[str] | Sequence[int],
    config: AlgorithmConfig,
    *,
    format_weight: float = 1.0,
    penalties: Sequence[float] | FloatArray | None = None,
) -> EpisodeAdvantages:
    """Group-relative advantages of a batch of N episodes (ParaVT, arXiv 2605.20342, section 4).

    Args:
        task_rewards: [N] R_acc + R_tool.
        format_rewards: [N] R_fmt.
        group_ids: [N] which prompt each episode belongs to; groups may be uneven and need not be contiguous.
        config: `advantage`, `batch_normalise` and `anchoring_scope` are read.
        format_weight: w_fmt. In scope `structural` it multiplies the format advantage, which has a spread of its own
            that it would vanish in otherwise.
        penalties: [N] the KL penalty of each episode. They are centred within their group and taken off the finished
            advantages: normalised with the rewards, the small differences of penalties would become the whole signal
            of every group whose rewards are equal.

    Raises:
        ValueError: the lengths differ or a reward is not finite.
    """
    task, fmt = np.asarray(task_rewards, dtype=np.float64), np.asarray(format_rewards, dtype=np.float64)
    if not len(task) == len(fmt) == len(group_ids):
        raise ValueError(f"{len(task)} task rewards, {len(fmt)} format rewards and {len(group_ids)} group ids.")
    penalty = group_advantages(np.zeros_like(task) if penalties is None else np.asarray(penalties), group_ids, "mean")
    if config.anchoring_scope == "all":
        sequence = _advantages(task + format_weight * fmt, group_ids, config)
        return EpisodeAdvantages(sequence - penalty, np.zeros_like(task))
    sequence = _advantages(task, group_ids, config)
    return EpisodeAdvantages(sequence - penalty, format_weight * _advantages(fmt, group_ids, config))


def _advantages(rewards: FloatArray, group_ids: Sequence[str] | Sequence[int], config: AlgorithmConfig) -> FloatArray:
    advantages = group_advantages(rewards, group_ids, config.advantage)
    return scale_to_unit_spread(advantages) if config.batch_normalise else advantages


def group_advantages(rewards: FloatArray, group_ids: Sequence[str] | Sequence[int], estimator: str) -> FloatArray:
    """Advantage of each reward within its own group, never against the whole batch.

    `mean_std`: (r - mean) / std with the sample standard deviation (GRPO, arXiv 2402.03300, section 4.1.2).
    `mean`: r - mean (Dr. GRPO, arXiv 2503.20783). `leave_one_out`: r - mean of the others (RLOO, arXiv 2402.14740).
    A group of one, or one whose rewards differ by rounding only, gets 0.

    Args:
        rewards: [N].
        group_ids: [N].
        estimator: one of the three.

    Raises:
        ValueError: a reward is not finite or the estimator is unknown.
    """
    if not np.all(np.isfinite(rewards)):
        raise ValueError(f"Rewards must be finite, but {int(np.sum(~np.isfinite(rewards)))} of {len(rewards)} are not.")
    advantages = np.zeros(len(rewards))
    _, group_of = np.unique(np.asarray(group_ids), return_inverse=True)
    for group in range(int(group_of.max(initial=-1)) + 1):
        members = np.flatnonzero(group_of == group)
        if has_spread(rewards[members]):
            advantages[members] = _centred(rewards[members], estimator)
    return advantages


def _centred(rewards: FloatArray, estimator: str) -> FloatArray:
    deviations = rewards - rewards.mean()
    if estimator == "mean_std":
        return np.asarray(deviations / rewards.std(ddof=1))
    if estimator == "mean":
        return np.asarray(deviations)
    if estimator == "leave_one_out":
        return np.asarray(deviations * (len(rewards) / (len(rewards) - 1)))
    raise ValueError(f"Unknown advantage estimator '{estimator}'.")


def has_spread(values: FloatArray) -> bool:
    """Whether rewards differ by more than rounding; decided on their range, since a standard deviation has residue."""
    return len(values) > 1 and float(np.ptp(values)) > _NO_SPREAD * max(1.0, float(np.abs(values).max()))


def scale_to_unit_spread(advantages: FloatArray) -> FloatArray:
    """Divide the batch's advantages [N] by their standard deviation, zeros included (REINFORCE++, arXiv 2501.03262).

    Their mean is 0 already, since each group's is; so groups without a signal keep exactly 0.
    """
    return advantages / advantages.std(ddof=1) if has_spread(advantages) else advantages
