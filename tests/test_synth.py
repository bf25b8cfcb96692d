"""The synthetic task: what the clips really show, what the questions mean, what the traces teach."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from tiny import make_tokenizer

from paravt_ray.chat import (
    Chat,
    Message,
    Reply,
    Video,
    assistant_parts,
    main_messages,
    subagent_messages,
    user_parts,
)
from paravt_ray.data.reader import read_rows
from paravt_ray.data.synth import (
    FRAME_BUDGETS,
    SynthSizes,
    draw_questions,
    held_out_questions,
    synthesize,
    visible_shares,
)
from paravt_ray.data.synth_looking import looking_trace
from paravt_ray.data.synth_questions import KINDS, LETTERS, draw_question, overview_times
from paravt_ray.data.synth_reading import draw_exercise
from paravt_ray.data.synth_traces import ERRORS, crop_seconds, main_trace, subagent_trace, summary
from paravt_ray.data.synth_video import COLOURS, Clip, plan_clip, write_clip
from paravt_ray.episode import Frame
from paravt_ray.parsing import parse_turn
from paravt_ray.rewards import accuracy
from paravt_ray.rollout import calls as served
from tool_workers import crop, overview

CLIPS = [plan_clip(f"v{seed:03d}.mp4", seed) for seed in range(60)]


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> tuple[Clip, Path]:
    clip = next(c for c in CLIPS if 100 <= c.duration <= 160 and c.empty)
    return clip, write_clip(clip, tmp_path_factory.mktemp("film"))


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer(["red from 12 to 18 s", "crop_video"]), 32)


def colour_of(pixels: np.ndarray) -> str | None:
    """The colour that fills the middle of a frame, None for grey."""
    middle = np.median(pixels[12:20, 12:20].reshape(-1, 3), axis=0)
    name, distance = min(
        ((name, float(abs(middle - np.array(rgb)).max())) for name, rgb in COLOURS.items()), key=lambda x: x[1]
    )
    return name if distance < 60 else None


def test_events_stay_in_their_windows_and_never_meet() -> None:
    for clip in CLIPS:
        assert 60 <= clip.duration <= 600
        assert len({event.colour for event in clip.events}) == len(clip.events) >= 3
        for event in clip.events:
            assert event.window[0] < event.start < event.end < event.window[1]
            assert 4 <= event.end - event.start <= 20
        windows = sorted([event.window for event in clip.events] + list(clip.empty))
        assert all(a[1] <= b[0] for a, b in pairwise(windows))
        assert windows[-1][1] <= clip.duration


def test_the_files_show_what_the_plan_says(film: tuple[Clip, Path]) -> None:
    clip, path = film
    frames = overview(path, 64, max_pixels=1024)
    for pixels, time in zip(frames.frames, frames.timestamps, strict=True):
        shown = next((e.colour for e in clip.events if e.start <= time < e.end), None)
        assert colour_of(pixels) == shown, f"at {time} s"


@pytest.mark.parametrize("count", FRAME_BUDGETS)
def test_frame_times_are_those_of_the_crop_service(film: tuple[Clip, Path], count: int) -> None:
    # The traces speak of frames that the model does not see if this rule and the service's ever part ways.
    clip, path = film
    assert overview(path, count, max_pixels=1024).timestamps.tolist() == pytest.approx(overview_times(clip, count))
    for window in [*clip.empty, *(event.window for event in clip.events), (0, 100)]:
        assert crop(path, *window, max_pixels=1024).timestamps.tolist() == pytest.approx(crop_seconds(window))


def test_equal_plans_give_equal_bytes(film: tuple[Clip, Path], tmp_path: Path) -> None:
    clip, path = film
    assert write_clip(clip, tmp_path).read_bytes() == path.read_bytes()
    assert plan_clip("a.mp4", 1).events != plan_clip("a.mp4", 2).events


def test_answers_follow_from_the_plan() -> None:
    for question in draw_questions(CLIPS, 8, seed=[0]):
        clip = question.clip
        if question.kind == "where":
            window = question.windows[LETTERS.index(question.answer)]
            event = clip.event_in(window)
            assert event and event.colour in question.text.splitlines()[0]
        elif question.kind == "what":
            event = clip.event_in(question.windows[0])
            assert event and question.options[LETTERS.index(question.answer)] == event.colour
        elif question.kind == "when":
            event = question.needed[0]
            assert accuracy(f"[{event.start}, {event.end}]", question.answer, "tvg") == 1.0
            # Whoever finds the window has nearly found the event; any other window is plainly wrong.
            assert accuracy(str(list(event.window)), question.answer, "tvg") >= 0.7
            assert all(
                accuracy(str(list(w)), question.answer, "tvg") == 0 for w in question.windows if w != event.window
            )
        else:
            assert question.answer == ", ".join(clip.event_in(w).colour for w in question.windows)  # type: ignore[union-attr]
        assert question.text.endswith(f"The video path for this video is: {clip.name}")


def test_few_frames_hide_what_many_show() -> None:
    shares = visible_shares(draw_questions(CLIPS, 8, seed=[0]))
    assert shares[4] < 0.25
    assert shares[64] > 0.9
    assert all(a < b for a, b in pairwise(shares.values()))


def test_prompts_of_traces_are_those_of_rollouts(chat: Chat) -> None:
    rng = np.random.default_rng(0)
    for kind in KINDS:
        question = draw_question(CLIPS[7], kind, rng)
        frames = [blank_frame(time) for time in overview_times(question.clip, 8)]
        trace = main_trace(question, 8, "json", rng)
        expected = chat.prompt(main_messages(question.text, [frames]), think_prefix=True).ids
        assert chat.render([as_message(m, frames) for m in trace]).ids[: len(expected)] == expected
        window = question.windows[0]
        crop_frames = [blank_frame(time) for time in crop_seconds(window)]
        expected = chat.prompt(subagent_messages(question.text, window, crop_frames)).ids
        rendered = chat.render([as_message(m, crop_frames) for m in subagent_trace(question, window)])
        assert rendered.ids[: len(expected)] == expected


def test_replies_in_traces_are_those_of_rollouts(chat: Chat) -> None:
    rng = np.random.default_rng(1)
    trace = next(
        t for _ in range(200) if len(t := main_trace(draw_question(CLIPS[5], "where", rng), 4, "json", rng)) > 4
    )
    text = trace[3]["content"][0]["text"]
    bodies = [part.split("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]
    forced = text.endswith("Answer now.")
    expected = chat.replies([Reply(body) for body in bodies], closed=True, think_prefix=True, force_answer=forced).ids
    assert_suffix = chat.render([as_message(m, []) for m in trace[3:5]]).ids
    # `replies` begins with the newline that follows the assistant's end-of-turn token.
    assert assert_suffix[: len(expected) - len(chat.encode_text("\n"))] == expected[len(chat.encode_text("\n")) :]


def test_json_traces_parse_and_code_traces_break_the_format() -> None:
    rng = np.random.default_rng(2)
    called = closed = 0
    for index in range(400):
        question = draw_question(CLIPS[index % len(CLIPS)], KINDS[index % 4], rng)
        for style in ("json", "code"):
            for message in main_trace(question, 8, style, rng):
                if message["role"] != "assistant":
                    continue
                turn = parse_turn(message["content"][0]["text"])
                assert all(call.ok and call.style == style for call in turn.calls)
                assert {(c.start_time, c.end_time) for c in turn.calls} <= set(question.windows)
                if style == "json":
                    called += bool(turn.calls)
                    assert turn.think_closed
                    assert bool(turn.calls) != (turn.answer is not None and turn.answer_closed)
                else:
                    closed += turn.answer is not None and turn.answer_closed
    assert called > 50
    assert closed == 0


def test_good_traces_answer_rightly() -> None:
    # Whoever reads all summaries and answers in the right form must be right: else calling the tool could not pay.
    rng = np.random.default_rng(3)
    scores: dict[bool, list[float]] = {True: [], False: []}
    for index in range(600):
        question = draw_question(CLIPS[index % len(CLIPS)], KINDS[index % 4], rng)
        trace = main_trace(question, 4, "json", rng)
        if any("Error:" in m["content"][0].get("text", "") for m in trace if m["role"] == "user"):
            continue
        answer = parse_turn(trace[-1]["content"][0]["text"]).answer
        scores[len(trace) > 3].append(accuracy(answer, question.answer, question.question_type))
    assert np.mean(scores[True]) > 0.93
    assert np.mean(scores[False]) < 0.6


def test_summaries_name_what_a_crop_shows(film: tuple[Clip, Path]) -> None:
    clip, path = film
    for event in clip.events:
        shown = {colour_of(pixels) for pixels in crop(path, *event.window, max_pixels=1024).frames}
        assert shown - {None} == {summary(clip, event.window)}
    assert {colour_of(pixels) for pixels in crop(path, *clip.empty[0], max_pixels=1024).frames} == {None}
    assert summary(clip, clip.empty[0]) == "nothing"


def test_thoughts_tell_what_the_overview_shows_of_each_window() -> None:
    rng = np.random.default_rng(6)
    told = {"not seen": 0, "seen": 0}
    for index in range(200):
        question = draw_question(CLIPS[index % len(CLIPS)], KINDS[index % 4], rng)
        times = overview_times(question.clip, 16)
        thought = main_trace(question, 16, "json", rng)[2]["content"][0]["text"].removeprefix("<think>\n")
        for window, line in zip(question.windows, thought.splitlines(), strict=False):
            event = question.clip.event_in(window)
            seen = event is not None and any(event.start <= time < event.end for time in times)
            said = f"{window[0]} to {window[1]} s: {event.colour if seen and event else 'not seen'}"
            assert said in line
            assert len(question.windows) == 1 or (line[0], line[-1]) == (LETTERS[question.windows.index(window)],) * 2
            told["seen" if seen else "not seen"] += 1
    assert min(told.values()) > 50


def test_exercises_in_looking_agree_with_the_plan() -> None:
    rng = np.random.default_rng(4)
    told = {"seen": 0, "not seen": 0}
    for index in range(200):
        clip = CLIPS[index % len(CLIPS)]
        user, assistant = looking_trace(clip, rng)
        video, text = user["content"]
        kind, value = video["video_url"]["url"].split("#")[1].split("=")
        if kind == "frames":
            times = overview_times(clip, int(value))
        else:
            start, end = (int(t) for t in value.split(","))
            assert 0 <= start < end <= clip.duration
            times = crop_seconds((start, end))
        asked, reply = text["text"].strip().splitlines(), assistant["content"][0]["text"].splitlines()
        for request, line in zip(asked, reply, strict=True):
            head, found = line.split(": ")
            assert request == head
            a, b = (int(t) for t in head.removesuffix(" s").split(" to "))
            inside = [time for time in times if a <= time < b]
            shown = [event.colour for event in clip.events if any(event.start <= t < event.end for t in inside)]
            assert [found] == (shown or ["not seen"])
            told["not seen" if found == "not seen" else "seen"] += 1
    assert min(told.values()) > 200


def test_exercises_in_reading_are_answered_from_their_own_text() -> None:
    rng = np.random.default_rng(5)
    asked = [draw_exercise(rng) for _ in range(400)]
    for request, reply in asked:
        # Copying is all there is to learn: every word and number of a reply stands in its request.
        words = [word.strip("[],:.") for word in reply.split()]
        assert all(word in request or word == "so" for word in words), (request, reply)
        lines = request.splitlines()
        if lines[-1].startswith("Which are "):
            colours = lines[-1].removeprefix("Which are ").rstrip("?").split(", ")
            for colour, line in zip(colours, reply.splitlines(), strict=True):
                option = next(option for option in lines[:-1] if colour in option.split())
                assert line == f"so {colour} {option.split(':')[0]}"
        elif lines[0].startswith(("When", "Where")):
            colour = lines[0].split()[3]
            right = next(line.split(": ")[0] for line in lines if line.endswith(f": {colour}"))
            assert reply.splitlines()[-2].startswith(f"so {colour} ")
            assert reply.splitlines()[-2].endswith(right)
    assert {request.split()[0] for request, _ in asked} >= {"Repeat:", "When", "Where", "Which", "A."}


def test_error_replies_are_those_of_rollouts() -> None:
    assert {served.TOO_MANY_IN_TURN, served.TOO_SLOW, served.NOT_READABLE} <= set(ERRORS)


def test_synthesize_writes_both_formats_on_different_clips(tmp_path: Path) -> None:
    sizes = SynthSizes(
        3,
        2,
        4,
        reading_conversations=7,
        looking_conversations=8,
        overview_conversations=9,
        prior_conversations=6,
        sft_conversations=5,
        calling_conversations=10,
        valid_conversations=4,
    )
    report = synthesize(tmp_path / "a", seed=1, sizes=sizes)
    assert report.rows == {
        "train": 12,
        "valid": 8,
        "sft_reading": 7,
        "sft_looking": 8,
        "sft_overviews": 9,
        "sft_prior": 6,
        "sft_weak_prior": 6,
        "sft_train": 5,
        "sft_calling": 10,
        "sft_valid": 4,
    }
    valid = read_rows(tmp_path / "a" / "valid.parquet", ["prompt"])
    asked = [question.text for question in held_out_questions(1, sizes)]
    assert [row["prompt"][0]["content"].removeprefix("<video>\n") for row in valid] == asked
    videos = {}
    for name in ("train", "valid"):
        rows = read_rows(tmp_path / "a" / f"{name}.parquet", ["prompt", "videos", "extra_info"])
        videos[name] = {row["videos"][0]["video"] for row in rows}
        assert all((tmp_path / "a" / video).is_file() for video in videos[name])
        assert {json.loads(row["extra_info"])["question_type"] for row in rows} == {"mcq", "tvg", "oe"}
    assert not videos["train"] & videos["valid"]
    again = synthesize(tmp_path / "b", seed=1, sizes=sizes)
    for name in again.rows:
        tables = [pyarrow.parquet.read_table(tmp_path / folder / f"{name}.parquet") for folder in "ab"]
        assert tables[0].equals(tables[1])


def blank_frame(time: float) -> Frame:
    return Frame(np.zeros((32, 32, 3), np.uint8), float(time), f"blank@{time}")


def as_message(message: dict, frames: list[Frame]) -> Message:  # type: ignore[type-arg]
    """As supervised training renders it."""
    parts: list[object] = []
    for part in message["content"]:
        if part["type"] == "video_url":
            parts.append(Video(tuple(frames)))
        else:
            parts += user_parts(part["text"]) if message["role"] == "user" else assistant_parts(part["text"])
    return Message(message["role"], tuple(parts))  # type: ignore[arg-type]
