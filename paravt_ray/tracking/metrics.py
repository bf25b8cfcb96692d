"""The metrics of one step's rollouts, under the names that `metrics.jsonl` and MLflow share.

    reward/{total,accuracy,format,anchor,tool}   means over episodes
    tool/call_rate                               valid calls per episode (kappa in the paper)
    tool/usage_rate                              share of episodes with a valid call
    tool/width                                   valid calls per turn that makes one
    tool/error_rate                              share of attempted calls that were answered with an error
    tool/latency_{p50,p95}                       seconds of a call that was run, sub-agent included
    format/{compliance,think_closed,answer_closed,calls_closed}   shares, see `paravt_ray.rewards.FormatStats`
    rollout/{episodes,failed}                    counts
    rollout/turns                                assistant turns per episode
    rollout/new_tokens                           sampled tokens of the step, sub-agents included
    rollout/tokens_per_s                         the same per second in which the generators worked on the step
    rollout/staleness                            versions between an episode's oldest weights and the learner's, mean
    rollout/duplicate_rate                       share of valid calls that repeat an earlier one of their episode

A metric that nothing can be said about in a step (latency without a call) is left out of it. The other prefixes
(`train/`, `sync/`, `time/`, `eval/`) and `reward/judge_*` are filled in where those things are measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np

from paravt_ray.episode import NOT_GENERATED, CallRecord, CallStatus, Episode, Group, Trajectory
from paravt_ray.rewards import format_stats

_VALID = (CallStatus.SERVED, CallStatus.DUPLICATE, CallStatus.FAILED)
_RUN = (CallStatus.SERVED, CallStatus.FAILED)
_ERRORS = (CallStatus.INVALID, CallStatus.OVER_CAP, CallStatus.FAILED)


def step_metrics(groups: Sequence[Group], sampling_seconds: float, version: int) -> dict[str, float]:
    """The metrics of the rollouts that one step consumes.

    Args:
        groups: with rewards on every episode.
        sampling_seconds: how long the generators worked meanwhile.
        version: of the learner's weights when it takes them.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    failed = sum(len(group.failures) for group in groups)
    metrics = {"rollout/episodes": float(len(episodes)), "rollout/failed": float(failed)}
    if not episodes:
        return metrics
    new_tokens = sum(sampled_tokens(episode) for episode in episodes)
    metrics |= {
        "rollout/turns": fmean(len(episode.turns) for episode in episodes),
        "rollout/new_tokens": float(new_tokens),
        "rollout/tokens_per_s": new_tokens / max(sampling_seconds, 1e-9),
    }
    sampled = [episode.policy_version for episode in episodes if episode.policy_version != NOT_GENERATED]
    if sampled:
        metrics["rollout/staleness"] = version - fmean(sampled)
    return metrics | reward_metrics(episodes) | tool_metrics(episodes) | format_metrics(episodes)


def reward_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """`reward/*` over the episodes that have been scored."""
    scored = [episode.rewards for episode in episodes if episode.rewards is not None]
    if not scored:
        return {}
    names = ("total", "accuracy", "format", "anchor", "tool")
    return {f"reward/{name}": fmean(getattr(rewards, name) for rewards in scored) for name in names}


def tool_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """`tool/*` and `rollout/duplicate_rate` from the execution records of at least one episode."""
    records = [record for episode in episodes for record in episode.call_records]
    valid = _count(records, _VALID)
    calling_turns = sum(_count(turn.calls, _VALID) > 0 for episode in episodes for turn in episode.turns)
    metrics = {
        "tool/call_rate": valid / len(episodes),
        "tool/usage_rate": fmean(_count(episode.call_records, _VALID) > 0 for episode in episodes),
        "tool/width": valid / calling_turns if calling_turns else 0.0,
        "tool/error_rate": _count(records, _ERRORS) / len(records) if records else 0.0,
        "rollout/duplicate_rate": _count(records, (CallStatus.DUPLICATE,)) / valid if valid else 0.0,
    }
    latencies = [record.latency_s for record in records if record.status in _RUN]
    if latencies:
        metrics["tool/latency_p50"] = float(np.percentile(latencies, 50))
        metrics["tool/latency_p95"] = float(np.percentile(latencies, 95))
    return metrics


def format_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """`format/*`: shares of at least one episode; `calls_closed` only over episodes that attempt a call."""
    stats = [format_stats(episode) for episode in episodes]
    metrics = {
        "format/compliance": fmean(s.compliance for s in stats),
        "format/think_closed": fmean(s.think_closed for s in stats),
        "format/answer_closed": fmean(s.answer_closed for s in stats),
    }
    calls_closed = [s.calls_closed for s in stats if s.calls_closed is not None]
    if calls_closed:
        metrics["format/calls_closed"] = fmean(calls_closed)
    return metrics


def sampled_tokens(episode: Episode) -> int:
    """Tokens that the policy sampled for an episode, each sub-agent counted once."""
    return sum(sum(trajectory.generated) for trajectory in trajectories(episode))


def trajectories(episode: Episode) -> list[Trajectory]:
    """The main agent's trajectory and those of its sub-agents; duplicates share theirs, which is listed once."""
    subagents = {id(r.subagent): r.subagent for r in episode.call_records if r.subagent is not None}
    return [episode.trajectory, *subagents.values()]


def split_finite(metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """The finite metrics, and the names of those that are NaN or infinite and belong in no record."""
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    return finite, sorted(set(metrics) - set(finite))


def _count(records: Iterable[CallRecord], statuses: Sequence[CallStatus]) -> int:
    return sum(record.status in statuses for record in records)
