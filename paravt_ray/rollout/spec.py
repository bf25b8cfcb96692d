"""What one group of rollouts is asked for: what the fleet sends to a generator."""

from __future__ import annotations

from dataclasses import dataclass

from paravt_ray.episode import Sample


@dataclass(frozen=True)
class GroupSpec:
    """One prompt to be rolled out `group_size` times. Small and picklable; everything else is in the configuration."""

    group_id: str
    """Unique in the run: seeds are derived from it."""
    sample: Sample
    frame_budget: int
    """K: overview frames asked for; clamped to what the clip has where the frames are taken."""
    group_size: int
    temperature: float
    """0 is greedy. Main agent and sub-agents alike."""
    seed: int
    """The run's seed."""
    epoch: int = 0
    """Pass over the data set that the group belongs to."""
    answer_tokens: int | None = None
    """Longest forced answer after tool turns, which is then begun for the model with an opened `<answer>`; None for a
    turn like any other, with thinking."""
