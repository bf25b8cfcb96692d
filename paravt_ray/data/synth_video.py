"""Synthetic long clips: grey noise, and now and then a coloured shape for a few seconds. All from a seed.

A clip is planned first (`plan_clip`: which colour, when, inside which window), then drawn frame by frame and encoded
as an ordinary H.264 file (`write_clip`), so that decoding, seeking and cropping meet a real video.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 25, 25),
    "green": (25, 200, 25),
    "blue": (30, 30, 230),
    "yellow": (230, 220, 20),
    "purple": (215, 25, 215),
    "cyan": (20, 215, 215),
    "white": (250, 250, 250),
    "black": (5, 5, 5),
}
"""Corners of the RGB cube: as far apart, and as far from the grey background, as eight colours can be."""

FPS = 4
SIDE = 64
"""Pixels of a frame's side."""
KEYFRAME_SECONDS = 12
GRID_SECONDS = 10
"""A window lasts this long, and begins on a multiple of it."""

Window = tuple[int, int]
"""From, to, in whole seconds."""


@dataclass(frozen=True)
class Event:
    """One coloured shape, shown from `start` to `end` (seconds), inside `window`."""

    colour: str
    start: float
    end: float
    window: Window


@dataclass(frozen=True)
class Clip:
    """What a clip shows. Everything about its pixels follows from this and `seed`."""

    name: str
    seed: int
    duration: int
    """Seconds, a multiple of GRID_SECONDS."""
    events: tuple[Event, ...]
    """In order of time, each of another colour, never two at once."""
    empty: tuple[Window, ...]
    """Windows in which nothing is shown."""

    def event_in(self, window: Window) -> Event | None:
        """The event inside a window, None where nothing is shown."""
        return next((event for event in self.events if event.window == window), None)


def plan_clip(name: str, seed: int) -> Clip:
    """Draw a clip of one to ten minutes (log-uniform) with three to eight events of 7 to 9 seconds."""
    rng = np.random.default_rng([seed, 0])
    cells = round(math.exp(rng.uniform(math.log(60), math.log(600))) / GRID_SECONDS)
    windows = _windows(rng, cells)
    shown = min(len(COLOURS), max(3, round(len(windows) * 0.65)))
    colours = rng.permutation(list(COLOURS))
    chosen = sorted(int(i) for i in rng.permutation(len(windows))[:shown])
    events = tuple(_event(rng, str(colours[i]), windows[index]) for i, index in enumerate(chosen))
    empty = tuple(window for index, window in enumerate(windows) if index not in chosen)
    return Clip(name, seed, cells * GRID_SECONDS, events, empty)


def _windows(rng: np.random.Generator, cells: int) -> list[Window]:
    """Five to twelve cells of the grid, with gaps between them where the clip is long enough."""
    chosen = sorted(int(cell) for cell in rng.permutation(cells)[: min(12, max(5, cells // 3))])
    return [(cell * GRID_SECONDS, (cell + 1) * GRID_SECONDS) for cell in chosen]


def _event(rng: np.random.Generator, colour: str, window: Window) -> Event:
    # Long for its window, so that whoever names the window has nearly named the event.
    length = round(rng.uniform(7, 9) * FPS) / FPS
    start = window[0] + 0.5 + round(rng.uniform(0, 9 - length) * FPS) / FPS
    return Event(colour, start, start + length, window)


def draw_frames(clip: Clip, side: int = SIDE) -> Iterator[NDArray[np.uint8]]:
    """All frames in order, uint8 [side, side, 3] RGB; frame i is shown at i / FPS seconds."""
    rng = np.random.default_rng([clip.seed, 1])
    y, x = np.mgrid[0:side, 0:side].astype(np.float32) / side
    base, tilt = rng.uniform(95, 160), rng.uniform(-30, 30, 2)
    texture = base + tilt[0] * (x - 0.5) + tilt[1] * (y - 0.5) + rng.normal(0, 6, (side, side))
    grains = rng.normal(0, 4, (6, side, side, 3)).astype(np.float32)
    looks = [_Look.draw(rng) for _ in clip.events]
    for index in range(clip.duration * FPS):
        time_s = index / FPS
        frame = np.repeat((texture + 8 * math.sin(time_s / 17))[..., None], 3, axis=2)
        for event, look in zip(clip.events, looks, strict=True):
            if event.start <= time_s < event.end:
                frame[look.mask(x, y, time_s)] = COLOURS[event.colour]
        yield np.clip(frame + grains[index % len(grains)], 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class _Look:
    """Form, size and slow movement of one shape, in units of the frame's side."""

    form: str
    radius: float
    centre: tuple[float, float]
    phase: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> _Look:
        form = str(rng.choice(["circle", "square", "triangle"]))
        centre = (float(rng.uniform(0.4, 0.6)), float(rng.uniform(0.4, 0.6)))
        return cls(form, float(rng.uniform(0.28, 0.38)), centre, float(rng.uniform(0, 6.28)))

    def mask(self, x: NDArray[np.float32], y: NDArray[np.float32], time_s: float) -> NDArray[np.bool_]:
        dx = x - self.centre[0] - 0.06 * math.sin(0.7 * time_s + self.phase)
        dy = y - self.centre[1] - 0.06 * math.cos(0.7 * time_s + self.phase)
        if self.form == "circle":
            return np.asarray(dx**2 + dy**2 < self.radius**2)
        if self.form == "square":
            return np.asarray(np.maximum(abs(dx), abs(dy)) < 0.85 * self.radius)
        return np.asarray((abs(dx) * 1.6 + dy < 0.8 * self.radius) & (dy > -self.radius))


def write_clip(clip: Clip, folder: Path) -> Path:
    """Encode the clip as H.264 in MP4, one keyframe every KEYFRAME_SECONDS. Equal clips give equal bytes."""
    import av

    path = folder / clip.name
    with av.open(str(path), "w", options={"fflags": "+bitexact"}) as container:
        options = {"preset": "veryfast", "crf": "30", "x264-params": "scenecut=0"}
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        stream.gop_size = KEYFRAME_SECONDS * FPS
        stream.thread_count = 1
        for pixels in draw_frames(clip):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return path
