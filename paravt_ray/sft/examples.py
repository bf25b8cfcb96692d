"""From conversations to rows that the learner trains on: frames are fetched, text is rendered, the mask is set."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import cast

import numpy as np
from numpy.typing import NDArray

from paravt_ray.chat import Chat, Message, Part, Video, assistant_parts, user_parts
from paravt_ray.config import Config
from paravt_ray.episode import Frame, TrainRow
from paravt_ray.rollout.gating import draw_frame_budget
from paravt_ray.sft.conversations import Conversation, ImageRef, SkippedRowError, Turn, VideoRef
from tool_workers.calls import CropCall, OverviewCall
from tool_workers.cropper import Cropper
from tool_workers.records import Crop, Limits, ToolError
from tool_workers.sizes import fit_size


class FrameSource:
    """Frames of videos and pictures, each decoded once as long as the cache holds it. For any number of threads."""

    def __init__(self, config: Config, patch_factor: int) -> None:
        """Decodes in `tools.workers` processes, started on first use; `patch_factor` pixels per visual token side."""
        model, self._tools = config.model, config.tools
        self._overview = Limits(model.overview_max_pixels, model.min_pixels, patch_factor)
        self._crop = Limits(model.crop_max_pixels, model.min_pixels, patch_factor)
        self._croppers = [Cropper(self._tools.crop_timeout_s, cache_bytes=0) for _ in range(self._tools.workers)]
        self._free: Queue[Cropper] = Queue()
        for cropper in reversed(self._croppers):
            self._free.put(cropper)
        self._lock = Lock()  # guards the two below
        self._kept: OrderedDict[CropCall | OverviewCall, list[Frame]] = OrderedDict()
        self._bytes = 0

    def video(self, path: Path, count: int | None, window: tuple[float, float] | None) -> list[Frame]:
        """`count` overview frames or the frames of `window` (seconds).

        Raises:
            ToolError: there are none.
        """
        call: CropCall | OverviewCall
        if window is not None:
            call = CropCall(str(path), *window, self._tools.crop_fps, self._tools.crop_max_frames, self._crop)
        else:
            call = OverviewCall(str(path), cast(int, count), self._overview)
        with self._lock:
            if call in self._kept:
                self._kept.move_to_end(call)
                return self._kept[call]
        crop = self._decode(call)
        times = crop.timestamps.tolist()
        frames = [_frame(pixels, time, str(path)) for pixels, time in zip(crop.frames, times, strict=True)]
        with self._lock:
            self._bytes += 0 if call in self._kept else _size(frames)
            self._kept[call] = frames
            while self._bytes > self._tools.cache_mb << 20:
                self._bytes -= _size(self._kept.popitem(last=False)[1])
        return frames

    def _decode(self, call: CropCall | OverviewCall) -> Crop:
        cropper = self._free.get()  # there are as many as threads, and each call has its deadline
        try:
            return cast(Crop, cropper.serve(call))
        finally:
            self._free.put(cropper)

    def image(self, path: Path) -> Frame:
        """A picture, resized as a frame is.

        Raises:
            OSError: it cannot be read.
        """
        from PIL import Image

        with Image.open(path) as picture:
            size = fit_size(*picture.size, self._crop)
            pixels = np.asarray(picture.convert("RGB").resize(size, Image.Resampling.BICUBIC))
        return _frame(pixels, 0.0, str(path))

    def close(self) -> None:
        """End the decoder processes."""
        for cropper in self._croppers:
            cropper.stop()


def _size(frames: list[Frame]) -> int:
    return sum(frame.pixels.nbytes for frame in frames)


def _frame(pixels: NDArray[np.uint8], time: float, path: str) -> Frame:
    return Frame(pixels, time, f"{path}@{time!r}/{pixels.shape[1]}x{pixels.shape[0]}")


class ExampleBuilder:
    """Renders conversations with the renderer of RL and evaluation."""

    def __init__(self, chat: Chat, frames: FrameSource, config: Config) -> None:
        self._chat, self._frames, self._config = chat, frames, config

    def build(self, conversation: Conversation, epoch: int) -> TrainRow:
        """One row; `generated` marks the assistant's text and its end-of-turn tokens.

        Raises:
            SkippedRowError: a file cannot be read, or the conversation is longer than the model's context.
        """
        messages = [self._message(turn, conversation.row_id, epoch) for turn in conversation.turns]
        rendered = self._chat.render(messages)
        pieces = self._chat.pieces(rendered.ids, rendered.frames)
        ids = np.asarray([token for piece in pieces for token in piece], np.int64)
        trained = np.repeat(np.asarray(rendered.trained), [len(piece) for piece in pieces])
        if len(ids) > self._config.model.context_length:
            raise SkippedRowError("longer than model.context_length", f"{len(ids)} tokens")
        zeros = np.zeros(len(ids), np.float32)
        return TrainRow(
            token_ids=ids, generated=trained, advantages=zeros, behaviour_logprobs=zeros, frames=rendered.frames
        )

    def _message(self, turn: Turn, row_id: str, epoch: int) -> Message:
        parts: list[Part] = []
        for part in turn.parts:
            if isinstance(part, str):
                parts += user_parts(part) if turn.role == "user" else assistant_parts(part)
            else:
                parts += self._shown(part, row_id, epoch)
        return Message(turn.role, tuple(parts))

    def _shown(self, part: VideoRef | ImageRef, row_id: str, epoch: int) -> list[Part]:
        rollout = self._config.rollout
        try:
            if isinstance(part, ImageRef):
                return [self._frames.image(part.path)]
            count = part.frames
            if count is None and part.window is None:
                drawn = draw_frame_budget(self._config.trainer.seed, row_id, epoch, rollout.frame_budgets)
                count = drawn if rollout.gating else rollout.overview_frames
            return [Video(tuple(self._frames.video(part.path, count, part.window)))]
        except ToolError as error:
            raise SkippedRowError(f"a video cannot be read: {error.kind}", str(error)) from error
        except OSError as error:
            raise SkippedRowError("a picture cannot be read", f"{part.path}: {error}") from error
