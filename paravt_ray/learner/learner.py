"""One rank of the learner: rows in, one or more optimizer steps, metrics out. Knows DeepSpeed, not Ray.

Every rank is given all rows of a batch, makes the same plan and runs its own part, so that one rank and many differ in
rounding only. Nothing here draws random numbers: the same rows give the same weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paravt_ray.algorithm.losses import TokenBatch, policy_loss, row_weights
from paravt_ray.config import Config
from paravt_ray.episode import InvalidTrajectoryError, TrainRow
from paravt_ray.errors import UserError
from paravt_ray.learner import checkpoint
from paravt_ray.learner.batching import Collator, MicroBatch
from paravt_ray.learner.engine import Engine, frozen, init_distributed, move_frozen
from paravt_ray.learner.lora import STEM, add_adapter, load_adapter, lora_scale, stored_adapter, write_adapter_config
from paravt_ray.learner.planning import plan, split_by_group
from paravt_ray.learner.policy import Policy
from paravt_ray.learner.schedule import LrSchedule
from paravt_ray.weights.manifest import checkpoint_digest
from paravt_ray.weights.push import Adapter, Push
from paravt_ray.weights.send import publish

FloatArray = NDArray[np.float32]
Loss = Callable[[int, MicroBatch, Tensor, Tensor], Tensor]
"""(Number of the micro-batch, micro-batch, log-probs [N], entropies [N]) to this rank's share of the loss."""

_SUMS = ("loss", "tokens", "clipped", "kl", "entropy", "behaviour_weight", "gap")

log = logging.getLogger(__name__)


class LearnerError(UserError):
    """Training cannot go on: a loss or gradient that is not finite, a rank that died or did not answer in time."""


class Learner:
    """Owns the model, its optimizer and the DeepSpeed engine on one rank. All calls are made on all ranks at once."""

    def __init__(
        self,
        config: Config,
        model_path: Path,
        schedule: LrSchedule,
        *,
        rank: int = 0,
        ranks: int = 1,
        rendezvous: str,
        reference_path: Path | None = None,
        resume: Path | None = None,
    ) -> None:
        """Load the model and set up training.

        Args:
            config: the whole configuration.
            model_path: checkpoint directory in Hugging Face format.
            schedule: the learning rate of every optimizer step.
            rank: of `ranks`.
            ranks: processes that train together.
            rendezvous: `tcp://HOST:PORT`, where rank 0 listens.
            reference_path: checkpoint of the frozen reference policy, if one is needed.
            resume: a checkpoint of `save` to go on from, made on any number of ranks; whether it is one of this run is
                for `resume.check_resume` to see.

        Raises:
            CheckpointError: `resume` is incomplete or belongs to another learning-rate schedule.
        """
        self.config, self.schedule, self.rank, self.ranks = config, schedule, rank, ranks
        lora = config.learner.lora_rank > 0
        self._adapter = Adapter(lora_scale(config.learner), checkpoint_digest(model_path)) if lora else None
        """What is trained, where it is a LoRA adapter."""
        self.steps_done = resumed_steps(resume, schedule) if resume else 0
        """Optimizer steps so far."""
        self.device = init_distributed(rank, ranks, rendezvous, config.learner.timeout_s)
        self._source = model_path
        self._collator = Collator(model_path)
        self._engine = Engine(self._trained_policy(resume), config)
        self._reference = self._make_reference(reference_path)
        if resume and self.steps_done:
            state = checkpoint.read_tensors(resume / checkpoint.OPTIMIZER)
            self._engine.load_optimizer(state, self.steps_done, self._collator.collate([], []).to(self.device))

    def _trained_policy(self, resume: Path | None) -> Policy:
        learner = self.config.learner
        policy = self._load(resume / checkpoint.MODEL if resume and not self._adapter else self._source)
        if learner.activation_checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        if self._adapter:
            add_adapter(policy.model, learner, self.config.trainer.seed)
            if resume:
                load_adapter(policy.model, checkpoint.read_tensors(resume / checkpoint.ADAPTER))
        return policy

    def _make_reference(self, path: Path | None) -> Any:
        if path is None:
            return None
        if self._adapter and path == self._source:
            return self._engine.base  # the frozen part of what is trained: a second model would be the same
        return frozen(self._load(path), self.config, self.device)

    def _load(self, path: Path) -> Policy:
        dtype = getattr(torch, self.config.model.dtype)
        return Policy.from_pretrained(path, dtype, self.config.learner.logprob_chunk_tokens)

    # ---- inference -------------------------------------------------------------------------------------------------

    def logprobs(self, rows: Sequence[TrainRow]) -> dict[int, FloatArray]:
        """Log-probs [T] under the current weights, 0 where not generated, of the rows that this rank computed.

        At the sampling temperature, as the generator reports them.

        Raises:
            InvalidTrajectoryError: no forward pass can make sense of a row.
        """
        for row in rows:
            self._collator.check(row)
        return self._infer(self._engine, rows)

    def reference_logprobs(self, rows: Sequence[TrainRow]) -> dict[int, FloatArray]:
        """The same under the reference policy; rows that no forward pass can make sense of are missing."""
        usable = [index for index, row in enumerate(rows) if self._is_usable(row)]
        results = self._infer(self._reference_policy(), [rows[index] for index in usable])
        return {usable[index]: values for index, values in results.items()}

    def cross_entropy(self, rows: Sequence[TrainRow]) -> tuple[float, int]:
        """Summed cross-entropy of the generated tokens of all rows at temperature 1, and their number."""
        sums = torch.zeros(2, dtype=torch.float64)
        for indices in self._plan(rows):
            batch = self._collator.collate(rows, indices)
            logprobs = self._no_grad(self._engine, batch, 1.0)
            sums += torch.tensor([-logprobs.double().sum().item(), len(batch.targets)], dtype=torch.float64)
        total, tokens = self._sum_over_ranks(sums)
        return total, int(tokens)

    def _infer(self, model: Any, rows: Sequence[TrainRow]) -> dict[int, FloatArray]:
        result: dict[int, FloatArray] = {}
        for indices in self._plan(rows):
            batch = self._collator.collate(rows, indices)
            logprobs = self._no_grad(model, batch, self.config.rollout.temperature)
            values = batch.split(logprobs) if indices else []
            for index, row_values in zip(batch.rows, values, strict=True):
                result[index] = np.zeros(len(rows[index].token_ids), np.float32)
                result[index][rows[index].generated] = row_values
        return result

    def _reference_policy(self) -> Any:
        if self._reference is None:
            raise LearnerError("There is no reference policy to compare with: algorithm.kl_coefficient is 0.")
        return self._reference

    def _no_grad(self, model: Any, batch: MicroBatch, temperature: float) -> Tensor:
        with torch.no_grad():
            logprobs: Tensor = model(batch.to(self.device), temperature)[0]
        return logprobs

    def _plan(self, rows: Sequence[TrainRow]) -> list[list[int]]:
        prompts = [self._collator.prompt(row) for row in rows]
        return plan(rows, prompts, self.ranks, self.config.learner.micro_batch_tokens)[self.rank]

    # ---- training --------------------------------------------------------------------------------------------------

    def fit(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """One optimizer step of supervised learning: mean cross-entropy of the generated tokens at temperature 1."""
        start = time.perf_counter()
        tokens = sum(int(row.generated.sum()) for row in rows)
        losses: list[Tensor] = []

        def loss(_: int, __: MicroBatch, logprobs: Tensor, ___: Tensor) -> Tensor:
            losses.append(-logprobs.detach().sum())
            return -logprobs.sum() / tokens

        norm = self._step(rows, self._plan(rows), 1.0, loss)
        (total,) = self._sum_over_ranks(torch.stack(losses).sum()[None])
        return self._metrics({"train/loss": total / tokens}, [norm], rows, start)

    def update(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """Learn from a batch of rollouts in `learner.updates_per_step` optimizer steps on whole groups each.

        Rows that no forward pass can make sense of are dropped and counted. `train/logp_gap` compares the generator's
        log-probs with the learner's before the first of these steps.

        Raises:
            LearnerError: no row can be used, or the loss or gradient is not finite.
        """
        start = time.perf_counter()
        usable = self._usable(rows)
        parts = split_by_group(usable, self.config.learner.updates_per_step)
        plans = [self._plan(part) for part in parts]
        temperature = self.config.rollout.temperature
        # The centre of the clipping is the policy before the first step. For the first part that is the policy of its
        # own forward pass; for later ones it has to be asked now.
        proximal: list[list[Tensor] | None] = [None]
        for part, steps in zip(parts[1:], plans[1:], strict=True):
            batches = (self._collator.collate(part, indices) for indices in steps)
            proximal.append([self._no_grad(self._engine, batch, temperature) for batch in batches])
        sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        norms = [
            self._step(part, steps, temperature, self._policy_loss(part, before, sums))
            for part, steps, before in zip(parts, plans, proximal, strict=True)
        ]
        total = dict(zip(_SUMS, self._sum_over_ranks(sums), strict=True))
        tokens = max(1.0, total["tokens"])
        metrics = {
            "train/loss": total["loss"] / len(parts),
            "train/kl": total["kl"] / tokens,
            "train/entropy": total["entropy"] / tokens,
            "train/clip_fraction": total["clipped"] / tokens,
            "train/behaviour_weight": total["behaviour_weight"] / tokens,
            "train/logp_gap": total["gap"] / tokens,
            "train/rows_dropped": float(len(rows) - len(usable)),
        }
        return self._metrics(metrics, norms, usable, start)

    def _policy_loss(self, rows: Sequence[TrainRow], proximal: list[Tensor] | None, sums: Tensor) -> Loss:
        """The loss function of one optimizer step over `rows`; adds to `sums` as it is called."""
        algorithm = self.config.algorithm
        trained = [int(row.generated.sum()) for row in rows]
        weights = row_weights(trained, algorithm.aggregation, self.config.rollout.max_new_tokens)
        weight_of = torch.as_tensor(weights, dtype=torch.float32)
        # Decided by the configuration, never by what a rank's rows bring along: under ZeRO-3 all ranks ask, or none.
        ask_reference = algorithm.kl_coefficient > 0 and algorithm.kl_placement == "loss"

        def loss(number: int, batch: MicroBatch, logprobs: Tensor, entropies: Tensor) -> Tensor:
            before = proximal[number] if proximal else logprobs.detach()
            reference = batch.reference_logprobs
            if ask_reference:
                reference = self._no_grad(self._reference_policy(), batch, self.config.rollout.temperature)
            tokens = TokenBatch(
                logprobs=logprobs,
                proximal_logprobs=before,
                behaviour_logprobs=batch.behaviour_logprobs,
                advantages=batch.advantages,
                mask=torch.ones_like(batch.targets, dtype=torch.bool),
                weights=weight_of[list(batch.rows)].to(self.device)[batch.sequence],
                sequence_ids=batch.sequence,
                entropy=entropies,
                reference_logprobs=reference,
            )
            result = policy_loss(tokens, algorithm)
            gap = (before - batch.behaviour_logprobs).abs().sum()
            parts = (result.loss.detach(), result.tokens, result.clipped, result.kl, result.entropy)
            sums.add_(torch.stack([x.to("cpu", torch.float64) for x in (*parts, result.behaviour_weight, gap)]))
            return result.loss

        return loss

    def _usable(self, rows: Sequence[TrainRow]) -> list[TrainRow]:
        usable = [row for row in rows if self._is_usable(row)]
        if not usable:
            raise LearnerError(f"None of the {len(rows)} rows of this batch can be trained on; the log says why.")
        return usable

    def _is_usable(self, row: TrainRow) -> bool:
        try:
            self._collator.check(row)
        except InvalidTrajectoryError as error:
            log.warning("A row is left out: %s", error)
            return False
        return True

    def _step(
        self, rows: Sequence[TrainRow], steps: Sequence[Sequence[int]], temperature: float, loss_of: Loss
    ) -> float:
        """One optimizer step over this rank's micro-batches; returns the norm of the gradient before clipping."""
        for number, indices in enumerate(steps):
            batch = self._collator.collate(rows, indices).to(self.device)
            loss = loss_of(number, batch, *self._engine(batch, temperature))
            if not torch.isfinite(loss):
                raise LearnerError(
                    f"The loss is {loss.item()} in optimizer step {self.steps_done} on rank {self.rank}."
                )
            self._engine.backward(loss)
        norm = self._engine.step(self.schedule.at(self.steps_done))
        if not np.isfinite(norm):
            raise LearnerError(f"The gradient has the norm {norm} in optimizer step {self.steps_done}.")
        self.steps_done += 1
        return norm

    def _metrics(
        self, metrics: dict[str, float], norms: list[float], rows: Sequence[TrainRow], start: float
    ) -> dict[str, float]:
        seconds = time.perf_counter() - start
        return metrics | {
            "train/grad_norm": float(np.mean(norms)),
            "train/lr": self.schedule.at(self.steps_done - 1),
            "train/tokens_per_s": sum(len(row.token_ids) for row in rows) / seconds,
        }

    def _sum_over_ranks(self, values: Tensor) -> list[float]:
        total = values.to(self.device, torch.float64)
        torch.distributed.all_reduce(total)
        sums: list[float] = total.tolist()
        return sums

    # ---- leaving the GPU -------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Leave the GPU to others: all weights and the optimizer's state go to the CPU's memory, until `reload`."""
        if isinstance(self._reference, torch.nn.Module):
            move_frozen(self._reference, torch.device("cpu"))
        self._engine.offload()

    def reload(self) -> None:
        """Come back to the GPU."""
        self._engine.reload()
        if isinstance(self._reference, torch.nn.Module):
            move_frozen(self._reference, self.device)

    # ---- weights and checkpoints -----------------------------------------------------------------------------------

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Checkpoint name, full weight), one after the other, a LoRA adapter merged in.

        Every rank must walk through all of them.
        """
        return self._engine.named_tensors()

    def publish(self, version: int) -> Push | None:
        """Make the current weights available to generators as `version`; rank 0 returns where they are.

        With LoRA that is the adapter alone: generators have the base.
        """
        tensors = self._engine.trained_tensors()
        if self.rank == 0:
            return publish(tensors, version, self._adapter)
        for _ in tensors:
            pass
        return None

    def save_model(self, out: Path) -> None:
        """Write the weights as a Hugging Face checkpoint to the directory `out`."""
        checkpoint.write_model(self.named_tensors(), self._source, out, write=self.rank == 0)

    def save(self, path: Path, state: dict[str, Any], keep: int) -> None:
        """Write a whole checkpoint to `path`, then remove older ones beside it but for the newest `keep`.

        Args:
            path: such as `checkpoints/step_000012`, on a file system that every rank's node sees.
            state: of the caller, as JSON.
            keep: complete checkpoints that stay, this one included.

        Raises:
            CheckpointWriteError: the disk is full or cannot be written.
        """
        if self.rank != 0:
            self._gather_for_rank_0()
            return
        with checkpoint.atomic_directory(path) as building:
            self.save_model(building / checkpoint.MODEL)
            if self._adapter:
                adapter = building / checkpoint.ADAPTER
                checkpoint.write_tensors(stored_adapter(self._engine.trained_tensors()), adapter, STEM)
                write_adapter_config(self.config.learner, self._source, adapter)
            if self.steps_done:
                checkpoint.write_tensors(self._engine.optimizer_tensors(), building / checkpoint.OPTIMIZER, "optimizer")
            learner = {"steps_done": self.steps_done, "schedule": asdict(self.schedule)}
            checkpoint.write_json(building / checkpoint.LEARNER_FILE, learner)
            checkpoint.write_json(building / checkpoint.STATE_FILE, state)
        checkpoint.prune(path.parent, keep)

    def close(self) -> None:
        """Let go of the engine and of the other ranks; another learner can then be made in this process."""
        self._engine.close()

    def _gather_for_rank_0(self) -> None:
        for _ in self.named_tensors():
            pass
        if self._adapter:
            for _ in self._engine.trained_tensors():
                pass
        if self.steps_done:
            for _ in self._engine.optimizer_tensors():
                pass


def resumed_steps(path: Path, schedule: LrSchedule) -> int:
    """Optimizer steps of a checkpoint, if a learner with this schedule can go on from it.

    Raises:
        CheckpointError: it cannot, or the checkpoint is incomplete.
    """
    checkpoint.read_state(path)  # refuses an incomplete one
    saved = checkpoint.read_json(path / checkpoint.LEARNER_FILE)
    done, before = int(saved["steps_done"]), LrSchedule(**saved["schedule"])
    last = max(0, done - 1)
    if any(before.at(step) != schedule.at(step) for step in (0, last // 2, last)):
        raise checkpoint.CheckpointError(
            f"{path} was trained with another learning rate ({before.describe()}; this run: {schedule.describe()}). "
            "Set learner.lr, learner.schedule, learner.warmup_steps and the number of steps as they were, or start a "
            "new run directory."
        )
    return done
