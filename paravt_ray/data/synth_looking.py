"""Short exercises in looking: which frame shows what, when it was, and what a window holds.

A stretch of a clip in at most sixteen frames and one request, without the long system prompt of the agents: cheap, and
every reply ties frames to the times that are written before them, which both agents rest on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paravt_ray.data.synth_questions import seen_at, span
from paravt_ray.data.synth_traces import Message, crop_seconds, text_message, text_part, video_part
from paravt_ray.data.synth_video import GRID_SECONDS, Clip, Event, Window

STRETCHES = (0, 20, 60, 120)
"""Seconds around an event's window that are shown as well: from a sub-agent's crop to a main agent's overview."""


def looking_trace(clip: Clip, rng: np.random.Generator) -> list[Message]:
    """One exercise about a stretch of the clip that holds at least one event."""
    event = clip.events[int(rng.integers(len(clip.events)))]
    stretch = _around(clip, event.window, int(rng.choice(STRETCHES)), rng)
    times = crop_seconds(stretch)
    exercises: tuple[Callable[[], tuple[str, str]], ...] = (
        lambda: ("What does each frame show?", "\n".join(f"{t:.1f}: {_shown(clip, t)}" for t in times)),
        lambda: _one_frame(clip, times, rng),
        lambda: (f"When is the {event.colour} shape shown?", _from_to(event, times)),
        lambda: (f"Where is the {event.colour} shape shown first?", _first(event, times)),
        lambda: _window(clip, stretch, times, rng),
        lambda: _window(clip, stretch, times, rng),
    )
    request, reply = exercises[int(rng.integers(len(exercises)))]()
    user = [video_part(clip, f"t={stretch[0]},{stretch[1]}"), text_part(f"\n{request}")]
    return [{"role": "user", "content": user}, text_message("assistant", reply)]


def _around(clip: Clip, window: Window, room: int, rng: np.random.Generator) -> Window:
    """A window and up to `room` seconds around it, on the grid and inside the clip."""
    before = int(rng.integers(room // GRID_SECONDS + 1)) * GRID_SECONDS
    return max(0, window[0] - before), min(clip.duration, window[1] + room - before)


def _shown(clip: Clip, time: float) -> str:
    return next((event.colour for event in clip.events if event.start <= time < event.end), "nothing")


def _one_frame(clip: Clip, times: list[int], rng: np.random.Generator) -> tuple[str, str]:
    time = times[int(rng.integers(len(times)))]
    return f"What is shown at {time:.1f}?", f"{time:.1f}: {_shown(clip, time)}"


def _from_to(event: Event, times: list[int]) -> str:
    """As a sub-agent writes it."""
    shown = [time for time in times if event.start <= time < event.end]
    return f"{event.colour} from {shown[0]} to {shown[-1]}" if shown else f"{event.colour} not seen"


def _first(event: Event, times: list[int]) -> str:
    """As the main agent writes it."""
    time = seen_at(event, times)
    return f"{event.colour} not seen" if time is None else f"{event.colour} at {time:.1f}"


def _window(clip: Clip, stretch: Window, times: list[int], rng: np.random.Generator) -> tuple[str, str]:
    """As the main agent reads a window from the overview."""
    windows = [event.window for event in clip.events] + list(clip.empty)
    inside = [w for w in windows if stretch[0] <= w[0] and w[1] <= stretch[1]]
    window = inside[int(rng.integers(len(inside)))]
    event = clip.event_in(window)
    seen = event.colour if event and seen_at(event, times) is not None else "not seen"
    return f"What colour is shown from {span(window)}?", f"{span(window)}: {seen}"
