"""R_fmt and R_anchor: how well an episode keeps the format (ParaVT, arXiv 2605.20342, section 4).

What is scored is the whole trajectory as it was rendered: the text of every assistant turn with its forced think
prefix, never tool replies, and never the loss-masked tokens alone. Over several turns
- thinking counts as closed if *every* turn closed it, and as never closed if *any* turn opened and did not close it;
- the answer is that of the last turn;
- counts are exact: a second think block in a turn, a second answer in the trajectory or tags in the wrong order
  forfeit the parts that they could otherwise be repeated for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paravt_ray.config import RewardConfig
from paravt_ray.episode import Episode, TurnRecord

_TAG = re.compile(r"</?(?:think|tool_call|tool_code|tool_response|answer)>")
_PAIRED = ("think", "tool_call", "answer")
_THINKS = ["<think>", "</think>"]
_CALLS = ["<tool_call>", "</tool_call>"]
_ANSWERS = ["<answer>", "</answer>"]
# Shortest thinking, in characters, that earns credit in front of a call.
_SUBSTANTIAL = 10


@dataclass(frozen=True)
class FormatStats:
    """What became of one episode's format; the metrics `format/*` are the means over episodes."""

    compliance: bool
    """Every turn is exactly one closed, non-empty think block, then either runnable JSON calls, all closed, or one
    closed, non-empty answer, and no other tag; calls in every turn but the last, the answer in the last."""
    think_closed: bool
    """Every turn opened thinking and closed it."""
    answer_closed: bool
    """The last turn gave a non-empty answer and closed its tag."""
    calls_closed: bool | None
    """Every attempted call has its closing tag; None where there was no call, which belongs in no mean."""


@dataclass(frozen=True)
class FormatScore:
    """R_fmt in [0, 1] and the R_anchor that went into it."""

    format: float
    anchor: float


def format_stats(episode: Episode) -> FormatStats:
    """The booleans behind the metrics `format/{compliance,think_closed,answer_closed,calls_closed}`."""
    calls = [call for record in episode.turns for call in record.turn.calls]
    return FormatStats(
        compliance=_flows(episode),
        think_closed=bool(episode.turns) and all(_closes_thinking(record) for record in episode.turns),
        answer_closed=episode.answer is not None and episode.turns[-1].turn.answer_closed,
        calls_closed=all(call.closed for call in calls) if calls else None,
    )


def score_format(episode: Episode, config: RewardConfig) -> FormatScore:
    """R_fmt = clamp01(base + lambda * R_anchor + 0.3 [substantial thinking] + 0.1 [score > 0, all tags balanced]).

    base = 0.2 for one closed, non-empty think block a turn + 0.3 for a final, non-empty answer + 0.2 if that is the
    only one and closed; without answer suffix 0.3, 0.2 and 0.1. Substantial thinking: there is a runnable call, and
    each turn that makes one thought for at least 10 characters before.
    """
    think, answered, closed = (0.2, 0.3, 0.2) if config.answer_suffix else (0.3, 0.2, 0.1)
    stats, anchor = format_stats(episode), score_anchor(episode, config)
    counts = tag_counts(episode)
    score = (
        think * (bool(episode.turns) and all(_thinks_once(record, episode.think_prefix) for record in episode.turns))
        + answered * (episode.answer is not None)
        + closed * (stats.answer_closed and counts.get("<answer>") == 1 and counts.get("</answer>") == 1)
        + config.anchor_weight * anchor
        + 0.3 * _thinks_before_calls(episode)
    )
    balanced = all(counts.get(f"<{name}>", 0) == counts.get(f"</{name}>", 0) for name in _PAIRED)
    score += 0.1 * (score > 0 and balanced)
    return FormatScore(format=min(1.0, max(0.0, score)), anchor=anchor)


def score_anchor(episode: Episode, config: RewardConfig) -> float:
    """R_anchor: +0.4 if thinking is closed, +0.3 for the full flow from thinking to the answer, minus gamma if some
    turn opened thinking and never closed it."""
    never_closed = any(record.turn.think_opened and not record.turn.think_closed for record in episode.turns)
    return 0.4 * format_stats(episode).think_closed + 0.3 * _flows(episode) - config.unclosed_penalty * never_closed


def tag_counts(episode: Episode) -> dict[str, int]:
    """How often each tag occurs in the assistant turns, forced prefixes included."""
    counts: dict[str, int] = {}
    for record in episode.turns:
        for tag in _tags(record, episode.think_prefix):
            counts[tag] = counts.get(tag, 0) + 1
    return counts


def _tags(record: TurnRecord, think_prefix: bool) -> list[str]:
    """The tags of one turn as rendered, in order."""
    return ["<think>"] * think_prefix + _TAG.findall(record.turn.text)


def _closes_thinking(record: TurnRecord) -> bool:
    return record.turn.think_opened and record.turn.think_closed


def _thinks_once(record: TurnRecord, think_prefix: bool) -> bool:
    """Whether a turn holds one closed think block with content, and no further opening or closing tag of one."""
    tags = [tag for tag in _tags(record, think_prefix) if tag in _THINKS]
    return tags == _THINKS and bool((record.turn.think or "").strip())


def _flows(episode: Episode) -> bool:
    """Whether the episode is compliant, as FormatStats says."""
    if not episode.turns:
        return False
    for position, record in enumerate(episode.turns):
        turn, tags = record.turn, _tags(record, episode.think_prefix)
        rest = tags[len(_THINKS) :]
        if tags[: len(_THINKS)] != _THINKS or not (turn.think or "").strip():
            return False
        if position == len(episode.turns) - 1:
            if rest != _ANSWERS or turn.answer is None:
                return False
        elif not turn.calls or not all(call.ok for call in turn.calls) or rest != _CALLS * (len(rest) // 2):
            return False
    return True


def _thinks_before_calls(episode: Episode) -> bool:
    """Whether runnable calls were made, each turn's after some thinking; the forced turn's calls are not run."""
    calling = [r.turn for r in episode.turns if not r.forced and any(call.ok for call in r.turn.calls)]
    return bool(calling) and all(len((turn.think or "").strip()) >= _SUBSTANTIAL for turn in calling)
