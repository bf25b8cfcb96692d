"""Held-out evaluation on RL samples: greedy, one rollout a question, at fixed frame budgets or at the gated one.

It goes through the same fleet and the same agent loop as training. What failed is counted and never scored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from paravt_ray.config import Config
from paravt_ray.episode import CallStatus, Episode, Group, Sample
from paravt_ray.rewards.judge import Judge
from paravt_ray.rewards.outcomes import Outcome, ScoringFailure, score_all
from paravt_ray.rollout.gating import draw_frame_budget
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.tracking.metrics import format_metrics, reward_metrics, tool_metrics

logger = logging.getLogger(__name__)

Scorer = Callable[[list[Episode]], list[Outcome]]
"""Gives each episode its outcome, in order: `RewardPool.score`, or `in_process` without one."""


@dataclass(frozen=True)
class Slice:
    """Some of the scored episodes, at least one."""

    episodes: int
    accuracy: float
    """Their mean R_acc."""


@dataclass(frozen=True)
class HeldOutReport:
    """What an evaluation found."""

    asked: int
    """Rollouts that were asked for: samples times budgets."""
    slices: dict[str, Slice]
    """`overall`, `called` (a call was served) and `not_called`, `k4`, `k8`, ... by frame budget, `mcq`, `tvg`, `oe`;
    those without an episode are left out."""
    failures: dict[str, int]
    """Rollouts without an episode or without a reward, by kind; `asked` is these and the scored ones."""
    metrics: dict[str, float]
    """`reward/*`, `format/*` and `tool/*` over the scored episodes, named as in training."""

    @property
    def scored(self) -> int:
        """Episodes that have a reward."""
        return self.slices["overall"].episodes if "overall" in self.slices else 0

    def flat(self) -> dict[str, float]:
        """Everything as flat numbers: the metrics, `accuracy/SLICE`, `scored` and `failed`."""
        accuracies = {f"accuracy/{name}": part.accuracy for name, part in self.slices.items()}
        return self.metrics | accuracies | {"scored": float(self.scored), "failed": float(self.asked - self.scored)}

    def text(self) -> str:
        """The report as lines for people."""
        names = ("format/compliance", "tool/call_rate", "tool/usage_rate")
        lines = [
            *(f"accuracy/{name:<16} {part.accuracy:6.3f}  ({part.episodes})" for name, part in self.slices.items()),
            *(f"{name:<25} {self.metrics[name]:6.3f}" for name in names if name in self.metrics),
        ]
        if self.failures:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in self.failures.items())
            lines.append(f"Not scored: {self.asked - self.scored} of {self.asked} ({kinds}).")
        return "\n".join(lines)


class Fleet(Protocol):
    """What is asked of the generators."""

    def rollout(self, specs: Sequence[GroupSpec]) -> list[Group]:
        """Roll out prompts and return their groups."""
        ...


def in_process(config: Config) -> Scorer:
    """Score in this process, which a scorer that hangs would hold up."""
    judge = Judge.of(config)
    return lambda episodes: score_all(episodes, config, judge).outcomes


def evaluate(
    fleet: Fleet,
    samples: Sequence[Sample],
    config: Config,
    budgets: Sequence[int] | None = None,
    *,
    tag: str,
    score: Scorer,
) -> HeldOutReport:
    """Ask every sample once at each budget, or, without budgets, once at the K that training would draw for it.

    `tag` distinguishes the evaluation's group ids from those of the training run and of other evaluations.
    """
    specs = held_out_specs(samples, config, budgets, tag)
    return report(len(specs), fleet.rollout(specs), score)


def held_out_specs(
    samples: Sequence[Sample], config: Config, budgets: Sequence[int] | None, tag: str
) -> list[GroupSpec]:
    """What `evaluate` rolls out."""
    rollout, seed = config.rollout, config.trainer.seed

    def budgets_of(sample: Sample) -> Sequence[int]:
        if budgets is not None:
            return budgets
        drawn = draw_frame_budget(seed, sample.sample_id, 0, rollout.frame_budgets) if rollout.gating else None
        return [drawn or rollout.overview_frames]

    return [
        GroupSpec(f"{tag}/{number}/k{budget}", sample, budget, group_size=1, temperature=0.0, seed=seed)
        for number, sample in enumerate(samples)
        for budget in budgets_of(sample)
    ]


def report(asked: int, groups: Iterable[Group], score: Scorer) -> HeldOutReport:
    """Score the episodes of the groups and sum them up; sets `rewards` of each scored episode."""
    failures: Counter[str] = Counter()
    scored: list[Episode] = []
    groups = list(groups)
    for group in groups:
        failures.update(reason.split(":", 1)[0] for reason in group.failures)
    episodes = [episode for group in groups for episode in group.episodes]
    for episode, outcome in zip(episodes, score(episodes), strict=True):
        if isinstance(outcome, ScoringFailure):
            logger.warning("Sample %s cannot be scored: %s", episode.sample.sample_id, outcome.reason)
            failures["reward"] += 1
        else:
            episode.rewards = outcome
            scored.append(episode)
    lost = asked - len(scored) - failures.total()
    if lost > 0:
        failures["lost"] = lost
    metrics = reward_metrics(scored) | tool_metrics(scored) | format_metrics(scored) if scored else {}
    return HeldOutReport(asked, _slices(scored), dict(failures), metrics)


def _slices(scored: Sequence[Episode]) -> dict[str, Slice]:
    """Mean accuracy by every slice that an episode belongs to."""
    parts: dict[str, list[float]] = {}
    for episode in sorted(scored, key=lambda e: (e.frame_budget, e.sample.question_type)):
        assert episode.rewards is not None
        served = any(record.status is CallStatus.SERVED for record in episode.call_records)
        called = "called" if served else "not_called"
        for name in ("overall", called, f"k{episode.frame_budget}", episode.sample.question_type):
            parts.setdefault(name, []).append(episode.rewards.accuracy)
    return {name: Slice(len(values), fmean(values)) for name, values in parts.items()}
