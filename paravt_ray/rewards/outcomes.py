"""Scoring many episodes: each gets its rewards or the reason why it has none, and none touches the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paravt_ray.config import Config
from paravt_ray.episode import Episode, Rewards
from paravt_ray.rewards.judge import Judge, JudgementFailure, JudgeUsage
from paravt_ray.rewards.score import score_episode


@dataclass(frozen=True)
class ScoringFailure:
    """Why an episode has no reward."""

    reason: str


Outcome = Rewards | ScoringFailure


@dataclass(frozen=True)
class Scored:
    """Outcomes in the order of the episodes, and what the judge was asked for them."""

    outcomes: list[Outcome]
    usage: JudgeUsage


def score_all(episodes: Sequence[Episode], config: Config, judge: Judge | None) -> Scored:
    """Score episodes, after the judge has given its score to those that need one.

    Takes at most `reward.timeout_s` for each `reward.judge_concurrency` episodes that go to the judge.

    Args:
        episodes: finished ones.
        config: the run's.
        judge: `Judge.of(config)`.
    """
    asked = [place for place, episode in enumerate(episodes) if judge is not None and _needs_judgement(episode)]
    usage = JudgeUsage()
    judgements: dict[int, float | JudgementFailure] = {}
    if judge is not None and asked:
        scores, usage = judge.judge([(episodes[place].sample, episodes[place].answer or "") for place in asked])
        judgements = dict(zip(asked, scores, strict=True))
    return Scored([_outcome(e, config, judgements.get(place)) for place, e in enumerate(episodes)], usage)


def _needs_judgement(episode: Episode) -> bool:
    """Whether there is an open-ended answer; where there is none, it is wrong without asking anybody."""
    return episode.sample.question_type == "oe" and bool((episode.answer or "").strip())


def _outcome(episode: Episode, config: Config, judgement: float | JudgementFailure | None) -> Outcome:
    if isinstance(judgement, JudgementFailure):
        return ScoringFailure(judgement.reason)
    try:
        return score_episode(episode, config, judgement)
    except Exception as error:  # whatever it was, it is reported for this episode alone
        return ScoringFailure(f"scoring raised {type(error).__name__}: {error}")
