"""Scoring in Ray actors: a scorer that hangs, dies or raises costs the episodes it was given, never the step.

An episode that could not be scored has no reward. It is left out with a reason; it is never given reward 0, which
would teach the policy something that nobody measured.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from paravt_ray.config import Config
from paravt_ray.episode import Episode, Group, Trajectory
from paravt_ray.errors import UserError
from paravt_ray.rewards.judge import Judge, JudgeUsage
from paravt_ray.rewards.outcomes import Outcome, Scored, ScoringFailure, score_all

REWARD_ACTOR_CPUS = 1.0
"""Logical CPUs that one actor asks of the cluster."""


class RewardPoolError(UserError):
    """No reward actor can be started; the message names the cause."""


class RewardActor:
    """Scores episodes in a process of its own."""

    def __init__(self, config: Config, judge: Judge | None) -> None:
        self._config, self._judge = config, judge

    def ready(self) -> bool:
        """Return once the actor runs."""
        return True

    def score(self, episodes: list[Episode]) -> Scored:
        """One outcome for each episode, in order, and what the judge was asked for it."""
        return score_all(episodes, self._config, self._judge)


@dataclass(frozen=True)
class _Call:
    """One `score` call in flight."""

    actor: Any
    episodes: list[int]
    deadline: float


class RewardPool:
    """The driver's handle on `reward.workers` actors; each serves one call at a time."""

    def __init__(self, config: Config) -> None:
        """Start the actors and wait for them, at most `reward.timeout_s`.

        Raises:
            ConfigError: the judge's key cannot be one.
            RewardPoolError: they did not come up.
        """
        self._config = config
        self._timeout_s = config.reward.timeout_s
        self._judge = Judge.of(config)
        self._usage = JudgeUsage()
        self._actors: list[Any] = []
        self.replacements = 0
        """Actors that were replaced so far, because they died or missed a deadline."""
        try:
            self._actors = [self._start() for _ in range(config.reward.workers)]
            self._wait_until_ready(self._actors)
        except RewardPoolError:
            self.close()
            raise

    def score_groups(self, groups: list[Group]) -> int:
        """Set `rewards` of every episode; move those without from `episodes` to `failures`, and return how many.

        Raises:
            RewardPoolError: an actor was lost and could not be replaced.
        """
        episodes = [episode for group in groups for episode in group.episodes]
        outcomes = iter(self.score(episodes))
        failed = 0
        for group in groups:
            scored = []
            for episode in group.episodes:
                outcome = next(outcomes)
                if isinstance(outcome, ScoringFailure):
                    group.failures.append(f"reward: {outcome.reason}")
                    failed += 1
                else:
                    episode.rewards = outcome
                    scored.append(episode)
            group.episodes = scored
        return failed

    def judge_metrics(self) -> dict[str, float]:
        """What the judge was asked since this was called last, as `reward/judge_*`; empty where there is none."""
        if self._judge is None:
            return {}
        usage, self._usage = self._usage, JudgeUsage()
        return usage.metrics()

    def score(self, episodes: list[Episode]) -> list[Outcome]:
        """One outcome for each episode, in order.

        A call that fails or misses its deadline is repeated episode by episode, so that only the one at fault is lost.
        The deadline is `reward.timeout_s`, and as long again where a judge has to answer first.

        Raises:
            RewardPoolError: an actor was lost and could not be replaced.
        """
        outcomes: dict[int, Outcome] = {}
        size, call_s = self._chunk_size(len(episodes)), self._timeout_s * (1 if self._judge is None else 2)
        pending = deque(list(range(i, min(i + size, len(episodes)))) for i in range(0, len(episodes), size))
        running: dict[Any, _Call] = {}
        while pending or running:
            busy = [call.actor for call in running.values()]
            for actor in [actor for actor in self._actors if actor not in busy][: len(pending)]:
                chunk = pending.popleft()
                ref = actor.score.remote([_without_tokens(episodes[i]) for i in chunk])
                running[ref] = _Call(actor, chunk, time.monotonic() + call_s)
            patience = max(0.0, min(call.deadline for call in running.values()) - time.monotonic())
            ray.wait(list(running), num_returns=1, timeout=patience)
            ready, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
            late = [ref for ref, call in running.items() if ref not in ready and call.deadline <= time.monotonic()]
            for ref in ready + late:
                call = running.pop(ref)
                result = self._collect(ref, call, timed_out=ref in late)
                if isinstance(result, Scored):
                    outcomes.update(zip(call.episodes, result.outcomes, strict=True))
                    self._usage += result.usage
                elif len(call.episodes) > 1:
                    pending.extend([i] for i in call.episodes)
                else:
                    outcomes[call.episodes[0]] = result
        return [outcomes[i] for i in range(len(episodes))]

    def _chunk_size(self, episodes: int) -> int:
        """Episodes of one call."""
        if self._judge is None:
            return max(1, episodes // (4 * len(self._actors)))
        # A judge is waited for: no more than are asked for at one time, so that one deadline holds for all of a call.
        return max(1, min(self._config.reward.judge_concurrency, -(-episodes // len(self._actors))))

    def _collect(self, ref: Any, call: _Call, timed_out: bool) -> Scored | ScoringFailure:
        """The outcomes of one call; where there are none the reason, with its actor replaced if it was lost."""
        if timed_out:
            self._replace(call.actor)
            return ScoringFailure(f"scoring took longer than reward.timeout_s ({self._timeout_s:g} s)")
        try:
            scored: Scored = ray.get(ref)
        except RayTaskError as error:
            return ScoringFailure(f"the reward actor raised {type(error.cause).__name__}: {error.cause}")
        except RayError as error:
            self._replace(call.actor)
            return ScoringFailure(f"the reward actor was lost ({type(error).__name__})")
        return scored

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _start(self) -> Any:
        actor = ray.remote(RewardActor).options(num_cpus=REWARD_ACTOR_CPUS, max_restarts=0)
        return actor.remote(self._config, self._judge)

    def _replace(self, actor: Any) -> None:
        ray.kill(actor)
        fresh = self._start()
        self._actors[self._actors.index(actor)] = fresh
        self.replacements += 1
        self._wait_until_ready([fresh])

    def _wait_until_ready(self, actors: list[Any]) -> None:
        try:
            ray.get([actor.ready.remote() for actor in actors], timeout=self._timeout_s)
        except GetTimeoutError as error:
            raise RewardPoolError(
                f"{len(actors)} reward actors did not start within reward.timeout_s ({self._timeout_s:g} s). Each "
                f"needs {REWARD_ACTOR_CPUS:g} CPU; the cluster has {ray.available_resources().get('CPU', 0.0):g} free."
            ) from error
        except RayError as error:
            raise RewardPoolError(f"A reward actor died while starting: {error}") from error


def _without_tokens(episode: Episode) -> Episode:
    """A copy without token lists and frames: scores are read from turns and execution records, pixels stay here."""
    turns = [replace(turn, calls=[replace(record, subagent=None) for record in turn.calls]) for turn in episode.turns]
    return replace(episode, turns=turns, trajectory=Trajectory())
