"""Rewards: pure functions of finished episodes (`score_episode`), a judge for open-ended answers (`rewards.judge`), and
the actors that run them (`rewards.actor`)."""

from paravt_ray.rewards.accuracy import accuracy
from paravt_ray.rewards.format import FormatStats, format_stats
from paravt_ray.rewards.score import score_episode

__all__ = ["FormatStats", "accuracy", "format_stats", "score_episode"]
