"""The paper's evaluation splits, read from local copies in their released schemas, field for field.

Every multiple-choice question ends up with its options in the text exactly once, whichever way the split brings them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from paravt_ray.config import Config
from paravt_ray.data.reader import DataError, read_samples
from paravt_ray.episode import QuestionType, Sample

Row = dict[str, Any]

LETTERS = "ABCDEFGHIJ"
NOT_AN_OPTION = "N/A"
SUFFIXES = (".mp4", ".MP4", ".mkv", ".webm", ".avi", ".mov")
"""Local copies keep some videos in another container than the split says."""

CHOOSE = "Answer with the letter of the right option."
GROUND = "When does this happen in the video: {caption} Answer with the first and the last second, as [start, end]."
SHORTLY = "Answer in a few words."

_LETTER = r"[(\[]?([A-J])[)\].:]"
_LETTERED = re.compile(rf"\s*{_LETTER}\s*(.*)", re.DOTALL)
_OPTION_LINE = re.compile(rf"^[ \t]*{_LETTER}[ \t]*(\S.*)$", re.MULTILINE)
_LETTER_ALONE = re.compile(rf"\s*(?:{_LETTER}|([A-J]))\s*")
_HUB_FILE = re.compile(r"https?://[^/]+/datasets/.+?/resolve/[^/]+/(.+)")
_MARKUP = re.compile(r"<[^>]+>")


class _MismatchError(Exception):
    """A row that is not as the split was released; the message says what is wrong with it."""


@dataclass(frozen=True)
class Question:
    """One question of a split."""

    sample: Sample
    row: int
    """Index in the local copy; where that holds the whole split in its order, the index in the split."""
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What tables are broken down by, such as `duration: ["short"]`; one question may belong to several values."""
    document: Row = field(default_factory=dict)
    """The row as it was read."""


@dataclass(frozen=True)
class _Draft:
    """What a row says, before its video is looked for."""

    sample_id: str
    question: str
    video: str
    answer: str
    question_type: QuestionType = "mcq"
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Schema:
    """How a split is released, and how a row of it is read."""

    title: str
    source: str
    """Where it is on the hub: id, configuration, split."""
    fields: Mapping[str, tuple[type, ...]]
    """The fields that are read, with the types they have."""
    read: Callable[[Row, int], _Draft]
    lmms_task: str
    """Its task in lmms-eval."""


def read_split(config: Config, count_tokens: Callable[[str], int]) -> list[Question]:
    """The questions that `eval.split`, `eval.data` and `eval.video_root` name, at most `eval.samples` of them.

    Args:
        config: the run's.
        count_tokens: tokens of a text, for the subtitles' budget.

    Raises:
        DataError: the file cannot be read, does not match the split's schema, or too many videos are missing.
    """
    settings = config.eval
    path = settings.data or (config.data.valid if settings.split == "rl" else "")
    if not path:
        raise DataError("eval.data is empty: name the local copy of the split (for eval.split=rl, or data.valid).")
    if settings.split == "rl":
        samples, _ = read_samples(path, settings.video_root or config.data.video_root, config.data.max_unusable)
        questions = [Question(s, row, {"type": (s.question_type,)}) for row, s in enumerate(samples)]
        return questions[: settings.samples or None]
    schema, file = SCHEMAS[settings.split], Path(path)
    rows = read_table(file)[: settings.samples or None]
    root = Path(settings.video_root) if settings.video_root else (file if file.is_dir() else file.parent)
    questions = [_question(schema, file, row, number, root) for number, row in enumerate(rows)]
    _refuse_missing_videos(questions, config.data.max_unusable)
    if settings.split == "videomme_subtitles":
        return _with_subtitles(questions, Path(settings.subtitles), settings.subtitle_tokens, count_tokens)
    return questions


def read_table(path: Path) -> list[Row]:
    """The rows of a parquet, JSON or JSONL file, or of all parquet files of a folder in the order of their names.

    Raises:
        DataError: there is none, or it holds no rows.
    """
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files or not path.exists():
        raise DataError(f"There is no data in {path}: give a parquet, JSON or JSONL file or a folder of parquet files.")
    try:
        rows = [row for file in files for row in _rows_of(file)]
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as {path.suffix or 'parquet'}: {str(error).splitlines()[0]}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} holds no list of rows.")
    return rows


def _rows_of(file: Path) -> list[Row]:
    if file.suffix == ".parquet":
        rows: list[Row] = pyarrow.parquet.read_table(file).to_pylist()
        return rows
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    loaded = json.loads(text)
    return loaded if isinstance(loaded, list) else []


def _question(schema: Schema, file: Path, row: Row, number: int, root: Path) -> Question:
    try:
        for name, types in schema.fields.items():
            if name not in row:
                raise _MismatchError(f"it has no field {name}; it has {', '.join(row)}")
            if not isinstance(row[name], types) or isinstance(row[name], bool):
                wanted = " or ".join(_TYPE_NAMES[type_] for type_ in types)
                raise _MismatchError(f"the field {name} is {row[name]!r:.80}, not {wanted}")
        draft = schema.read(row, number)
    except _MismatchError as error:
        raise DataError(
            f"{file} does not match the schema of {schema.title} ({schema.source}): row {number}: {error}. "
            f"The fields that are read: {', '.join(schema.fields)}."
        ) from None
    video = str(_video(root, draft.video))
    sample = Sample(draft.sample_id, draft.question, (video,), draft.answer, draft.question_type)
    return Question(sample, number, draft.categories, row)


def _video(root: Path, name: str) -> Path:
    """The file that a split's video name means; the name as it stands where there is none."""
    path = (root / name).absolute()
    candidates = [path, *(path.with_suffix(suffix) for suffix in SUFFIXES)]
    return next((candidate for candidate in candidates if candidate.is_file()), path)


def _refuse_missing_videos(questions: Sequence[Question], most: float) -> None:
    missing = [q.sample.videos[0] for q in questions if not Path(q.sample.videos[0]).is_file()]
    if len(missing) > most * len(questions):
        raise DataError(
            f"The videos of {len(missing)} of {len(questions)} questions are missing, for example {missing[0]}. Set "
            f"eval.video_root to their folder; data.max_unusable is the share that may be missing (now {most:g}). "
            f"Questions without their video are counted and never scored."
        )


# -- options -----------------------------------------------------------------------------------------------------------


def options_text(options: Sequence[str]) -> str:
    """One line an option, lettered `A. text`; options that bring their letters along are not lettered again."""
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, bare_options(options), strict=False))


def bare_options(options: Sequence[str]) -> list[str]:
    """The options without the letters that all of them may bring along.

    Raises:
        _MismatchError: there are none, or more than letters.
    """
    if not 1 < len(options) <= len(LETTERS) or not all(isinstance(option, str) for option in options):
        raise _MismatchError(f"{list(options)!r:.80} is no list of 2 to {len(LETTERS)} options")
    found = [_LETTERED.fullmatch(option) for option in options]
    if all(match and match[1] == letter for match, letter in zip(found, LETTERS, strict=False)):
        return [match[2].strip() for match in found if match]
    return [option.strip() for option in options]


def inline_options(question: str) -> list[str]:
    """The options that stand in a question, one a line after its letter; empty where there are none."""
    options: list[str] = []
    for match in _OPTION_LINE.finditer(question):
        if match[1] == "A":
            options = []
        if match[1] == LETTERS[len(options)]:
            options.append(match[2].strip())
    return options if len(options) > 1 else []


def gold_letter(answer: str, options: Sequence[str]) -> str:
    """The letter of the right option, given as `B`, `(B)`, `B.` or as the option's text.

    Raises:
        _MismatchError: it names no option.
    """
    match = _LETTER_ALONE.fullmatch(answer)
    letter = (match[1] or match[2]) if match else None
    if letter and LETTERS.index(letter) < len(options):
        return str(letter)
    for known in (bare_options(options), [option.strip() for option in options]):
        if answer.strip() in known:
            return LETTERS[known.index(answer.strip())]
    raise _MismatchError(f"the answer {answer!r:.80} names none of the {len(options)} options")


def _without_filler(options: Sequence[Any], filler: Sequence[Any]) -> list[Any]:
    """Options up to the fillers at the end; one in between would shift the letters and is left for others to refuse."""
    last = max((i for i, option in enumerate(options) if option not in filler), default=-1)
    return list(options[: last + 1])


def _choice(question: str, options: Sequence[str]) -> str:
    return f"{question.strip()}\n{options_text(options)}\n{CHOOSE}"


def _inline_choice(question: str) -> tuple[str, list[str]]:
    options = inline_options(question)
    if not options:
        raise _MismatchError("the question holds no options, one a line, as `(A) ...`")
    return f"{question.strip()}\n{CHOOSE}", options


# -- the splits --------------------------------------------------------------------------------------------------------


def _videomme(row: Row, number: int) -> _Draft:
    return _Draft(
        row["question_id"],
        _choice(row["question"], row["options"]),
        f"{row['videoID']}.mp4",
        gold_letter(row["answer"], row["options"]),
        categories={"duration": (row["duration"],), "domain": (row["domain"],), "task": (row["task_type"],)},
    )


def _longvideobench(row: Row, number: int) -> _Draft:
    options = _without_filler([row[f"option{i}"] for i in range(5)], [NOT_AN_OPTION])
    right = row["correct_choice"]
    if not 0 <= right < len(options):
        raise _MismatchError(f"correct_choice is {right}, but there are {len(options)} options")
    categories = {"duration group": (str(row["duration_group"]),), "category": (row["question_category"],)}
    question = _choice(row["question"], options)
    return _Draft(row["id"], question, row["video_path"], LETTERS[right], categories=categories)


def _lvbench(row: Row, number: int) -> _Draft:
    question, options = _inline_choice(row["question"])
    kinds = row["question_type"] if isinstance(row["question_type"], list) else [row["question_type"]]
    answer = gold_letter(row["answer"], options)
    return _Draft(str(row["uid"]), question, row["video_path"], answer, categories={"ability": tuple(kinds)})


def _mlvu(row: Row, number: int) -> _Draft:
    if inline_options(row["question"]):
        question, options = _inline_choice(row["question"])
    else:
        options = row.get("candidates") or []
        question = _choice(row["question"], options)
    answer = gold_letter(row["answer"], options)
    task = row["task_type"]
    return _Draft(f"{task}/{number}", question, row["video_name"], answer, categories={"task": (task,)})


def _mmvu(row: Row, number: int) -> _Draft:
    hub_file = _HUB_FILE.fullmatch(row["video"])
    video = hub_file[1] if hub_file else row["video"]
    categories = {"subject": (Path(video).parent.name or "none",)}
    if row["question_type"] == "open-ended":
        question = f"{row['question'].strip()}\n{SHORTLY}"
        return _Draft(row["id"], question, video, row["answer"], "oe", categories)
    if row["question_type"] != "multiple-choice":
        raise _MismatchError(f"question_type is {row['question_type']!r}, not 'multiple-choice' or 'open-ended'")
    choices = row["choices"] or {}
    options = _without_filler([choices.get(letter) for letter in "ABCDE"], [None, ""])
    answer = gold_letter(row["answer"], options)
    return _Draft(row["id"], _choice(row["question"], options), video, answer, categories=categories)


def _charades(row: Row, number: int) -> _Draft:
    times = row["timestamp"]
    if len(times) != 2:
        raise _MismatchError(f"timestamp is {times!r:.80}, not [start, end]")
    start, end = map(float, times)
    question = GROUND.format(caption=row["caption"].strip().rstrip(".") + "?")
    return _Draft(f"{Path(row['video']).stem}/{number}", question, row["video"], f"[{start:g}, {end:g}]", "tvg")


_TYPE_NAMES: dict[type, str] = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}
_TYPE_NAMES[type(None)] = "nothing"

_TEXT, _WHOLE, _LIST = (str,), (int,), (list,)
_VIDEOMME = Schema(
    "Video-MME",
    "lmms-lab/Video-MME, videomme, test",
    dict.fromkeys(("videoID", "question_id", "question", "answer", "duration", "domain", "task_type"), _TEXT)
    | {"options": _LIST},
    _videomme,
    "videomme",
)
SCHEMAS: dict[str, Schema] = {
    "videomme": _VIDEOMME,
    "videomme_subtitles": replace(_VIDEOMME, title="Video-MME with subtitles", lmms_task="videomme_w_subtitle"),
    "longvideobench": Schema(
        "LongVideoBench",
        "longvideobench/LongVideoBench, validation",
        dict.fromkeys(("id", "video_path", "question", *(f"option{i}" for i in range(5)), "question_category"), _TEXT)
        | {"correct_choice": _WHOLE, "duration_group": _WHOLE},
        _longvideobench,
        "longvideobench_val_v",
    ),
    "lvbench": Schema(
        "LVBench",
        "lmms-lab/LVBench, train",
        dict.fromkeys(("video_path", "question", "answer"), _TEXT) | {"uid": (str, int), "question_type": (str, list)},
        _lvbench,
        "lvbench",
    ),
    "mlvu": Schema(
        "MLVU",
        "sy1998/MLVU_dev, test",
        dict.fromkeys(("video_name", "question", "answer", "task_type"), _TEXT),
        _mlvu,
        "mlvu_dev",
    ),
    "mmvu": Schema(
        "MMVU",
        "yale-nlp/MMVU, validation",
        dict.fromkeys(("id", "video", "question", "answer", "question_type"), _TEXT) | {"choices": (dict, type(None))},
        _mmvu,
        "mmvu_val",
    ),
    "charades": Schema(
        "Charades-STA",
        "lmms-lab/charades_sta, test",
        dict.fromkeys(("video", "caption"), _TEXT) | {"timestamp": _LIST},
        _charades,
        "temporal_grounding_charades",
    ),
}
"""By the name of `eval.split`."""


# -- subtitles ---------------------------------------------------------------------------------------------------------


def _with_subtitles(
    questions: Sequence[Question], folder: Path, budget: int, count_tokens: Callable[[str], int]
) -> list[Question]:
    """Put each video's subtitles before its question; some videos of the split have none."""
    texts: dict[str, str] = {}
    for video in {question.document["videoID"] for question in questions}:
        file = folder / f"{video}.srt"
        if file.is_file():
            lines = subtitle_lines(file.read_text(encoding="utf-8", errors="replace"))
            texts[video] = "\n".join(within_budget(lines, budget, count_tokens))
    if not texts:
        raise DataError(f"No subtitles of these videos are in eval.subtitles={folder}: it must hold files VIDEO.srt.")

    def subtitled(question: Question) -> Question:
        text = texts.get(question.document["videoID"])
        if not text:
            return question
        asked = f"The video's subtitles:\n{text}\n\n{question.sample.question}"
        return replace(question, sample=replace(question.sample, question=asked))

    return [subtitled(question) for question in questions]


def subtitle_lines(srt: str) -> list[str]:
    """The spoken lines of an SRT file in order, without numbers, times, markup and immediate repetitions."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", srt.replace("\r\n", "\n").lstrip("\ufeff").strip()):
        parts = block.split("\n")
        timed = next((i for i, part in enumerate(parts) if "-->" in part), None)
        spoken = [] if timed is None else [_MARKUP.sub("", part).strip() for part in parts[timed + 1 :]]
        for line in filter(None, spoken):
            if not lines or lines[-1] != line:
                lines.append(line)
    return lines


def within_budget(lines: Sequence[str], budget: int, count_tokens: Callable[[str], int]) -> list[str]:
    """All lines, or as many, evenly spread over the video, as have `budget` tokens, line ends included."""
    costs = [count_tokens(f"{line}\n") for line in lines]
    count = len(lines)
    while count:
        kept = [i * len(lines) // count for i in range(count)]
        total = sum(costs[i] for i in kept)
        if total <= budget:
            return [lines[i] for i in kept]
        count = min(count - 1, count * budget // total)
    return []
