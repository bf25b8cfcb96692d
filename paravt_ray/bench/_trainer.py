"""The real loop of `paravt train`, with actors that the bench has started, timed from outside."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from rich.console import Console

from paravt_ray.colocation import Handover
from paravt_ray.config import Config
from paravt_ray.episode import Sample
from paravt_ray.learner.actor import LearnerGroup
from paravt_ray.rewards.actor import RewardPool
from paravt_ray.rollout.fleet import GeneratorFleet
from paravt_ray.tracking.mlflow_log import MlflowLogger
from paravt_ray.tracking.progress import Progress
from paravt_ray.tracking.run_dir import RunDir
from paravt_ray.tracking.tracker import Tracker
from paravt_ray.trainer import Trainer


class BenchTrainer(Trainer):
    """`Trainer`, but for its start. Everything it does in a step is the same, logging and MLflow included."""

    def __init__(
        self, config: Config, samples: Sequence[Sample], run: RunDir, fleet: GeneratorFleet, learner: object
    ) -> None:
        """`fleet` and `learner` (a `LearnerGroup`, or what stands for one) must live longer than the trainer."""
        progress = Progress(config.trainer.steps, Console(quiet=True))
        super().__init__(config, Path(config.model.path), samples, run, progress)
        self.fleet, self.learner = fleet, cast(LearnerGroup, learner)
        self.handover = Handover(self.fleet, self.learner, shared=False)

    def __enter__(self) -> BenchTrainer:
        """Start what is left to start, and push the first weights."""
        with ExitStack() as stack:
            mlflow = stack.enter_context(MlflowLogger(self.run_dir, self.config))
            self.tracker = Tracker(self.run_dir, self.progress, mlflow)
            self.rewards = RewardPool(self.config)
            stack.callback(self.rewards.close)
            self.push()
            self._stack = stack.pop_all()
        return self

    def timed_step(self, step: int) -> float:
        """Do a step; seconds from its beginning until everything is written down."""
        started = time.perf_counter()
        self.step(step, [])
        return time.perf_counter() - started
