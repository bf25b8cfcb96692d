"""Small clips of every kind that the crop service must read, with the frame number drawn into each frame.

`python tests/clips.py FOLDER` writes them all; tests make the ones that they need. Nothing is downloaded.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 192, 128
BITS = 12
"""Frame numbers up to 4095, as two rows of bars: the bits, and below them their complements as a check."""


@dataclass(frozen=True)
class Clip:
    """A clip, and what is in it."""

    path: Path
    times: Sequence[float]
    """Presentation time in seconds of frame 0, 1, 2, ... as they were encoded; some containers shift them all."""


def draw(number: int, width: int = WIDTH, height: int = HEIGHT) -> NDArray[np.uint8]:
    """Return [height, width, 3] RGB: the number's bars on a moving background, a red corner at the top left."""
    y, x = np.mgrid[0:height, 0:width]
    image = np.empty((height, width, 3), np.uint8)
    image[..., 0] = (x + 3 * number) % 64 + 64
    image[..., 1] = (y + 2 * number) % 64 + 64
    image[..., 2] = (x + y + 5 * number) % 64 + 64
    top, row = height // 4, height // 4
    for bit in range(BITS):
        value = 235 if number >> bit & 1 else 16
        bar = slice(bit * width // BITS, (bit + 1) * width // BITS)
        image[top : top + row, bar] = value
        image[top + row : top + 2 * row, bar] = 251 - value
    image[: height // 8, : width // 8] = (230, 20, 20)
    return image


def read_number(image: NDArray[np.uint8]) -> int:
    """Return the number drawn into a frame of any size.

    Raises:
        AssertionError: where the bars and their complements disagree, as in a damaged, mixed or turned picture.
    """
    height, width = image.shape[:2]
    grey = image.astype(np.float32).mean(axis=2)
    number = 0
    for bit in range(BITS):
        x0 = int((bit + 0.25) * width / BITS)
        x1 = max(x0 + 1, int((bit + 0.75) * width / BITS))
        upper = grey[int(height * 0.30) : int(height * 0.45), x0:x1].mean()
        lower = grey[int(height * 0.55) : int(height * 0.70), x0:x1].mean()
        assert abs(upper - lower) > 100, f"bit {bit} is unreadable: {upper:.0f} over {lower:.0f}"
        number |= int(upper > lower) << bit
    return number


def is_upright(image: NDArray[np.uint8]) -> bool:
    """Whether the red corner is at the top left."""
    height, width = image.shape[:2]
    red, green, _ = image[: height // 16, : width // 16].reshape(-1, 3).mean(axis=0)
    return bool(red > 150 and green < 80)


@dataclass(frozen=True)
class Recipe:
    """How a clip is encoded."""

    codec: str = "libx264"
    suffix: str = ".mp4"
    frames: int = 100
    rate: Fraction = Fraction(25)
    ticks: Sequence[int] | None = None
    """Presentation times in units of `base`; None for a constant rate from 0."""
    base: Fraction | None = None
    pixel_format: str = "yuv420p"
    size: tuple[int, int] = (WIDTH, HEIGHT)
    options: dict[str, str] = field(default_factory=dict)
    mux_options: dict[str, str] = field(default_factory=dict)
    turn: int = 0
    """Quarter turns (counter-clockwise) of the picture before encoding."""
    interlaced: bool = False
    colour: tuple[int, int, int] | None = None
    """Primaries, transfer, matrix (ITU-T H.273 codes)."""
    patch: Callable[[bytearray], None] | None = None
    """Applied to the finished file."""
    aspect: Fraction | None = None
    """Shape of a pixel."""


def encode(recipe: Recipe, path: Path) -> Clip:
    """Write the clip, unless it is there already."""
    base = recipe.base or 1 / recipe.rate
    ticks = recipe.ticks if recipe.ticks is not None else range(recipe.frames)
    clip = Clip(path, [float(tick * base) for tick in ticks])
    if path.exists():
        return clip
    with av.open(str(path), "w", options={"fflags": "+bitexact"} | recipe.mux_options) as container:
        # With mbtree, x264 does not write the same file every time.
        options = {"mbtree": "0"} if recipe.codec == "libx264" else {}
        stream: Any = container.add_stream(recipe.codec, rate=recipe.rate, options=options | recipe.options)
        stream.width, stream.height = recipe.size
        stream.pix_fmt = recipe.pixel_format
        stream.codec_context.thread_count = 2  # the bytes would depend on the machine's cores
        stream.time_base = stream.codec_context.time_base = base
        if recipe.aspect:
            stream.codec_context.sample_aspect_ratio = recipe.aspect
        if recipe.interlaced:
            stream.codec_context.flags |= int(av.codec.context.Flags.interlaced_dct) | int(
                av.codec.context.Flags.interlaced_me
            )
        if recipe.colour:
            context = stream.codec_context
            context.color_primaries, context.color_trc, context.colorspace = recipe.colour
        for number, tick in enumerate(ticks):
            container.mux(stream.encode(_picture(recipe, number, tick, base)))
            if recipe.codec == "libsvtav1" and number == 0:
                _give_up_real_time()
        container.mux(stream.encode(None))
    if recipe.patch:
        data = bytearray(path.read_bytes())
        recipe.patch(data)
        path.write_bytes(data)
    return clip


def _give_up_real_time() -> None:
    """Undo what SVT-AV1 does as root when it starts: it gives all threads of the process real-time priority.

    Children inherit that, and two that are busy then bring a machine of two cores to a halt.
    """
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))


def _picture(recipe: Recipe, number: int, tick: int, base: Fraction) -> av.VideoFrame:
    width, height = recipe.size if recipe.turn % 2 == 0 else recipe.size[::-1]
    image = np.rot90(draw(number, width, height), recipe.turn)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
    frame = frame.reformat(format=recipe.pixel_format)
    frame.pts, frame.time_base = tick, base
    return frame


def linear_truth(path: Path) -> list[tuple[int, float]]:
    """Return (number, seconds) of all frames by decoding from the start to the end, with nothing clever."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        frames = []
        for frame in container.decode(stream):
            image = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
            frames.append((read_number(image), float("nan") if frame.pts is None else frame.time))
    return frames


# -- patches of MP4 boxes ---------------------------------------------------------------------------------------------


def _box(data: bytearray, name: bytes) -> int:
    """Return the offset of the contents of the first box of that name."""
    return data.index(name) + 4


def rotate_tag(degrees: int) -> Callable[[bytearray], None]:
    """Write a display matrix that tells players to turn the picture clockwise."""
    a, b = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]

    def patch(data: bytearray) -> None:
        matrix = struct.pack(">9i", a << 16, b << 16, 0, -b << 16, a << 16, 0, 0, 0, 1 << 30)
        start = _box(data, b"tkhd") + 40
        data[start : start + 36] = matrix

    return patch


def edit_list(skip_s: float) -> Callable[[bytearray], None]:
    """Cut the beginning off by an edit list: playback starts `skip_s` into the media."""

    def patch(data: bytearray) -> None:
        mdhd = _box(data, b"mdhd")
        (scale,) = struct.unpack_from(">I", data, mdhd + 12)
        (movie_scale,) = struct.unpack_from(">I", data, _box(data, b"mvhd") + 12)
        elst = _box(data, b"elst")
        duration, media_time = struct.unpack_from(">Ii", data, elst + 8)
        struct.pack_into(
            ">Ii", data, elst + 8, duration - round(skip_s * movie_scale), media_time + round(skip_s * scale)
        )

    return patch


def claim_duration(factor: int) -> Callable[[bytearray], None]:
    """Multiply the durations in the header."""

    def patch(data: bytearray) -> None:
        for name, offset in ((b"mvhd", 16), (b"tkhd", 20), (b"mdhd", 16)):
            start = _box(data, name) + offset
            (duration,) = struct.unpack_from(">I", data, start)
            struct.pack_into(">I", data, start, duration * factor)
        if b"elst" in data:
            start = _box(data, b"elst") + 8
            (duration,) = struct.unpack_from(">I", data, start)
            struct.pack_into(">I", data, start, duration * factor)

    return patch


def _jittered(count: int, seed: int) -> list[int]:
    """Presentation times in milliseconds with gaps of 10 to 400 ms."""
    gaps = np.random.default_rng(seed).integers(10, 400, size=count)
    return [int(t) for t in np.concatenate([[0], np.cumsum(gaps)[:-1]])]


MS = Fraction(1, 1000)
AV1 = {"g": "30", "preset": "8", "crf": "20"}
RECIPES: dict[str, Recipe] = {
    "h264": Recipe(options={"g": "30", "bf": "3"}),
    "h264-one-gop": Recipe(options={"g": "1000", "bf": "3"}),
    "h264-no-b": Recipe(options={"g": "25", "bf": "0"}),
    "h264-pyramid": Recipe(options={"g": "40", "bf": "7", "x264-params": "b-pyramid=strict:ref=4"}),
    "h264-open-gop": Recipe(options={"g": "20", "bf": "3", "x264-params": "open-gop=1:scenecut=0"}),
    "h264-intra-refresh": Recipe(options={"g": "20", "x264-params": "intra-refresh=1:bframes=0"}),
    "h264-2997": Recipe(rate=Fraction(30000, 1001), options={"g": "45"}),
    "h264-10bit": Recipe(pixel_format="yuv420p10le", options={"g": "30"}),
    "h264-444-odd": Recipe(pixel_format="yuv444p", size=(191, 127), options={"g": "30"}),
    "h264-interlaced": Recipe(options={"g": "30", "x264-params": "tff=1"}, interlaced=True),
    "h264-vfr": Recipe(ticks=_jittered(80, 1), base=MS, options={"g": "25", "bf": "3"}),
    "h264-vfr-mkv": Recipe(suffix=".mkv", ticks=_jittered(80, 2), base=MS, options={"g": "25", "bf": "3"}),
    "h264-slides": Recipe(ticks=[0, 40, 10_000, 30_000, 30_040, 60_000], base=MS),
    "h264-late": Recipe(ticks=[5000 + 40 * i for i in range(80)], base=MS, options={"g": "25"}),
    "h264-late-mkv": Recipe(suffix=".mkv", ticks=[5000 + 40 * i for i in range(80)], base=MS, options={"g": "25"}),
    "h264-mkv-live": Recipe(suffix=".mkv", options={"g": "25"}, mux_options={"live": "1"}),
    "h264-fragmented": Recipe(options={"g": "25"}, mux_options={"movflags": "frag_keyframe+empty_moov"}),
    "h264-edit-list": Recipe(options={"g": "30", "bf": "3"}, patch=edit_list(1.0)),
    "h264-wrong-duration": Recipe(options={"g": "30"}, patch=claim_duration(5)),
    "h264-rot90": Recipe(turn=1, options={"g": "30"}, patch=rotate_tag(90)),
    "h264-rot180": Recipe(turn=2, options={"g": "30"}, patch=rotate_tag(180)),
    "h264-rot270": Recipe(turn=3, options={"g": "30"}, patch=rotate_tag(270)),
    "h264-anamorphic": Recipe(aspect=Fraction(2), options={"g": "30"}),
    "h264-one-frame": Recipe(frames=1),
    "h264-ts": Recipe(suffix=".ts", options={"g": "25", "bf": "3"}),
    "h264-flv": Recipe(suffix=".flv", options={"g": "25", "bf": "3"}),
    "h264-bare": Recipe(suffix=".h264", options={"g": "25", "bf": "2"}),
    "hevc-ts": Recipe("libx265", ".ts", options={"x265-params": "log-level=none:keyint=25"}),
    "mpeg1-ps": Recipe("mpeg1video", ".mpg", options={"g": "15", "bf": "2"}),
    "mpeg2-cbr-ps": Recipe(
        "mpeg2video",
        ".vob",
        options={"g": "15", "bf": "2", "b": "6M", "minrate": "6M", "maxrate": "6M", "bufsize": "1M"},
    ),
    "h263-3gp": Recipe("h263", ".3gp", size=(176, 144)),
    "huffyuv-avi": Recipe("huffyuv", ".avi", pixel_format="yuv422p"),
    "vp8-ivf": Recipe("libvpx", ".ivf", options={"g": "25", "cpu-used": "8", "deadline": "realtime"}),
    "h264-avi": Recipe(suffix=".avi", options={"g": "25", "bf": "0"}),
    "h264-avi-b": Recipe(suffix=".avi", options={"g": "25", "bf": "2"}),
    "hevc": Recipe("libx265", options={"x265-params": "log-level=none:keyint=30:open-gop=0"}),
    "hevc-open-gop": Recipe("libx265", options={"x265-params": "log-level=none:keyint=20:open-gop=1:scenecut=0"}),
    "hevc-10bit-hdr": Recipe(
        "libx265",
        pixel_format="yuv420p10le",
        colour=(9, 16, 9),
        options={"x265-params": "log-level=none:keyint=25:colorprim=bt2020:transfer=smpte2084:colormatrix=bt2020nc"},
    ),
    "av1": Recipe("libsvtav1", options={"g": "30", "preset": "8", "crf": "20"}),
    "av1-10bit-mkv": Recipe(
        "libsvtav1", ".mkv", pixel_format="yuv420p10le", options={"g": "30", "preset": "8", "crf": "20"}
    ),
    "av1-webm": Recipe(
        "libsvtav1", ".webm", options={"g": "30", "preset": "8", "crf": "20"}, base=MS, ticks=range(0, 4000, 40)
    ),
    "vp9": Recipe("libvpx-vp9", ".webm", options={"g": "30", "cpu-used": "8", "deadline": "realtime"}),
    "vp9-altref": Recipe(
        "libvpx-vp9", ".webm", options={"g": "40", "cpu-used": "5", "lag-in-frames": "16", "auto-alt-ref": "1"}
    ),
    "vp9-odd": Recipe("libvpx-vp9", ".webm", size=(191, 127), options={"g": "30", "cpu-used": "8"}),
    "vp8-altref": Recipe(
        "libvpx", ".webm", options={"g": "40", "cpu-used": "5", "lag-in-frames": "16", "auto-alt-ref": "1", "b": "800k"}
    ),
    "mpeg4-asp-avi": Recipe("mpeg4", ".avi", options={"g": "25", "bf": "2", "flags": "+qpel", "qscale": "3"}),
    "mpeg4-avi": Recipe("mpeg4", ".avi", options={"g": "25", "bf": "0", "qscale": "3"}),
    "mpeg4-asp-mp4": Recipe("mpeg4", ".mp4", options={"g": "25", "bf": "2", "qscale": "3"}),
    "mpeg4-asp-mkv": Recipe("mpeg4", ".mkv", options={"g": "25", "bf": "2", "qscale": "3"}),
    "mpeg2-ts": Recipe("mpeg2video", ".ts", options={"g": "15", "bf": "2", "qscale": "3"}),
    "mpeg2-ps": Recipe("mpeg2video", ".mpg", options={"g": "15", "bf": "2", "qscale": "3"}),
    "mpeg2-interlaced-ts": Recipe("mpeg2video", ".ts", options={"g": "15", "bf": "2", "qscale": "3"}, interlaced=True),
    "mjpeg-avi": Recipe("mjpeg", ".avi", pixel_format="yuvj420p", options={"qscale": "3"}),
    "wmv": Recipe("wmv2", ".wmv", options={"g": "25", "qscale": "3"}),
    "flv1": Recipe("flv1", ".flv", options={"g": "25", "qscale": "3"}),
    "ffv1-mkv": Recipe("ffv1", ".mkv"),
    "prores-mov": Recipe("prores_ks", ".mov", pixel_format="yuv422p10le"),
    "gif": Recipe("gif", ".gif", pixel_format="rgb8", rate=Fraction(10), frames=40),
    "hours": Recipe(
        ticks=range(0, 1200 * 12, 12),
        base=Fraction(1),
        rate=Fraction(1, 12),
        size=(96, 64),
        options={"g": "30", "preset": "ultrafast"},
    ),
}


def make(name: str, folder: Path) -> Clip:
    """Write the clip of that name into the folder."""
    recipe = RECIPES[name]
    return encode(recipe, folder / f"{name}{recipe.suffix}")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for clip_name in RECIPES:
        print(make(clip_name, target).path)
