"""What the paper's mechanism needs of a cold start, measured before any arm is run.

The tool-necessity gap: whether calling pays, at each overview budget K. Format fragility: how many closing tags survive
sampling, at each temperature. Episodes are sampled as GRPO samples them (no forced prefix) and then sorted by whether
they called. Questions on which a model calls differ from those on which it does not, so calling and skipping are also
compared within the questions that got both: that difference is what a group's advantages see.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from paravt_ray.episode import CallStatus, Group
from paravt_ray.errors import InputError
from paravt_ray.evaluation.tables import Score, bootstrap
from paravt_ray.rewards import format_stats
from paravt_ray.tracking.run_dir import replace_file

TAGS = {"think": "</think>", "call": "</tool_call>", "answer": "</answer>"}


@dataclass
class GroupRecord:
    """The sampled episodes of one question; all lists have the same length."""

    prior: str
    model: str
    """Digest of the checkpoint's files."""
    sample: str
    budget: int
    """K."""
    temperature: float
    sweep: str
    """What it was sampled for: `budget` or `temperature`."""
    failed: int = 0
    """Rollouts without an episode or without a reward."""
    called: list[bool] = field(default_factory=list)
    """Whether a call was served."""
    accuracy: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    """Total reward, as GRPO is given it."""
    think: list[bool] = field(default_factory=list)
    call: list[bool | None] = field(default_factory=list)
    answer: list[bool] = field(default_factory=list)
    """Whether the tags were closed (`paravt_ray.rewards.FormatStats`); None where no call was attempted."""

    def fill(self, group: Group, asked: int) -> None:
        """Take down the scored episodes of a group in which `asked` rollouts were asked for."""
        for episode in group.episodes:
            if episode.rewards is not None:
                stats = format_stats(episode)
                self.called.append(any(call.status is CallStatus.SERVED for call in episode.call_records))
                self.accuracy.append(episode.rewards.accuracy)
                self.total.append(episode.rewards.total)
                self.think.append(stats.think_closed)
                self.call.append(stats.calls_closed)
                self.answer.append(stats.answer_closed)
        self.failed = asked - len(self.called)

    def split(self, reward: str) -> tuple[list[float], list[float]]:
        """A reward (`accuracy`, `total`) of the episodes that called, and of those that did not."""
        pairs = list(zip(self.called, getattr(self, reward), strict=True))
        return [value for called, value in pairs if called], [value for called, value in pairs if not called]


def pooled(records: Iterable[GroupRecord], reward: str) -> tuple[list[float], list[float]]:
    """A reward of all episodes that called, and of all that did not."""
    parts = [record.split(reward) for record in records]
    return [value for called, _ in parts for value in called], [value for _, skipped in parts for value in skipped]


def gap_within(records: Iterable[GroupRecord], reward: str) -> Score | None:
    """Mean reward of calling minus that of skipping, over the questions that have both."""
    parts = [record.split(reward) for record in records]
    return _over_questions([fmean(called) - fmean(skipped) for called, skipped in parts if called and skipped])


def tag_survival(records: Iterable[GroupRecord], tag: str) -> Score | None:
    """Share of episodes that close a tag (`think`, `call`, `answer`); `call`: of those that attempt one."""
    kept = [[bool(value) for value in getattr(record, tag) if value is not None] for record in records]
    return _over_questions([fmean(values) for values in kept if values])


def _over_questions(means: Sequence[float]) -> Score | None:
    """Episodes of one question are not independent, so its mean counts as one; None where there is no question."""
    return bootstrap("", [means]) if means else None


def write_records(file: Path, records: Iterable[GroupRecord]) -> None:
    """Write one JSON object a line, whole or not at all."""
    replace_file(file, "".join(f"{json.dumps(asdict(record), allow_nan=False)}\n" for record in records))


def read_records(file: Path) -> list[GroupRecord]:
    """Read what `write_records` wrote.

    Raises:
        InputError: it is something else.
    """
    try:
        lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        records = [GroupRecord(**line) for line in lines]
    except (ValueError, TypeError) as error:
        raise InputError(f"{file} is damaged ({error}). Remove it, and it is measured again.") from error
    if not records:
        raise InputError(f"{file} is empty. Remove it, and it is measured again.")
    return records
