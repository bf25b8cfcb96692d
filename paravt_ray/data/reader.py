"""Questions from a parquet file in the released RL format, and the order in which a run asks them.

One row: `prompt`, a list of {role, content} in which `<video>` marks a video; `videos`, a list of {"video": path};
`extra_info`, a JSON string or a struct with `answer` and `question_type` (`mcq`, `tvg`, anything else is open-ended).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow
import pyarrow.parquet

from paravt_ray.episode import QuestionType, Sample
from paravt_ray.errors import InputError
from paravt_ray.rewards import accuracy

COLUMNS = ("prompt", "videos", "extra_info")
SYNTH = Path("outputs/synth")
"""Where the shipped configurations look for the synthetic task."""
VIDEO_MARKER = "<video>"
EXAMPLES_PER_REASON = 3

_FRAGMENT = re.compile(r"#(?:frames|t)=[\d.,]+$")
_TYPES: dict[str, QuestionType] = {"mcq": "mcq", "tvg": "tvg", "oe": "oe", "": "oe"}


class DataError(InputError):
    """A data set that cannot be used: no file, no parquet, wrong columns, too many unusable rows."""


class _UnusableRowError(Exception):
    """One row that cannot be asked: the reason (the same words for every row like it) and what it was about."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


@dataclass
class ReadReport:
    """What was found in a file; every row is either usable or counted under a reason."""

    path: Path
    rows: int = 0
    unusable: Counter[str] = field(default_factory=Counter)
    """Rows by reason."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """A few rows of each reason, as `row 12: ...`."""
    types: Counter[str] = field(default_factory=Counter)
    """Usable rows by question type as it is written in the file."""

    @property
    def usable(self) -> int:
        """Rows that became samples."""
        return self.rows - self.unusable.total()

    def sentence(self) -> str:
        """The report in one sentence."""
        text = f"{self.usable} of {self.rows} rows of {self.path} can be used"
        if not self.unusable:
            return f"{text}."
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.unusable.most_common())
        return f"{text}; left out: {reasons}."


def read_samples(parquet: str | Path, video_root: str | Path, max_unusable: float) -> tuple[list[Sample], ReadReport]:
    """Read all rows; videos are looked for on the disk anew each time.

    Args:
        parquet: the file.
        video_root: where relative video paths start; empty for the file's own folder.
        max_unusable: share of rows in [0, 1] that may be unusable.

    Raises:
        DataError: the file cannot be read, has other columns or no rows, or more rows than allowed are unusable.
    """
    path = Path(parquet)
    rows = read_rows(path, COLUMNS)
    root = Path(video_root) if str(video_root) else path.parent
    report = ReadReport(path, rows=len(rows))
    samples: list[Sample] = []
    for number, row in enumerate(rows):
        try:
            sample, written_type = _sample(row, root)
        except _UnusableRowError as error:
            report.unusable[error.reason] += 1
            examples = report.examples.setdefault(error.reason, [])
            if len(examples) < EXAMPLES_PER_REASON:
                examples.append(f"row {number}: {error.detail}")
        else:
            report.types[written_type] += 1
            samples.append(sample)
    _refuse_if_too_many(report, max_unusable)
    return samples, report


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a parquet file as Python objects, with these columns and, where the file has it, `id`.

    Raises:
        DataError: there is no such file, it is no parquet file, it lacks a column or has no rows.
    """
    if not path.is_file():
        made = " `paravt data synth outputs/synth` makes it." if path.parent == SYNTH else ""
        raise DataError(f"There is no data file {path}, seen from {Path.cwd()}.{made}")
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        missing = [name for name in columns if name not in names]
        if missing:
            raise DataError(
                f"{path} has the columns {', '.join(names) or 'none'}, but lacks {', '.join(missing)}: "
                f"rows need {', '.join(columns)}."
            )
        table = file.read(columns=[*columns, *(["id"] if "id" in names else [])])
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as a parquet file: {str(error).splitlines()[0]}") from error
    if table.num_rows == 0:
        raise DataError(f"{path} has no rows.")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def local_path(reference: str, root: Path) -> Path:
    """The file that a video reference names: without `file://`, relative ones from `root`."""
    if reference.startswith("file://"):
        bare = reference.removeprefix("file://")
        # Both are in use: a path with a prefix, and a proper URL, in which a space is written %20.
        return root / (bare if (root / bare).exists() else unquote(bare))
    return root / reference


def split_fragment(reference: str) -> tuple[str, str]:
    """A reference without and with only what conversations put behind it: `#frames=16`, `#t=30,45`, or nothing."""
    match = _FRAGMENT.search(reference)
    return (reference[: match.start()], match[0]) if match else (reference, "")


def _refuse_if_too_many(report: ReadReport, max_unusable: float) -> None:
    if report.usable and report.unusable.total() <= max_unusable * report.rows:
        return
    reason, count = report.unusable.most_common(1)[0]
    raise DataError(
        f"{report.unusable.total()} of {report.rows} rows of {report.path} cannot be used, more than data.max_unusable="
        f"{max_unusable:g} allows; the commonest reason, {count} times, is: {reason} ({report.examples[reason][0]}). "
        f"Mend the data or data.video_root, or allow more."
    )


def _sample(row: dict[str, Any], root: Path) -> tuple[Sample, str]:
    """One row's sample and its question type as written."""
    question, markers = _question(row["prompt"])
    references = _references(row["videos"])
    if markers not in (0, len(references)):
        raise _UnusableRowError("the prompt marks another number of videos", f"{markers}, not {len(references)}")
    answer, written, question_type = _answer(row["extra_info"])
    videos = tuple(str(_video(reference, root)) for reference in references)
    if len({Path(video).name for video in videos}) < len(videos):
        raise _UnusableRowError("two of its videos have the same file name", ", ".join(references))
    content = json.dumps([question, references, answer, question_type])
    given = row.get("id")
    sample_id = str(given) if given is not None else hashlib.sha256(content.encode()).hexdigest()[:16]
    return Sample(sample_id, question, videos, answer, question_type), written


def _question(prompt: Any) -> tuple[str, int]:
    """The user's text without video marks, and how many there were; the system prompt is the renderer's own."""
    messages: list[Any] = prompt if isinstance(prompt, list) else [None]
    if not all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages):
        raise _UnusableRowError("the prompt is no list of {role, content}", _short(prompt))
    text = "\n".join(message["content"] for message in messages if message.get("role") == "user")
    question = re.sub(rf"[ \t]*{VIDEO_MARKER}[ \t]*\n?", "", text).strip()
    if not question:
        raise _UnusableRowError("the prompt asks nothing", _short(prompt))
    return question, text.count(VIDEO_MARKER)


def _references(videos: Any) -> list[str]:
    if not isinstance(videos, list) or not all(isinstance(v, dict) and isinstance(v.get("video"), str) for v in videos):
        raise _UnusableRowError('the videos are no list of {"video": path}', _short(videos))
    if not videos:
        raise _UnusableRowError("there is no video", "videos is empty")
    return [video["video"] for video in videos]


def _video(reference: str, root: Path) -> Path:
    path = local_path(reference, root).absolute()
    if not path.is_file():
        raise _UnusableRowError("the video file is missing", str(path))
    if path.stat().st_size == 0:
        raise _UnusableRowError("the video file is empty", str(path))
    return path


def _answer(extra: Any) -> tuple[str, str, QuestionType]:
    """The gold answer, the question type as written, and as it is understood."""
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except json.JSONDecodeError as error:
            raise _UnusableRowError("extra_info is no JSON", f"{error}: {_short(extra)}") from error
    if not isinstance(extra, dict):
        raise _UnusableRowError("extra_info is no JSON object", _short(extra))
    answer, written = extra.get("answer"), extra.get("question_type")
    answer = answer.strip() if isinstance(answer, str) else "" if answer is None else json.dumps(answer)
    if not answer:
        raise _UnusableRowError("there is no answer", _short(extra))
    if written is not None and not isinstance(written, str):
        raise _UnusableRowError("the question type is no text", _short(written))
    written = written or ""
    question_type = _TYPES.get(written.strip().lower())
    if question_type is None:
        question_type = "oe"
        # A misspelt type would train on token overlap with "B" or "[3, 9]" and look like a hard task.
        if (len(answer) == 1 and _fits(answer, "mcq")) or (answer.startswith("[") and _fits(answer, "tvg")):
            raise _UnusableRowError(
                f"the question type '{written}' is unknown, and the answer looks like one to mcq or tvg", _short(answer)
            )
    if not _fits(answer, question_type):
        raise _UnusableRowError(f"the answer is none for a question of type {question_type}", _short(answer))
    return answer, written or "oe", question_type


def _fits(answer: str, question_type: QuestionType) -> bool:
    """A gold answer that does not even match itself could never be rewarded."""
    try:
        return accuracy(answer, answer, question_type) == 1.0
    except ValueError:
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


class Drawn(NamedTuple):
    """One sample in its place in the endless order."""

    sample: Sample
    epoch: int
    position: int
    """Samples before it since the start of the run."""


class SampleStream:
    """Samples for ever, each epoch in another order that depends on seed, epoch and sample alone.

    The order is the same on every machine and after every restart, so positions in it are all there is to save.
    """

    def __init__(self, samples: Sequence[Sample], seed: int) -> None:
        """Start at the first sample of epoch 0.

        Raises:
            DataError: there are no samples.
        """
        if not samples:
            raise DataError("There are no samples to draw from.")
        self._samples = list(samples)
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []
        self.position = 0
        """Where the next sample is drawn."""
        self._taken: set[int] = set()
        """Positions from there on whose samples were drawn before a restart."""

    def take(self, count: int) -> list[Drawn]:
        """The next samples that were not drawn yet."""
        return [self._next() for _ in range(count)]

    def state(self, ahead: Collection[int] = ()) -> dict[str, Any]:
        """What a checkpoint keeps: where to go on, and what was drawn from behind there.

        Args:
            ahead: positions of samples that were drawn and are to be drawn again after a restart.
        """
        position = min(ahead, default=self.position)
        drawn = {*range(position, self.position), *self._taken}.difference(ahead)
        state: dict[str, Any] = {"position": position}
        return state | {"taken": sorted(drawn)} if drawn else state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a stream of the same samples and seed stood."""
        self.position = int(state["position"])
        self._taken = set(state.get("taken", ()))

    def _next(self) -> Drawn:
        while self.position in self._taken:
            self._taken.remove(self.position)
            self.position += 1
        epoch, offset = divmod(self.position, len(self._samples))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        self.position += 1
        return Drawn(self._samples[self._order[offset]], epoch, self.position - 1)

    def _shuffled(self, epoch: int) -> list[int]:
        def key(index: int) -> bytes:
            return hashlib.sha256(f"{self._seed}/{epoch}/{index}/{self._samples[index].sample_id}".encode()).digest()

        return sorted(range(len(self._samples)), key=key)
