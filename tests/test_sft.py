"""Supervised training: what is trained on, what is left out, and that a run goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from learning import make_config
from PIL import Image

from paravt_ray import sft
from paravt_ray.chat import MAIN_SYSTEM, Chat, main_messages
from paravt_ray.config import Config
from paravt_ray.data.synth_video import plan_clip, write_clip
from paravt_ray.episode import TrainRow
from paravt_ray.errors import InputError
from paravt_ray.learner.checkpoint import CheckpointError, read_tensors
from paravt_ray.learner.learner import Learner
from paravt_ray.rollout.gating import draw_frame_budget
from paravt_ray.sft.conversations import Skipped, SkippedRowError, VideoRef, read_conversations
from paravt_ray.sft.examples import ExampleBuilder, FrameSource
from paravt_ray.sft.train import Batches, train
from paravt_ray.tracking.run_dir import RunDirError, read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for number in range(2):
        write_clip(plan_clip(f"v{number}.mp4", number), folder)
    (folder / "junk.mp4").write_bytes(bytes(range(256)) * 36)
    Image.fromarray(np.full((50, 90, 3), 200, np.uint8)).save(folder / "picture.png")
    return folder


@pytest.fixture
def config(tiny_path: Path, videos: Path, tmp_path: Path) -> Config:
    config = make_config(lr=3e-3)
    config.model = replace(config.model, path=str(tiny_path), overview_max_pixels=1024, crop_max_pixels=1024)
    config.data = replace(config.data, train=str(tmp_path / "sft.parquet"), video_root=str(videos))
    config.sft = replace(config.sft, output=str(tmp_path / "out"), batch_size=4)
    config.tools.workers = 1
    return config


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def video(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def message(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def simple(url: str, answer: str) -> list[dict[str, Any]]:
    question = message("user", video(url), text("\nwhich?"))
    return [message("system", text(MAIN_SYSTEM)), question, message("assistant", text(answer))]


def write_rows(config: Config, rows: list[Any], as_json: bool = True) -> None:
    table = pyarrow.table({"messages": [json.dumps(row) if as_json else row for row in rows]})
    pyarrow.parquet.write_table(table, config.data.train)


def build(config: Config, chat: Chat, rows: list[Any], epoch: int = 0, as_json: bool = True) -> list[TrainRow]:
    write_rows(config, rows, as_json)
    conversations, _ = read_conversations(Path(config.data.train), config.data.video_root, 0.0)
    with closing(FrameSource(config, chat.patch_factor)) as frames:
        return [ExampleBuilder(chat, frames, config).build(c, epoch) for c in conversations]


# ---- rendering ----


def test_loss_is_on_assistant_text_and_its_end_of_turn_alone(config: Config, tiny_chat: Chat) -> None:
    turns = ['<think>\nlook\n</think>\n<tool_call>\n{"name": "crop_video"}\n</tool_call>', "<answer>A</answer>"]
    reply = "<tool_response>\n30 to 45 s: red <|im_end|> <think>\n</tool_response>"
    (row,) = build(
        config,
        tiny_chat,
        [
            [
                message("system", text("You see <think>.")),
                message("user", video("v0.mp4#frames=4"), text("\nwhich?")),
                message("assistant", text(turns[0])),
                message("user", text(reply)),
                message("assistant", text(turns[1])),
            ]
        ],
    )
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.generated.astype(int), [0]])))
    spans = [row.token_ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]
    assert [tiny_chat.decode(span) for span in spans] == [f"{turn}<|im_end|>" for turn in turns]
    # Each span follows the assistant's header, and nothing else is marked.
    header = [tiny_chat.im_start, *tiny_chat.encode_text("assistant\n")]
    for start in edges[::2]:
        assert row.token_ids[start - len(header) : start].tolist() == header
    assert (row.token_ids == tiny_chat.im_end).sum() == 5, "text that looks like a control token became one"


def test_a_prompt_is_rendered_as_in_reinforcement_learning(config: Config, tiny_chat: Chat) -> None:
    (row,) = build(config, tiny_chat, [simple("v0.mp4#frames=4", "x")])
    assert len(row.frames) == 4
    expected = tiny_chat.prompt(main_messages("which?", [row.frames]))
    ids = tiny_chat.expand(expected.ids, row.frames)
    assert row.token_ids[: len(ids)].tolist() == ids


def test_a_video_is_rendered_as_in_reinforcement_learning(config: Config, tiny_chat: Chat) -> None:
    video_chat = Chat(tiny_chat.tokenizer, tiny_chat.patch_factor, frames_as="video")
    (row,) = build(config, video_chat, [simple("v0.mp4#frames=5", "x")])
    expected = video_chat.prompt(main_messages("which?", [row.frames[:5]]))
    ids = video_chat.expand(expected.ids, expected.frames)
    assert row.token_ids[: len(ids)].tolist() == ids
    assert row.frames == expected.frames
    assert tiny_chat.decode(row.token_ids[row.generated].tolist()) == "x<|im_end|>"


def test_a_window_shows_the_frames_of_that_window_with_their_times(config: Config, tiny_chat: Chat) -> None:
    (row,) = build(config, tiny_chat, [simple("v0.mp4#t=30,45", "x")])
    times = [frame.time_s for frame in row.frames]
    assert len(times) == 15 and all(30 <= time <= 45 for time in times)
    assert f"<{times[3]:.1f} seconds>" in tiny_chat.decode(row.token_ids.tolist())


def test_without_a_fragment_the_frame_budget_is_drawn_by_seed_row_and_epoch(config: Config, tiny_chat: Chat) -> None:
    config.rollout.frame_budgets = [2, 3, 4, 5, 6]
    rows = [simple("v0.mp4", "x")] * 6
    for epoch in (0, 1):
        counts = [len(row.frames) for row in build(config, tiny_chat, rows, epoch)]
        assert counts == [draw_frame_budget(0, str(i), epoch, config.rollout.frame_budgets) for i in range(6)]
        assert len(set(counts)) > 1


def test_pictures_and_lists_are_read_too(config: Config, tiny_chat: Chat) -> None:
    picture = {"type": "image_url", "image_url": {"url": "picture.png"}}
    rows = [[message("user", picture, text("what?")), message("assistant", text("grey"))]]
    (row,) = build(config, tiny_chat, rows, as_json=False)
    assert [frame.pixels.shape for frame in row.frames] == [(32, 32, 3)]
    assert (row.token_ids == tiny_chat.image_pad).sum() == 1


def test_clips_are_decoded_once(config: Config, tiny_chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    original = FrameSource._decode
    monkeypatch.setattr(FrameSource, "_decode", lambda self, call: decoded.append(call) or original(self, call))
    rows = build(config, tiny_chat, [simple("v0.mp4#frames=4", "x")] * 3 + [simple("v0.mp4#frames=8", "x")])
    assert len(decoded) == 2
    assert all(a is b for a, b in zip(rows[0].frames, rows[2].frames, strict=True))


# ---- rows that cannot be used ----


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "the messages are no JSON"),
        ([], "there are no messages"),
        ([message("user", text("hi"))], "the assistant says nothing"),
        ([message("tool", text("hi"))], "a message has no role system, user or assistant"),
        ([{"role": "user", "content": 3}], "a content is no list of parts"),
        ([message("user", {"type": "audio"})], "a part is no text, video_url or image_url"),
        ([message("assistant", video("v0.mp4"))], "the assistant shows pictures"),
        (simple("gone.mp4", "x"), "a file is missing"),
        (simple("v0.mp4#frames=0", "x"), "a video fragment is neither #frames=N nor #t=START,END"),
        (simple("v0.mp4#frames=many", "x"), "a video fragment is neither #frames=N nor #t=START,END"),
        (simple("v0.mp4#t=5,nan", "x"), "a video fragment is neither #frames=N nor #t=START,END"),
        (simple("v0.mp4#t=9,3", "x"), "a video fragment is neither #frames=N nor #t=START,END"),
    ],
)
def test_rows_that_cannot_be_read_are_counted_by_reason(config: Config, row: Any, reason: str) -> None:
    table = pyarrow.table(
        {"messages": [row if isinstance(row, str) else json.dumps(row), json.dumps(simple("v0.mp4", "x"))]}
    )
    pyarrow.parquet.write_table(table, config.data.train)
    conversations, skipped = read_conversations(Path(config.data.train), config.data.video_root, 0.5)
    assert dict(skipped.reasons) == {reason: 1} and [c.row_id for c in conversations] == ["1"]
    with pytest.raises(InputError, match=r"sft\.max_skipped=0\.4") as error:
        read_conversations(Path(config.data.train), config.data.video_root, 0.4)
    assert reason in str(error.value)


def test_fragments_name_an_overview_or_a_window(config: Config, videos: Path) -> None:
    write_rows(config, [simple(url, "x") for url in ("v0.mp4#frames=16", "v0.mp4#t=30,45.5", "v0.mp4")])
    conversations, _ = read_conversations(Path(config.data.train), str(videos), 0.0)
    clip = videos / "v0.mp4"
    assert [c.turns[1].parts[0] for c in conversations] == [
        VideoRef(clip, frames=16),
        VideoRef(clip, window=(30.0, 45.5)),
        VideoRef(clip),
    ]


def test_a_row_is_used_again_once_its_file_is_there(config: Config, tmp_path: Path) -> None:
    write_rows(config, [simple("late.mp4", "x"), simple(str(tmp_path / "v.mp4"), "x")])
    (tmp_path / "v.mp4").write_bytes(b"x")
    root = str(tmp_path)
    assert len(read_conversations(Path(config.data.train), root, 0.5)[0]) == 1
    (tmp_path / "late.mp4").write_bytes(b"x")
    assert len(read_conversations(Path(config.data.train), root, 0.0)[0]) == 2


def test_videos_that_cannot_be_decoded_and_rows_too_long_are_left_out_and_counted(
    config: Config, tiny_chat: Chat
) -> None:
    config.model.context_length = 1200
    rows = [simple("junk.mp4#frames=4", "x"), simple("v0.mp4#frames=4", "x" * 3000), simple("v0.mp4#frames=4", "x")]
    write_rows(config, rows)
    conversations, skipped = read_conversations(Path(config.data.train), config.data.video_root, 0.7)
    with closing(FrameSource(config, tiny_chat.patch_factor)) as frames:
        builder = ExampleBuilder(tiny_chat, frames, config)
        with closing(Batches(conversations, skipped, builder, config)) as batches:
            (built,) = batches.once()
    assert len(built) == 1
    assert set(skipped.reasons) == {"a video cannot be read: unreadable", "longer than model.context_length"}


def test_a_row_that_comes_again_is_counted_once() -> None:
    skipped = Skipped(10, 0.1, Path("x"))
    for _ in range(5):
        skipped.add("3", SkippedRowError("a file is missing"))
    with pytest.raises(InputError, match="2 of 10 rows are left out"):
        skipped.add("4", SkippedRowError("a file is missing"))


# ---- training ----


def training_rows() -> list[Any]:
    return [simple(f"v{i % 2}.mp4#frames={2 + i % 3}", f"<answer>{'AB'[i % 2]}</answer>") for i in range(10)]


def test_a_run_trains_and_leaves_a_model_with_its_metrics(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    write_rows(config, training_rows())
    config.data.valid, config.trainer.eval_every, config.sft.steps = config.data.train, 4, 8
    assert sft.run(config) == 0
    out = Path(config.sft.output)
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(9))
    assert lines[8]["train/loss"] < lines[1]["train/loss"]
    assert [line["step"] for line in lines if "valid/loss" in line] == [0, 4, 8]
    assert lines[8]["valid/loss"] < lines[0]["valid/loss"]
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(out)
    start = dict(read_tensors(Path(config.model.path)))
    assert any(not torch.equal(tensor, start[name]) for name, tensor in loaded.state_dict().items())
    assert "learning rate: constant, 8 optimizer steps" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_to_the_same_weights(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(config, training_rows())
    config.learner.schedule, config.sft.steps, config.trainer.save_every = "cosine", 6, 2
    whole = train(config)

    broken = replace(config, sft=replace(config.sft, output=str(tmp_path / "broken")))
    fit, calls = Learner.fit, []

    def fails_at_the_fourth(self: Learner, rows: list[TrainRow]) -> dict[str, float]:
        calls.append(rows)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return fit(self, rows)

    monkeypatch.setattr(Learner, "fit", fails_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        train(broken)
    with pytest.raises(RunDirError, match=r"already holds a run.*sft\.output="):
        train(broken)
    again = train(replace(broken, trainer=replace(config.trainer, resume="auto")))

    one, other = dict(read_tensors(whole)), dict(read_tensors(again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    losses = [
        [(line["step"], line["train/loss"]) for line in read_metrics(out / "metrics.jsonl")] for out in (whole, again)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_a_run_goes_on_with_its_own_data_model_and_settings_alone(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused leaves the run as it was; where files lie does not matter."""
    rows = training_rows()
    write_rows(config, rows)
    config.sft.steps, config.trainer.save_every = 3, 2
    fit = Learner.fit

    def fails_at_the_third(self: Learner, batch: list[TrainRow]) -> dict[str, float]:
        if self.steps_done == 2:
            raise KeyboardInterrupt
        return fit(self, batch)

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(Learner, "fit", fails_at_the_third)
        train(config)
    out = Path(config.sft.output)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 1.0}\n')  # done, and lost with its weights
    before = contents(out)

    again = replace(config, trainer=replace(config.trainer, resume="auto"))
    moved = Path(shutil.copytree(config.model.path, tmp_path / "moved"))
    changed = Path(shutil.copytree(config.model.path, tmp_path / "changed"))
    (changed / "chat_template.jinja").write_text("another")
    for other, reason in (
        (replace(again, trainer=replace(again.trainer, seed=5)), r"trainer\.seed=0, this run has 5"),
        (replace(again, sft=replace(again.sft, batch_size=2)), r"sft\.batch_size=4, this run has 2"),
        (replace(again, learner=replace(again.learner, lr=1e-4)), "another learning rate"),
        (replace(again, model=replace(again.model, path=str(changed))), "another model than the one at model.path"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            train(other)
        assert contents(out) == before
    with pytest.raises(InputError, match=r"gone\.parquet"):
        train(replace(again, data=replace(again.data, valid=str(tmp_path / "gone.parquet"))))
    assert contents(out) == before
    write_rows(config, [*rows[:-1], simple("v1.mp4#frames=2", "<answer>C</answer>")])
    with pytest.raises(CheckpointError, match=r"data\.train are not those of"):
        train(again)
    assert contents(out) == before

    write_rows(config, rows)
    train(replace(again, model=replace(again.model, path=str(moved))))
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl")] == [1, 2, 3]


def contents(folder: Path) -> dict[Path, bytes]:
    """All files of a run but its lock."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != ".lock"}


def test_a_run_without_a_checkpoint_begins_anew(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(config, training_rows())
    config.data.valid, config.sft.steps = config.data.train, 1

    def fails(*_: object) -> dict[str, float]:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(Learner, "fit", fails)
        train(config)
    out = train(replace(config, trainer=replace(config.trainer, resume="auto")))
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl")] == [0, 1]


@pytest.mark.slow
def test_two_ranks_train_as_one_does(config: Config, tmp_path: Path) -> None:
    write_rows(config, training_rows())
    config.sft.steps, config.cluster.object_store_gb = 3, 0.2
    one = dict(read_tensors(train(config)))
    ranks = replace(config.learner, ranks=2, zero_stage=3)
    both = train(replace(config, learner=ranks, sft=replace(config.sft, output=str(tmp_path / "both"))))
    other = dict(read_tensors(both))
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-4
