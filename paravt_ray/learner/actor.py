"""The learner on Ray: one actor a rank, driven as one object, with a deadline for every call.

If one rank fails or is late, the others wait for it in a collective for ever; so all are killed, and the error names
the rank.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from paravt_ray.config import Config
from paravt_ray.episode import TrainRow
from paravt_ray.errors import UserError
from paravt_ray.learner.engine import denormals_flushed
from paravt_ray.learner.learner import FloatArray, Learner, LearnerError
from paravt_ray.learner.schedule import LrSchedule
from paravt_ray.placement import has_gpus, place, reserve
from paravt_ray.weights.push import Push

log = logging.getLogger(__name__)


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class LearnerActor:
    """One rank: a process with its own share of the cores, or its own GPU."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._learner: Learner

    def rendezvous(self) -> str:
        """Where rank 0 will listen."""
        return f"tcp://{ray.util.get_node_ip_address()}:{free_port()}"

    def device(self) -> str:
        """What this rank computes on; two ranks must never name the same GPU."""
        import torch

        if not torch.cuda.is_available():
            return "cpu"
        return str(torch.cuda.get_device_properties(0).uuid)

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Build the learner; takes its arguments."""
        with denormals_flushed():
            self._learner = Learner(*args, rank=self._rank, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the learner."""
        with denormals_flushed():
            return getattr(self._learner, method)(*args, **kwargs)


class LearnerGroup:
    """All ranks. Every method returns when all of them are done, or raises within `learner.timeout_s`."""

    def __init__(
        self,
        config: Config,
        model_path: Path,
        *,
        supervised: LrSchedule | None = None,
        resume: Path | None = None,
        placement_group: PlacementGroup | None = None,
    ) -> None:
        """Start the ranks on the cluster that this process is connected to.

        Args:
            config: the whole configuration.
            model_path: checkpoint directory that training starts from, and the reference policy.
            supervised: the schedule of supervised training; None for reinforcement learning, whose schedule and
                reference policy follow from the configuration.
            resume: a checkpoint of `save` to go on from.
            placement_group: where each rank shares a place with a generator; None for room of their own.

        Raises:
            CheckpointError: `resume` cannot be gone on from.
            PlacementError: the cluster has no room for them.
            LearnerError: one of them did not come up.
        """
        self._timeout_s = config.learner.timeout_s
        self._ranks = config.learner.ranks
        schedule = supervised or LrSchedule.of_training(config)
        reference = model_path if config.algorithm.kl_coefficient > 0 and supervised is None else None
        log.info("%s", schedule.describe())
        self._own_placement = None if placement_group else reserve(self._ranks, 1, "learner ranks", "learner.ranks")
        self._actors: list[Any] = []
        try:
            self._actors = [self._start_actor(rank, placement_group) for rank in range(self._ranks)]
            _refuse_shared(self._call("device", direct=True))
            rendezvous = ray.get(self._actors[0].rendezvous.remote(), timeout=self._timeout_s)
            self._call(
                "start",
                config,
                model_path,
                schedule,
                direct=True,
                ranks=self._ranks,
                rendezvous=rendezvous,
                reference_path=reference,
                resume=resume,
            )
        except BaseException:
            self.close()
            raise

    def _start_actor(self, rank: int, placement_group: PlacementGroup | None) -> Any:
        where = place(placement_group, rank, share=0.5) if placement_group else place(self._own_placement, rank)
        environment = {"env_vars": _environment(self._ranks, has_gpus())}
        return ray.remote(LearnerActor).options(**where, max_restarts=0, runtime_env=environment).remote(rank)

    # ---- what the learner does -------------------------------------------------------------------------------------

    def update(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """Learn from a batch of rollouts; see `Learner.update`."""
        metrics: dict[str, float] = self._call("update", ray.put(list(rows)))[0]
        return metrics

    def fit(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """One supervised optimizer step; see `Learner.fit`."""
        metrics: dict[str, float] = self._call("fit", ray.put(list(rows)))[0]
        return metrics

    def logprobs(self, rows: Sequence[TrainRow]) -> list[FloatArray]:
        """Log-probs [T] of each row under the current weights at the sampling temperature, 0 where not generated."""
        found = self._by_row("logprobs", rows)
        return [found[index] for index in range(len(rows))]

    def add_reference_logprobs(self, rows: Sequence[TrainRow]) -> None:
        """Fill in every row's `reference_logprobs`.

        A row that no forward pass can make sense of, and that `update` will therefore drop, gets its own log-probs:
        no divergence.
        """
        found = self._by_row("reference_logprobs", rows)
        for index, row in enumerate(rows):
            row.reference_logprobs = found.get(index, row.behaviour_logprobs)

    def cross_entropy(self, rows: Sequence[TrainRow]) -> tuple[float, int]:
        """Summed cross-entropy of the generated tokens of all rows, and their number."""
        result: tuple[float, int] = self._call("cross_entropy", ray.put(list(rows)))[0]
        return result

    def publish(self, version: int) -> Push:
        """Make the current weights available to generators as `version`."""
        push: Push = self._call("publish", version)[0]
        return push

    def offload(self) -> None:
        """Leave the GPUs to others until `reload`; see `Learner.offload`."""
        self._call("offload")

    def reload(self) -> None:
        """Come back to the GPUs after `offload`."""
        self._call("reload")

    def save(self, path: Path, state: dict[str, Any], keep: int) -> None:
        """Write a whole checkpoint; see `Learner.save`."""
        self._call("save", path.absolute(), state, keep)

    def save_model(self, out: Path) -> None:
        """Write the weights as a Hugging Face checkpoint to the directory `out`."""
        self._call("save_model", out.absolute())

    def __enter__(self) -> LearnerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks. May be called twice."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._own_placement:
            remove_placement_group(self._own_placement)

    # ---- calling -----------------------------------------------------------------------------------------------------

    def _by_row(self, method: str, rows: Sequence[TrainRow]) -> dict[int, FloatArray]:
        parts: list[dict[int, FloatArray]] = self._call(method, ray.put(list(rows)))
        return {index: values for part in parts for index, values in part.items()}

    def _call(self, method: str, *args: Any, direct: bool = False, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks at once and return its results by rank.

        Raises:
            UserError: of the first rank that failed, or LearnerError for a rank that died or was late. All ranks are
                gone then.
        """
        if not self._actors:
            raise LearnerError("The learner was closed, or ended by an earlier failure.")
        calls = [getattr(a, method) if direct else a.call for a in self._actors]
        leading = () if direct else (method,)
        refs = [call.remote(*leading, *args, **kwargs) for call in calls]
        try:
            return self._results(method, refs)
        except BaseException:
            self.close()
            raise

    def _results(self, method: str, refs: list[Any]) -> list[Any]:
        deadline = time.monotonic() + self._timeout_s
        waiting = list(refs)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                late = [refs.index(ref) for ref in waiting]
                raise LearnerError(
                    f"Learner rank {', '.join(map(str, late))} of {self._ranks} did not finish `{method}` within "
                    f"learner.timeout_s={self._timeout_s:g} s; all ranks were ended."
                )
            for ref in done:
                _raise_failure(ref, refs.index(ref), method)
        return list(ray.get(refs))


def _raise_failure(ref: Any, rank: int, method: str) -> None:
    """Raise what the call behind `ref` failed with, if it did."""
    try:
        ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError):
            raise cause from None
        raise LearnerError(f"Learner rank {rank} failed in `{method}`: {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        raise LearnerError(
            f"Learner rank {rank} died in `{method}` ({str(error).splitlines()[0]}). Out of memory is the usual cause: "
            "lower learner.micro_batch_tokens, or raise learner.zero_stage or learner.ranks."
        ) from error
    except RayError as error:
        raise LearnerError(f"Learner rank {rank} gave no answer to `{method}`: {error}") from error


def _refuse_shared(devices: Sequence[str]) -> None:
    gpus = [device for device in devices if device != "cpu"]
    if len(set(gpus)) != len(gpus):
        raise LearnerError(
            f"Several learner ranks were given the same GPU ({', '.join(gpus)}). Unset "
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES where the cluster is started."
        )


def _environment(ranks: int, gpu: bool) -> dict[str, str]:
    """Settings of libraries in a rank's process.

    OpenMP threads that spin while they wait would take the cores from the generators, which then run many times slower.
    """
    threads = 8 if gpu else max(1, len(os.sched_getaffinity(0)) // ranks)
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
