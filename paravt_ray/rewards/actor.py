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
from paravt_ray.episode import Episode, Group, Rewards, Trajectory
from paravt_ray.errors import UserError
from paravt_ray.rewards.score import score_episode

REWARD_ACTOR_CPUS = 1.0
"""Logical CPUs that one actor asks of the cluster."""


class RewardPoolError(UserError):
    """No reward actor can be started; the message names the cause."""


@dataclass(frozen=True)
class ScoringFailure:
    """Why an episode has no reward."""

    reason: str


Outcome = Rewards | ScoringFailure


class RewardActor:
    """Scores episodes in a process of its own."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def ready(self) -> bool:
        """Return once the actor runs."""
        return True

    def score(self, episodes: list[Episode]) -> list[Outcome]:
        """One outcome for each episode, in order; an episode that raises does not touch the others."""
        return [self._score(episode) for episode in episodes]

    def _score(self, episode: Episode) -> Outcome:
        try:
            return score_episode(episode, self._config)
        except Exception as error:  # whatever it was, it is reported for this episode alone
            return ScoringFailure(f"scoring raised {type(error).__name__}: {error}")


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
            RewardPoolError: they did not come up.
        """
        self._config = config
        self._timeout_s = config.reward.timeout_s
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

    def score(self, episodes: list[Episode]) -> list[Outcome]:
        """One outcome for each episode, in order.

        A call that fails or misses its deadline of `reward.timeout_s` is repeated episode by episode, so that only the
        one at fault is lost.

        Raises:
            RewardPoolError: an actor was lost and could not be replaced.
        """
        outcomes: dict[int, Outcome] = {}
        size = max(1, len(episodes) // (4 * len(self._actors)))
        pending = deque(list(range(i, min(i + size, len(episodes)))) for i in range(0, len(episodes), size))
        running: dict[Any, _Call] = {}
        while pending or running:
            busy = [call.actor for call in running.values()]
            for actor in [actor for actor in self._actors if actor not in busy][: len(pending)]:
                chunk = pending.popleft()
                ref = actor.score.remote([_without_tokens(episodes[i]) for i in chunk])
                running[ref] = _Call(actor, chunk, time.monotonic() + self._timeout_s)
            patience = max(0.0, min(call.deadline for call in running.values()) - time.monotonic())
            ray.wait(list(running), num_returns=1, timeout=patience)
            ready, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
            late = [ref for ref, call in running.items() if ref not in ready and call.deadline <= time.monotonic()]
            for ref in ready + late:
                call = running.pop(ref)
                result = self._collect(ref, call, timed_out=ref in late)
                if isinstance(result, list):
                    outcomes.update(zip(call.episodes, result, strict=True))
                elif len(call.episodes) > 1:
                    pending.extend([i] for i in call.episodes)
                else:
                    outcomes[call.episodes[0]] = result
        return [outcomes[i] for i in range(len(episodes))]

    def _collect(self, ref: Any, call: _Call, timed_out: bool) -> list[Outcome] | ScoringFailure:
        """The outcomes of one call; where there are none the reason, with its actor replaced if it was lost."""
        if timed_out:
            self._replace(call.actor)
            return ScoringFailure(f"scoring took longer than reward.timeout_s ({self._timeout_s:g} s)")
        try:
            outcomes: list[Outcome] = ray.get(ref)
        except RayTaskError as error:
            return ScoringFailure(f"the reward actor raised {type(error.cause).__name__}: {error.cause}")
        except RayError as error:
            self._replace(call.actor)
            return ScoringFailure(f"the reward actor was lost ({type(error).__name__})")
        return outcomes

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _start(self) -> Any:
        return ray.remote(RewardActor).options(num_cpus=REWARD_ACTOR_CPUS, max_restarts=0).remote(self._config)

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
