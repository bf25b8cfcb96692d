"""Micro-batches: which rows run together, and that what they share runs once and counts as if it did not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning import make_frame, make_row

from paravt_ray.chat import Chat
from paravt_ray.episode import Frame, TrainRow
from paravt_ray.learner.attention import CPU_BLOCK, family, packed_attention
from paravt_ray.learner.batching import Collator
from paravt_ray.learner.planning import Prompt, plan, split_by_group

# ---- planning ------------------------------------------------------------------------------------------------------


def row_of_length(length: int, group: int, prompt: int = 0) -> TrainRow:
    """A row of ones whose first `prompt` tokens are its prompt; without one, nothing is generated."""
    zeros = np.zeros(length, np.float32)
    return TrainRow(
        token_ids=np.ones(length, np.int64),
        generated=(np.arange(length) >= prompt) & (prompt > 0),
        advantages=zeros,
        behaviour_logprobs=zeros,
        frames=[],
        group_index=group,
    )


def prompt_of(row: TrainRow) -> Prompt:
    """All but the last token of a row's prompt, without pictures."""
    length = max(0, int(row.generated.argmax()) - 1)
    return Prompt(length, row.token_ids[:length].tobytes(), ())


@given(
    lengths=st.lists(st.integers(1, 400), max_size=40),
    ranks=st.integers(1, 8),
    budget=st.integers(1, 1000),
    prompt=st.integers(0, 300),
)
@settings(deadline=None, max_examples=200)
def test_a_plan_runs_every_row_once_within_the_budget(lengths: list[int], ranks: int, budget: int, prompt: int) -> None:
    """Where a group's rows have a prompt in common, all but its last token counts once in a micro-batch."""
    rows = [row_of_length(length, index // 4, prompt) for index, length in enumerate(lengths)]
    steps = plan(rows, [prompt_of(row) for row in rows], ranks, budget)
    assert len(steps) == ranks and len({len(rank) for rank in steps}) == 1
    batches = [batch for rank in steps for batch in rank]
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    for batch in batches:
        with_prompt = [i for i in batch if lengths[i] > prompt]  # the others hold nothing that is generated
        groups = {rows[i].group_index for i in with_prompt}
        saved = max(0, prompt - 1) * (len(with_prompt) - len(groups))
        assert len(batch) <= 1 or sum(lengths[i] for i in batch) - saved <= budget


def test_a_plan_balances_the_tokens_of_mixed_lengths_over_ranks() -> None:
    lengths = np.random.default_rng(0).integers(50, 2000, 256).tolist()
    rows = [row_of_length(n, i // 8) for i, n in enumerate(lengths)]
    steps = plan(rows, [prompt_of(row) for row in rows], ranks=4, budget=32768)
    for at_once in zip(*steps, strict=True):
        loads = [sum(lengths[i] for i in batch) for batch in at_once]
        assert max(loads) / (sum(loads) / len(loads)) < 1.1


def test_a_group_whose_prompt_counts_once_fits_into_one_micro_batch() -> None:
    """8 rows of 111 tokens are 888; with the 100 that they share counted once they are 188."""
    rows = [row_of_length(111, 0, prompt=101) for _ in range(8)]
    prompts = [prompt_of(row) for row in rows]
    assert plan(rows, prompts, ranks=1, budget=188) == [[list(range(8))]]
    assert len(plan(rows, prompts, ranks=1, budget=187)[0]) == 2


def test_groups_are_never_split_between_optimizer_steps() -> None:
    rows = [row_of_length(5, group) for group in (0, 0, 1, 2, 2, 2, 3)]
    parts = split_by_group(rows, 3)
    assert len(parts) == 3 and sum(map(len, parts)) == len(rows)
    seen = [{row.group_index for row in part} for part in parts]
    assert all(not (a & b) for i, a in enumerate(seen) for b in seen[i + 1 :])
    assert len(split_by_group(rows, 9)) == 4


# ---- what rows share ------------------------------------------------------------------------------------------------


def test_attention_with_a_shared_prefix_is_attention_over_whole_sequences() -> None:
    """Values and gradients, with grouped heads, suffixes of equal lengths and one longer than a block."""
    suffixes, prefix, alone = (7, 7, CPU_BLOCK + 44), 5, (4, 4, 9)
    families = (family(suffixes, prefix), family(alone))
    total = prefix + sum(suffixes) + sum(alone)
    assert families == ((5, ((2, 7), (1, CPU_BLOCK + 44))), (0, ((2, 4), (1, 9))))
    q, k, v = (torch.randn(1, h, total, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    module = torch.nn.Module()
    module.is_causal = True
    found, _ = packed_attention(module, q, k, v, None, cu_seq_lens_q=families)

    starts = np.cumsum([prefix, *suffixes, *alone])[:-1]
    tokens = [[*range(prefix), *range(s, s + n)] for s, n in zip(starts, suffixes, strict=False)]
    tokens += [[*range(s, s + n)] for s, n in zip(starts[len(suffixes) :], alone, strict=True)]
    expected = torch.zeros(total, 4, 8, dtype=torch.float64)
    for own in tokens:
        hidden = torch.ones(len(own), len(own), dtype=torch.bool).triu(1)
        scores = q[0][:, own] @ k[0].repeat_interleave(2, 0)[:, own].transpose(1, 2) / 8**0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = expected.index_copy(
            0, torch.tensor(own), (weights @ v[0].repeat_interleave(2, 0)[:, own]).transpose(0, 1)
        )
    torch.testing.assert_close(found[0], expected)
    noise = torch.randn_like(expected)
    for one, other in zip(
        *(torch.autograd.grad((o * noise).sum(), (q, k, v)) for o in (found[0], expected)), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention behind a prefix needs a GPU")
def test_a_gpu_attends_behind_a_shared_prefix_as_a_cpu_does() -> None:
    families = (family((70, 70, 300), 40), family((9, 9)))
    q, k, v = (torch.randn(1, heads, 498, 64) for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.is_causal = True
    expected, _ = packed_attention(module, q, k, v, None, cu_seq_lens_q=families)
    on_gpu = [x.to("cuda", torch.bfloat16) for x in (q, k, v)]
    found, _ = packed_attention(module, *on_gpu, None, cu_seq_lens_q=families)
    torch.testing.assert_close(found.float().cpu(), expected, atol=0.03, rtol=0.03)


def test_a_prompt_that_several_rows_have_runs_once(tiny_path: Path, tiny_rows: list[TrainRow]) -> None:
    """All but its last token, which predicts each row's first generated one."""
    batch = Collator(tiny_path).collate(tiny_rows, range(len(tiny_rows)))
    prompts = [int(row.generated.argmax()) for row in tiny_rows]
    assert prompts[0] == prompts[1] and prompts[5] == prompts[6]
    whole = sum(len(row.token_ids) for row in tiny_rows)
    assert batch.input_ids.numel() == whole - (prompts[0] - 1) - (prompts[5] - 1)
    assert [family.prefix for family in batch.families] == [prompts[0] - 1, prompts[5] - 1, 0]


def test_a_prompt_with_other_frames_is_another_prompt(tiny_path: Path, tiny_chat: Chat) -> None:
    """Pads are the same ids whatever they show."""
    frames = [make_frame(0), Frame(make_frame(1).pixels, 0.0, "another")]
    rows = [make_row(tiny_chat, [frame], "A") for frame in frames]
    assert np.array_equal(rows[0].token_ids, rows[1].token_ids)
    collator, budget = Collator(tiny_path), len(rows[0].token_ids) + 9
    assert collator.collate(rows, [0, 1]).input_ids.numel() == sum(len(row.token_ids) for row in rows)
    prompts = [collator.prompt(row) for row in rows]
    assert len(plan(rows, prompts, ranks=1, budget=budget)[0]) == 2, "what is planned has to be what is packed"


def test_a_prompt_that_ends_in_a_picture_is_not_cut(tiny_path: Path, tiny_chat: Chat) -> None:
    row = make_row(tiny_chat, [make_frame(0, 64, 96)], "A")
    pads = Collator(tiny_path)._pads(row.token_ids)
    row.generated = np.arange(len(row.token_ids)) > pads[-1]
    batch = Collator(tiny_path).collate([row, row], [0, 1])
    assert batch.input_ids.numel() == 2 * len(row.token_ids) and len(batch.visual_index) == 2 * len(pads)
