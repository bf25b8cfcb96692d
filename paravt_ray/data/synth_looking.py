"""Short exercises in looking: what many windows of a clip show, read from frames with times before them.

One request about many windows, without the long system prompt of the agents: cheap, and every line of the reply ties
frames to the times that are written before them, which the main agent's first thought rests on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paravt_ray.data.synth_questions import overview_times, seen_at, span
from paravt_ray.data.synth_traces import Message, crop_seconds, text_message, text_part, video_part
from paravt_ray.data.synth_video import GRID_SECONDS, Clip, Window

OVERVIEWS = (16, 32)
"""Frames of the whole clip, as the main agent sees it."""
LONG_OVERVIEWS = (16, 32, 64, 64)
"""Likewise, up to the longest."""
STRETCHES = (0, 10, 20, 40, 80)
"""Or seconds around one event's window, as a sub-agent sees its crop or more closely than any overview."""
MOST_WINDOWS = 16
"""Of one exercise: four times as many as a question has, for the price of the same frames."""


def looking_trace(clip: Clip, rng: np.random.Generator) -> list[Message]:
    """One exercise about the windows of a clip, or of a stretch of it that holds at least one event."""
    if rng.random() < 0.5:
        return overview_trace(clip, OVERVIEWS, rng)
    event = clip.events[int(rng.integers(len(clip.events)))]
    stretch = _around(clip, event.window, int(rng.choice(STRETCHES)), rng)
    return _trace(clip, f"t={stretch[0]},{stretch[1]}", crop_seconds(stretch), stretch, rng)


def overview_trace(clip: Clip, budgets: Sequence[int], rng: np.random.Generator) -> list[Message]:
    """One exercise about the windows of a whole clip, seen in one of so many frames."""
    count = int(rng.choice(budgets))
    return _trace(clip, f"frames={count}", overview_times(clip, count), (0, clip.duration), rng)


def _trace(clip: Clip, fragment: str, times: list[float], stretch: Window, rng: np.random.Generator) -> list[Message]:
    windows = _windows(clip, stretch, rng)
    request = text_part("".join(f"\n{span(window)}" for window in windows))
    reply = "\n".join(f"{span(window)}: {_shown(clip, window, times)}" for window in windows)
    return [
        {"role": "user", "content": [video_part(clip, fragment), request]},
        text_message("assistant", reply),
    ]


def _windows(clip: Clip, stretch: Window, rng: np.random.Generator) -> list[Window]:
    """Windows of a stretch in order of time, about half of them with an event."""
    cells = [(second, second + GRID_SECONDS) for second in range(*stretch, GRID_SECONDS)]
    shown = [cell for cell in cells if clip.event_in(cell)]
    others = [cell for cell in cells if cell not in shown]
    windows = shown + [others[int(i)] for i in rng.permutation(len(others))[: len(shown)]]
    return sorted(windows[int(i)] for i in rng.permutation(len(windows))[:MOST_WINDOWS])


def _around(clip: Clip, window: Window, room: int, rng: np.random.Generator) -> Window:
    """A window and up to `room` seconds around it, on the grid and inside the clip."""
    before = int(rng.integers(room // GRID_SECONDS + 1)) * GRID_SECONDS
    return max(0, window[0] - before), min(clip.duration, window[1] + room - before)


def _shown(clip: Clip, window: Window, times: list[float]) -> str:
    """As the main agent reads a window from its overview: no frame in it, or none of an event, is all the same."""
    event = clip.event_in(window)
    return event.colour if event and seen_at(event, times) is not None else "not seen"
