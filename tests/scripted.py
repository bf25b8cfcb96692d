"""An engine and a crop service that follow a script, for tests of what happens around them, and what they are asked.

The engine expands pads by itself, from pixels and times alone, as the real one does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paravt_ray.chat import SUBAGENT_SYSTEM, Chat
from paravt_ray.config import Config
from paravt_ray.episode import Frame, Group, QuestionType, Sample
from paravt_ray.rollout.agent import run_group
from paravt_ray.rollout.engine import Generation, Sampling
from paravt_ray.rollout.spec import GroupSpec
from tool_workers.records import Crop, ErrorKind, ToolError, VideoInfo

CLIP_SECONDS = 60.0
SIDE = 32


@dataclass(frozen=True)
class Request:
    """One engine call, as the script sees it."""

    text: str
    turn: int
    """Assistant turns before this one."""
    subagent: bool
    sampling: Sampling
    prompt_ids: tuple[int, ...]
    frames: tuple[Frame, ...]


Output = str | list[int] | Generation | Exception
"""What a script says: text (the end of turn is added), token ids as they are, a whole generation, an error."""


@dataclass
class ScriptedEngine:
    """Says what `main` (main agent) and `sub` (sub-agents) return for a request."""

    chat: Chat
    main: Callable[[Request], Output]
    sub: Callable[[Request], Output] = lambda request: "red ball"
    delay_s: float = 0.0
    sub_delay_s: float = 0.0
    version: int = 3
    requests: list[Request] = field(default_factory=list)

    async def generate(self, prompt_ids: Sequence[int], frames: Sequence[Frame], sampling: Sampling) -> Generation:
        text = self.chat.decode(prompt_ids)
        turn = text.count("<|im_start|>assistant") - 1
        request = Request(text, turn, SUBAGENT_SYSTEM in text, sampling, tuple(prompt_ids), tuple(frames))
        self.requests.append(request)
        await asyncio.sleep(self.sub_delay_s if request.subagent else self.delay_s)
        output = (self.sub if request.subagent else self.main)(request)
        if isinstance(output, Exception):
            raise output
        if isinstance(output, Generation):
            return output
        return generation(self.chat, request, output, self.version)

    def main_requests(self) -> list[Request]:
        return [request for request in self.requests if not request.subagent]

    def sub_requests(self) -> list[Request]:
        return [request for request in self.requests if request.subagent]


def generation(chat: Chat, request: Request, output: str | list[int], version: int = 3) -> Generation:
    """A well-formed generation: text ends its turn, long output is cut at the limit."""
    ids = [*chat.tokenizer.encode(output, add_special_tokens=False), chat.im_end] if isinstance(output, str) else output
    kept = ids[: request.sampling.max_new_tokens]
    stopped = bool(kept) and kept[-1] == chat.im_end
    logprobs = [-0.5 - (token % 7) / 10 for token in kept]
    expanded = engine_expand(chat, request.prompt_ids, request.frames)
    return Generation(expanded, kept, logprobs, "stop" if stopped else "length", version)


def engine_expand(chat: Chat, ids: Sequence[int], frames: Sequence[Frame]) -> list[int]:
    """One pad becomes one for each 32x32 pixels; a video pad stands for two frames and brings their time and marks."""
    pads = iter(frames)
    out: list[int] = []
    for token in ids:
        if token not in (chat.image_pad, chat.video_pad):
            out.append(token)
            continue
        frame = next(pads)
        shown = [token] * (frame.pixels.shape[0] // 32 * (frame.pixels.shape[1] // 32))
        if token == chat.video_pad:
            time_text = f"<{(frame.time_s + next(pads).time_s) / 2:.1f} seconds>"
            time = chat.tokenizer.encode(time_text, add_special_tokens=False)
            shown = [*time, chat.vision_start, *shown, chat.vision_end]
        out += shown
    return out


@dataclass
class ScriptedPool:
    """A crop service on clips of 60 s: one frame each whole second, its red value the second."""

    delay_s: float = 0.0
    error: Callable[[str, float, float], ToolError | None] = lambda video, start, end: None
    side: int = SIDE
    calls: list[tuple[str, float, float]] = field(default_factory=list)
    overviews: list[tuple[str, int]] = field(default_factory=list)

    async def probe(self, video: str) -> VideoInfo:
        if "missing" in video:
            raise ToolError(ErrorKind.NOT_FOUND, f"There is no file {video}.")
        return VideoInfo(0.0, CLIP_SECONDS, 25.0, SIDE, SIDE, 1500, "h264", "mp4")

    async def crop(
        self, video: str, start_time: float, end_time: float, *, fps: float, max_frames: int, max_pixels: int
    ) -> Crop:
        self.calls.append((video, start_time, end_time))
        await asyncio.sleep(self.delay_s)
        error = self.error(video, start_time, end_time)
        if error is not None:
            raise error
        count = max(1, min(max_frames, int((end_time - start_time) * fps)))
        return self._crop([start_time + i for i in range(count)])

    async def overview(self, video: str, count: int, *, max_pixels: int) -> Crop:
        self.overviews.append((video, count))
        count = min(count, 40)  # as if the clip had no more frames
        return self._crop([(i + 0.5) * CLIP_SECONDS / count for i in range(count)])

    def _crop(self, times: list[float]) -> Crop:
        frames = np.zeros((len(times), self.side, self.side, 3), np.uint8)
        frames[..., 0] = np.array(times, np.uint8)[:, None, None]
        return Crop(frames, np.array(times), "")


@dataclass
class LocalFleet:
    """Runs groups in this process."""

    engine: ScriptedEngine
    config: Config

    def rollout(self, specs: Sequence[GroupSpec]) -> list[Group]:
        async def all_groups() -> list[Group]:
            pool, chat = ScriptedPool(), self.engine.chat
            return await asyncio.gather(*(run_group(self.engine, pool, chat, self.config, spec) for spec in specs))

        return asyncio.run(all_groups())


def calls_text(*windows: tuple[float, float], video: str = "a.mp4", think: str = "look closer") -> str:
    """A turn with calls, as it follows the forced think prefix."""
    blocks = []
    for start, end in windows:
        arguments = {"video_path": video, "start_time": start, "end_time": end}
        blocks.append(f"<tool_call>\n{json.dumps({'name': 'crop_video', 'arguments': arguments})}\n</tool_call>")
    return f"{think}\n</think>\n" + "\n".join(blocks)


def answer_text(answer: str = "B") -> str:
    return f"seen\n</think>\n<answer>{answer}</answer>"


def by_turn(*outputs: Output) -> Callable[[Request], Output]:
    """The n-th output in the n-th turn, the last one from then on."""
    return lambda request: outputs[min(request.turn, len(outputs) - 1)]


def small_config() -> Config:
    config = Config()
    config.model.context_length = 4096
    config.rollout.max_new_tokens = 512
    config.rollout.turn_timeout_s = 5.0
    config.rollout.episode_timeout_s = 20.0
    return config


def sample(name: str, answer: str = "B", kind: QuestionType = "mcq", question: str = "Which?") -> Sample:
    return Sample(name, question, ("/v/a.mp4",), answer, kind)


def spec(videos: Sequence[str] = ("/v/a.mp4",), group_size: int = 1, **changes: object) -> GroupSpec:
    values: dict[str, object] = {
        "group_id": "g1",
        "sample": Sample("s1", "Which letter?", tuple(videos), "B", "mcq"),
        "frame_budget": 4,
        "group_size": group_size,
        "temperature": 0.7,
        "seed": 1,
        "epoch": 0,
    }
    return GroupSpec(**(values | changes))  # type: ignore[arg-type]
