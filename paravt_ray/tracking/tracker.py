"""One place that a step is reported to: the run directory, the screen, and through the run directory MLflow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from paravt_ray.episode import Group
from paravt_ray.tracking.episodes import write_episodes
from paravt_ray.tracking.metrics import split_finite
from paravt_ray.tracking.mlflow_log import DROPPED, MlflowLogger
from paravt_ray.tracking.progress import Progress
from paravt_ray.tracking.run_dir import RunDir


class Tracker:
    """Reports finished steps. Nothing here waits for a server."""

    def __init__(self, run: RunDir, progress: Progress, mlflow: MlflowLogger) -> None:
        """All three must live as long as the tracker."""
        self._run = run
        self._progress = progress
        self._mlflow = mlflow
        self._problem = ""

    def log_start(self, metrics: Mapping[str, float]) -> None:
        """Record what was measured before the first step, as step 0."""
        finite, dropped = split_finite(metrics)
        self._run.log_metrics(0, {**finite, DROPPED: float(len(dropped))})

    def log_step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group] = ()) -> None:
        """Record a step: its trajectories, then its metrics. NaN and infinite values are left out and announced.

        Raises:
            OSError: the disk is full or gone.
        """
        finite, dropped = split_finite(metrics)
        finite[DROPPED] = float(len(dropped))
        if groups:
            write_episodes(self._run.episodes_file(step), groups)
        self._run.log_metrics(step, finite)
        self._progress.step(step, finite)
        failures = Counter(reason for group in groups for reason in group.failures)
        if failures:
            reason, count = failures.most_common(1)[0]
            self._progress.warn(f"{failures.total()} rollouts of step {step} failed; {count} of them: {reason}")
        if dropped:
            self._progress.warn(f"NaN or infinite in step {step}: {', '.join(dropped)}.")
        self._watch_mlflow()

    def _watch_mlflow(self) -> None:
        problem = self._mlflow.problem()
        if problem and not self._problem:
            self._progress.warn(f"{problem} The run goes on.")
        self._problem = problem
