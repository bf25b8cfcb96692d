"""From rows to micro-batches: the tensors of those that run together (`planning` says which).

A micro-batch is one packed row of tokens without padding (see `attention`). What its sequences share is computed once:
the prompt of a group's rollouts, and every frame that several of them show.

A *picture* is what one run of pads shows: one frame as an image, or the two that a video shows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paravt_ray.episode import Frame, InvalidTrajectoryError, TrainRow
from paravt_ray.learner.attention import Family, family
from paravt_ray.learner.planning import Prompt


@dataclass
class MicroBatch:
    """The tensors of one forward pass. T tokens, N of them generated, P patches of U different pictures, V pads."""

    input_ids: Tensor  # [1, T] int64, with image pads for those of videos too
    position_ids: Tensor  # [3, 1, T] int64, M-RoPE: time, height, width
    families: tuple[Family, ...]
    pixel_values: Tensor  # [P, channels * temporal patch * patch * patch] float32
    frame_grid: Tensor  # [U, 3] int64, patches in time, height, width
    frame_families: tuple[Family, ...]
    visual_index: Tensor  # [V] int64, which visual token of the different pictures stands at each pad
    sources: Tensor  # [N] int64, position in T whose hidden state predicts the generated token
    targets: Tensor  # [N] int64, the generated token
    sequence: Tensor  # [N] int64, which of the micro-batch's rows it belongs to
    advantages: Tensor  # [N] float32
    behaviour_logprobs: Tensor  # [N] float32
    reference_logprobs: Tensor | None  # [N] float32, where all rows have them
    rows: tuple[int, ...]
    """Indices of the rows, in the order in which they are packed."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
        return MicroBatch(**moved)

    def split(self, values: Tensor) -> list[NDArray[np.float32]]:
        """Cut per-token values [N] into one array for each row, in packed order."""
        counts = torch.bincount(self.sequence, minlength=len(self.rows)).tolist()
        return np.split(values.detach().float().cpu().numpy(), np.cumsum(counts)[:-1])


class _Segment(NamedTuple):
    """A part of a row that stands in the micro-batch: the prompt of several rows, or what is a row's own."""

    row: int
    """Position of the row among the packed ones; of a prompt, any that has it."""
    start: int
    stop: int


class _Picture(NamedTuple):
    """What one run of pads shows."""

    frames: tuple[Frame, ...]
    """One of an image, as many as the temporal patch of a video."""
    start: int
    """Index of its first pad in its row."""
    rows: int
    """Of visual tokens."""
    columns: int

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for pictures that look the same."""
        return tuple(frame.key for frame in self.frames)

    @property
    def tokens(self) -> int:
        """Visual tokens, and pads."""
        return self.rows * self.columns


class Collator:
    """Builds micro-batches for one checkpoint: its normalisation of pictures, patch sizes and pads."""

    def __init__(self, path: str | Path) -> None:
        """`path` is a checkpoint directory in Hugging Face format."""
        from transformers import AutoConfig, AutoImageProcessor, AutoVideoProcessor

        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        self._processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        self._video_processor = AutoVideoProcessor.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        self._image_pad: int = config.image_token_id
        self._video_pad: int = config.video_token_id
        self._patch: int = config.vision_config.patch_size
        self._merge: int = config.vision_config.spatial_merge_size
        self._temporal: int = config.vision_config.temporal_patch_size

    def check(self, row: TrainRow) -> None:
        """Refuse a row that no forward pass can make sense of.

        Raises:
            InvalidTrajectoryError: arrays of different lengths, pads that do not match the frames (a policy may have
                sampled one), frames of a size that is no multiple of a visual token, nothing before the first
                generated token, log-probs that are not finite.
        """
        ids = np.asarray(row.token_ids)
        lengths = {len(ids), len(row.generated), len(row.advantages), len(row.behaviour_logprobs)}
        if len(lengths) != 1 or not len(ids):
            raise InvalidTrajectoryError(f"The arrays of a row have the lengths {sorted(lengths)}.")
        if row.generated[0]:
            raise InvalidTrajectoryError("The first token of a row is marked as generated, but nothing predicts it.")
        if not np.isfinite(row.behaviour_logprobs).all():
            raise InvalidTrajectoryError("A log-prob of the generator is not finite.")
        side = self._patch * self._merge
        for frame in row.frames:
            shape = frame.pixels.shape
            if frame.pixels.dtype != np.uint8 or len(shape) != 3 or 0 in shape or shape[0] % side or shape[1] % side:
                raise InvalidTrajectoryError(f"{frame} is not an RGB image with sides that are multiples of {side}.")
        pads = self._pads(ids)
        pictures = self._pictures(row)
        places = [place for picture in pictures for place in range(picture.start, picture.start + picture.tokens)]
        fit = pads.tolist() == places and all(self._fits(ids, picture) for picture in pictures)
        shown = sum(len(picture.frames) for picture in pictures)
        if not fit or shown != len(row.frames) or row.generated[pads].any():
            raise InvalidTrajectoryError(f"{len(pads)} pads do not stand where {len(row.frames)} frames belong.")

    def prompt(self, row: TrainRow) -> Prompt:
        """What a row may share with others; empty where nothing is generated or a picture would be cut in two."""
        return _prompt(row, self._pictures(row))

    def collate(self, rows: Sequence[TrainRow], indices: Sequence[int]) -> MicroBatch:
        """Pack the rows with these indices.

        A micro-batch without any frame gets one black frame that no token shows: the vision tower then runs, and
        communicates, on every rank alike. Without any row it also gets one token, so that a rank with nothing to do
        keeps step with the others.

        The rows must have passed `check`.
        """
        pictures_of = {i: self._pictures(rows[i]) for i in indices}
        order, families, segments = _pack(rows, {i: _prompt(rows[i], own) for i, own in pictures_of.items()})
        chosen, pictures = [rows[i] for i in order], [pictures_of[i] for i in order]
        positions = [_positions(len(row.token_ids), own) for row, own in zip(chosen, pictures, strict=True)]
        shown = [p for row, start, stop in segments for p in pictures[row] if start <= p.start < stop]
        pixels, grid, first_token = self._patches(list({p.key: p for p in shown}.values()) or [self._blank()])
        visual = [first_token[picture.key] + np.arange(picture.tokens) for picture in shown]

        def joined(arrays: Sequence[NDArray[Any]], empty: NDArray[Any]) -> NDArray[Any]:
            parts = [arrays[row][..., start:stop] for row, start, stop in segments]
            return np.concatenate(parts, axis=-1) if parts else empty

        def at_targets(arrays: Sequence[NDArray[np.float32]]) -> Tensor:
            return _tensor(joined(arrays, np.zeros(1, np.float32))[where].astype(np.float32))

        ids = joined([row.token_ids for row in chosen], np.zeros(1, np.int64))
        where = np.flatnonzero(joined([row.generated for row in chosen], np.zeros(1, bool)))
        known = [row.reference_logprobs for row in chosen if row.reference_logprobs is not None]
        sequence = [np.full(stop - start, row) for row, start, stop in segments] or [np.zeros(1, np.int64)]
        return MicroBatch(
            # The model puts features in the place of pads; of both kinds they come in one tensor, so they need one pad.
            input_ids=_tensor(np.where(ids == self._video_pad, self._image_pad, ids))[None],
            position_ids=_tensor(joined(positions, np.zeros((3, 1), np.int64)))[:, None],
            families=families,
            pixel_values=pixels,
            frame_grid=grid,
            frame_families=(family(grid.prod(-1).tolist()),),
            visual_index=_tensor(np.concatenate(visual) if visual else np.zeros(0, np.int64)),
            sources=_tensor(where - 1),
            targets=_tensor(ids[where]),
            sequence=_tensor(np.concatenate(sequence)[where]),
            advantages=at_targets([row.advantages for row in chosen]),
            behaviour_logprobs=at_targets([row.behaviour_logprobs for row in chosen]),
            reference_logprobs=at_targets(known) if known and len(known) == len(chosen) else None,
            rows=tuple(order),
        )

    def _blank(self) -> _Picture:
        side = self._patch * self._merge
        return _Picture((Frame(np.zeros((side, side, 3), np.uint8), 0.0, "blank"),), 0, 1, 1)

    def _pads(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.flatnonzero((ids == self._image_pad) | (ids == self._video_pad))

    def _frame_count(self, pad: int) -> int:
        return 1 if pad == self._image_pad else self._temporal

    def _fits(self, ids: NDArray[np.int64], picture: _Picture) -> bool:
        """Whether its pads are all of one kind, and its frames as many as that kind shows and all of one size."""
        kinds = set(ids[picture.start : picture.start + picture.tokens].tolist())
        sizes = {frame.pixels.shape for frame in picture.frames}
        return len(kinds) == len(sizes) == 1 and len(picture.frames) == self._frame_count(kinds.pop())

    def _pictures(self, row: TrainRow) -> list[_Picture]:
        """What each run of pads shows, in order, as far as pads and frames go; `check` says whether they match."""
        ids = np.asarray(row.token_ids)
        pads = self._pads(ids)
        side = self._patch * self._merge
        pictures: list[_Picture] = []
        pad = frame = 0
        while pad < len(pads) and frame < len(row.frames):
            start = int(pads[pad])
            count = self._frame_count(ids[start])
            frames = tuple(row.frames[frame : frame + count])
            rows, columns = (length // side for length in frames[0].pixels.shape[:2])
            pictures.append(_Picture(frames, start, rows, columns))
            pad, frame = pad + rows * columns, frame + count
        return pictures

    def _patches(self, pictures: list[_Picture]) -> tuple[Tensor, Tensor, dict[tuple[str, ...], int]]:
        """Normalised patches [P, D], grids [U, 3], and each picture's first visual token.

        Nothing is resized: frames come in their final size, and the engine is told to leave them alone too. The
        checkpoint's own processors do the arithmetic, so that both sides see the same values to the last bit.
        """
        by_kind: dict[tuple[int, ...], list[_Picture]] = {}
        for picture in pictures:
            by_kind.setdefault((len(picture.frames), *picture.frames[0].pixels.shape), []).append(picture)
        patches: list[Tensor] = []
        grid: list[list[int]] = []
        first_token: dict[tuple[str, ...], int] = {}
        token = 0
        for group in by_kind.values():
            pixels = torch.from_numpy(np.stack([[frame.pixels for frame in picture.frames] for picture in group]))
            pixels = pixels.permute(0, 1, 4, 2, 3)  # [pictures, frames, channels, height, width]
            one = pixels.shape[1] == 1
            p, values = (self._processor, pixels[:, 0]) if one else (self._video_processor, pixels)
            values = p.rescale_and_normalize(
                values, p.do_rescale, p.rescale_factor, p.do_normalize, p.image_mean, p.image_std
            )
            flat, *_, rows, columns = p.patchify(values, self._patch, self._merge, self._temporal)
            patches.append(flat.flatten(0, 1))
            for picture in group:
                first_token[picture.key] = token
                token += picture.tokens
                grid.append([1, rows, columns])
        return torch.cat(patches), torch.tensor(grid), first_token


def _pack(rows: Sequence[TrainRow], prompts: dict[int, Prompt]) -> tuple[list[int], tuple[Family, ...], list[_Segment]]:
    """The order of the rows, how they are related, and what stands in the micro-batch one after the other.

    Rows of equal prompts are a family; rows without such a relation are one without a prefix. Within a family equal
    lengths lie side by side: they share an attention call.
    """
    by_prompt: dict[Prompt, list[int]] = {}
    for i, prompt in prompts.items():
        by_prompt.setdefault(prompt, []).append(i)
    related = [(prompt.length, members) for prompt, members in by_prompt.items() if prompt.length and len(members) > 1]
    together = {i for _, members in related for i in members}
    alone = [i for i in prompts if i not in together]
    order: list[int] = []
    families: list[Family] = []
    segments: list[_Segment] = []
    for prefix, members in [*related, (0, alone)] if alone else related:
        members.sort(key=lambda i: (len(rows[i].token_ids), i))
        first, own = len(order), [len(rows[i].token_ids) for i in members]
        families.append(family([length - prefix for length in own], prefix))
        segments += [_Segment(first, 0, prefix)] if prefix else []
        segments += [_Segment(first + number, prefix, length) for number, length in enumerate(own)]
        order += members
    return order, tuple(families) or (family([1]),), segments


def _prompt(row: TrainRow, pictures: Sequence[_Picture]) -> Prompt:
    length = max(0, int(row.generated.argmax()) - 1)
    if any(picture.start < length < picture.start + picture.tokens for picture in pictures):
        length = 0
    shown = tuple(picture.key for picture in pictures if picture.start < length)
    return Prompt(length, row.token_ids[:length].tobytes(), shown)


def _positions(length: int, pictures: Sequence[_Picture]) -> NDArray[np.int64]:
    """M-RoPE positions [3, T] of one row: what the model's own `get_rope_index` computes, without its loop.

    Text advances all three positions by one a token. A picture's tokens share one time, count rows and columns, and
    advance the positions by its longer side.
    """
    step = np.ones(length, np.int64)
    offsets = np.zeros((3, length), np.int64)
    for picture in pictures:
        end = picture.start + picture.tokens
        step[picture.start : end] = 0
        step[end - 1] = max(picture.rows, picture.columns)
        offsets[1, picture.start : end] = np.repeat(np.arange(picture.rows), picture.columns)
        offsets[2, picture.start : end] = np.tile(np.arange(picture.columns), picture.rows)
    base = np.concatenate([[0], np.cumsum(step)[:-1]])
    return base + offsets


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
