"""The parser: the shared cases, the kinds they stand for, and hostile text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt_ray.episode import Turn
from paravt_ray.parsing import STRUCTURAL_TAGS, parse_turn
from paravt_ray.timestamps import to_seconds

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "turns.jsonl").read_text().splitlines()]


def call(start: Any = 1, end: Any = 2, name: str = "crop_video") -> str:
    return json.dumps({"name": name, "arguments": {"video_path": "a.mp4", "start_time": start, "end_time": end}})


def block(*objects: str) -> str:
    return "<tool_call>\n" + "\n".join(objects) + "\n</tool_call>"


def windows(turn: Turn) -> list[tuple[float | None, float | None] | None]:
    """The window of each call, None for an attempt that cannot be run."""
    return [(c.start_time, c.end_time) if c.ok else None for c in turn.calls]


@pytest.mark.parametrize("case", CASES, ids=[case["what"] for case in CASES])
def test_shared_case(case: dict[str, Any]) -> None:
    turn = parse_turn(case["text"], case["think_prefilled"])
    assert windows(turn) == [(c["start_time"], c["end_time"]) if c["ok"] else None for c in case["calls"]]
    assert (turn.answer, turn.think_closed) == (case["answer"], case["think_closed"])
    assert all((c.error is None) == c.ok for c in turn.calls)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" + call(1, 2) + ', {"name": "crop_video", "arguments": {"start_time": 3', [(1, 2), None]),
        (call(1, 2)[:-1] + "\n" + call(3, 4), [None, (3, 4)]),  # a missing brace costs that call alone
        (call(1, 2) + " and {} and " + call(3, 4), [(1, 2), None, (3, 4)]),
        ("{'name': 'crop_video', 'arguments': {'start_time', 'end_time'}}" + call(3, 4), [None, (3, 4)]),
        ("```json\n" + call(1, 2) + "\n```", [(1, 2)]),
        ('{"name": "crop_video", "arguments": {"video_path": "</tool_call>", "start": 1, "end": 2}}', [(1, 2)]),
        (call(1, 2).replace("a.mp4", "</tool_call>") + call(3, 4), [(1, 2), (3, 4)]),
        ("{'name': 'crop_video', 'arguments': {'start_time': (1], 'end_time': 2}}" + call(3, 4), [None, (3, 4)]),
        ('{"name": "crop_video", "arguments": "\\"{}\\""}', [None]),  # unwrapped once, not twice
        ('{"name": "crop_video", "arguments": {"start_time": NaN, "end_time": 2}}', [None]),
        ('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": Infinity}}', [None]),
        ('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 1' + "0" * 5000 + "}}", [None]),
        ('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 1e999}}', [None]),
        ('{"name": "crop_video", "arguments": {"start_time": 1, "end_time": "nan"}}', [None]),
        ('{"name": "crop_video", "arguments": {"start_time": [1], "end_time": 2}}', [None]),
        ('{"name": "crop_video", "arguments": [1, 2]}', [None]),
        ('{"name": ["crop_video"], "arguments": {"start_time": 1, "end_time": 2}}', [None]),
        ('{"arguments": {"start_time": 1, "end_time": 2}}', [None]),
        ("{'name': 'crop_video', 'arguments': {'start_time': 1, 'end_time': b'2'}}", [None]),
        ("{'name': 'crop_video', 'arguments': {'start': 1, 'end': 2, 'tags': {'a', 'b'}}}", [None]),
        ("{'name': 'crop_video', 'arguments': {'start': 1, 'end': 2, 'note': b'a'}}", [None]),
        ('{"name": "crop_video", "arguments": {"video_path": 5, "start_time": 1, "end_time": 2}}', [None]),
        (call(-3, 4), [(-3, 4)]),  # partly outside: clamped where the clip's length is known
    ],
)
def test_block_contents(text: str, expected: list[Any]) -> None:
    assert windows(parse_turn(f"<think>x</think><tool_call>{text}</tool_call>")) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("a = crop_video('a.mp4', 1, 2)\nb = crop_video(start_time='0:03', end_time='4s')", [(1, 2), (3, 4)]),
        ("[tools.crop_video('a', 1, 2), crop_video('b', 3, 4)]", [(1, 2), (3, 4)]),
        ("```python\nprint(crop_video('it\\'s(.mp4', 1, 2))\n```", [(1, 2)]),
        ("crop_video('a.mp4', 1, open('/etc/passwd'))", [None]),
        ("crop_video(*[1], **{'start_time': 1})", [None]),
        ("crop_video('a.mp4', 1, 2, 3)", [None]),
        ("__import__('os').system('id')", [None, None]),
        ("crop_video('a.mp4', 1,", [None]),
        ("crop_video('a.mp4', (1, crop_video('a.mp4', 3, 4)", [None, (3, 4)]),
        ("no call at all", [None]),
    ],
)
def test_code_style(code: str, expected: list[Any]) -> None:
    turn = parse_turn(f"<think>x</think><tool_code>{code}</tool_code>")
    assert windows(turn) == expected
    assert {c.style for c in turn.calls} == {"code"}


def test_unclosed_thinking_ends_at_first_complete_call_or_answer() -> None:
    turn = parse_turn(f"I could use <tool_call> or\n{block(call(1, 2))}{block('{')}", think_prefilled=True)
    assert windows(turn) == [(1, 2), None]
    assert turn.think == "I could use <tool_call> or\n"
    assert turn.think_opened and not turn.think_closed

    turn = parse_turn("maybe <answer></answer>, rather <answer>B</answer>", think_prefilled=True)
    assert (turn.answer, turn.think_closed) == ("B", False)

    for cut_off in ("hmm <tool_call>{'name': 'crop_", "hmm <answer>B"):
        turn = parse_turn(cut_off, think_prefilled=True)
        assert (turn.calls, turn.answer, turn.think, turn.think_closed) == ((), None, cut_off, False)


def test_thinking_without_opener_is_thinking() -> None:
    turn = parse_turn(f"draft {block(call(1, 2))}</think>{block(call(3, 4))}")
    assert windows(turn) == [(3, 4)]
    assert (turn.think_opened, turn.think_closed) == (False, True)


def test_second_think_block() -> None:
    turn = parse_turn(f"<think>a</think>{block(call(1, 2))}<think>b {block(call(3, 4))}</think><answer>C</answer>")
    assert (windows(turn), turn.answer, turn.think, turn.think_closed) == ([(1, 2)], "C", "a", True)
    assert not parse_turn("<think>a</think><think>b").think_closed


def test_closing_tags_are_credited_only_where_they_stand() -> None:
    turn = parse_turn(f"<think>x</think><tool_call>{call(1, 2)}<tool_call>{call(3, 4)}</tool_call><answer>B")
    assert [c.closed for c in turn.calls] == [False, True]
    assert (turn.answer, turn.answer_closed) == ("B", False)
    turn = parse_turn("<think>x</think><answer>A<answer>B</answer>")
    assert (turn.answer, turn.answer_closed) == ("B", True)


def test_calls_inside_an_answer_are_text() -> None:
    turn = parse_turn(f"<think>x</think><answer>{block(call())}</answer>")
    assert (turn.calls, turn.answer) == ((), block(call()))


def test_nothing_after_the_end_of_turn_counts() -> None:
    turn = parse_turn("<think>x</think><answer>A</answer><|im_end|>\n<|im_start|>user\n<answer>B</answer>")
    assert turn.answer == "A"


def test_raw_text_of_each_attempt() -> None:
    turn = parse_turn(f"<think>x</think><tool_call></tool_call><tool_call>\n[{call()}, {call()[:-1]}</tool_call>")
    assert [c.raw for c in turn.calls] == ["<tool_call></tool_call>", call(), call()[:-1]]


def test_video_argument_is_kept_as_text() -> None:
    (found,) = parse_turn("<think>x</think>" + block(call().replace("a.mp4", "../../etc/passwd"))).calls
    assert found.video == "../../etc/passwd"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(3, 3.0), ("3.", 3.0), (" 12.5 Seconds ", 12.5), ("75:30", 4530.0), ("1:02:03.5", 3723.5), ("-4", -4.0)],
)
def test_times(value: object, seconds: float) -> None:
    assert to_seconds(value) == seconds


@pytest.mark.parametrize(
    "value", [True, None, "", "1:90", "1:2:3:4", "1_000", "٣", "inf", 10**400, float("nan"), "1" + " " * 99_999 + "x"]
)
def test_no_times(value: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        to_seconds(value)


N = 100_000
HOSTILE = {
    "openers": "<tool_call>" * (N // 11),
    "closers": "</tool_call></think></answer>" * (N // 29),
    "thinks": "<think>" * (N // 7),
    "answers": "<answer>" * (N // 8),
    "closed answers": "<answer>A</answer>" * (N // 18),
    "open calls in open thinking": "<think>" + '<tool_call>{"name"' * (N // 18),
    "json nesting": "<tool_call>" + '{"a":' * (N // 5),
    "named nesting": "<tool_call>" + '{"name":' * (N // 8),
    "shallow named nesting": "<tool_call>" + ('{"name":' * 15 + "}") * (N // 121),
    "filled nesting": "<tool_call>" + ('{"name":{"b":"' + "x" * 5000 + '"},"c":') * 20,
    "lists": "<tool_call>" + "[" * N,
    "braces": "<tool_call>" + "{" * N,
    "code nesting": "<tool_code>" + "f(" * (N // 2),
    "unary": "<tool_code>crop_video(" + "-" * N + "1)</tool_code>",
    "sum": "<tool_code>crop_video(" + "1+" * (N // 2) + "1)</tool_code>",
    "one name": "<tool_code>" + "a" * N,
    "quotes": "<tool_call>{" + "'\\" * (N // 2),
    "mixed quotes": "<tool_call>" + "{'\"" * (N // 3),
    "digits": '<tool_call>{"name": "crop_video", "arguments": {"start": "' + "9" * N + '", "end": 1}}',
    "blanks": '<tool_call>{"name": "crop_video", "arguments": {"start": "1' + " " * N + 'x", "end": 1}}',
    "blanks in objects": "<tool_call>" + ("{" + " " * 300) * (N // 300),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("prefilled", [False, True])
def test_hostile_text_is_read_in_linear_time(name: str, prefilled: bool) -> None:
    """A slip into quadratic time on one of these takes many seconds; linear reading takes some milliseconds."""
    start = time.process_time()
    turn = parse_turn(HOSTILE[name], prefilled)
    assert time.process_time() - start < 6.0
    assert not any(c.ok for c in turn.calls)


def test_a_thousand_calls() -> None:
    turn = parse_turn("<think>x</think>" + "".join(block(call(i, i + 1)) for i in range(1000)))
    assert windows(turn) == [(i, i + 1) for i in range(1000)]


TAGS = [*STRUCTURAL_TAGS, "<think>", "<tool_code>", "</tool_code>", "<|im_end|>"]
CALLS = [call(1, 2), call(3, 4)[:-9], call("x", 4), "{'a': {1}}", "print(crop_video('v', 1, 2))", "crop_video('v'"]
PIECES = st.sampled_from([*TAGS, *CALLS, *"[]{}()'\"\\,", "B", "\n", "\ud800", "\0"])


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=25), st.booleans())
def test_any_text_gives_a_turn(pieces: list[str], prefilled: bool) -> None:
    text = "".join(pieces)
    turn = parse_turn(text, prefilled)
    assert turn.text == text
    position = 0
    for found in turn.calls:  # raw texts stand in the turn, in call order, without overlap
        position = text.index(found.raw, position) + len(found.raw)
        assert found.ok == (found.error is None)
        if found.ok:
            assert found.start_time is not None and found.end_time is not None and found.start_time < found.end_time
    assert turn.answer is None or (turn.answer and turn.answer == turn.answer.strip() and turn.answer in text)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e4), st.floats(0.1, 1e3), st.sampled_from(["json", "literal", "code", "list", "bad"])),
        min_size=1,
        max_size=8,
    )
)
def test_calls_keep_their_order_in_any_mixture(calls: list[tuple[float, float, str]]) -> None:
    text, expected = "<think>x</think>", []
    for start, length, style in calls:
        end = start + length
        expected.append(None if style == "bad" else (start, end))
        text += {
            "json": block(call(start, end)),
            "list": block(f"[{call(start, end)}]"),
            "literal": block(repr(json.loads(call(start, end)))),
            "code": f"<tool_code>crop_video('a.mp4', {start!r}, end_time={end!r})</tool_code>",
            "bad": block(call(start, end)[:-3]),
        }[style]
    assert windows(parse_turn(text)) == expected
