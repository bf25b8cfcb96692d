"""Where the format advantage is placed: on the tokens that make up the structural tags, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

TokenText = Callable[[int], str]
"""The text of one token id, special tokens included, such as a cached `lambda i: tokenizer.decode([i])`.

Broken UTF-8 may come out as replacement characters: tags are ASCII, so they are found all the same.
"""


def structural_mask(
    token_ids: Sequence[int] | NDArray[np.int64],
    generated: Sequence[bool] | NDArray[np.bool_],
    token_text: TokenText,
    tags: Collection[str],
    end_of_turn_ids: Collection[int],
) -> NDArray[np.bool_]:
    """Mark the generated tokens of structural tags and of the end of a turn (ParaVT, arXiv 2605.20342, section 4).

    Works on the text of the very tokens that were sampled and never tokenises anything: a tag may span several tokens
    and may share its first or last one with neighbouring text; each token that holds a part of it is marked. A tag
    counts only where all of it was generated within one turn.

    Args:
        token_ids: [T] one trajectory.
        generated: [T] where the policy sampled the token; each unbroken run of them is one turn.
        token_text: text of one token.
        tags: such as `parsing.STRUCTURAL_TAGS`.
        end_of_turn_ids: ids that end a turn.

    Returns:
        [T] bool, False wherever `generated` is.
    """
    ids = [int(i) for i in token_ids]
    mask = np.zeros(len(ids), dtype=np.bool_)
    any_tag = re.compile("|".join(re.escape(tag) for tag in tags))
    for begin, end in _runs(np.asarray(generated, dtype=np.bool_)):
        pieces = [token_text(i) for i in ids[begin:end]]
        ends = np.fromiter(accumulate(len(piece) for piece in pieces), dtype=np.int64, count=len(pieces))
        for match in any_tag.finditer("".join(pieces)):
            first = np.searchsorted(ends, match.start(), side="right")
            last = np.searchsorted(ends, match.end(), side="left")
            mask[begin + first : begin + last + 1] = True
        mask[begin:end] |= np.isin(ids[begin:end], list(end_of_turn_ids))
    return mask


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First index and one past the last of each unbroken run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    return [(int(a), int(b)) for a, b in list(pairwise(edges))[::2]]


def token_advantages(
    generated: Sequence[bool] | NDArray[np.bool_],
    structural: NDArray[np.bool_],
    sequence_advantage: float,
    format_advantage: float,
) -> NDArray[np.float32]:
    """Advantage of every token [T]: the sequence's on all generated ones, plus the format's on the structural ones.

    In scope `all`, `advantages.episode_advantages` has put everything into `sequence_advantage` and the other is 0.
    """
    mask = np.asarray(generated, dtype=np.bool_)
    return (mask * sequence_advantage + (mask & structural) * format_advantage).astype(np.float32)
