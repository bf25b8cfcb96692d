"""The health of one generator as a state machine: no I/O, no clock of its own, one forbidden transition.

    STARTING -> NEEDS_WEIGHTS -> SERVING <-> SUSPECT      SERVING, SUSPECT -> ASLEEP -> SERVING
        ^             |             |           |
        |             v             v           v
        +---------- DEAD <----------+-----------+         DEAD -> RETIRED after too many restarts; ASLEEP -> DEAD

Forbidden: a generator that died serves again without having loaded the weights that are current by then. The way from
DEAD leads through STARTING and NEEDS_WEIGHTS only, and `loaded` opens the last door for the current version alone.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class State(StrEnum):
    """Where a generator stands."""

    STARTING = "starting"
    NEEDS_WEIGHTS = "needs_weights"
    SERVING = "serving"
    SUSPECT = "suspect"
    ASLEEP = "asleep"
    DEAD = "dead"
    RETIRED = "retired"


class IllegalTransitionError(RuntimeError):
    """An event came that cannot happen in this state: a fault in the caller."""


class Health:
    """State, reason and number of restarts of one generator. Only a SERVING one may be given work."""

    def __init__(self, max_restarts: int, suspect_timeout_s: float, clock: Callable[[], float]) -> None:
        """A generator that has just been started.

        Args:
            max_restarts: after so many restarts the next death is final.
            suspect_timeout_s: seconds without a sign of life after which it is dead.
            clock: seconds from an arbitrary start.
        """
        self._max_restarts, self._suspect_timeout_s, self._clock = max_restarts, suspect_timeout_s, clock
        self._suspected_at = 0.0
        self.state = State.STARTING
        self.reason = ""
        """Why it is suspect, dead or retired."""
        self.restarts = 0

    @property
    def serving(self) -> bool:
        """Whether it may be given work."""
        return self.state is State.SERVING

    @property
    def alive(self) -> bool:
        """Whether it has not died."""
        return self.state not in (State.DEAD, State.RETIRED)

    @property
    def loadable(self) -> bool:
        """Whether it runs with weights that a push can replace."""
        return self.state in (State.SERVING, State.SUSPECT, State.ASLEEP)

    def ready(self) -> None:
        """Its engine has started."""
        self._move("ready", State.NEEDS_WEIGHTS, State.STARTING)

    def loaded(self, version: int, current: int) -> None:
        """It holds a version of the weights; anything but the current one does not make it serve."""
        self._expect("loaded", State.NEEDS_WEIGHTS, State.SERVING, State.SUSPECT, State.ASLEEP)
        self.state = State.SERVING if version == current else State.NEEDS_WEIGHTS

    def slept(self) -> None:
        """It has given up its GPU's memory."""
        self._move("slept", State.ASLEEP, State.SERVING, State.SUSPECT)

    def awoke(self) -> None:
        """It has its GPU's memory again, and the weights that it held before."""
        self._move("awoke", State.SERVING, State.ASLEEP)

    def answered(self) -> None:
        """It gave a sign of life."""
        if self.state is State.SUSPECT:
            self.state, self.reason = State.SERVING, ""

    def missed(self, reason: str) -> None:
        """It gave no sign of life in time: suspect at first, dead when that lasts."""
        if self.state is State.SERVING:
            self.state, self.reason, self._suspected_at = State.SUSPECT, reason, self._clock()
        elif self.state is State.SUSPECT and self._clock() - self._suspected_at >= self._suspect_timeout_s:
            self.died(reason)

    def died(self, reason: str) -> None:
        """Its process has ended, it hangs, or it failed in a way that cannot be trusted again."""
        if self.alive:  # the first reason is the cause, later ones are its echoes
            self.state, self.reason = State.DEAD, reason

    def restart(self) -> bool:
        """It may be started again, and is; False where that has been done too often."""
        self._expect("restart", State.DEAD)
        if self.restarts >= self._max_restarts:
            self.state = State.RETIRED
            return False
        self.restarts += 1
        self.state = State.STARTING
        return True

    def retire(self) -> None:
        """It is not to be started again."""
        self._move("retire", State.RETIRED, State.DEAD)

    def _move(self, event: str, state: State, *allowed: State) -> None:
        self._expect(event, *allowed)
        self.state = state

    def _expect(self, event: str, *allowed: State) -> None:
        if self.state not in allowed:
            raise IllegalTransitionError(f"'{event}' cannot happen to a generator that is {self.state}.")
