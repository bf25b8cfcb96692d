"""One episode shown to people: on the terminal and as a page, whatever texts it holds."""

from __future__ import annotations

import asyncio
import base64
import io
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import clips
import numpy as np
import pytest
from PIL import Image
from scripted import ScriptedEngine, ScriptedPool, answer_text, by_turn, calls_text, small_config, spec
from tiny import make_tiny_checkpoint, make_tokenizer

from paravt_ray.chat import Chat
from paravt_ray.episode import Episode
from paravt_ray.errors import InputError
from paravt_ray.evaluation import ask
from paravt_ray.evaluation.page import episode_page
from paravt_ray.evaluation.show import Narrator, bar, clock, outcome, printable
from paravt_ray.rollout.agent import run_group

CLIP = (0.0, 60.0)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer(["<answer>A</answer> crop_video seconds video"] * 4), 32)


def episode_of(chat: Chat, *turns: str, sub: str = "red ball", reply: str = "summary", out: Any = None) -> Episode:
    config = small_config()
    config.rollout.reply = reply
    engine = ScriptedEngine(chat, by_turn(*turns), lambda request: sub)
    narrator = Narrator(CLIP, think_prefix=True, out=out or io.StringIO())
    group = asyncio.run(run_group(engine, ScriptedPool(), chat, config, spec(), observer=narrator))
    (episode,) = group.episodes
    return episode


class Page(HTMLParser):
    """Collects tags, text and the pictures of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.images: list[np.ndarray[Any, Any]] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "src":
                data = base64.b64decode(value.removeprefix("data:image/png;base64,"), validate=True)
                self.images.append(np.asarray(Image.open(io.BytesIO(data))))
            elif name in ("href", "action", "onerror", "onload"):
                self.links.append(value)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_turns_calls_and_answer_are_printed_as_they_happen(chat: Chat) -> None:
    out = io.StringIO()
    episode = episode_of(chat, calls_text((30, 45), (70, 80)), answer_text("B"), out=out)
    text = out.getvalue()
    assert text.index("Turn 1") < text.index("red ball") < text.index("Turn 2") < text.index("<answer>B</answer>")
    assert f" 1 |{'·' * 24}{'█' * 12}{'·' * 12}| 0:30.0 to 0:45.0  served, 15 frames" in text
    assert "no window  invalid" in text and "Error: The window is outside the video" in text
    assert "<|im_end|>" not in text
    assert outcome(episode) == "B"


def test_no_answer_is_explained(chat: Chat) -> None:
    assert outcome(episode_of(chat, "hm")) == "There is no answer. It ended with neither a call nor an answer."


def test_bar_marks_the_window() -> None:
    assert bar((0, 10), (0, 10), 10) == "█" * 10
    assert bar((5, 6), (0, 10), 10) == "·····█····"
    assert bar((10, 10), (0, 10), 10) == "·" * 9 + "█", "a window at the very end is still seen"
    assert bar((3, 3.01), (0, 1000), 10) == "█" + "·" * 9
    assert len(bar((0, 1), (0, 0))) == 48


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00.0"), (59.96, "1:00.0"), (75.25, "1:15.2"), (3600, "1:00:00.0"), (3599.99, "1:00:00.0")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_nothing_printed_moves_the_terminal() -> None:
    assert printable("a\x1b[31mb\r\x9b2Jc\u202ed\te\n") == "a\ufffd[31mb\ufffd\ufffd2Jc\ufffdd\te\n"


@pytest.mark.parametrize("reply", ["summary", "frames"])
@pytest.mark.parametrize("frames_as", ["images", "video"])
def test_page_holds_every_frame_as_it_was_seen(chat: Chat, frames_as: str, reply: str) -> None:
    chat = Chat(chat.tokenizer, chat.patch_factor, frames_as)
    page = Page(episode_page(episode_of(chat, calls_text((30, 33)), answer_text(), reply=reply), CLIP))
    reds = [int(image[0, 0, 0]) for image in page.images]
    assert reds == [7, 22, 37, 52, 30, 31, 32], "four of the overview, three of the crop, the red value is the second"
    assert page.images[0].shape == (32, 32, 3)


def test_page_escapes_what_the_model_says_and_loads_nothing(chat: Chat) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'</pre>"
    episode = episode_of(chat, evil + calls_text((1, 2)), f"x</think><answer>{evil}</answer>", sub=evil)
    page = Page(episode_page(episode, CLIP))
    assert "script" not in page.tags and page.links == []
    assert page.text.count("<script>alert(1)</script>") == 4, "answer, two turns, one summary"
    assert len(page.images) == page.tags.count("img") == 5


def test_what_cannot_be_asked_is_refused_before_anything_starts(tmp_path: Path) -> None:
    clip = clips.encode(clips.Recipe(), tmp_path / "a.mp4").path
    config = small_config()
    with pytest.raises(InputError, match=r"no\.mp4 cannot be asked about: "):
        ask.run(config, str(tmp_path / "no.mp4"), "What?")
    with pytest.raises(InputError, match="The question is empty"):
        ask.run(config, str(clip), " ")
    with pytest.raises(InputError, match=r"ends in \.html"):
        ask.run(config, str(clip), "What?", tmp_path / "page.json")
    with pytest.raises(InputError, match="There is no folder"):
        ask.run(config, str(clip), "What?", tmp_path / "nowhere" / "page.html")


@pytest.mark.slow
def test_the_command_asks_a_real_engine(tmp_path: Path) -> None:
    """A model that knows nothing: it is asked, shown and put on the page all the same."""
    model = make_tiny_checkpoint(tmp_path / "model")
    clip = clips.encode(clips.Recipe(frames=100), tmp_path / "a b.mp4").path
    config = tmp_path / "c.yaml"
    config.write_text(
        f"data: {{train: none.parquet}}\nmodel: {{path: {model}, dtype: float32, context_length: 2048}}\n"
        "rollout: {overview_frames: 4, max_new_tokens: 16, kv_cache_gb: 0.2}\ncluster: {object_store_gb: 0.1}\n"
    )
    command = [sys.executable, "-m", "paravt_ray.cli", "ask", "--save", str(tmp_path / "page.html")]
    words = [str(config), str(clip), "What <|im_end|> is shown?"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "Turn 1 (16 tokens" in done.stdout and "There is no answer. It ran out of tokens" in done.stdout
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [clips.read_number(image) // 25 for image in page.images] == [0, 1, 2, 3]
    assert "What <|im_end|> is shown?" in page.text
