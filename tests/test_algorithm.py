"""The algorithm: hand-computed numbers, autograd, splits into micro-batches, and TRL's loss as a second opinion."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import fields, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from tiny import make_tokenizer
from torch import Tensor

from paravt_ray.algorithm.advantages import episode_advantages, group_advantages, scale_to_unit_spread
from paravt_ray.algorithm.anchoring import structural_mask, token_advantages
from paravt_ray.algorithm.kl import kl_estimate
from paravt_ray.algorithm.losses import TokenBatch, behaviour_weights, policy_loss, row_weights
from paravt_ray.config import AlgorithmConfig
from paravt_ray.parsing import STRUCTURAL_TAGS

LOSSES = ["ppo", "gspo", "cispo"]
AGGREGATIONS = ["token_mean", "sequence_mean", "dr_grpo"]
ESTIMATORS = ["mean_std", "mean", "leave_one_out"]

# Advantages


def test_group_advantages_by_hand() -> None:
    rewards, groups = np.array([1.0, 5.0, 2.0, 3.0, 5.0]), ["a", "b", "a", "a", "b"]
    assert_allclose(group_advantages(rewards, groups, "mean_std"), [-1, 0, 0, 1, 0])
    assert_allclose(group_advantages(rewards, groups, "mean"), [-1, 0, 0, 1, 0])
    assert_allclose(group_advantages(rewards, groups, "leave_one_out"), [-1.5, 0, 0, 1.5, 0])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_uneven_groups_never_fall_back_to_the_batch(estimator: str) -> None:
    rewards = np.array([1.0, 2, 3, 4, 5, 5, 5, 1, 0, 1, 0, 7])
    groups = [0] * 4 + [1] * 3 + [2] * 4 + [3]
    advantages = group_advantages(rewards, groups, estimator)
    assert np.all(advantages[4:7] == 0) and advantages[11] == 0  # no variance; a group of one
    for group in range(4):
        assert advantages[np.array(groups) == group].sum() == pytest.approx(0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rounding_is_no_variance(estimator: str) -> None:
    equal = np.float32([0.1 + 0.2 + 0.7] * 7).astype(np.float64) + np.array([0, 1e-8, -1e-8, 0, 1e-8, 0, 0])
    assert np.all(group_advantages(equal, [0] * 7, estimator) == 0)
    assert np.all(scale_to_unit_spread(equal * 1e-9) == equal * 1e-9)
    one_other = np.append(equal, 1.3)
    advantages = group_advantages(one_other, [0] * 8, estimator)
    assert np.abs(advantages).max() < 3 and np.ptp(advantages[:7]) < 1e-6  # residue is not blown up


def test_rewards_are_not_clipped_before_they_are_normalised() -> None:
    advantages = group_advantages(np.array([2.0, 2.8]), [0, 0], "mean_std")
    assert_allclose(advantages, [-math.sqrt(0.5), math.sqrt(0.5)])


def test_batch_normalisation_comes_after_the_group() -> None:
    task, config = [0.0, 2.0, 5.0, 5.0], AlgorithmConfig(advantage="mean", anchoring_scope="all")
    advantages = episode_advantages(task, [0.0] * 4, [0, 0, 1, 1], config)
    assert_allclose(advantages.sequence, np.array([-1, 1, 0, 0]) / np.std([-1, 1, 0, 0], ddof=1))
    config.batch_normalise = False
    assert_allclose(episode_advantages(task, [0.0] * 4, [0, 0, 1, 1], config).sequence, [-1, 1, 0, 0])


def test_scope_decides_whether_format_has_its_own_advantage() -> None:
    task, fmt, groups = [1.0, 0.0, 0.0, 1.0], [0.2, 0.2, 0.8, 0.8], [0] * 4
    config = AlgorithmConfig(advantage="mean", batch_normalise=False)
    structural = episode_advantages(task, fmt, groups, config)
    assert_allclose(structural.sequence, [0.5, -0.5, -0.5, 0.5])
    assert_allclose(structural.format, [-0.3, -0.3, 0.3, 0.3])
    config.anchoring_scope = "all"
    spread = episode_advantages(task, fmt, groups, config)
    assert_allclose(spread.sequence, structural.sequence + structural.format)
    assert np.all(spread.format == 0)


def test_bad_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        episode_advantages([math.nan, 1.0], [0.0, 0.0], [0, 0], AlgorithmConfig())
    with pytest.raises(ValueError, match="1 format rewards"):
        episode_advantages([1.0, 1.0], [0.0], [0, 0], AlgorithmConfig())
    assert len(episode_advantages([], [], [], AlgorithmConfig()).sequence) == 0


# Anchoring

PIECES = [
    "</think>",
    "<tool_call>",
    "<",
    "answer",
    ">",
    "></",
    "B",
    "\n<ans",
    "wer>\n",
    "<|im_end|>",
    "\ufffd>",
    "</answ",
    "er",
]
ID = {piece: i for i, piece in enumerate(PIECES)}


def mask_of(*pieces: str, generated: list[bool] | None = None) -> list[bool]:
    ids = [ID[piece] for piece in pieces]
    flags = [True] * len(ids) if generated is None else generated
    return structural_mask(ids, flags, PIECES.__getitem__, STRUCTURAL_TAGS, [ID["<|im_end|>"]]).tolist()


def test_tags_of_one_several_and_shared_tokens() -> None:
    pieces = ["</think>", "B", "<", "answer", ">", "B", "</answ", "er", ">", "<|im_end|>"]
    assert mask_of(*pieces) == [True, False, True, True, True, False, True, True, True, True]
    assert mask_of("B", "\n<ans", "wer>\n", "B", "</answ", "er", "\ufffd>") == [False, True, True] + [False] * 4
    # one token ends a tag and begins the next
    assert mask_of("<", "answer", "></", "answer", ">", "B") == [True] * 5 + [False]


def test_tags_in_qwens_tokens() -> None:
    """`</think>` is one token there and `<answer>` several; whatever pieces it takes, the marked text is the tags'."""
    tokenizer: Any = make_tokenizer(["<answer>red</answer>\n the</answer>"])
    text = 'ünd </think>\n<tool_call>\n{"a": 1}\n</tool_call>(<answer>B</answer><|im_end|>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    mask = structural_mask(
        ids, [True] * len(ids), lambda i: tokenizer.decode([i]), STRUCTURAL_TAGS, [tokenizer.eos_token_id]
    )
    assert len(ids) > len(STRUCTURAL_TAGS)
    marked = tokenizer.decode([i for i, flag in zip(ids, mask, strict=True) if flag])
    assert all(tag in marked for tag in STRUCTURAL_TAGS) and marked.endswith("<|im_end|>")
    kept = tokenizer.decode([i for i, flag in zip(ids, mask, strict=True) if not flag])
    assert '{"a": 1}' in kept and "ünd" in kept and "B" in kept and "think" not in kept and "answer" not in kept


def test_lookalikes_and_text_are_not_marked() -> None:
    assert not any(mask_of("<", "answer", "B", ">", "answer", ">", "<", "B"))


def test_only_what_was_generated_in_one_turn_is_marked() -> None:
    pieces = ["<", "answer", ">", "</think>", "<|im_end|>"]
    assert not any(mask_of(*pieces, generated=[False] * 5))
    assert mask_of(*pieces, generated=[True, True, False, True, False]) == [False, False, False, True, False]
    assert mask_of() == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*PIECES[:5], "</answ", "er"]), max_size=30))
def test_marked_characters_are_those_of_the_tags(pieces: list[str]) -> None:
    """Each token that overlaps a tag is marked and no other, checked one character at a time."""
    text, marked = "".join(pieces), set()
    for tag in STRUCTURAL_TAGS:
        for start in range(len(text)):
            if text.startswith(tag, start):
                marked |= set(range(start, start + len(tag)))
    position, expected = 0, []
    for piece in pieces:
        expected.append(bool(marked & set(range(position, position + len(piece)))))
        position += len(piece)
    assert mask_of(*pieces) == expected


def test_token_advantages() -> None:
    generated, structural = np.array([False, True, True, True]), np.array([False, False, True, True])
    assert_allclose(token_advantages(generated, structural, 0.5, -2.0), [0, 0.5, -1.5, -1.5])
    assert token_advantages(generated, structural, 0.5, -2.0).dtype == np.float32


# Losses


def make_batch(
    seed: int, rows: int = 4, length: int = 6, dtype: torch.dtype = torch.float64, spread: float = 0.3
) -> TokenBatch:
    """Random rows of different lengths, every tensor off-policy by a little."""
    random = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(rows, length, generator=random, dtype=dtype)

    behaviour = -1.5 + noise(0.5)
    proximal = behaviour + noise(spread)
    mask = torch.rand(rows, length, generator=random) < 0.7
    mask[:, 0] = True
    return TokenBatch(
        logprobs=(proximal + noise(spread)).requires_grad_(),
        proximal_logprobs=proximal,
        behaviour_logprobs=behaviour,
        advantages=noise(1.0),
        mask=mask,
        weights=torch.ones(rows, length, dtype=dtype),
        sequence_ids=torch.arange(rows)[:, None].expand(rows, length),
        entropy=noise(0.1).abs().requires_grad_(),
        reference_logprobs=proximal + noise(spread),
    )


def weighted(batch: TokenBatch, aggregation: str, max_tokens: int = 10) -> TokenBatch:
    weights = row_weights(batch.mask.sum(-1).tolist(), aggregation, max_tokens)
    return replace(batch, weights=torch.tensor(weights)[:, None].expand(batch.mask.shape).to(batch.logprobs.dtype))


def rows_of(batch: TokenBatch, rows: slice) -> TokenBatch:
    return TokenBatch(**{f.name: getattr(batch, f.name)[rows] for f in fields(batch)})


def gradient(batch: TokenBatch, *losses: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(sum(losses, torch.zeros(())), batch.logprobs, retain_graph=True)
    return grad


def one_token(
    log_ratio: float, advantage: float, config: AlgorithmConfig, stale: float = 0.0
) -> tuple[float, float, bool]:
    """Loss, gradient and whether it is clipped, of a single token with weight 1."""
    value = torch.tensor([[-1.0 + log_ratio]], dtype=torch.float64, requires_grad=True)
    proximal = torch.full((1, 1), -1.0, dtype=torch.float64)
    ones = torch.ones(1, 1, dtype=torch.float64)
    batch = TokenBatch(value, proximal, proximal - stale, ones * advantage, ones.bool(), ones, ones.long() * 0)
    result = policy_loss(batch, config)
    return result.loss.item(), gradient(batch, result.loss).item(), bool(result.clipped)


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_clipping_by_hand(loss: str) -> None:
    config = AlgorithmConfig(loss=loss, clip_low=0.2, clip_high=0.3)
    up, down = math.log(2.0), math.log(0.5)
    assert one_token(0.0, 3.0, config) == pytest.approx((-3.0, -3.0, False))
    assert one_token(up, 1.0, config) == pytest.approx((-1.3, 0.0, True))
    assert one_token(up, -1.0, config) == pytest.approx((2.0, 2.0, False))
    assert one_token(down, 1.0, config) == pytest.approx((-0.5, -0.5, False))
    assert one_token(down, -1.0, config) == pytest.approx((0.8, 0.0, True))


def test_cispo_by_hand() -> None:
    config = AlgorithmConfig(loss="cispo", clip_high=0.3)
    up, down = math.log(2.0), math.log(0.5)
    assert one_token(up, 1.0, config) == pytest.approx((-1.3 * (-1 + up), -1.3, True))
    assert one_token(down, -1.0, config) == pytest.approx((0.5 * (-1 + down), 0.5, False))


def test_behaviour_weight_by_hand() -> None:
    config = AlgorithmConfig(behaviour_cap=5.0)
    assert one_token(0.0, 1.0, config, stale=math.log(3)) == pytest.approx((-3.0, -3.0, False))
    assert one_token(0.0, 1.0, config, stale=math.log(7)) == pytest.approx((-5.0, -5.0, False))
    config.behaviour_correction = "mask"
    assert one_token(0.0, 1.0, config, stale=math.log(3)) == pytest.approx((-3.0, -3.0, False))
    assert one_token(0.0, 1.0, config, stale=math.log(7)) == pytest.approx((0.0, 0.0, False))
    proximal = torch.tensor([0.0], requires_grad=True)
    assert not behaviour_weights(proximal, torch.tensor([-1.0]), config).requires_grad


def test_gspo_uses_the_ratio_of_the_sequence() -> None:
    """Two sequences packed into one row: ratios exp(0.1) and exp(-0.3), each spread over its own tokens."""
    logprobs = torch.tensor([[0.2, 0.0, -0.3, -0.3, -0.3]], dtype=torch.float64, requires_grad=True)
    zeros, ids = torch.zeros(1, 5, dtype=torch.float64), torch.tensor([[0, 0, 3, 3, 3]])
    batch = TokenBatch(logprobs, zeros, zeros, zeros + 1, ids >= 0, zeros + 1, ids)
    result = policy_loss(batch, AlgorithmConfig(loss="gspo"))
    assert result.loss.item() == pytest.approx(-2 * math.exp(0.1) - 3 * math.exp(-0.3))
    assert_allclose(gradient(batch, result.loss), [[-math.exp(0.1)] * 2 + [-math.exp(-0.3)] * 3])


def test_kl_estimates_by_hand() -> None:
    policy, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -0.5])
    assert_allclose(kl_estimate(policy, reference, "k1"), [0.5, -0.5])
    assert_allclose(kl_estimate(policy, reference, "k2"), [0.125, 0.125])
    assert_allclose(kl_estimate(policy, reference, "k3"), [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5], rtol=1e-6)


def test_kl_estimates_agree_with_the_divergence() -> None:
    """Over all tokens of a distribution, k1 and k3 average to the divergence exactly."""
    p, q = torch.tensor([0.1, 0.2, 0.7]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    divergence = float((p * (p / q).log()).sum())
    for estimator in ("k1", "k3"):
        assert float((p * kl_estimate(p.log(), q.log(), estimator)).sum()) == pytest.approx(divergence)


def test_kl_and_entropy_terms() -> None:
    batch = weighted(make_batch(0), "token_mean")
    assert batch.entropy is not None and batch.reference_logprobs is not None
    plain = policy_loss(batch, AlgorithmConfig(kl_coefficient=0.0))
    config = AlgorithmConfig(kl_coefficient=0.1, kl_placement="loss", kl_estimator="k3", entropy_coefficient=0.02)
    result = policy_loss(batch, config)
    kl = kl_estimate(batch.logprobs, batch.reference_logprobs, "k3")[batch.mask].mean()
    assert result.loss.item() == pytest.approx((plain.loss + 0.1 * kl - 0.02 * batch.entropy[batch.mask].mean()).item())
    assert float(result.kl / result.tokens) == pytest.approx(kl.item())
    in_reward = policy_loss(batch, AlgorithmConfig(kl_coefficient=0.1, kl_placement="reward"))
    assert in_reward.loss.item() == plain.loss.item()
    with pytest.raises(ValueError, match="reference"):
        policy_loss(replace(batch, reference_logprobs=None), config)
    with pytest.raises(ValueError, match="entropies"):
        policy_loss(replace(batch, entropy=None), config)


def test_row_weights_by_hand() -> None:
    assert_allclose(row_weights([2, 3, 0], "token_mean", 10), [0.2, 0.2, 0])
    assert_allclose(row_weights([2, 3, 0], "sequence_mean", 10), [1 / 4, 1 / 6, 0])
    assert_allclose(row_weights([2, 3, 0], "dr_grpo", 10), [0.05, 0.05, 0])
    assert_allclose(row_weights([0, 0], "token_mean", 10), [0, 0])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_does_not_depend_on_micro_batches(loss: str, aggregation: str) -> None:
    """The same eight rows at once, as 4 x 2, unevenly, and packed into one row."""
    config = AlgorithmConfig(
        loss=loss, kl_coefficient=0.1, kl_placement="loss", kl_estimator="k3", entropy_coefficient=0.1
    )
    batch = weighted(make_batch(1, rows=8), aggregation)
    whole = policy_loss(batch, config)
    expected = gradient(batch, whole.loss)
    for cuts in ([0, 2, 4, 6, 8], [0, 1, 8], [0, 5, 8]):
        parts = [policy_loss(rows_of(batch, slice(a, b)), config) for a, b in pairwise(cuts)]
        assert_allclose(gradient(batch, *[part.loss for part in parts]), expected, atol=1e-12)
        for name in ("tokens", "clipped", "kl", "entropy", "behaviour_weight"):
            assert_allclose(sum(getattr(part, name) for part in parts), getattr(whole, name), atol=1e-12)
    packed = TokenBatch(**{f.name: getattr(batch, f.name).reshape(1, -1) for f in fields(batch)})
    assert_allclose(gradient(batch, policy_loss(packed, config).loss), expected, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_tokens_are_in_neither_numerator_nor_denominator(loss: str) -> None:
    batch = weighted(make_batch(2, rows=5), "token_mean")
    expected = policy_loss(batch, AlgorithmConfig(loss=loss))
    assert int(expected.tokens) == int(batch.mask.sum())

    def spoil(values: Tensor) -> Tensor:
        return torch.where(batch.mask, values, torch.nan)

    spoiled = replace(
        batch,
        logprobs=spoil(batch.logprobs.detach()).requires_grad_(),
        proximal_logprobs=spoil(batch.proximal_logprobs),
        behaviour_logprobs=spoil(batch.behaviour_logprobs),
        advantages=spoil(batch.advantages),
        sequence_ids=torch.where(batch.mask, batch.sequence_ids, -1),
        entropy=None,
        reference_logprobs=None,
    )
    result = policy_loss(spoiled, AlgorithmConfig(loss=loss))
    assert result.loss.item() == pytest.approx(expected.loss.item())
    assert_allclose(gradient(spoiled, result.loss), gradient(batch, expected.loss), atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_to_train_gives_an_attached_zero(loss: str) -> None:
    batch = make_batch(3)
    empty = weighted(replace(batch, mask=torch.zeros_like(batch.mask)), "token_mean")
    result = policy_loss(empty, AlgorithmConfig(loss=loss, entropy_coefficient=0.1))
    assert result.loss.item() == 0.0 and int(result.tokens) == 0
    assert torch.equal(gradient(empty, result.loss), torch.zeros_like(empty.logprobs))
    no_rows = rows_of(batch, slice(0, 0))  # what a rank gets when there are fewer rows than ranks
    assert policy_loss(no_rows, AlgorithmConfig(loss=loss)).loss.grad_fn is not None


@pytest.mark.parametrize("loss", LOSSES)
def test_a_broken_token_cannot_make_the_loss_infinite(loss: str) -> None:
    batch = make_batch(4, dtype=torch.float32)
    far = replace(batch, proximal_logprobs=batch.proximal_logprobs - 500, behaviour_logprobs=batch.behaviour_logprobs)
    result = policy_loss(far, AlgorithmConfig(loss=loss))
    assert torch.isfinite(result.loss) and torch.isfinite(gradient(far, result.loss)).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_first_step_is_the_policy_gradient(loss: str) -> None:
    """Where all policies agree, every loss has the gradient of -advantage * log-prob."""
    batch = make_batch(5, spread=0.0)
    batch = replace(batch, advantages=batch.advantages[:, :1].expand(batch.mask.shape))
    expected = torch.where(batch.mask, -batch.advantages, 0.0)
    assert_allclose(gradient(batch, policy_loss(batch, AlgorithmConfig(loss=loss)).loss), expected, atol=1e-12)


# TRL's GRPO loss on the same tensors


def trl_loss(batch: TokenBatch, config: AlgorithmConfig, loss_type: str, max_tokens: int) -> Tensor:
    """The loss of TRL's GRPOTrainer: its own code on our tensors, without a model or a trainer around it."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    stale = (batch.proximal_logprobs - batch.behaviour_logprobs).exp().clamp(max=config.behaviour_cap)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logprobs, batch.entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if config.loss == "gspo" else "token",
        beta=config.kl_coefficient if config.kl_placement == "loss" else 0.0,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type=loss_type,
        epsilon_low=config.clip_low,
        epsilon_high=1 + config.clip_high if loss_type == "cispo" else config.clip_high,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=max_tokens,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        _entropy_bonus_enabled=config.entropy_coefficient != 0,
        use_adaptive_entropy=False,
        entropy_coef=config.entropy_coefficient,
        _metrics={"train": defaultdict(list)},
    )
    trainer.accelerator.sync_gradients = True
    ids = torch.zeros_like(batch.sequence_ids)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.proximal_logprobs,
        "ref_per_token_logps": batch.reference_logprobs,
        "importance_sampling_ratio": stale,
        "num_items_in_batch": batch.mask.sum(),
    }
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


@pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("loss", "aggregation", "loss_type"),
    [
        ("ppo", "token_mean", "dapo"),
        ("ppo", "sequence_mean", "grpo"),
        ("ppo", "dr_grpo", "dr_grpo"),
        ("gspo", "sequence_mean", "grpo"),
        ("cispo", "token_mean", "cispo"),
    ],
)
def test_equals_trl(loss: str, aggregation: str, loss_type: str, seed: int) -> None:
    config = AlgorithmConfig(loss=loss, clip_low=0.1, clip_high=0.25, behaviour_cap=1.2, entropy_coefficient=0.0)
    config.kl_coefficient, config.kl_placement, config.kl_estimator = 0.05, "loss", "k3"
    if aggregation == "token_mean":
        config.entropy_coefficient = 0.02  # TRL's bonus is a token mean whatever the loss
    batch = make_batch(10 + seed, rows=6, length=12)
    if loss == "gspo":  # TRL knows no token-wise form: advantages and behaviour weights are one number a sequence
        stale = torch.linspace(-0.3, 0.3, 6, dtype=torch.float64)[:, None]
        advantages = batch.advantages[:, :1].expand(batch.mask.shape)
        config.clip_low, config.clip_high = 0.03, 0.05  # means over tokens stray less
        batch = replace(batch, advantages=advantages, behaviour_logprobs=batch.proximal_logprobs - stale)
    batch = weighted(batch, aggregation, max_tokens=12)
    ours, theirs = policy_loss(batch, config), trl_loss(batch, config, loss_type, 12)
    assert int(ours.clipped) > 0
    assert ours.loss.item() == pytest.approx(theirs.item(), rel=1e-10)
    assert_allclose(gradient(batch, ours.loss), gradient(batch, theirs), atol=1e-12)
