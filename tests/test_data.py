"""Reading questions, their order over epochs and restarts, pointing data sets at local files, checking videos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import clips
import pyarrow
import pyarrow.parquet
import pytest

from paravt_ray.data import check
from paravt_ray.data.materialize import materialize, parse_roots
from paravt_ray.data.reader import DataError, Drawn, SampleStream, read_samples
from paravt_ray.episode import Sample
from paravt_ray.errors import InputError

QUESTION = "<video>\nWhich ball? A. red B. blue\nThe video path for this video is: x.mp4"


def row(**changes: Any) -> dict[str, Any]:
    """A row as in the released RL data."""
    values: dict[str, Any] = {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        "videos": [{"video": "clips/x.mp4"}],
        "extra_info": json.dumps({"answer": "B", "question_type": "mcq"}),
    }
    return values | changes


def info(answer: Any, kind: Any = None) -> str:
    return json.dumps({"answer": answer} if kind is None else {"answer": answer, "question_type": kind})


def write(folder: Path, rows: list[dict[str, Any]], name: str = "data.parquet") -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    return folder / name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the video that `row` names; the reader does not open it."""
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "x.mp4").write_bytes(b"video")
    return tmp_path


def only_reason(folder: Path, bad: dict[str, Any]) -> str:
    """The reason under which a bad row beside a good one is counted."""
    _, report = read_samples(write(folder, [row(), bad]), "", max_unusable=0.5)
    assert report.usable == 1
    (reason,) = report.unusable
    return reason


# Rows


def test_released_row_is_read(folder: Path) -> None:
    (sample,), report = read_samples(write(folder, [row()]), "", 0.0)
    assert sample.question == "Which ball? A. red B. blue\nThe video path for this video is: x.mp4"
    assert (sample.answer, sample.question_type) == ("B", "mcq")
    assert sample.videos == (str(folder / "clips/x.mp4"),)
    assert (report.rows, report.usable) == (1, 1)


def test_extra_info_may_be_a_struct(folder: Path) -> None:
    rows = [row(extra_info={"answer": "[3.2, 9.8]", "question_type": "tvg", "index": 4})]
    (sample,), _ = read_samples(write(folder, rows), "", 0.0)
    assert (sample.answer, sample.question_type) == ("[3.2, 9.8]", "tvg")


@pytest.mark.parametrize("reference", ["file://{root}/clips/x.mp4", "{root}/clips/x.mp4", "file://clips/x.mp4"])
def test_references_with_a_prefix_or_absolute(folder: Path, reference: str) -> None:
    rows = [row(videos=[{"video": reference.format(root=folder)}])]
    (sample,), _ = read_samples(write(folder, rows), "", 0.0)
    assert sample.videos == (str(folder / "clips/x.mp4"),)


def test_relative_paths_start_at_the_video_root(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = write(tmp_path_factory.mktemp("elsewhere"), [row()])
    (sample,), _ = read_samples(elsewhere, folder, 0.0)
    assert sample.videos == (str(folder / "clips/x.mp4"),)


def test_every_other_type_is_open_ended(folder: Path) -> None:
    rows = [row(extra_info=info("a red ball", kind)) for kind in ("oe", "caption", None, " OE ")]
    samples, report = read_samples(write(folder, rows), "", 0.0)
    assert {sample.question_type for sample in samples} == {"oe"}
    assert report.types["caption"] == 1


def test_types_are_read_without_regard_to_case(folder: Path) -> None:
    (sample,), _ = read_samples(write(folder, [row(extra_info=info("B", " MCQ"))]), "", 0.0)
    assert sample.question_type == "mcq"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"videos": [{"video": "clips/gone.mp4"}]}, "missing"),
        ({"videos": []}, "no video"),
        ({"extra_info": "{not json"}, "no JSON"),
        ({"extra_info": "[1]"}, "no JSON object"),
        ({"extra_info": info("")}, "no answer"),
        ({"extra_info": info(None, "mcq")}, "no answer"),
        ({"extra_info": info("red", "mcq")}, "none for a question of type mcq"),
        ({"extra_info": info("[9, 3]", "tvg")}, "none for a question of type tvg"),
        ({"extra_info": info("B", "mqc")}, "'mqc' is unknown"),
        ({"extra_info": info("[3, 9]", "grounding")}, "'grounding' is unknown"),
        ({"extra_info": info("B", 3)}, "no text"),
        ({"prompt": [{"role": "user", "content": "<video>"}]}, "asks nothing"),
        ({"prompt": [{"role": "user", "content": "<video><video> What?"}]}, "another number of videos"),
        ({"prompt": [{"role": "user", "content": None}]}, "no list of"),
        ({"prompt": None}, "no list of"),
    ],
)
def test_unusable_rows_are_counted_under_their_reason(folder: Path, changes: dict[str, Any], reason: str) -> None:
    assert reason in only_reason(folder, row(**changes))


def test_two_videos_of_one_name_cannot_be_told_apart(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "x.mp4").write_bytes(b"video")
    prompt = [{"role": "user", "content": "<video><video> Which?"}]
    videos = [{"video": "clips/x.mp4"}, {"video": "other/x.mp4"}]
    assert "same file name" in only_reason(folder, row(prompt=prompt, videos=videos))


def test_an_empty_video_file_is_unusable(folder: Path) -> None:
    (folder / "clips" / "empty.mp4").touch()
    assert "empty" in only_reason(folder, row(videos=[{"video": "clips/empty.mp4"}]))


def test_too_many_unusable_rows_are_refused_with_the_commonest_reason(folder: Path) -> None:
    gone = row(videos=[{"video": "gone.mp4"}])
    file = write(folder, [row(), gone, gone, row(extra_info=info(""))])
    with pytest.raises(DataError, match=r"3 of 4 rows .* 2 times, is: the video file is missing \(row 1: .*gone\.mp4"):
        read_samples(file, "", 0.5)
    samples, report = read_samples(file, "", 0.75)
    assert len(samples) == 1
    assert report.sentence().startswith("1 of 4 rows")


def test_all_rows_unusable_is_refused_whatever_is_allowed(folder: Path) -> None:
    with pytest.raises(DataError, match="2 of 2 rows"):
        read_samples(write(folder, [row(extra_info=info(""))] * 2), "", 1.0)


def test_a_file_that_appears_is_found_the_next_time(folder: Path) -> None:
    file = write(folder, [row(), row(videos=[{"video": "late.mp4"}])])
    assert read_samples(file, "", 0.5)[1].usable == 1
    (folder / "late.mp4").write_bytes(b"video")
    assert read_samples(file, "", 0.0)[1].usable == 2


def test_unreadable_files_are_one_sentence(folder: Path) -> None:
    with pytest.raises(DataError, match=r"There is no data file"):
        read_samples(folder / "none.parquet", "", 0.0)
    (folder / "text.parquet").write_text("hello")
    with pytest.raises(DataError, match="cannot be read as a parquet file"):
        read_samples(folder / "text.parquet", "", 0.0)
    whole = write(folder, [row()] * 100).read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read as a parquet file"):
        read_samples(folder / "cut.parquet", "", 0.0)
    with pytest.raises(DataError, match="lacks videos, extra_info"):
        read_samples(write(folder, [{"prompt": "x", "answer": "y"}]), "", 0.0)
    empty = pyarrow.Table.from_pylist([row()]).slice(0, 0)
    pyarrow.parquet.write_table(empty, folder / "empty.parquet")
    with pytest.raises(DataError, match="has no rows"):
        read_samples(folder / "empty.parquet", "", 0.0)


def test_ids_depend_on_content_alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = row(extra_info=info("A", "mcq"))
    first = read_samples(write(folder, [row(), other]), "", 0.0)[0]
    elsewhere = write(tmp_path_factory.mktemp("elsewhere"), [other, row()])
    second = read_samples(elsewhere, folder, 0.0)[0]
    assert [s.sample_id for s in first] == [s.sample_id for s in reversed(second)]
    assert first[0].sample_id != first[1].sample_id


def test_a_rows_own_id_is_kept(folder: Path) -> None:
    (sample,), _ = read_samples(write(folder, [row(id=17)]), "", 0.0)
    assert sample.sample_id == "17"


# Order


def stream(count: int = 10, seed: int = 1) -> SampleStream:
    return SampleStream([Sample(f"s{i}", "?", (), "A", "mcq") for i in range(count)], seed)


def ids(drawn: list[Drawn]) -> list[tuple[str, int]]:
    return [(one.sample.sample_id, one.epoch) for one in drawn]


def test_each_epoch_asks_every_sample_once_in_another_order() -> None:
    drawn = ids(stream().take(20))
    epochs = [[name for name, epoch in drawn if epoch == number] for number in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [f"s{i}" for i in range(10)]
    assert epochs[0] != epochs[1]


def test_order_depends_on_the_seed_and_on_nothing_else() -> None:
    # Written down, so that a change of the shuffle, of Python or of the machine cannot pass unnoticed.
    assert [name for name, _ in ids(stream(6, seed=3).take(6))] == ["s4", "s2", "s3", "s0", "s5", "s1"]
    assert ids(stream(seed=1).take(10)) != ids(stream(seed=2).take(10))


@pytest.mark.parametrize("taken", [0, 4, 10, 23])
def test_a_restored_stream_goes_on_where_it_stood(taken: int) -> None:
    unbroken = stream()
    unbroken.take(taken)
    state = json.loads(json.dumps(unbroken.state()))
    resumed = stream()
    resumed.restore(state)
    assert ids(resumed.take(15)) == ids(unbroken.take(15))


def test_what_was_drawn_ahead_is_drawn_again_and_nothing_else() -> None:
    """After 2 samples, 3 and 2 ahead of which nothing was used, and 2 from behind them: also across two restarts."""
    unbroken = stream()
    drawn = unbroken.take(9)
    ahead = drawn[2:7]
    state = json.loads(json.dumps(unbroken.state([one.position for one in ahead])))
    resumed = stream()
    resumed.restore(state)
    assert resumed.state() == state
    assert resumed.take(3) == ahead[:3]
    again = stream()
    again.restore(json.loads(json.dumps(resumed.state())))
    assert again.take(14) == [*ahead[3:], *unbroken.take(12)]
    assert "taken" not in again.state()


def test_no_samples_no_stream() -> None:
    with pytest.raises(DataError):
        SampleStream([], 0)


# Materialize


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name in ("charades/AB12.mp4", "longvt/cg/deep/v.mkv", "et/q.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"video")
    (tmp_path / "secret.mp4").write_bytes(b"video")
    return tmp_path


def test_questions_are_pointed_at_local_files(sources: Path) -> None:
    names = ["museg/charades/AB12.mp4", "file://longvt_source/cg/deep/v.mp4", "museg/charades/none.mp4"]
    names += ["museg/et_instruct_164k/q.mp4", "odd/x.mp4", "museg/charades/../secret.mp4"]
    file = write(sources, [row(videos=[{"video": name}]) for name in names])
    roots = parse_roots([f"museg/charades={sources / 'charades'}", f"longvt_source={sources / 'longvt'}"])
    report = materialize(file, sources / "out.parquet", roots)
    written = [r["videos"][0]["video"] for r in pyarrow.parquet.read_table(sources / "out.parquet").to_pylist()]
    # The second clip is there in another container; the fourth one's root was not given; the last leaves its root.
    assert written == [str(sources / "charades/AB12.mp4"), str(sources / "longvt/cg/deep/v.mkv"), *names[2:]]
    assert report.found == 2
    assert report.missing == {
        "museg/charades": ["museg/charades/none.mp4", "museg/charades/../secret.mp4"],
        "museg/et_instruct_164k": ["museg/et_instruct_164k/q.mp4"],
        "other": ["odd/x.mp4"],
    }


@pytest.mark.parametrize("as_text", [True, False])
def test_conversations_are_pointed_at_local_files(sources: Path, as_text: bool) -> None:
    parts = [
        {"type": "text", "text": "museg/charades/AB12.mp4 stays as text", "video_url": None},
        {"type": "video_url", "text": None, "video_url": {"url": "museg/charades/AB12.mp4#t=3,9.5"}},
    ]
    messages = [{"role": "user", "content": parts}]
    file = write(sources, [{"messages": json.dumps(messages) if as_text else messages}])
    report = materialize(file, sources / "out.parquet", {"museg/charades": sources / "charades"})
    (after,) = pyarrow.parquet.read_table(sources / "out.parquet").column("messages").to_pylist()
    content = (json.loads(after) if as_text else after)[0]["content"]
    assert content[1]["video_url"]["url"] == str(sources / "charades/AB12.mp4#t=3,9.5")
    assert content[0] == parts[0]
    assert report.complete


def test_materialized_rows_can_be_read(sources: Path) -> None:
    file = write(sources, [row(videos=[{"video": "museg/charades/AB12.mp4"}])])
    materialize(file, sources / "out.parquet", {"museg/charades": sources / "charades"})
    (sample,), _ = read_samples(sources / "out.parquet", "", 0.0)
    assert sample.videos == (str(sources / "charades/AB12.mp4"),)


@pytest.mark.parametrize("assignment", ["museg/charades", "nowhere=/tmp", "selfqa=/no/such/folder"])
def test_bad_roots_are_refused(assignment: str) -> None:
    with pytest.raises(InputError):
        parse_roots([assignment])


# Check


def test_check_lists_videos_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = clips.make("h264", tmp_path).path
    short = clips.make("h264-one-frame", tmp_path).path
    (tmp_path / "junk.mp4").write_bytes(bytes(9000))
    whole = good.read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    names = [good.name, short.name, "junk.mp4", "cut.mp4", "gone.mp4", good.name]
    file = write(tmp_path, [row(videos=[{"video": name}]) for name in names])
    assert check.run(str(file), "", as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["videos"] == 5
    found = {Path(finding["video"]).name: finding["problem"] for finding in report["findings"]}
    assert found.pop("cut.mp4") in ("unreadable", "damaged")
    assert found == {short.name: "short", "junk.mp4": "unreadable", "gone.mp4": "not_found"}


def test_check_reads_conversations_and_says_when_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = clips.make("h264", tmp_path).path
    parts = [
        {"type": "video_url", "video_url": {"url": f"file://{video}#frames=16"}},
        {"type": "text", "text": "What?"},
    ]
    file = write(tmp_path, [{"messages": json.dumps([{"role": "user", "content": parts}])}])
    assert check.run(str(file), "", as_json=False) == 0
    assert "1 of 1 videos can be used." in capsys.readouterr().out


def test_check_names_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no data file"):
        check.run(str(tmp_path / "none.parquet"), "", as_json=False)
