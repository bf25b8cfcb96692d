"""Held-out evaluation: what is asked, what is scored, and that an error is never an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from scripted import LocalFleet, Request, ScriptedEngine, answer_text, calls_text, sample, small_config
from tiny import make_tokenizer

from paravt_ray.chat import Chat
from paravt_ray.episode import Group, Sample
from paravt_ray.evaluation.heldout import HeldOutReport, Slice, evaluate, held_out_specs, in_process
from paravt_ray.rollout.engine import EngineError
from paravt_ray.rollout.gating import draw_frame_budget
from paravt_ray.rollout.spec import GroupSpec


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer(["<answer>A</answer> crop_video seconds video"] * 4), 32)


def ask(chat: Chat, samples: list[Sample], main: Any, budgets: list[int] | None = None) -> HeldOutReport:
    config = small_config()
    return evaluate(
        LocalFleet(ScriptedEngine(chat, main), config), samples, config, budgets, tag="t", score=in_process(config)
    )


def test_every_sample_is_asked_once_and_greedily_at_each_budget() -> None:
    specs = held_out_specs([sample("a"), sample("b")], small_config(), [4, 16], "eval/3")
    assert [(s.sample.sample_id, s.frame_budget) for s in specs] == [("a", 4), ("a", 16), ("b", 4), ("b", 16)]
    assert {(s.temperature, s.group_size) for s in specs} == {(0.0, 1)}
    assert len({s.group_id for s in specs}) == 4
    assert all(s.group_id.startswith("eval/3/") for s in specs)


def test_without_budgets_k_is_what_training_draws() -> None:
    config = small_config()
    samples = [sample(f"s{i}") for i in range(20)]
    drawn = [draw_frame_budget(config.trainer.seed, s.sample_id, 0, config.rollout.frame_budgets) for s in samples]
    assert [s.frame_budget for s in held_out_specs(samples, config, None, "t")] == drawn
    assert len(set(drawn)) > 1
    config.rollout.gating, config.rollout.overview_frames = False, 12
    assert {s.frame_budget for s in held_out_specs(samples, config, None, "t")} == {12}


def test_accuracy_overall_where_it_called_by_k_and_by_type(chat: Chat) -> None:
    """It calls where it sees four frames, and is then right; otherwise it says B."""

    def main(request: Request) -> str:
        if len(request.frames) == 4 and request.turn == 0:
            return calls_text((1, 2), (3, 4))
        return answer_text("C" if len(request.frames) == 4 else "B")

    found = ask(chat, [sample("a", "C"), sample("b", "C"), sample("c", "B"), sample("d", "word", "oe")], main, [4, 8])
    assert found.slices == {
        "overall": Slice(8, 3 / 8),
        "called": Slice(4, 0.5),
        "not_called": Slice(4, 0.25),
        "k4": Slice(4, 0.5),
        "k8": Slice(4, 0.25),
        "mcq": Slice(6, 0.5),
        "oe": Slice(2, 0.0),
    }
    assert (found.asked, found.scored, found.failures) == (8, 8, {})
    assert found.metrics["tool/call_rate"] == 1.0
    assert found.metrics["tool/usage_rate"] == 0.5
    assert found.metrics["format/compliance"] == 1.0
    assert found.flat()["accuracy/k4"] == 0.5
    assert "accuracy/called            0.500  (4)" in found.text()


def test_errors_are_counted_apart_and_never_scored(chat: Chat) -> None:
    def main(request: Request) -> Any:
        return EngineError("gone") if "broken" in request.text else answer_text("B")

    samples = [sample("a"), sample("b", question="broken?"), Sample("c", "q", ("/v/missing.mp4",), "B", "mcq")]
    found = ask(chat, [*samples, sample("d", answer="no letter")], main, [4])
    assert found.slices["overall"] == Slice(1, 1.0)
    assert found.failures == {"engine": 1, "tool": 1, "reward": 1}
    assert found.flat()["failed"] == 3.0
    assert "Not scored: 3 of 4 (1 x engine, 1 x tool, 1 x reward)." in found.text()


def test_groups_that_never_came_back_are_counted(chat: Chat) -> None:
    class Losing(LocalFleet):
        def rollout(self, specs: Sequence[GroupSpec]) -> list[Group]:
            return super().rollout(specs[1:])

    config = small_config()
    fleet = Losing(ScriptedEngine(chat, lambda request: answer_text("B")), config)
    found = evaluate(fleet, [sample("a"), sample("b")], config, [4], tag="t", score=in_process(config))
    assert (found.scored, found.failures) == (1, {"lost": 1})


def test_nothing_scored_is_no_accuracy(chat: Chat) -> None:
    found = ask(chat, [sample("a")], lambda request: EngineError("gone"), [4])
    assert found.slices == {} and found.metrics == {}
    assert found.flat() == {"scored": 0.0, "failed": 1.0}
