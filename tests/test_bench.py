"""The benches: the arithmetic of their tables, and each of them once at toy size, so that it runs when asked for."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import make_tiny_checkpoint

from paravt_ray.bench import _simulated, learner, rollout, step
from paravt_ray.bench._peer import Peer, PeerError
from paravt_ray.bench._scripted import script_of
from paravt_ray.bench._simulated import Crowd, Overlap, Pause, SimulatedHost, driver_row, overlap_row
from paravt_ray.bench._table import Row, in_turn, show
from paravt_ray.bench._workload import local_cluster, question, words
from paravt_ray.chat import Chat, Reply, frames_reply, main_messages, question_text
from paravt_ray.episode import Frame
from paravt_ray.errors import InputError
from paravt_ray.parsing import parse_turn


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cluster() -> Iterator[None]:
    with local_cluster(cpus=16):
        yield


# ---- the table -------------------------------------------------------------------------------------------------------


def test_a_ratio_above_one_is_better_whichever_way_the_figure_goes() -> None:
    faster = Row("speed", ours=20.0, peer=10.0, peer_name="peer", goal=2.0, unit="/s")
    shorter = Row("time", ours=10.0, peer=20.0, peer_name="peer", goal=2.1, unit="s", less_is_better=True)
    assert (faster.ratio, shorter.ratio) == (2.0, 2.0)
    assert (faster.reached, shorter.reached) == (True, False)


def test_the_exit_code_and_the_table_tell_of_a_missed_goal(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = (Row(name, 0.5, 1.0, "peer", goal, "/s") for name, goal in (("good", 0.5), ("bad", 0.6)))
    assert show([good], ["2 cores"]) == 0
    assert show([good, bad], ["2 cores"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "missed" in line] == ["bad"]


def test_sides_are_asked_in_turn_and_the_first_round_does_not_count() -> None:
    asked: list[tuple[str, int]] = []

    def side(name: str, figures: Sequence[float]) -> Any:
        def measure(index: int) -> float:
            asked.append((name, index))
            return figures[index]

        return measure

    assert in_turn(3, side("a", [99, 1, 2, 30]), side("b", [99, 5, 4, 6])) == [2, 5]
    assert asked == [(name, index) for index in range(4) for name in "ab"]


# ---- a side in its own process ---------------------------------------------------------------------------------------


class Counter:
    """What the other process holds."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ValueError("nothing below zero")
        self.value = start

    def add(self, number: int) -> tuple[int, int]:
        self.value += number
        return self.value, os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def die(self) -> None:
        print("last words", flush=True)
        os._exit(3)


def test_a_peer_keeps_its_object_elsewhere_and_says_what_went_wrong(tmp_path: Path) -> None:
    with Peer(tmp_path / "log", Counter, 1, env={"BENCH_SIDE": "peer"}) as peer:
        assert peer.call("add", 2)[0] == 3
        value, pid = peer.call("add", 4)
        assert (value, pid != os.getpid()) == (7, True)
        assert peer.call("environment", "BENCH_SIDE") == "peer"
        assert "BENCH_SIDE" not in os.environ
        with pytest.raises(PeerError, match="AttributeError"):
            peer.call("subtract", 1)
        with pytest.raises(PeerError, match=r"died in 'die'.*\n.*last words"):
            peer.call("die")
    with pytest.raises(PeerError, match="nothing below zero"):
        Peer(tmp_path / "log", Counter, -1)


# ---- what is measured ------------------------------------------------------------------------------------------------


def test_a_script_calls_each_window_once_and_answers(model: Path) -> None:
    chat = Chat.from_pretrained(model)
    for per_turn, turns in ((4, 2), (1, 5)):
        script = script_of(chat, rollout.WINDOWS, think_tokens=20, summary_tokens=30, per_turn=per_turn)
        parsed = [parse_turn(text, think_prefilled=True) for text in script.turns]
        assert len(parsed) == turns
        assert all(turn.think_closed for turn in parsed)
        calls = [call for turn in parsed for call in turn.calls]
        assert [(call.ok, call.start_time, call.end_time) for call in calls] == [(True, *w) for w in rollout.WINDOWS]
        assert [turn.answer for turn in parsed] == [None] * (turns - 1) + ["A"]
        assert 20 < len(chat.encode_text(script.summary)) <= 30
    assert words(chat, 25) == words(chat, 25) != words(chat, 25, seed=1)


def test_text_prompts_have_the_length_that_the_table_names(model: Path) -> None:
    chat, sizes = Chat.from_pretrained(model), step.Sizes(prompts=4, prompt_tokens=400)
    config = step._config(model, Path("unused"), sizes)
    lengths = [len(step._text_prompt(chat, config, sample)) for sample in step.text_samples(chat, config, sizes)]
    assert len(lengths) == 4
    assert all(380 < length <= 400 for length in lengths)


def test_mixed_lengths_are_those_of_a_step_and_rows_carry_loss_everywhere() -> None:
    lengths = learner.mixed_lengths(64)
    assert lengths == learner.mixed_lengths(64)
    assert 64 < len(lengths) < 64 * 3
    padded = len(lengths) * max(lengths) / sum(lengths)
    assert 3 < padded < 6, "neither uniform nor absurd: what padding would cost"
    rows = learner.make_rows([3, 5])
    assert [row.generated.sum() for row in rows] == [2, 4]
    assert all(np.count_nonzero(row.advantages) == row.generated.sum() for row in rows)


def test_a_pause_lies_between_its_bounds_and_belongs_to_the_group(model: Path) -> None:
    config = step._config(model, Path("unused"), step.Sizes())
    specs = [_simulated.spec_of(question("v.mp4", n), config, f"{n}", 8) for n in range(100)]
    pauses = [Pause(1.0, 3.0).of(spec) for spec in specs]
    assert all(1.0 <= pause <= 3.0 for pause in pauses)
    assert max(pauses) - min(pauses) > 1.5
    assert pauses == [Pause(1.0, 3.0).of(spec) for spec in specs]


def test_without_trl_the_step_bench_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="TRL"):
        step.main()


def test_trl_is_given_the_prompts_that_our_renderer_writes(model: Path) -> None:
    trl = pytest.importorskip("paravt_ray.bench._trl")
    chat = Chat.from_pretrained(model)
    frames = [Frame(np.zeros((32, 32, 3), np.uint8), time_s, f"f{time_s}") for time_s in (0.5, 1.5)]
    sample = question("/v/0.mp4", 1)
    text = question_text(sample.question, sample.videos)
    call = {"function": {"name": "crop_video", "arguments": {"video_path": "0.mp4", "start_time": 1, "end_time": 2}}}
    blocks = [
        part for f in frames for part in ({"type": "text", "text": f"<{f.time_s:.1f} seconds>"}, {"type": "image"})
    ]
    shown = [{"type": "text", "text": frames_reply((1, 2))}, *blocks]
    conversation = [
        {"role": "system", "content": [{"type": "text", "text": trl.MAIN_SYSTEM}]},
        {"role": "user", "content": [*blocks, {"type": "text", "text": f"\n{text}"}]},
        {"role": "assistant", "content": "<think>\nlook\n</think>", "tool_calls": [call]},
        {"role": "tool", "name": "crop_video", "content": shown},
        {"role": "tool", "name": "crop_video", "content": "Error: none"},
    ]
    rendered = chat.tokenizer.apply_chat_template(
        conversation, chat_template=trl.CHAT_TEMPLATE, add_generation_prompt=True, tokenize=False
    )
    said = rendered.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    turn = parse_turn(said, think_prefilled=False)
    assert [(c.ok, c.start_time, c.end_time) for c in turn.calls] == [(True, 1.0, 2.0)]
    ours = chat.prompt(main_messages(text, [frames]), think_prefix=True)
    prefix = chat.decode(ours.ids).removesuffix("<think>\n")
    replies = [Reply(frames_reply((1, 2)), tuple(frames)), Reply("Error: none")]
    suffix = chat.replies(replies, closed=True, think_prefix=True, force_answer=False)
    assert rendered == f"{prefix}{said}<|im_end|>{chat.decode(suffix.ids)}"


# ---- each bench once, at toy size ------------------------------------------------------------------------------------


def is_measured(row: Row) -> bool:
    return row.ours > 0 and row.peer > 0 and math.isfinite(row.ratio)


def test_overlap_saves_the_shorter_of_rollout_and_training(model: Path, tmp_path: Path, cluster: None) -> None:
    row = overlap_row(model, tmp_path, Overlap(Pause(0.8, 0.9), update_s=1.0, steps=2))
    assert 1.0 <= row.peer < 1.5
    assert 1.0 <= row.ours < 1.7, "rollout and training took turns"


def test_the_crowd_is_fed_and_the_driver_measured(tmp_path: Path, cluster: None) -> None:
    row = driver_row(tmp_path, Crowd(generators=20, episodes=4, pause=Pause(0.1, 0.3), seconds=1.5))
    assert is_measured(row)
    assert row.ours < 2.0


def test_simulated_groups_can_be_trained_on(model: Path) -> None:
    host = SimulatedHost(Pause(0.0, 0.0))
    config = step._config(model, Path("unused"), step.Sizes(group_size=3))
    episode = host._episode(_simulated.spec_of(question("v.mp4", 0), config, "1/0", 3), 2, version=5)
    episode.trajectory.check()
    assert episode.policy_version == 5
    assert sum(episode.trajectory.generated) == _simulated.NEW_TOKENS


@pytest.mark.bench
def test_the_learner_bench_runs(model: Path, tmp_path: Path) -> None:
    speed = learner.speed_rows(model, tmp_path, equal=[32] * 4, mixed=[48, 8, 8, 8], rounds=1)
    assert [is_measured(row) for row in speed] == [True, True]
    assert is_measured(learner.memory_row(model, tmp_path, [256] * 4, (512, 1024), chunk_tokens=8))


@pytest.mark.bench
def test_the_calls_of_the_rollout_bench_run(model: Path, tmp_path: Path, cluster: None) -> None:
    row = rollout.calls_row(model, tmp_path, rollout.Calls(think=4, summary=8), rounds=1)
    assert is_measured(row)
    assert row.ratio > 1.0, "four calls at once took longer than one after the other"


@pytest.mark.bench
def test_the_tool_task_of_the_step_bench_runs_in_several_turns(model: Path, tmp_path: Path, cluster: None) -> None:
    pytest.importorskip("trl")
    sizes = step.Sizes(prompts=2, group_size=2, think_tokens=4, overview_frames=4)
    rows = step.tool_rows(model, tmp_path / "tools", sizes, rounds=1, per_turn=2)
    assert [is_measured(row) for row in rows] == [True, True]
