"""`paravt data traces`: sequential traces become parallel ones that the parser and the cold start read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paravt_ray import cli
from paravt_ray.chat import MAIN_SYSTEM
from paravt_ray.data.reader import DataError
from paravt_ray.data.synth_questions import KINDS, draw_question
from paravt_ray.data.synth_traces import main_trace
from paravt_ray.data.synth_video import plan_clip
from paravt_ray.data.traces import SUMMARY_CHARS, UnusableTraceError, convert, merge_trace, observed
from paravt_ray.parsing import parse_turn
from paravt_ray.sft.conversations import read_conversations

Message = dict[str, Any]


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def said(role: str, *parts: dict[str, Any] | str) -> Message:
    return {"role": role, "content": [text(part) if isinstance(part, str) else part for part in parts]}


def call(start: float, end: float, video: str = "videos/x.mp4") -> str:
    arguments = {"video_path": video, "start_time": start, "end_time": end}
    return f"<tool_call>\n{json.dumps({'name': 'crop_video', 'arguments': arguments})}\n</tool_call>"


def frames(*names: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": name}} for name in names]


VIDEO = {"type": "video_url", "video_url": {"url": "longvt_source/a/x.mp4"}}
SEQUENTIAL = [
    said("system", "You are another system."),
    said("user", VIDEO, "Which ball is last? A. red B. blue"),
    said("assistant", f"<think>Two places may show a ball. I will look at the first.</think>{call(30, 45)}"),
    said("user", "<tool_response>", *frames("1.png", "2.png"), "2 frames from 30.0s to 45.0s.</tool_response>"),
    said("assistant", f"<think>A red ball rolls by. Next, I need the end. It is gone at 40 s.</think>{call(50.5, 60)}"),
    said("user", "<tool_response>", *frames("3.png"), "1 frames from 50.5s to 60.0s.</tool_response>"),
    said("assistant", "<think>A blue ball lies there. So blue is last.</think><answer>B</answer>"),
]


def words(message: Message) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def test_a_sequential_trace_becomes_one_parallel_turn() -> None:
    merged = merge_trace(SEQUENTIAL)
    assert [message["role"] for message in merged] == ["system", "user", "assistant", "user", "assistant"]
    system, user, calling, replies, answer = map(words, merged)
    assert system == MAIN_SYSTEM
    assert user == "Which ball is last? A. red B. blue\nThe video path for this video is: x.mp4"
    assert merged[1]["content"][0] == VIDEO
    turn = parse_turn(calling)
    assert [(c.ok, c.start_time, c.end_time, c.video) for c in turn.calls] == [
        (True, 30, 45, "x.mp4"),
        (True, 50.5, 60, "x.mp4"),
    ]
    assert turn.think is not None and turn.think_closed
    assert turn.think.strip().endswith("Look at 30 to 45 s and 50.5 to 60 s at once.")
    assert "red ball" not in turn.think, "what was seen later is not known when planning"
    assert replies == (
        "<tool_response>\n30 to 45 s: A red ball rolls by. It is gone at 40 s.\n</tool_response>\n"
        "<tool_response>\n50.5 to 60 s: A blue ball lies there. So blue is last.\n</tool_response>"
    )
    assert answer == "<think>\nA blue ball lies there. So blue is last.\n</think>\n<answer>B</answer>"
    assert not any(part["type"] == "image_url" for message in merged for part in message["content"])


def test_text_replies_stay_and_windows_are_asked_once() -> None:
    trace = [
        SEQUENTIAL[1],
        said("assistant", f"<think>a</think>{call(1, 2)}"),
        said("user", "<tool_response>\nError: Too slow.\n</tool_response>"),
        said("assistant", f"<think>b</think>{call(3, 4)}{call(1, 2)}{call(3, 4)}"),
        said(
            "user",
            "<tool_response>\na cat\n</tool_response>\n<tool_response>\na dog\n</tool_response>\n"
            "<tool_response>\nanother cat\n</tool_response>\nAnswer now.",
        ),
        said("assistant", "<think>c</think><answer>A</answer>"),
    ]
    merged = merge_trace(trace)
    assert [(c.start_time, c.end_time) for c in parse_turn(words(merged[2])).calls] == [(1, 2), (3, 4)]
    assert words(merged[3]) == ("<tool_response>\na dog\n</tool_response>\n<tool_response>\na cat\n</tool_response>"), (
        "the reply of a window is its first, unless that was an error"
    )


def test_a_merged_trace_stays_as_it_is_but_for_its_plan() -> None:
    once = merge_trace(SEQUENTIAL)
    twice = merge_trace(once)
    assert [words(m) for m in twice][3:] == [words(m) for m in once][3:]
    assert twice[1] == once[1]
    assert parse_turn(words(twice[2])).calls == parse_turn(words(once[2])).calls


def test_synthetic_traces_keep_calls_replies_and_answer() -> None:
    merged_traces = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        question = draw_question(plan_clip("v000.mp4", seed), KINDS[seed % len(KINDS)], rng)
        trace = main_trace(question, 4, "json", rng)
        before = [parse_turn(words(m)) for m in trace if m["role"] == "assistant"]
        windows = {(c.start_time, c.end_time) for turn in before for c in turn.calls}
        if not windows:
            continue
        merged_traces += 1
        merged = merge_trace(trace)
        calling, answering = (parse_turn(words(m)) for m in merged if m["role"] == "assistant")
        assert {(c.start_time, c.end_time) for c in calling.calls} == windows
        assert words(merged[3]).count("<tool_response>") == len(calling.calls) == len(windows)
        assert answering.answer == before[-1].answer
    assert merged_traces >= 10


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({6: said("assistant", "<think>hm</think>")}, "the last turn gives no answer"),
        ({5: said("user", "nothing")}, "not one reply for each call"),
        ({4: said("assistant", "<think>a</think><tool_call>{}</tool_call>")}, "one that cannot be run"),
        ({4: said("assistant", "<think>I will look.</think>" + call(1, 2))}, "nothing is said of the frames"),
        ({1: said("user", "Which?")}, "asks nothing about a video"),
        ({5: said("assistant", "x")}, "do not take turns"),
        ({2: said("assistant", "<think>a</think>" + "".join(call(i, i + 1) for i in range(6))),
          3: said("user", "<tool_response>x</tool_response>" * 6)}, "more than 5 calls"),
        ({2: said("assistant", "<think>a</think>" + call(1, 2) + call(3, 4)),
          3: said("user", *frames("1.png"), "<tool_response>x</tool_response>" * 2)}, "no text tells them apart"),
    ],
)  # fmt: skip
def test_unusable_traces_have_a_reason(changes: dict[int, Message], reason: str) -> None:
    with pytest.raises(UnusableTraceError, match=reason):
        merge_trace([changes.get(index, message) for index, message in enumerate(SEQUENTIAL)])


@pytest.mark.parametrize(
    ("think", "kept"),
    [
        ("The red car stands next to the door. Let me check the end.", "The red car stands next to the door."),
        ("I see a dog.\nI should look at 30 s.\nIt barks!", "I see a dog. It barks!"),
        ("I’ll crop again.", ""),
        ("", ""),
    ],
)
def test_what_was_observed_is_told_from_what_is_intended(think: str, kept: str) -> None:
    assert observed(think) == kept


def test_a_summary_ends_with_a_sentence_before_its_limit() -> None:
    summary = observed("A red ball is seen. " * 1000)
    assert SUMMARY_CHARS - 20 <= len(summary) <= SUMMARY_CHARS and summary.endswith("seen.")


@pytest.mark.parametrize("as_text", [True, False])
def test_a_file_is_converted_and_what_is_left_out_is_counted(
    tmp_path: Path, as_text: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = [SEQUENTIAL[1], said("assistant", "<think>a</think><answer>B</answer>")]
    broken = SEQUENTIAL[:-1]
    rows = [SEQUENTIAL, plain, broken]
    messages = [json.dumps(row) if as_text else row for row in rows]
    source, out = tmp_path / "in.parquet", tmp_path / "new" / "out.parquet"
    pq.write_table(pa.Table.from_pylist([{"id": i, "messages": m} for i, m in enumerate(messages)]), source)
    assert cli.main(["data", "traces", str(source), str(out)]) == 0
    printed = capsys.readouterr().out
    assert "1 traces merged into one parallel turn; 1 conversations have no calls." in printed
    assert "Left out: 1 x user and assistant do not take turns up to an answer." in printed
    table = pq.read_table(out)
    assert table.column("id").to_pylist() == [0, 1]
    (tmp_path / "new" / "longvt_source" / "a").mkdir(parents=True)
    (tmp_path / "new" / "longvt_source" / "a" / "x.mp4").touch()
    conversations, skipped = read_conversations(out, "", 0.0)
    assert len(conversations) == 2 and not skipped.ids
    assert [turn.role for turn in conversations[0].turns] == ["system", "user", "assistant", "user", "assistant"]


def test_files_that_hold_no_traces_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "in.parquet"
    with pytest.raises(DataError, match="cannot be read as a parquet file"):
        convert(file, tmp_path / "out.parquet")
    pq.write_table(pa.Table.from_pylist([{"videos": "x"}]), file)
    with pytest.raises(DataError, match="but no messages"):
        convert(file, tmp_path / "out.parquet")
    pq.write_table(pa.Table.from_pylist([{"messages": "no JSON"}]), file)
    with pytest.raises(DataError, match=r"No conversation of .* can be used\. Left out: 1 x the messages are no list"):
        convert(file, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
