"""`paravt bench learner`: the learner against a bare transformers loop and against padding, and its memory.

Both sides live in processes of their own, with the same threads, and are asked in turn.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paravt_ray.bench._peer import Peer
from paravt_ray.bench._table import Row, in_turn, machine, say, show
from paravt_ray.bench._workload import bench_config
from paravt_ray.config import Config, model_directory
from paravt_ray.episode import TrainRow
from paravt_ray.learner.schedule import LrSchedule

if TYPE_CHECKING:
    from torch import Tensor

ROUNDS = 5
MICRO_BATCH_TOKENS = 4096
EQUAL_LENGTHS = (512,) * 32
EPISODES = 24
"""Whose rows have mixed lengths."""
MEMORY_ROWS = (512,) * 32
VOCABULARIES = (1024, 151_936)
"""About 1k, and Qwen3's."""
CHUNK_TOKENS = 64
"""`learner.logprob_chunk_tokens` where memory is measured."""
ORDINARY_IDS = 256
"""Rows hold byte tokens only: no control token, no image."""


def main() -> int:
    """Measure and print a table; 1 where a goal was missed."""
    model, mixed = model_directory(Config()), mixed_lengths(EPISODES)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            *speed_rows(model, Path(folder), EQUAL_LENGTHS, mixed, ROUNDS),
            memory_row(model, Path(folder), MEMORY_ROWS, VOCABULARIES, CHUNK_TOKENS),
        ]
    settings = [
        machine("torch", "transformers", "deepspeed"),
        f"Tiny model, float32, text only, loss on every token; at most {MICRO_BATCH_TOKENS:,} tokens, padding "
        f"included, in one forward and backward pass; medians of {ROUNDS} rounds.",
        f"Equal lengths: {len(EQUAL_LENGTHS)} rows of {EQUAL_LENGTHS[0]}. Mixed lengths: {len(mixed)} rows of "
        f"{EPISODES} episodes, {min(mixed)} to {max(mixed)}, mean {np.mean(mixed):.0f}.",
        f"Memory: peak of one pass over {sum(MEMORY_ROWS):,} tokens beyond weights and gradients, "
        f"learner.logprob_chunk_tokens={CHUNK_TOKENS}.",
    ]
    return show(rows, settings)


def mixed_lengths(episodes: int) -> list[int]:
    """Row lengths in tokens of a step with tools: main agents about 500 with a long tail, half of them with sub-agents.

    Each of those has one to four sub-agents of 120 to 200 tokens.
    """
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    for _ in range(episodes):
        lengths.append(int(np.clip(rng.lognormal(np.log(500), 0.5), 200, 2000)))
        if rng.random() < 0.5:
            lengths += rng.integers(120, 200, rng.integers(1, 5)).tolist()
    return lengths


def make_rows(lengths: Sequence[int]) -> list[TrainRow]:
    """Rows of random text with these lengths; every token but the first carries loss."""
    rng = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(lengths):
        generated = np.arange(length) > 0
        rows.append(
            TrainRow(
                token_ids=rng.integers(0, ORDINARY_IDS, length),
                generated=generated,
                advantages=np.where(generated, rng.normal(size=length), 0).astype(np.float32),
                behaviour_logprobs=np.full(length, -np.log(ORDINARY_IDS), np.float32),
                frames=[],
                group_index=number,
                sequence_index=number,
            )
        )
    return rows


# ---- speed -----------------------------------------------------------------------------------------------------------


class OurLearner:
    """The learner, one rank, as its actor holds it."""

    def __init__(self, model: Path, folder: Path) -> None:
        """Load the model and set up DeepSpeed."""
        from paravt_ray.learner.actor import free_port
        from paravt_ray.learner.engine import denormals_flushed
        from paravt_ray.learner.learner import Learner

        config = bench_config(model, folder)
        config.learner.micro_batch_tokens = MICRO_BATCH_TOKENS
        schedule = LrSchedule.from_config(config.learner, config.trainer.steps)
        with denormals_flushed():  # as the learner's actor does
            self._learner = Learner(config, model, schedule, rendezvous=f"tcp://127.0.0.1:{free_port()}")

    def tokens_per_s(self, lengths: Sequence[int]) -> float:
        """A whole update: batching, forward, loss with its metrics, backward, optimizer."""
        from paravt_ray.learner.engine import denormals_flushed

        rows = make_rows(lengths)
        started = time.perf_counter()
        with denormals_flushed():  # as the learner's actor does
            self._learner.update(rows)
        return sum(lengths) / (time.perf_counter() - started)


class BareTransformers:
    """Forward, log-probs of every token, weighted sum, backward; no optimizer, no metrics."""

    def __init__(self, model: Path) -> None:
        """Load the model."""
        import torch
        from transformers import Qwen3VLForConditionalGeneration

        torch.set_flush_denormal(True)  # as on our side
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = Qwen3VLForConditionalGeneration.from_pretrained(
            model, dtype=torch.float32, local_files_only=True
        ).to(self._device)

    def tokens_per_s(self, lengths: Sequence[int]) -> float:
        """All rows in batches of equally many, each padded to the longest row of all, as a padded batch is."""
        rows = make_rows(lengths)
        started = time.perf_counter()
        at_once = max(1, MICRO_BATCH_TOKENS // max(lengths))
        for start in range(0, len(rows), at_once):
            self._loss(rows[start : start + at_once], max(lengths)).backward()  # type: ignore[no-untyped-call]
        self._model.zero_grad()
        return sum(lengths) / (time.perf_counter() - started)

    def _loss(self, rows: Sequence[TrainRow], longest: int) -> Tensor:
        import torch

        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros(len(rows), longest, dtype=torch.int64)
        advantages = torch.zeros(len(rows), longest)
        for number, row in enumerate(rows):
            length = len(row.token_ids)
            ids[number, :length], mask[number, :length] = torch.from_numpy(row.token_ids), 1
            advantages[number, :length] = torch.from_numpy(row.advantages)
        ids, mask, advantages = ids.to(self._device), mask.to(self._device), advantages.to(self._device)
        # Without padding there is no mask, and attention takes its fastest way.
        attention = {} if mask.all() else {"attention_mask": mask}
        logits = self._model(input_ids=ids, use_cache=False, **attention).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss: Tensor = -(logprobs * advantages[:, 1:]).sum()
        return loss


def speed_rows(model: Path, folder: Path, equal: Sequence[int], mixed: Sequence[int], rounds: int) -> list[Row]:
    """Tokens a second on rows of equal and of mixed lengths."""
    say("Starting both sides ...")
    with (
        Peer(folder / "learner.log", OurLearner, model, folder / "learner") as ours,
        Peer(folder / "bare_transformers.log", BareTransformers, model) as bare,
    ):
        found = in_turn(
            rounds,
            lambda _: float(ours.call("tokens_per_s", equal)),
            lambda _: float(bare.call("tokens_per_s", equal)),
            lambda _: float(ours.call("tokens_per_s", mixed)),
            lambda _: float(bare.call("tokens_per_s", mixed)),
        )
    return [
        Row("update, equal lengths", found[0], found[1], "bare forward and backward", 0.9, "tokens/s"),
        Row("update, mixed lengths", found[2], found[3], "the same, padded", 2.0, "tokens/s"),
    ]


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryProbe:
    """One forward and backward pass of a policy with a vocabulary of any size and random weights."""

    model: Path
    vocabulary: int
    chunk_tokens: int

    def peak_mb(self, lengths: Sequence[int]) -> float:
        """Most memory in MB that the pass over these rows holds at one time, beyond weights and gradients.

        Call it once in a process: the system only knows the highest mark of the process.
        """
        import torch
        from transformers import AutoConfig, Qwen3VLForConditionalGeneration

        from paravt_ray.learner.batching import Collator
        from paravt_ray.learner.policy import Policy

        config = AutoConfig.from_pretrained(self.model, local_files_only=True)
        config.text_config.vocab_size = self.vocabulary
        policy = Policy(Qwen3VLForConditionalGeneration(config), self.chunk_tokens)
        batch = Collator(self.model).collate(make_rows(lengths), range(len(lengths)))
        with torch.no_grad():  # what libraries allocate at first use is not the pass's
            policy(Collator(self.model).collate(make_rows([8]), [0]), 1.0)
        before = _resident_mb()
        logprobs, entropies = policy(batch, 1.0)
        (logprobs * batch.advantages + 0.0 * entropies).sum().backward()
        gradients = sum(p.grad.nbytes for p in policy.parameters() if p.grad is not None)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before - gradients / 2**20


def memory_row(
    model: Path, folder: Path, lengths: Sequence[int], vocabularies: tuple[int, int], chunk_tokens: int
) -> Row:
    """Peak memory of one pass with a large vocabulary against that with a small one; flat is 1."""
    small, large = (_peak_mb(model, folder, lengths, vocabulary, chunk_tokens) for vocabulary in vocabularies)
    what, peer = (f"a vocabulary of {vocabulary:,}" for vocabulary in reversed(vocabularies))
    return Row(f"peak memory, {what}", large, small, peer, 0.9, "MB", less_is_better=True)


def _peak_mb(model: Path, folder: Path, lengths: Sequence[int], vocabulary: int, chunk_tokens: int) -> float:
    say(f"Peak memory with a vocabulary of {vocabulary:,} ...")
    with Peer(folder / f"memory_{vocabulary}.log", MemoryProbe, model, vocabulary, chunk_tokens) as probe:
        return float(probe.call("peak_mb", lengths))


def _resident_mb() -> float:
    """What the process holds now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20
