"""Tools: a second one, from one file (`zoom.py`) and one line of a configuration, goes through everything."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import clips
import numpy as np
import pytest
import ray
import zoom
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, ScriptedPool, answer_text, by_turn, calls_text, small_config, spec
from tiny import make_tokenizer
from zoom import ZOOM

import tool_workers
from paravt_ray.chat import Chat, main_system
from paravt_ray.config import Config, ConfigError, load_config, save_config
from paravt_ray.episode import CallStatus, Episode, Group, ToolCall, Trajectory
from paravt_ray.evaluation.results import protocol
from paravt_ray.parsing import parse_turn
from paravt_ray.report.source import read_run
from paravt_ray.report.trajectories import read_groups
from paravt_ray.rollout.agent import run_group
from paravt_ray.rollout.frames import crop_pool
from paravt_ray.tools.offered import ToolNameError, load_tools
from paravt_ray.tools.tool import Arguments
from paravt_ray.tracking.episodes import write_episodes
from tool_workers import CropPool

BOTH = load_tools(("crop_video", "zoom:ZOOM"))
SERVED, DUPLICATE, INVALID = CallStatus.SERVED, CallStatus.DUPLICATE, CallStatus.INVALID


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer(["<answer>A</answer> zoom crop_video start_time end_time x y width height"] * 4), 32)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    file = tmp_path / "zoom.yaml"
    file.write_text("tools: {offered: [crop_video, zoom:ZOOM]}\n")
    config = small_config()
    config.tools = load_config(file).tools
    config.tools.workers = 1
    config.model.context_length, config.rollout.max_new_tokens = 8192, 2048
    return config


def zoom_call(start: Any, end: Any, *part: Any, video: str = "a.mp4") -> str:
    values = (video, start, end, *part)
    call = {"name": "zoom", "arguments": dict(zip(ZOOM.parameters, values, strict=False))}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def roll(engine: ScriptedEngine, pool: Any, config: Config, **changes: Any) -> Episode:
    group = asyncio.run(asyncio.wait_for(run_group(engine, pool, engine.chat, config, spec(**changes)), 60))
    assert group.failures == []
    (episode,) = group.episodes
    return episode


def zoomed(arguments: Any) -> ToolCall:
    text = json.dumps({"name": "zoom", "arguments": arguments})
    (call,) = parse_turn(f"<think>x</think><tool_call>{text}</tool_call>", tools=BOTH).calls
    return call


# In the agent loop


@pytest.fixture
def pool(config: Config) -> Iterator[CropPool]:
    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False, object_store_memory=100 << 20)
    try:
        pool = crop_pool(config, patch_factor=32)
        yield pool
        pool.close()
    finally:
        ray.shutdown()


def test_zoom_shows_a_part_of_the_same_frames_larger(
    chat: Chat, config: Config, pool: CropPool, tmp_path: Path
) -> None:
    clip = clips.encode(clips.Recipe(frames=150), tmp_path / "a.mp4").path
    config.model.crop_max_pixels = clips.WIDTH * clips.HEIGHT // 4
    quarter = zoom_call(2, 4, 0.5, 0, 0.5, 0.5)
    beyond = zoom_call(2, 4, 0.5, 0, 1, 0.5)  # the same part, once it is cut at the edge
    lost = zoom_call(2, 4, 0.95, 0, 1, 0.5)
    hostile = zoom_call(2, 4, math.nan, 0, 1, 1)
    text = "\n".join((calls_text((2, 4)), quarter, beyond, lost, hostile))
    engine = ScriptedEngine(chat, by_turn(text, answer_text()))
    episode = roll(engine, pool, config, videos=(str(clip),))

    crop, part, again, outside, broken = episode.call_records
    assert [record.status for record in episode.call_records] == [SERVED, SERVED, DUPLICATE, INVALID, INVALID]
    assert (crop.reply, part.reply) == ("2 to 4 s: red ball", "2 to 4 s, x 0.5 to 1, y 0 to 0.5: red ball")
    assert again.reply == part.reply
    assert outside.reply == "Error: The part is outside the picture."
    assert broken.reply == "Error: x must be a number from 0 to 1."
    assert "What is shown from 2 to 4 s, x 0.5 to 1, y 0 to 0.5?" in engine.sub_requests()[1].text

    seen, whole = frames_of(part.subagent), frames_of(crop.subagent)
    assert part.timestamps == crop.timestamps == (2.0, 3.0)
    native = tool_workers.crop(clip, 2, 4, max_pixels=clips.WIDTH * clips.HEIGHT).frames
    np.testing.assert_array_equal(seen, native[:, : clips.HEIGHT // 2, clips.WIDTH // 2 :])
    assert seen.shape == whole.shape, "the part takes as many tokens as the whole does"
    assert not np.array_equal(seen, whole)


def frames_of(trajectory: Trajectory | None) -> np.ndarray[Any, Any]:
    assert trajectory is not None
    return np.stack([frame.pixels for frame in trajectory.frames])


def test_the_video_is_one_of_the_episodes_own(chat: Chat, config: Config) -> None:
    names = ("/etc/b.mp4", "../../etc/passwd", "c.mp4")
    text = "x\n</think>\n" + "\n".join(zoom_call(1, 99, 0, 0, 1, 1, video=name) for name in names)
    pool = ScriptedPool()
    episode = roll(ScriptedEngine(chat, by_turn(text, answer_text())), pool, config, videos=("/v/a.mp4", "/w/b.mp4"))
    assert pool.calls == [("/w/b.mp4", 1.0, 60.0)]
    assert [record.status for record in episode.call_records] == [SERVED, INVALID, INVALID]
    assert "/v/" not in "".join(record.reply for record in episode.call_records)


def test_frames_of_two_tools_are_not_taken_for_each_other(chat: Chat, config: Config) -> None:
    """Of the same time and size, in the same context."""
    config.rollout.reply = "frames"
    text = calls_text((5, 7)) + zoom_call(5, 7, 0, 0, 0.5, 1) + zoom_call(5, 7, 0, 0, 1, 0.5)
    episode = roll(ScriptedEngine(chat, by_turn(text, answer_text())), ScriptedPool(), config)
    shown = episode.trajectory.frames[4:]
    assert [frame.time_s for frame in shown] == [5.0, 6.0] * 3
    assert len({frame.pixels.shape for frame in shown}) == 1
    assert len({frame.key for frame in shown}) == 6


def test_the_report_believes_the_run_about_its_tools(chat: Chat, config: Config, tmp_path: Path) -> None:
    """It imports no tool that a file names, and must not take its calls for broken ones."""
    text = "look closer\n</think>\n" + zoom_call(1, 2, 0, 0, 1, 1)
    episode = roll(ScriptedEngine(chat, by_turn(text, answer_text())), ScriptedPool(), config)
    (tmp_path / "episodes").mkdir()
    save_config(config, tmp_path / "config.yaml")
    group = Group("g1", episode.sample, 4, [episode])
    write_episodes(tmp_path / "episodes" / "step_000001.jsonl", [group])
    ((shown,),) = (group.episodes for group in read_groups(read_run(tmp_path)))
    assert shown["problems"] == []


# What the model is told, and what it may write


def test_the_model_is_told_of_every_tool(chat: Chat) -> None:
    system = main_system(BOTH)
    schemas, examples = system.split("<tools>\n")[1].split("\n</tools>\nA call looks like this:\n")
    assert [json.loads(line)["name"] for line in schemas.splitlines()] == ["crop_video", "zoom"]
    shown = parse_turn(f"<think>x</think>{examples}", tools=BOTH).calls
    assert [(call.ok, call.name) for call in shown] == [(True, "crop_video"), (True, "zoom")]


def test_what_is_not_offered_is_unknown() -> None:
    text = f"<think>x</think>{zoom_call(1, 2, 0, 0, 1, 1)}<tool_code>pan(1)</tool_code>"
    alone, both = (parse_turn(text, tools=tools).calls for tools in (load_tools(["crop_video"]), BOTH))
    assert [call.ok for call in (*alone, *both)] == [False, False, True, False]
    assert alone[0].error == "There is no tool 'zoom'; the only tool is crop_video."
    assert both[1].error == "There is no tool 'pan'; the tools are crop_video, zoom."


def test_calls_written_as_code_follow_the_order_of_the_schema() -> None:
    code = "zoom('a.mp4', 1, '0:04', 0.25, y=0.5, width=0.5, height=1)\nzoom(**{'x': 1})"
    call, starred = parse_turn(f"<think>x</think><tool_code>{code}</tool_code>", tools=BOTH).calls
    assert (call.start_time, call.end_time, call.detail) == (1.0, 4.0, (0.25, 0.5, 0.5, 1.0))
    assert starred.error == f"zoom takes the arguments {', '.join(ZOOM.parameters)}."


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.just(10**400),
    st.sampled_from(["", "1", "nan", "0:10", "x"]),
    st.lists(st.integers(), max_size=2),
    st.floats(0, 1),
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(ZOOM.parameters), VALUES), st.booleans())
def test_any_arguments_give_a_bounded_call_or_a_sentence(wild: dict[str, Any], complete: bool) -> None:
    call = zoomed(dict(ZOOM.example) | wild if complete else wild)
    if call.ok:
        x, y, width, height = call.detail  # type: ignore[misc]
        assert 0 <= x <= 1 and 0 <= y <= 1 and 0.1 <= width <= 1 and 0.1 <= height <= 1
        assert call.start_time is not None and call.end_time is not None and call.start_time < call.end_time
    else:
        assert call.error is not None and call.detail is None


def test_results_of_other_tools_are_not_taken_for_these(config: Config) -> None:
    alone = replace(config, tools=replace(config.tools, offered=["crop_video"]))
    assert protocol(config) != protocol(alone)


# What the configuration may name


class Unreadable(zoom.Zoom):
    def read(self, arguments: Any) -> Arguments:
        return super().read({**arguments, "x": 7})


class Unlisted(zoom.Zoom):
    example: ClassVar[Mapping[str, Any]] = {**zoom.Zoom.example, "depth": 1}


class Unnamed(zoom.Zoom):
    schema: ClassVar[Mapping[str, Any]] = {**zoom.Zoom.schema, "name": "zoom in"}


class Untold(zoom.Zoom):
    schema: ClassVar[Mapping[str, Any]] = {"name": "zoom"}


UNREADABLE, UNLISTED, UNNAMED, UNTOLD = Unreadable(), Unlisted(), Unnamed(), Untold()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["../zoom"], "'../zoom' is no name of a tool"),
        (["zoom.py"], "is no name of a tool"),
        (["zoom:ZOOM()"], "is no name of a tool"),
        (["pan"], r"pan cannot be imported \(ModuleNotFoundError.*PYTHONPATH"),
        (["no_such_module:ZOOM"], "cannot be imported"),
        (["zoom:PAN"], r"cannot be imported \(AttributeError"),
        (["zoom:Zoom"], "is no tool, but ABCMeta"),
        (["zoom:SMALLEST"], "is no tool, but float"),
        (["zoom:ZOOM", "zoom:ZOOM"], "there is one of that name already"),
        (["test_tools:UNREADABLE"], "does not read its own example: x must be a number from 0 to 1"),
        (["test_tools:UNLISTED"], "its example adds depth"),
        (["test_tools:UNNAMED"], "its name is 'zoom in'"),
        (["test_tools:UNTOLD"], "no usable schema"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(names: list[str], message: str) -> None:
    with pytest.raises(ToolNameError, match=message):
        load_tools(names)


def test_a_configuration_without_usable_tools_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    with pytest.raises(ConfigError, match=r"tools\.offered: pan cannot be imported"):
        load_config(tmp_path / "run.yaml", ["tools.offered=[crop_video,pan]"])
    with pytest.raises(ConfigError, match=r"tools\.offered is empty"):
        load_config(tmp_path / "run.yaml", ["tools.offered=[]"])
    assert load_config(tmp_path / "run.yaml", ["tools.offered=[zoom:ZOOM]"]).tools.offered == ["zoom:ZOOM"]
