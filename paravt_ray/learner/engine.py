"""Setting up torch.distributed and a DeepSpeed engine around the policy, the same way on CPU and on GPU."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from paravt_ray.config import Config
from paravt_ray.learner.batching import MicroBatch
from paravt_ray.learner.lora import lora_scale, trained_parameters, whole_weights, without_adapter
from paravt_ray.learner.policy import Policy
from paravt_ray.weights.lora import merged

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's state of each parameter, beside its step count."""


def init_distributed(rank: int, ranks: int, rendezvous: str, timeout_s: float) -> torch.device:
    """Join the process group and choose this rank's device. Call it before anything else of DeepSpeed.

    Args:
        rank: of `ranks`.
        ranks: processes that train together.
        rendezvous: such as `tcp://10.0.0.1:29500`, the same on every rank.
        timeout_s: how long a collective may wait for the other ranks.
    """
    cuda = torch.cuda.is_available()
    os.environ["DS_ACCELERATOR"] = "cuda" if cuda else "cpu"  # DeepSpeed's own switch; it guesses and warns otherwise
    import deepspeed

    # DeepSpeed uses collectives under names that torch has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # Ray shows an actor its own GPU only
    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    # DeepSpeed would compile a shared-memory collective for CPUs here: minutes on first use, and a compiler needed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", dist_init_required=False)
    return device


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Take numbers below 1e-38 for 0 within the block, in this thread and those that it starts meanwhile.

    Softmax and Adam leave many of them, on which a CPU is many times slower. OpenMP's threads keep what they were
    started with, so that what starts them, the first large computation of a process, has to be inside too.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def deepspeed_config(config: Config) -> dict[str, Any]:
    """DeepSpeed's configuration. Gradient accumulation is ours: `backward` adds up, `step` reduces and applies."""
    learner = config.learner
    zero: dict[str, Any] = {"stage": learner.zero_stage}
    if learner.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # Without ZeRO DeepSpeed does not report the norm that it clips by: `Engine` clips there itself.
        "gradient_clipping": learner.grad_clip if learner.zero_stage else 0.0,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def frozen(policy: Policy, config: Config, device: torch.device) -> Any:
    """A policy for inference only, called as the trained one is; under ZeRO-3 it is spread over the ranks too."""
    import deepspeed

    policy.requires_grad_(False)
    if config.learner.zero_stage < 3:
        return policy.to(device)
    return deepspeed.initialize(model=policy, config=deepspeed_config(config))[0]


def move_frozen(module: Any, device: torch.device) -> None:
    """Move parameters that are not trained, which DeepSpeed leaves where they are; under ZeRO-3 this rank's part."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            held = getattr(parameter, "ds_tensor", parameter)
            held.data = held.data.to(device)


class Engine:
    """A policy under DeepSpeed: forward, backward, step, and its full tensors whatever the ZeRO stage."""

    def __init__(self, policy: Policy, config: Config) -> None:
        """Wrap for training with torch's AdamW (DeepSpeed's own optimizers compile code on first use)."""
        import deepspeed

        learner = config.learner
        self._settings = learner
        self.zero_stage = learner.zero_stage
        self._trained, self._whole = trained_parameters(policy.model), whole_weights(policy.model)
        self._limit = learner.grad_clip or float("inf")
        self._norm = 0.0
        self._optimizer = torch.optim.AdamW(
            self._trained.values(),
            lr=learner.lr,
            betas=(learner.beta1, learner.beta2),
            weight_decay=learner.weight_decay,
            fused=True,
        )
        if self.zero_stage == 0:
            self._optimizer.register_step_pre_hook(self._clip)
        self._engine, *_ = deepspeed.initialize(
            model=policy, optimizer=self._optimizer, config=deepspeed_config(config)
        )
        self._engine.train()
        self._model = policy.model

    def __call__(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """The policy's forward: log-probs [N] and entropies [N]."""
        output: tuple[Tensor, Tensor] = self._engine(batch, temperature)
        return output

    def base(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """The forward of the model that a LoRA adapter is trained on, without the adapter."""
        with without_adapter(self._model):
            return self(batch, temperature)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of the loss; shares are summed over ranks and calls."""
        self._engine.backward(loss * torch.distributed.get_world_size())  # DeepSpeed averages over ranks

    def step(self, lr: float) -> float:
        """Apply the gradients; returns their global norm before clipping."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        return self._norm if self.zero_stage == 0 else float(self._engine.get_global_grad_norm())

    def _clip(self, *_: Any) -> None:
        # Gradients are already reduced here. With ZeRO, DeepSpeed clips and reports the norm; without, only we do.
        self._norm = float(torch.nn.utils.clip_grad_norm_(self._trained.values(), self._limit))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Checkpoint name, full weight) one after the other, a LoRA adapter merged in.

        Under ZeRO-3 every rank must walk through all of them. A tensor is valid only until the next one is asked for.
        """
        for name, parts in self._whole.items():
            with self._gathered(parts):
                yield name, self._weight(*(part.data for part in parts))

    def trained_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Name, full tensor) of what is trained, in the same way: a LoRA adapter's alone, or all weights."""
        for name, parameter in self._trained.items():
            with self._gathered((parameter,)):
                yield name, parameter.data

    def optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(State, full float32 tensor) such as `exp_avg.lm_head.weight`; every rank must walk through all of them.

        Only once a step was made. With bfloat16 weights the float32 ones come along as `master.*`.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for name, parameter in self._trained.items():
            for key in MOMENTS:
                full = safe_get_full_optimizer_state(parameter, key) if self.zero_stage else self._state(parameter)[key]
                yield f"{key}.{name}", full
            if parameter.dtype != torch.float32:
                yield f"master.{name}", safe_get_full_fp32_param(parameter)

    def load_optimizer(self, tensors: Iterable[tuple[str, Tensor]], steps: int, blank: MicroBatch) -> None:
        """Restore what `optimizer_tensors` gave, after `steps` optimizer steps, on any number of ranks.

        Args:
            tensors: the same names and full tensors.
            steps: optimizer steps done.
            blank: a micro-batch without rows.
        """
        # DeepSpeed creates its states in the first step: make one that changes nothing.
        logprobs, _ = self(blank, 1.0)
        self.backward(logprobs.sum())
        self.step(lr=0.0)
        expected = {f"{key}.{name}" for name in self._trained for key in MOMENTS}
        for key_and_name, value in tensors:
            key, _, name = key_and_name.partition(".")
            expected.discard(key_and_name)
            self._restore(self._trained[name], key, value.to(self._engine.device))
        if expected:
            raise KeyError(f"The optimizer state lacks {len(expected)} tensors, such as {sorted(expected)[0]}.")
        for state in self._optimizer.state.values():
            state["step"].fill_(steps)

    def offload(self) -> None:
        """Move weights and optimizer state to the CPU's memory; nothing can be computed until `reload`."""
        move_frozen(self._model, torch.device("cpu"))
        # Not pinned: DeepSpeed would pin anew in every step what is given back at `reload`.
        self._engine.offload_states(pin_memory=False)

    def reload(self) -> None:
        """Move back what `offload` has moved."""
        self._engine.reload_states()
        move_frozen(self._model, self._engine.device)
        zero = self._engine.optimizer
        if self.zero_stage == 2 and zero._hp_optimizer_states_linked:
            # DeepSpeed makes each weight's link to its optimizer state anew, and leaves it empty: it fills it in the
            # first step alone. Checkpoints are read through it.
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def close(self) -> None:
        """End DeepSpeed's engine and leave the process group."""
        import deepspeed

        self._engine.destroy()
        deepspeed.comm.destroy_process_group()

    def _weight(self, base: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        return base if a is None or b is None else merged(base, a, b, lora_scale(self._settings))

    def _gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Within the block they are whole on every rank."""
        import deepspeed

        gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
            list(parameters), enabled=self.zero_stage == 3
        )
        return gathered

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._optimizer.state[parameter]
        return state

    def _restore(self, parameter: Any, key: str, value: Tensor) -> None:
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        if self.zero_stage == 0:
            self._state(parameter)[key].copy_(value)
        elif self.zero_stage < 3:
            if key == "master":
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, key)
        else:
            # This rank's part; the last rank's is padded, which DeepSpeed's own setter of full tensors overlooks.
            size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()
            part = torch.nn.functional.pad(
                value.flatten(), (0, size * torch.distributed.get_world_size() - value.numel())
            )
            part = part[rank * size : (rank + 1) * size]
            if key == "master":
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, key)
