"""Results of a benchmark, kept sample by sample: whose they are, what they hold, and the file that they stand in.

A result belongs to a model (its files), a protocol (everything that decides what the model is shown and may do) and a
question (its text and right answer). One of another model, protocol or question is never used in its place. Scores that
rules give are given anew whenever results are read, so that answers of before and after a change of the rules compare.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from paravt_ray import chat
from paravt_ray.config import Config
from paravt_ray.episode import CallStatus, Episode, QuestionType
from paravt_ray.errors import InputError
from paravt_ray.evaluation.splits import Question
from paravt_ray.rewards.accuracy import accuracy
from paravt_ray.rewards.judge import JUDGE_SYSTEM
from paravt_ray.tools.offered import load_tools
from paravt_ray.tracking.episodes import episode_record
from paravt_ray.tracking.metrics import sampled_tokens, tool_metrics
from paravt_ray.weights.digest import model_digest

ROLLOUT_KEYS = (
    "max_new_tokens",
    "max_tool_turns",
    "max_calls_per_turn",
    "max_calls_per_episode",
    "max_invalid_turns",
    "dispatch",
    "reply",
    "think_prefix",
    "overview_frames",
    "subagent_max_new_tokens",
)
MODEL_KEYS = ("dtype", "context_length", "overview_max_pixels", "crop_max_pixels", "min_pixels", "frames_as")
TOOLS_KEYS = ("crop_fps", "crop_max_frames")
EVAL_KEYS = ("mcq_answer_tokens", "other_answer_tokens")


@dataclass(frozen=True)
class Owner:
    """Whose results they are."""

    model: str
    """Digest of the model's files."""
    protocol: str
    """Digest of the protocol."""


@dataclass(frozen=True)
class Result:
    """One scored sample, as tables need it."""

    score: float
    """In [0, 1]: right or wrong, intersection over union, token F1, or a judge's score."""
    question_type: QuestionType
    categories: dict[str, list[str]]
    answer: str | None
    gold: str
    end_reason: str
    calls: int
    """Valid calls."""
    failed_calls: int
    """Calls that were answered with an error, whatever the reason."""
    attempted_calls: int
    new_tokens: int
    """Sampled, sub-agents included."""
    seconds: float
    """From the overview to the answer."""


def owner_of(config: Config) -> Owner:
    """The owner of what a run with this configuration finds; `model.path` is a directory."""
    return Owner(model_digest(Path(config.model.path)), _digest(protocol(config)))


def protocol(config: Config) -> dict[str, Any]:
    """Everything besides model and question that decides an answer and its score."""
    parts = {
        "rollout": (config.rollout, ROLLOUT_KEYS),
        "model": (config.model, MODEL_KEYS),
        "tools": (config.tools, TOOLS_KEYS),
        "eval": (config.eval, EVAL_KEYS),
        "reward": (config.reward, ("open_ended",)),
    }
    values = {f"{name}.{key}": getattr(section, key) for name, (section, keys) in parts.items() for key in keys}
    if config.reward.open_ended == "judge":
        values["judge"] = [config.reward.judge_model, _digest(JUDGE_SYSTEM)]
    main_system = chat.main_system(load_tools(config.tools.offered))
    prompts = (main_system, chat.NO_TOOLS_SYSTEM, chat.SUBAGENT_SYSTEM, chat.FORCE_ANSWER)
    return values | {"temperature": 0.0, "prompts": _digest(prompts)}


def question_key(question: Question) -> str:
    """The question's id with a digest of its text, right answer and videos' names: the same id may be asked anew."""
    sample = question.sample
    content = [sample.question, sample.answer, sample.question_type, [Path(video).name for video in sample.videos]]
    return f"{sample.sample_id}/{_digest(content)}"


def result_of(question: Question, episode: Episode) -> Result:
    """The result of an episode that has rewards."""
    assert episode.rewards is not None
    records = episode.call_records
    wrong = (CallStatus.INVALID, CallStatus.OVER_CAP, CallStatus.FAILED)
    return Result(
        score=episode.rewards.accuracy,
        question_type=episode.sample.question_type,
        categories={name: list(values) for name, values in question.categories.items()},
        answer=episode.answer,
        gold=episode.sample.answer,
        end_reason=episode.end_reason,
        calls=int(tool_metrics([episode])["tool/call_rate"]),
        failed_calls=sum(record.status in wrong for record in records),
        attempted_calls=len(records),
        new_tokens=sampled_tokens(episode),
        seconds=round(episode.seconds, 3),
    )


class ResultFile:
    """A split's results of all models and protocols, one JSON object a line, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file, or begin it; a last line that was cut off by a crash is removed.

        Raises:
            InputError: another process holds it, or it cannot be written.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise InputError(
                f"{path} is being written by another evaluation. Wait for it to end, or choose another eval.results."
            ) from None
        except OSError as error:
            raise InputError(f"The results file {path} cannot be written: {error.strerror}.") from error
        self._file.seek(max(0, self._file.tell() - 1))
        if self._file.read() not in (b"", b"\n"):
            self._file.seek(0)
            self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def add(self, owner: Owner, question: Question, episode: Episode) -> Result:
        """Append a scored episode; it is on the disk when this returns."""
        result = result_of(question, episode)
        record = {
            **asdict(owner),
            "question": question_key(question),
            "row": question.row,
            "result": asdict(result),
            "episode": episode_record(episode),
        }
        # A model can sample half a character, which has no UTF-8 form.
        self._file.write(f"{json.dumps(record, ensure_ascii=False)}\n".encode("utf-8", "replace"))
        self._file.flush()
        os.fsync(self._file.fileno())
        return result

    def close(self) -> None:
        """Let another process have the file."""
        self._file.close()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_results(path: Path, owner: Owner, open_ended: str) -> dict[str, Result]:
    """The results of one owner by question, scored by today's rules; of several of one question the last.

    Args:
        path: of a `ResultFile`; nothing is read where there is none.
        owner: whose.
        open_ended: `reward.open_ended`; what a judge gave is kept.

    Raises:
        InputError: a line is no result.
    """
    return dict(_results(path, owner, open_ended)) if path.is_file() else {}


def _results(path: Path, owner: Owner, open_ended: str) -> Iterator[tuple[str, Result]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):  # still being written, or cut off by a crash
                return
            try:
                record = json.loads(line)
                if Owner(record["model"], record["protocol"]) == owner:
                    yield record["question"], _scored(Result(**record["result"]), open_ended)
            except (ValueError, LookupError, TypeError) as error:
                raise InputError(
                    f"Line {number} of {path} is no result ({error}). Remove that line, or choose another eval.results."
                ) from error


def _scored(result: Result, open_ended: str) -> Result:
    score = accuracy(result.answer, result.gold, result.question_type, open_ended, judged=result.score)
    return replace(result, score=score)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()[:16]
