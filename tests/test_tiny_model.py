"""The tiny Qwen3-VL: what makes it a Qwen3-VL, and what the one in the package can do."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from scripted import LocalFleet, Request, ScriptedEngine, answer_text, calls_text, small_config

from paravt_ray import tiny_build
from paravt_ray.chat import Chat
from paravt_ray.config import Config, load_config, model_directory, save_config
from paravt_ray.config.schema import SHIPPED_MODELS
from paravt_ray.data.synth import SynthSizes
from paravt_ray.data.synth_questions import Question, overview_times
from paravt_ray.data.synth_video import Clip, Event
from paravt_ray.episode import Frame
from paravt_ray.errors import InputError
from paravt_ray.tiny_measure import roll_out, slices
from paravt_ray.tiny_model import FRAME_SIDE, PLAIN_ADDED_TOKENS, SPECIAL_TOKENS, write_blank_model

TEXTS = ["Where is the red shape shown? A. 110 to 130 s", "red from 112 to 118", "crop_video start_time end_time"] * 9


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_blank_model(tmp_path_factory.mktemp("blank"), TEXTS, seed=0)


@pytest.fixture(scope="module")
def tokenizer(blank: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(blank)


def test_added_tokens_are_qwens(tokenizer: Any) -> None:
    added = tokenizer.get_added_vocab()
    assert set(added) == {*SPECIAL_TOKENS, *PLAIN_ADDED_TOKENS}
    assert len(tokenizer.encode("<answer>")) > 1
    # Tags must survive decoding without special tokens: the parser reads them.
    ids = tokenizer.encode("<think>\n<tool_call><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\n<tool_call>"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_any_text_survives_and_digits_stand_alone(tokenizer: Any) -> None:
    text = 'Från 123.45 s: 红色, é, \t"quotes" and 🎬\n'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("from 1234 to 99")]
    assert [piece for piece in pieces if piece.strip().isdigit()] == list("123499")


@pytest.mark.parametrize("name", SHIPPED_MODELS)
def test_what_is_said_to_ship_is_there(name: str) -> None:
    config = Config()
    config.model.path = name
    manifest = json.loads((model_directory(config) / "manifest.json").read_text())
    assert manifest["seed"] == 0 and list(manifest["stages"])[:2] == ["reading", "looking"]


def test_a_build_refuses_what_another_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a manifest would say how a model might have been made."""
    monkeypatch.setattr(tiny_build, "WORK", tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    (data / "made.json").write_text(json.dumps({"seed": 0, **asdict(SynthSizes())}))
    with pytest.raises(InputError, match="was made with another seed or other sizes"):
        tiny_build.build_tiny_model(tmp_path / "out", 0, tiny_build.MODELS["tiny"])
    (data / "made.json").write_text(json.dumps({"seed": 0, **asdict(tiny_build.SIZES)}))
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "config.json").touch()
    stage, fewer = tmp_path / "reading", load_config(tiny_build.CONFIGS / "tiny_reading.yaml", ["sft.steps=100"])
    stage.mkdir()
    (stage / "config.json").touch()
    save_config(fewer, stage / "config.yaml")
    with pytest.raises(InputError, match="reading was trained with other settings"):
        tiny_build.build_tiny_model(tmp_path / "out", 0, {"reading": (f"sft.output={stage}",)})


def test_one_frame_is_one_visual_token_for_processor_and_renderer(blank: Path) -> None:
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(blank)
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "red?"}]}],
        add_generation_prompt=True,
    )
    out = processor(text=[prompt], images=[Image.new("RGB", (640, 360))])
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert list(out["input_ids"][0]).count(pad) == 1
    pixels = np.zeros((FRAME_SIDE, FRAME_SIDE, 3), np.uint8)
    assert Chat.from_pretrained(blank).visual_tokens(Frame(pixels, 0.0, "f")) == 1


def test_it_is_small_untied_and_follows_its_seed(blank: Path, tmp_path: Path) -> None:
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    model, info = Qwen3VLForConditionalGeneration.from_pretrained(blank, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert 0.8e6 < sum(weight.numel() for weight in model.parameters()) < 2e6
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    same = Qwen3VLForConditionalGeneration.from_pretrained(write_blank_model(tmp_path / "a", TEXTS, seed=0))
    other = Qwen3VLForConditionalGeneration.from_pretrained(write_blank_model(tmp_path / "b", TEXTS, seed=1))
    assert torch.equal(model.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_figures_tell_seeing_from_luck_and_calls_from_both(blank: Path, tmp_path: Path) -> None:
    clip = Clip("a.mp4", 0, 60, (Event("red", 22.0, 28.0, (20, 30)), Event("blue", 41.0, 47.0, (40, 50))), ((0, 10),))
    question = Question("where", clip, "Where?", "B", ((0, 10), (20, 30)), ("0 to 10 s", "20 to 30 s"), clip.events[:1])
    row = {
        "prompt": [{"role": "user", "content": "Where?"}],
        "videos": [{"video": "a.mp4"}],
        "extra_info": '{"answer": "B", "question_type": "mcq"}',
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "valid.parquet")
    (tmp_path / "a.mp4").write_bytes(b"never opened")

    def main(request: Request) -> str:
        """With four frames it looks closer and is right, with eight it is wrong, with more it sees and is careless."""
        if len(request.frames) == 4:
            return answer_text("B") if request.turn else calls_text((0, 10), (20, 30))
        return answer_text("A") if len(request.frames) == 8 else "red at 25.0\n</think>\n<answer>B"

    def sub(request: Request) -> str:
        return "red" if "from 20 to 30 s" in request.text else "blue"

    engine = ScriptedEngine(Chat.from_pretrained(blank), main, sub)
    config = small_config()
    config.data.valid = str(tmp_path / "valid.parquet")

    fleet = LocalFleet(engine, config)
    found = slices(roll_out(fleet, config, [question], temperature=0.0))
    assert overview_times(clip, 4) == [7.5, 22.5, 36.0, 52.5]  # the second frame shows the event
    assert found["k4"] | {"compliance": 1.0} == {
        "accuracy": 1.0,
        "accuracy_called": 1.0,
        "usage_rate": 1.0,
        "usage_rate_visible": 1.0,
        "compliance": 1.0,
        "think_closed": 1.0,
        "answer_closed": 1.0,
        "calls_closed": 1.0,
        "summary_exact": 0.5,
    }
    assert found["k8"]["accuracy_direct_visible"] == 0.0
    assert found["k64"]["accuracy_direct_visible"] == 1.0
    assert found["k64"]["answer_closed"] == found["k64"]["compliance"] == 0.0
    assert found["all"]["accuracy"] == pytest.approx(0.8)
    assert found["all"]["usage_rate"] == pytest.approx(0.2)
    assert found["where"] == found["all"]
    with pytest.raises(ValueError, match="does not hold the questions"):
        roll_out(fleet, config, [question, question], temperature=0.0)
