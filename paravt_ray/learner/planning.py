"""Which rows run together: cut by tokens, balanced over ranks, with rows of one prompt side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from paravt_ray.episode import TrainRow


class Prompt(NamedTuple):
    """What a row begins with before anything is generated, but for the last token.

    Rows with equal prompts share it; the last token predicts the first generated one, so each row has its own.
    """

    length: int
    ids: bytes
    pictures: tuple[tuple[str, ...], ...]
    """Keys of the frames that it shows."""


def plan(rows: Sequence[TrainRow], prompts: Sequence[Prompt], ranks: int, budget: int) -> list[list[list[int]]]:
    """Cut rows into micro-batches of at most `budget` tokens: result[rank][step] holds row indices.

    Every rank gets the same number of steps (DeepSpeed communicates in each), the micro-batches that run at the same
    time are about equally long, and rows of a group with equal prompts stay together where they can: the prompt counts
    once in a micro-batch. A row that is longer than the budget runs alone. A micro-batch is empty where
    there are fewer rows than ranks.
    """
    keys = [(row.group_index, prompt) for row, prompt in zip(rows, prompts, strict=True)]
    order = sorted(range(len(rows)), key=lambda i: (keys[i], rows[i].sequence_index, i))
    lengths = [len(rows[i].token_ids) for i in order]
    added = list(lengths)  # by a row to a micro-batch that holds the row before it
    for position, (before, i) in enumerate(pairwise(order), start=1):
        if keys[before] == keys[i]:
            added[position] -= keys[i][1].length
    steps = -(-len(_cut(lengths, added, budget)) // ranks)
    # The lowest limit that needs no more micro-batches makes them about equally long.
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        fits = len(_cut(lengths, added, middle)) <= ranks * steps
        low, high = (low, middle) if fits else (middle + 1, high)
    pieces = _cut(lengths, added, low)
    # The longest run at the same time.
    pieces.sort(key=lambda piece: -sum(lengths[piece[0] : piece[0] + 1]) - sum(added[piece[0] + 1 : piece[1]]))
    bins = [order[start:end] for start, end in pieces]
    bins += [[] for _ in range(ranks * steps - len(bins))]
    return [bins[rank::ranks] for rank in range(ranks)]


def _cut(lengths: Sequence[int], added: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Cut into contiguous pieces of at most `limit`, as few as possible; a longer item is a piece of its own.

    An item takes its length at the beginning of a piece, and what it adds elsewhere.
    """
    pieces, start, total = [], 0, 0
    for index, (length, more) in enumerate(zip(lengths, added, strict=True)):
        if total + more > limit and index > start:
            pieces.append((start, index))
            start = index
        total = length if index == start else total + more
    return [*pieces, (start, len(lengths))]


def split_by_group(rows: Sequence[TrainRow], parts: int) -> list[list[TrainRow]]:
    """Split rows into `parts` sets of whole groups with about equally many groups; fewer where there are fewer."""
    groups = sorted({row.group_index for row in rows})
    parts = min(parts, len(groups))
    part_of = {group: index * parts // len(groups) for index, group in enumerate(groups)}
    return [[row for row in rows if part_of[row.group_index] == part] for part in range(parts)]
