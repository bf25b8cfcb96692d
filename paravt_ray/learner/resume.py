"""Whether a run can go on from its newest checkpoint. Every reason to refuse is found here, before anything is changed.

A checkpoint's data position, moments and reference policy mean nothing without what they came from, so each checkpoint
keeps that as its origin, in `state.json`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paravt_ray.config import Config, config_items
from paravt_ray.learner.checkpoint import CheckpointError, latest_complete, read_state
from paravt_ray.learner.learner import resumed_steps
from paravt_ray.learner.schedule import LrSchedule
from paravt_ray.weights.digest import model_digest

SETTINGS = ("model.dtype", "model.frames_as", "trainer.seed", "learner.lora_rank", "learner.lora_alpha")
"""Keys that must be as they were, in every kind of training."""

_OTHERWISE = "or start a new run directory."


@dataclass(frozen=True)
class Origin:
    """What a run's checkpoints belong to."""

    model: str
    """Digest of the model's files: the first weights, the reference policy and the processor are made from them."""
    samples: str
    """Digest of the usable samples, in their order."""
    settings: dict[str, Any]
    """Values by dotted configuration key."""

    @classmethod
    def of(cls, config: Config, model: Path, samples: Iterable[Any], *more: str) -> Origin:
        """The origin of a run's checkpoints. Reads all files of the model: a minute for a large one.

        Args:
            config: the run's.
            model: checkpoint directory that training starts from.
            samples: of each usable sample what makes it the one that it is, as JSON; not where its files lie.
            more: keys that must be as they were, beside SETTINGS.
        """
        items = config_items(config)
        digest = hashlib.sha256()
        for sample in samples:
            digest.update(f"{json.dumps(sample)}\n".encode())
        return cls(model_digest(model), digest.hexdigest()[:16], {key: items[key] for key in (*SETTINGS, *more)})

    def state(self, step: int, **more: Any) -> dict[str, Any]:
        """What a checkpoint keeps for `check_resume`, with what else its owner needs."""
        return {"step": step, "origin": asdict(self), **more}


@dataclass(frozen=True)
class Resume:
    """Where a run goes on."""

    checkpoint: Path
    step: int
    """The last step that is done."""
    state: dict[str, Any]
    """As it was given to `Origin.state`."""


def check_resume(checkpoints: Path, origin: Origin, schedule: LrSchedule) -> Resume | None:
    """Where a run goes on: behind its newest complete checkpoint, or at its beginning (None). Changes nothing.

    Args:
        checkpoints: directory of the run's.
        origin: of this run.
        schedule: the learning rate of this run's optimizer steps.

    Raises:
        CheckpointError: it cannot go on; the message names what differs, or the file that is damaged.
    """
    checkpoint = latest_complete(checkpoints)
    if checkpoint is None:
        return None
    state = read_state(checkpoint)
    _check_origin(checkpoint, state.get("origin", {}), origin)
    resumed_steps(checkpoint, schedule)
    return Resume(checkpoint, int(state["step"]), state)


def _check_origin(checkpoint: Path, kept: Mapping[str, Any], origin: Origin) -> None:
    if not kept or origin.settings.keys() - kept["settings"].keys():
        raise CheckpointError(
            f"{checkpoint} does not say which model, data and settings it came from: an earlier version of this "
            f"program wrote it. Go on with that version, {_OTHERWISE}"
        )
    for key, value in origin.settings.items():
        if (before := kept["settings"][key]) != value:
            raise CheckpointError(
                f"{checkpoint} was made with {key}={before}, this run has {value}. Set {key}={before}, {_OTHERWISE}"
            )
    if kept["model"] != origin.model:
        raise CheckpointError(
            f"{checkpoint} comes from another model than the one at model.path (digest {kept['model']}, here "
            f"{origin.model}): it would be compared with another reference policy and shown other tokens. Set "
            f"model.path to the model that the run began with, {_OTHERWISE}"
        )
    if kept["samples"] != origin.samples:
        raise CheckpointError(
            f"The usable samples of data.train are not those of {checkpoint}: their order cannot be continued. "
            f"Restore the data (files and videos), {_OTHERWISE}"
        )
