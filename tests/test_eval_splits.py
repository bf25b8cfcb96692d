"""The evaluation splits in their released schemas: what becomes of a row, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paravt_ray.config import Config
from paravt_ray.config.schema import CHOICES
from paravt_ray.data.reader import DataError
from paravt_ray.evaluation.splits import (
    CHOOSE,
    SCHEMAS,
    Question,
    gold_letter,
    inline_options,
    options_text,
    read_split,
    subtitle_lines,
    within_budget,
)
from paravt_ray.rewards import accuracy

Row = dict[str, Any]
TEXTS = pa.list_(pa.string())

VIDEOMME: Row = {
    "video_id": "001",
    "duration": "short",
    "domain": "Knowledge",
    "sub_category": "Humanity & History",
    "url": "https://www.youtube.com/watch?v=fFjv93ACGo8",
    "videoID": "fFjv93ACGo8",
    "question_id": "001-1",
    "task_type": "Counting Problem",
    "question": "How many apples are there?",
    "options": ["A. Two.", "B. Three.", "C. Four.", "D. A lot."],
    "answer": "C",
}
LONGVIDEOBENCH: Row = {
    "video_id": "86CxyhFV9MI",
    "id": "86CxyhFV9MI_0",
    "video_path": "86CxyhFV9MI.mp4",
    "subtitle_path": "86CxyhFV9MI_en.json",
    "correct_choice": 1,
    "question": "What does she hold?",
    "option0": "A cup",
    "option1": "A book",
    "option2": "Nothing",
    "option3": "N/A",
    "option4": "N/A",
    "duration": 190.16,
    "duration_group": 600,
    "question_category": "TOS",
    "topic_category": "NP-News-Programs",
    "starting_timestamp_for_subtitles": 0.0,
}
LVBENCH: Row = {
    "uid": "2221",
    "video_path": "Cm73ma6Ibcs.mp4",
    "question": "What year appears at the start?\n(A) 1636\n(B) 1366\n(C) 1363\n(D) 1633",
    "answer": "D",
    "question_type": ["key information retrieval", "event understanding"],
    "time_reference": "00:15-00:19",
}
MLVU: Row = {
    "video_name": "surveil_24.mp4",
    "duration": 450.0,
    "question": "Is there an anomaly?\n(A) Yes\n(B) No",
    "candidates": ["Yes", "No"],
    "answer": "B",
    "task_type": "anomaly_reco",
}
MMVU: list[Row] = [
    {
        "id": "validation_0",
        "video": "https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos/Art/0.mp4",
        "question_type": "multiple-choice",
        "question": "Which style is it?",
        "choices": {"A": "Cubism", "B": "Fauvism", "C": "Dada", "D": "Pop", "E": "Op"},
        "answer": "E",
    },
    {
        "id": "validation_1",
        "video": "https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos/Computer_Science/7.mp4",
        "question_type": "open-ended",
        "question": "Which algorithm is shown?",
        "choices": {"A": "", "B": "", "C": "", "D": "", "E": ""},
        "answer": "Depth-First Search",
    },
]
CHARADES: Row = {"video": "3MSZA.mp4", "caption": "person turn a light on.", "timestamp": [24.296875, 30.40625]}
CHARADES_TYPES = pa.schema(
    [("video", pa.string()), ("caption", pa.string()), ("timestamp", pa.list_(pa.float16()))]  # as released
)

RELEASED: dict[str, list[Row]] = {
    "videomme": [VIDEOMME],
    "longvideobench": [LONGVIDEOBENCH],
    "lvbench": [LVBENCH],
    "mlvu": [MLVU],
    "mmvu": MMVU,
    "charades": [CHARADES],
}


def write(folder: Path, rows: list[Row], kind: str = "parquet", types: pa.Schema | None = None) -> Path:
    file = folder / f"split.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows, schema=types), file)
    else:
        text = json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows)
        file.write_text(text, encoding="utf-8")
    return file


def read(file: Path, split: str, missing: float = 1.0, **settings: Any) -> list[Question]:
    config = Config()
    config.data.max_unusable = missing
    config.eval.split, config.eval.data = split, str(file)
    for name, value in settings.items():
        setattr(config.eval, name, value)
    return read_split(config, lambda text: len(text.split()))


def test_every_split_of_the_configuration_has_its_schema() -> None:
    assert {*SCHEMAS, "rl"} == set(CHOICES["eval.split"])


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl"])
@pytest.mark.parametrize("split", RELEASED)
def test_released_schemas_are_read_from_every_kind_of_copy(tmp_path: Path, split: str, kind: str) -> None:
    questions = read(write(tmp_path, RELEASED[split], kind), split)
    assert [question.row for question in questions] == list(range(len(RELEASED[split])))
    for question in questions:
        sample = question.sample
        assert accuracy(sample.answer, sample.answer, sample.question_type) == 1.0, "the right answer scores 1"
        assert sample.question.count(CHOOSE) == (sample.question_type == "mcq")


def test_videomme_options_are_not_lettered_twice(tmp_path: Path) -> None:
    (question,) = read(write(tmp_path, [VIDEOMME]), "videomme")
    sample = question.sample
    assert sample.question == f"How many apples are there?\nA. Two.\nB. Three.\nC. Four.\nD. A lot.\n{CHOOSE}"
    assert (sample.sample_id, sample.answer, sample.question_type) == ("001-1", "C", "mcq")
    assert sample.videos == (str(tmp_path / "fFjv93ACGo8.mp4"),)
    assert question.categories == {
        "duration": ("short",),
        "domain": ("Knowledge",),
        "task": ("Counting Problem",),
    }


def test_longvideobench_fillers_are_no_options(tmp_path: Path) -> None:
    (question,) = read(write(tmp_path, [LONGVIDEOBENCH]), "longvideobench")
    assert question.sample.question == f"What does she hold?\nA. A cup\nB. A book\nC. Nothing\n{CHOOSE}"
    assert question.sample.answer == "B"
    assert question.categories["duration group"] == ("600",)
    with pytest.raises(DataError, match="correct_choice is 3, but there are 3 options"):
        read(write(tmp_path, [LONGVIDEOBENCH | {"correct_choice": 3}]), "longvideobench")


def test_lvbench_keeps_its_inline_options_and_all_abilities(tmp_path: Path) -> None:
    (question,) = read(write(tmp_path, [LVBENCH]), "lvbench")
    assert question.sample.question == f"{LVBENCH['question']}\n{CHOOSE}"
    assert question.sample.answer == "D"
    assert question.categories["ability"] == ("key information retrieval", "event understanding")
    with pytest.raises(DataError, match="holds no options"):
        read(write(tmp_path, [LVBENCH | {"question": "What year?"}]), "lvbench")


def test_mlvu_candidates_stand_in_the_question_once(tmp_path: Path) -> None:
    (inline,) = read(write(tmp_path, [MLVU]), "mlvu")
    assert inline.sample.question == f"Is there an anomaly?\n(A) Yes\n(B) No\n{CHOOSE}"
    apart = MLVU | {"question": "Is there an anomaly?", "answer": "No"}
    (given,) = read(write(tmp_path, [apart]), "mlvu")
    assert given.sample.question == f"Is there an anomaly?\nA. Yes\nB. No\n{CHOOSE}"
    assert inline.sample.answer == given.sample.answer == "B"


def test_mmvu_finds_videos_behind_hub_addresses_and_keeps_open_ended_apart(tmp_path: Path) -> None:
    (tmp_path / "videos" / "Art").mkdir(parents=True)
    (tmp_path / "videos" / "Art" / "0.mp4").touch()
    choice, worded = read(write(tmp_path, MMVU, "json"), "mmvu")
    assert choice.sample.videos == (str(tmp_path / "videos" / "Art" / "0.mp4"),)
    assert choice.sample.answer == "E" and "E. Op" in choice.sample.question
    assert (worded.sample.question_type, worded.sample.answer) == ("oe", "Depth-First Search")
    assert "A." not in worded.sample.question
    assert worded.categories["subject"] == ("Computer_Science",)


def test_charades_times_are_half_precision_floats(tmp_path: Path) -> None:
    (question,) = read(write(tmp_path, [CHARADES], types=CHARADES_TYPES), "charades")
    assert question.sample.answer == "[24.2969, 30.4062]"
    assert question.sample.question_type == "tvg"
    assert "person turn a light on?" in question.sample.question
    assert accuracy("24.3 - 30.4", question.sample.answer, "tvg") == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("split", "row", "message"),
    [
        ("videomme", {k: v for k, v in VIDEOMME.items() if k != "question_id"}, "has no field question_id; it has"),
        ("videomme", VIDEOMME | {"options": "A. one B. two"}, "field options is 'A. one B. two', not a list"),
        ("videomme", VIDEOMME | {"answer": "E"}, "the answer 'E' names none of the 4 options"),
        ("videomme", VIDEOMME | {"options": []}, "no list of 2 to 10 options"),
        ("videomme", VIDEOMME | {"question": None}, "field question is None, not a text"),
        ("longvideobench", LONGVIDEOBENCH | {"correct_choice": "1"}, "correct_choice is '1', not a whole number"),
        ("longvideobench", LONGVIDEOBENCH | {"correct_choice": True}, "correct_choice is True, not a whole number"),
        ("mmvu", MMVU[0] | {"question_type": "essay"}, "question_type is 'essay'"),
        ("mmvu", MMVU[0] | {"choices": {"A": "x", "B": "", "C": "y"}}, "no list of 2 to 10 options|names none"),
        ("charades", CHARADES | {"timestamp": [1.0]}, r"timestamp is \[1.0\], not \[start, end\]"),
    ],
)
def test_what_does_not_match_is_named(tmp_path: Path, split: str, row: Row, message: str) -> None:
    good = RELEASED[split][0]
    with pytest.raises(DataError, match=message) as refused:
        read(write(tmp_path, [good, row], "json"), split)
    assert "row 1" in str(refused.value) and SCHEMAS[split].source in str(refused.value)


def test_another_splits_file_is_refused_not_misread(tmp_path: Path) -> None:
    for split in SCHEMAS:
        for other, rows in RELEASED.items():
            if other not in split:
                with pytest.raises(DataError, match="does not match the schema of"):
                    read(write(tmp_path, rows, "json"), split)


def test_unreadable_copies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"eval\.data is empty"):
        read(Path(), "mlvu", data="")
    with pytest.raises(DataError, match="There is no data in"):
        read(tmp_path / "none.parquet", "mlvu")
    broken = tmp_path / "broken.json"
    broken.write_text("[{]")
    with pytest.raises(DataError, match=r"cannot be read as \.json"):
        read(broken, "mlvu")
    broken.write_text('{"a": 1}')
    with pytest.raises(DataError, match="holds no list of rows"):
        read(broken, "mlvu")


def test_a_folder_of_shards_is_read_in_order(tmp_path: Path) -> None:
    for shard in (1, 0):
        rows = [VIDEOMME | {"question_id": f"{shard}-{i}"} for i in range(2)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"test-0000{shard}-of-00002.parquet")
    questions = read(tmp_path, "videomme", samples=3)
    assert [q.sample.sample_id for q in questions] == ["0-0", "0-1", "1-0"]


def test_missing_videos_are_refused_beyond_the_limit(tmp_path: Path) -> None:
    rows = [VIDEOMME, VIDEOMME | {"videoID": "other", "question_id": "2"}]
    (tmp_path / "fFjv93ACGo8.mkv").touch()  # another container than the split says
    file = write(tmp_path, rows)
    with pytest.raises(
        DataError, match=r"videos of 1 of 2 questions are missing, for example .*other\.mp4.*video_root"
    ):
        read(file, "videomme", missing=0.4)
    found, _ = read(file, "videomme", missing=0.5)
    assert found.sample.videos == (str(tmp_path / "fFjv93ACGo8.mkv"),)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["(A) red", "(B) blue"], "A. red\nB. blue"),
        (["A: red", "B: blue"], "A. red\nB. blue"),
        (["A. Smith", "Miller"], "A. A. Smith\nB. Miller"),
        (["B. blue", "A. red"], "A. B. blue\nB. A. red"),
        ([" red ", "blue"], "A. red\nB. blue"),
        (["A little", "B flat"], "A. A little\nB. B flat"),
    ],
)
def test_options_text(options: list[str], text: str) -> None:
    assert options_text(options) == text


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("Which?\n(A) red\n(B) blue (C) not a line", ["red", "blue (C) not a line"]),
        ("A. Smith asked B. Miller what?", []),
        ("Which?\n  A. red\n  B. blue\n  C. green", ["red", "blue", "green"]),
        ("(A) 1\nWhich?\n(A) red\n(B) blue", ["red", "blue"]),
        ("Which?\n(A) red", []),
    ],
)
def test_inline_options(question: str, options: list[str]) -> None:
    assert inline_options(question) == options


@pytest.mark.parametrize(
    ("answer", "letter"), [("B", "B"), ("(B)", "B"), (" B. ", "B"), ("blue", "B"), ("B. blue", "B"), ("red", "A")]
)
def test_gold_letter(answer: str, letter: str) -> None:
    options = ["A. red", "B. blue"] if answer == "B. blue" else ["red", "blue"]
    assert gold_letter(answer, options) == letter


SRT = """\ufeff1\r
00:00:01,000 --> 00:00:02,500\r
<font color="white" size=".72c">Good morning.</font>\r
\r
2\r
00:00:02,500 --> 00:00:04,000\r
Good morning.\r
\r
3\r
00:00:04,000 --> 00:00:06,000\r
Two lines\r
of text\r
"""


def test_subtitles_are_lines_of_speech() -> None:
    assert subtitle_lines(SRT) == ["Good morning.", "Two lines", "of text"]
    assert subtitle_lines("") == []


def test_subtitles_keep_to_their_budget_over_the_whole_video() -> None:
    lines = [f"line {i}" for i in range(100)]  # two tokens each
    kept = within_budget(lines, 20, lambda text: len(text.split()))
    assert len(kept) == 10 and kept[0] == "line 0" and kept[-1] == "line 90"
    assert within_budget(lines, 1000, lambda text: len(text.split())) == lines
    assert within_budget(lines, 1, lambda text: len(text.split())) == []


def test_subtitles_stand_before_the_question(tmp_path: Path) -> None:
    rows = [VIDEOMME, VIDEOMME | {"videoID": "silent", "question_id": "002-1"}]
    file, folder = write(tmp_path, rows), tmp_path / "subtitle"
    folder.mkdir()
    with pytest.raises(DataError, match=r"No subtitles of these videos are in eval\.subtitles="):
        read(file, "videomme_subtitles", subtitles=str(folder))
    (folder / "fFjv93ACGo8.srt").write_text(SRT, encoding="utf-8")
    spoken, silent = read(file, "videomme_subtitles", subtitles=str(folder))
    plain = read(file, "videomme")[1].sample.question
    assert spoken.sample.question.startswith("The video's subtitles:\nGood morning.\nTwo lines\nof text\n\nHow many")
    assert silent.sample.question == plain, "a video without subtitles is asked about without them"


def test_held_out_questions_are_a_split_too(tmp_path: Path) -> None:
    (tmp_path / "v.mp4").write_bytes(b"x")
    row = {
        "prompt": [{"role": "user", "content": "<video>\nWhich?"}],
        "videos": [{"video": "v.mp4"}],
        "extra_info": json.dumps({"answer": "B", "question_type": "mcq"}),
    }
    (question,) = read(write(tmp_path, [row]), "rl")
    assert (question.sample.question, question.sample.answer) == ("Which?", "B")
    assert question.categories == {"type": ("mcq",)}
