"""One episode as a single HTML file: no scripts, nothing loaded from elsewhere, every text escaped."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence

from paravt_ray.episode import CallRecord, Episode, Frame, TurnRecord
from paravt_ray.evaluation.show import clock, outcome, turn_text

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .6rem .8rem; border-radius: 6px; }
.frames { display: flex; flex-wrap: wrap; gap: 6px; }
figure { margin: 0; font-size: 12px; text-align: center; }
figure img { display: block; height: 110px; border-radius: 4px; }
.line { position: relative; height: 14px; background: #8882; border-radius: 3px; margin: .4rem 0; }
.line i { position: absolute; top: 0; bottom: 0; min-width: 3px; background: #2a7de1; border-radius: 3px; }
.line i.tick { width: 2px; min-width: 2px; background: #888; }
.call { border-left: 3px solid #2a7de1; padding-left: .8rem; margin: 1rem 0; }
.call.failed, .call.invalid, .call.over_cap { border-color: #d33; }
.answer { font-size: 1.3rem; font-weight: 600; }
small { opacity: .7; }
"""


def episode_page(episode: Episode, clip: tuple[float, float]) -> str:
    """The page.

    Args:
        episode: with its frames.
        clip: first and last second of the video that the time lines stand for.
    """
    overview = _different(episode.trajectory.frames)[: len(episode.overview_times)]
    names = ", ".join(video.rsplit("/", 1)[-1] for video in episode.sample.videos)
    body = [
        f"<h1>{_text(episode.sample.question)}</h1>",
        f"<p><small>{_text(names)}, {clock(clip[0])} to {clock(clip[1])}; {episode.seconds:.1f} s</small></p>",
        f'<p class="answer">{_text(outcome(episode))}</p>',
        f"<h2>Overview: {len(overview)} frames</h2>",
        _line([(time, time) for time in episode.overview_times], clip, "tick"),
        _frames(overview),
    ]
    for number, record in enumerate(episode.turns, start=1):
        body += _turn(number, record, episode, clip)
    title = _text(f"ParaVT: {names}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _turn(number: int, record: TurnRecord, episode: Episode, clip: tuple[float, float]) -> list[str]:
    forced = ", an answer was demanded" if record.forced else ""
    tokens = f"{record.end - record.start} tokens, {record.seconds:.1f} s{forced}"
    parts = [
        f"<h2>Turn {number} <small>{tokens}</small></h2>",
        f"<pre>{_text(turn_text(record, episode.think_prefix))}</pre>",
    ]
    return parts + [_call(call, episode, clip) for call in record.calls]


def _call(record: CallRecord, episode: Episode, clip: tuple[float, float]) -> str:
    window = f"{clock(record.window[0])} to {clock(record.window[1])}, " if record.window else ""
    parts = [
        f'<div class="call {record.status.value}">',
        f"<p>{window}{record.status.value} <small>{record.latency_s:.1f} s</small></p>",
        _line([record.window], clip) if record.window else "",
        _frames(_frames_of(record, episode)),
        f"<pre>{_text(record.reply)}</pre>",
        "</div>",
    ]
    return "\n".join(filter(None, parts))


def _frames_of(record: CallRecord, episode: Episode) -> list[Frame]:
    """A call's frames: those of its sub-agent, or, with `reply: frames`, those in the main agent's context."""
    if record.subagent is not None:
        return _different(record.subagent.frames)
    shown = episode.trajectory.frames[len(episode.overview_times) :]
    found = {f.time_s: f for f in shown if f.key.startswith(f"{record.video}@") and f.time_s in record.timestamps}
    return [found[time] for time in record.timestamps if time in found]


def _different(frames: Sequence[Frame]) -> list[Frame]:
    """Without the repetition of a frame, which closes a video of an odd number of them."""
    return list(dict.fromkeys(frames))


def _line(windows: Iterable[tuple[float, float]], clip: tuple[float, float], kind: str = "") -> str:
    length = max(clip[1] - clip[0], 1e-9)
    marks = "".join(
        f'<i class="{kind}" style="left:{100 * (start - clip[0]) / length:.2f}%;'
        f'width:{100 * (end - start) / length:.2f}%"></i>'
        for start, end in windows
    )
    return f'<div class="line">{marks}</div>'


def _frames(frames: Sequence[Frame]) -> str:
    figures = (
        f'<figure><img alt="{clock(frame.time_s)}" src="data:image/png;base64,{_png(frame)}">'
        f"<figcaption>{clock(frame.time_s)}</figcaption></figure>"
        for frame in frames
    )
    return f'<div class="frames">{"".join(figures)}</div>' if frames else ""


def _png(frame: Frame) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame.pixels).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _text(text: str) -> str:
    # Lone surrogates (half a sampled character, an odd file name) have no UTF-8 form.
    return html.escape(text.encode("utf-8", "replace").decode())
