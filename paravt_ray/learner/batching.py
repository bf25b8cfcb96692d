"""From rows to micro-batches: which rows run together, and the tensors of one micro-batch.

A micro-batch is one packed row of tokens without padding (see `attention`). Frames that its sequences share (the
rollouts of one prompt see the same overview) go through the vision tower once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paravt_ray.episode import Frame, InvalidTrajectoryError, TrainRow
from paravt_ray.learner.attention import Runs, runs_of


def plan(rows: Sequence[TrainRow], ranks: int, budget: int) -> list[list[list[int]]]:
    """Cut rows into micro-batches of at most `budget` tokens: result[rank][step] holds row indices.

    Every rank gets the same number of steps (DeepSpeed communicates in each), the micro-batches that run at the same
    time are about equally long, and rows of a group stay together where they can, since they share frames. A row that
    is longer than the budget runs alone. A micro-batch is empty where there are fewer rows than ranks.
    """
    order = sorted(range(len(rows)), key=lambda i: (rows[i].group_index, rows[i].sequence_index, i))
    lengths = [len(rows[i].token_ids) for i in order]
    steps = -(-len(_cut(lengths, budget)) // ranks)
    # The lowest limit that needs no more micro-batches makes them about equally long.
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(lengths, middle)) <= ranks * steps else (middle + 1, high)
    bins = [order[start:end] for start, end in _cut(lengths, low)]
    bins += [[] for _ in range(ranks * steps - len(bins))]
    # The longest run at the same time. Within one, equal lengths lie side by side: they share an attention call.
    bins.sort(key=lambda indices: -sum(len(rows[i].token_ids) for i in indices))
    packed = [sorted(indices, key=lambda i: (len(rows[i].token_ids), i)) for indices in bins]
    return [packed[rank::ranks] for rank in range(ranks)]


def _cut(lengths: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Cut into contiguous pieces of at most `limit` in sum, as few as possible; a longer item is a piece of its own."""
    pieces, start, total = [], 0, 0
    for index, length in enumerate(lengths):
        if total + length > limit and index > start:
            pieces.append((start, index))
            start, total = index, 0
        total += length
    return [*pieces, (start, len(lengths))]


def split_by_group(rows: Sequence[TrainRow], parts: int) -> list[list[TrainRow]]:
    """Split rows into `parts` sets of whole groups with about equally many groups; fewer where there are fewer."""
    groups = sorted({row.group_index for row in rows})
    parts = min(parts, len(groups))
    part_of = {group: index * parts // len(groups) for index, group in enumerate(groups)}
    return [[row for row in rows if part_of[row.group_index] == part] for part in range(parts)]


@dataclass
class MicroBatch:
    """The tensors of one forward pass. T tokens, N of them generated, P patches of U different frames, V image pads."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [3, 1, T] int64, M-RoPE: time, height, width
    runs: Runs
    pixel_values: Tensor  # [P, channels * temporal patch * patch * patch] float32
    frame_grid: Tensor  # [U, 3] int64, patches in time, height, width
    frame_runs: Runs
    visual_index: Tensor  # [V] int64, which visual token of the different frames stands at each image pad
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


class Collator:
    """Builds micro-batches for one checkpoint: its image normalisation, patch sizes and image pad."""

    def __init__(self, path: str | Path) -> None:
        """`path` is a checkpoint directory in Hugging Face format."""
        from transformers import AutoConfig, AutoImageProcessor

        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        self._processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        self._image_pad: int = config.image_token_id
        self._patch: int = config.vision_config.patch_size
        self._merge: int = config.vision_config.spatial_merge_size
        self._temporal: int = config.vision_config.temporal_patch_size

    def check(self, row: TrainRow) -> None:
        """Refuse a row that no forward pass can make sense of.

        Raises:
            InvalidTrajectoryError: arrays of different lengths, image pads that do not match the frames (a policy may
                have sampled one), frames of a size that is no multiple of a visual token, nothing before the first
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
        pads = np.flatnonzero(ids == self._image_pad)
        sizes = [self._tokens(frame) for frame in row.frames]
        *spans, rest = np.split(pads, np.cumsum(sizes, dtype=np.int64))
        fit = all(len(span) == size == span[-1] - span[0] + 1 for span, size in zip(spans, sizes, strict=True))
        if not fit or len(rest) or row.generated[pads].any():
            raise InvalidTrajectoryError(f"{len(pads)} image pads do not stand where {len(sizes)} frames belong.")

    def collate(self, rows: Sequence[TrainRow], indices: Sequence[int]) -> MicroBatch:
        """Pack the rows with these indices.

        A micro-batch without any frame gets one black frame that no token shows: the vision tower then runs, and
        communicates, on every rank alike. Without any row it also gets one token, so that a rank with nothing to do
        keeps step with the others.

        The rows must have passed `check`.
        """
        chosen = [rows[i] for i in indices]
        frames = _different([frame for row in chosen for frame in row.frames])
        pixels, grid, first_token = self._patches(frames or [self._blank()])
        ids = np.concatenate([row.token_ids for row in chosen]) if chosen else np.zeros(1, np.int64)
        positions = [self._positions(row) for row in chosen] or [np.zeros((3, 1), np.int64)]
        generated = np.concatenate([row.generated for row in chosen]) if chosen else np.zeros(1, bool)
        where = np.flatnonzero(generated)
        lengths = [len(row.token_ids) for row in chosen] or [1]
        known = [row.reference_logprobs for row in chosen if row.reference_logprobs is not None]
        visual = [first_token[f.key] + np.arange(self._tokens(f)) for row in chosen for f in row.frames]
        return MicroBatch(
            input_ids=_tensor(ids)[None],
            position_ids=_tensor(np.concatenate(positions, axis=1))[:, None],
            runs=runs_of(lengths),
            pixel_values=pixels,
            frame_grid=grid,
            frame_runs=runs_of(grid.prod(-1).tolist()),
            visual_index=_tensor(np.concatenate(visual) if visual else np.zeros(0, np.int64)),
            sources=_tensor(where - 1),
            targets=_tensor(ids[where]),
            sequence=_tensor(np.repeat(np.arange(len(lengths)), lengths)[where]),
            advantages=_gather(where, [row.advantages for row in chosen]),
            behaviour_logprobs=_gather(where, [row.behaviour_logprobs for row in chosen]),
            reference_logprobs=_gather(where, known) if known and len(known) == len(chosen) else None,
            rows=tuple(indices),
        )

    def _blank(self) -> Frame:
        side = self._patch * self._merge
        return Frame(np.zeros((side, side, 3), np.uint8), 0.0, "blank")

    def _tokens(self, frame: Frame) -> int:
        height, width = frame.pixels.shape[:2]
        side = self._patch * self._merge
        return int(height // side) * int(width // side)

    def _patches(self, frames: list[Frame]) -> tuple[Tensor, Tensor, dict[str, int]]:
        """Normalised patches [P, D], grids [U, 3], and each frame's first visual token.

        Nothing is resized: frames come in their final size, and the engine is told to leave them alone too. The
        checkpoint's own processor does the arithmetic, so that both sides see the same values to the last bit.
        """
        by_size: dict[tuple[int, ...], list[Frame]] = {}
        for frame in frames:
            by_size.setdefault(frame.pixels.shape, []).append(frame)
        patches: list[Tensor] = []
        grid: list[list[int]] = []
        first_token: dict[str, int] = {}
        token = 0
        p = self._processor
        for group in by_size.values():
            images = torch.from_numpy(np.stack([f.pixels for f in group])).permute(0, 3, 1, 2)
            images = p.rescale_and_normalize(
                images, p.do_rescale, p.rescale_factor, p.do_normalize, p.image_mean, p.image_std
            )
            flat, rows, columns = p.patchify(images, self._patch, self._merge, self._temporal)
            patches.append(flat.flatten(0, 1))
            for frame in group:
                first_token[frame.key] = token
                token += self._tokens(frame)
                grid.append([1, rows, columns])
        return torch.cat(patches), torch.tensor(grid), first_token

    def _positions(self, row: TrainRow) -> NDArray[np.int64]:
        """M-RoPE positions [3, T] of one row: what the model's own `get_rope_index` computes, without its loop.

        Text advances all three positions by one a token. A frame's tokens share one time, count rows and columns, and
        advance the positions by its longer side.
        """
        ids = np.asarray(row.token_ids)
        pads = np.flatnonzero(ids == self._image_pad)
        sizes = [self._tokens(frame) for frame in row.frames]
        starts = pads[np.cumsum([0, *sizes[:-1]])] if sizes else pads
        step = np.ones(len(ids), np.int64)
        offsets = np.zeros((3, len(ids)), np.int64)
        for start, size, frame in zip(starts, sizes, row.frames, strict=True):
            rows, columns = (side // (self._patch * self._merge) for side in frame.pixels.shape[:2])
            step[start : start + size] = 0
            step[start + size - 1] = max(rows, columns)
            offsets[1, start : start + size] = np.repeat(np.arange(rows), columns)
            offsets[2, start : start + size] = np.tile(np.arange(columns), rows)
        base = np.concatenate([[0], np.cumsum(step)[:-1]])
        return base + offsets


def _different(frames: Sequence[Frame]) -> list[Frame]:
    return list({frame.key: frame for frame in frames}.values())


def _gather(where: NDArray[np.int64], arrays: Sequence[NDArray[Any]]) -> Tensor:
    joined = np.concatenate(arrays) if arrays else np.zeros(0, np.float32)
    return _tensor(joined[where].astype(np.float32))


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
