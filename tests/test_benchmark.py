"""`paravt eval` with the real agent loop and fleet and a scripted engine: what is asked, kept, counted, reported."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripted import Output, Request, ScriptedEngine, ScriptedPool, answer_text, by_turn, calls_text
from tiny import make_tokenizer

from paravt_ray.chat import FORCE_ANSWER, Chat
from paravt_ray.config import Config
from paravt_ray.episode import Group
from paravt_ray.errors import InputError
from paravt_ray.evaluation import benchmark
from paravt_ray.evaluation.export import response
from paravt_ray.evaluation.results import Owner, Result, read_results
from paravt_ray.evaluation.tables import PAPER, beside_paper, bootstrap, report, scores, wilson
from paravt_ray.rollout.agent import run_group
from paravt_ray.rollout.canary import CanaryRun
from paravt_ray.rollout.engine import EngineError
from paravt_ray.rollout.fleet import GeneratorFleet
from paravt_ray.rollout.generator import GeneratorInfo
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.weights.digest import model_digest
from paravt_ray.weights.push import Push

COUNT = 6


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is read of a checkpoint here: configuration and tokenizer; the weights are only bytes with a digest."""
    from transformers import Qwen3VLConfig

    path = tmp_path_factory.mktemp("model")
    Qwen3VLConfig().save_pretrained(path)
    make_tokenizer(["<answer>A</answer> crop_video start_time end_time seconds video"] * 4).save_pretrained(path)  # type: ignore[attr-defined]
    (path / "model.safetensors").write_bytes(b"weights")
    return path


@dataclass
class ScriptedGenerator:
    """A generator whose engine follows a script."""

    config: Config
    engine: ScriptedEngine
    specs: list[GroupSpec]

    async def ready(self) -> GeneratorInfo:
        return GeneratorInfo(0, "here", "node", 0, (), 0)

    async def rollout_group(self, spec: GroupSpec) -> Group:
        self.specs.append(spec)
        return await run_group(self.engine, ScriptedPool(), self.engine.chat, self.config, spec)

    async def health(self, timeout_s: float) -> int:
        return 0

    async def shutdown(self) -> None:
        pass

    def kill(self) -> None:
        pass

    async def update_weights(self, push: Push) -> int:
        raise AssertionError("an evaluation pushes no weights")

    async def canary(self) -> CanaryRun:
        raise AssertionError("an evaluation needs no canary")


@dataclass
class Bench:
    """A folder with a split of six questions about one video, and `run`, which answers as `main` says."""

    config: Config
    monkeypatch: pytest.MonkeyPatch
    specs: list[GroupSpec] = field(default_factory=list)
    """What the last run asked."""
    engine: ScriptedEngine | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.eval.results)

    def run(self, main: Callable[[Request], Output]) -> int:
        self.specs.clear()

        @contextmanager
        def started(config: Config, chat: Chat, logs: Path) -> Iterator[GeneratorFleet]:
            self.engine = ScriptedEngine(chat, main)
            generator = ScriptedGenerator(config, self.engine, self.specs)
            with GeneratorFleet(config, None, logs, start=lambda index: generator) as fleet:  # type: ignore[arg-type]
                yield fleet

        self.monkeypatch.setattr(benchmark, "started_fleet", started)
        return benchmark.run(self.config)

    def asked(self) -> list[str]:
        return sorted(spec.sample.sample_id for spec in self.specs)

    def records(self) -> list[dict[str, Any]]:
        text = (self.folder / f"{self.config.eval.split}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def table(self) -> str:
        return (self.folder / f"{self.config.eval.split}.md").read_text(encoding="utf-8")


@pytest.fixture
def bench(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    rows = [
        {
            "videoID": "clip",
            "question_id": f"q{number}",
            "question": f"Question {number}: which one?",
            "options": ["A. red", "B. blue", "C. green", "D. white"],
            "answer": "B",
            "duration": "short" if number < 2 else "long",
            "domain": "Knowledge",
            "task_type": "OCR",
        }
        for number in range(COUNT)
    ]
    (tmp_path / "videomme.json").write_text(json.dumps(rows))
    (tmp_path / "clip.mp4").touch()
    config = Config()
    config.model.path = str(model)
    config.model.context_length = 4096
    config.rollout.overview_frames = 4
    config.rollout.turn_timeout_s, config.rollout.episode_timeout_s = 5.0, 20.0
    config.eval.split, config.eval.data = "videomme", str(tmp_path / "videomme.json")
    config.eval.results = str(tmp_path / "results")
    return Bench(config, monkeypatch)


def number_of(request: Request) -> int:
    match = re.search(r"Question (\d+):", request.text)
    assert match is not None
    return int(match[1])


def never(request: Request) -> str:
    raise AssertionError("nothing is left to ask")


# -- asking, keeping, resuming -----------------------------------------------------------------------------------------


def test_all_questions_are_asked_scored_and_kept(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(lambda request: answer_text("B" if number_of(request) < 3 else "C")) == 0
    assert bench.asked() == [f"q{i}" for i in range(COUNT)]
    assert all(spec.temperature == 0.0 and spec.frame_budget == 4 and spec.group_size == 1 for spec in bench.specs)
    records = bench.records()
    assert {r["episode"]["sample"]["sample_id"]: r["result"]["score"] for r in records} == {
        f"q{i}": float(i < 3) for i in range(COUNT)
    }
    table = bench.table()
    assert "videomme: 6 of 6 questions scored" in table
    assert "| accuracy | 6 | 50.0 | 18.8 to 81.2 |" in table
    assert "| duration: short | 2 | 100.0 |" in table and "| duration: long | 4 | 25.0 |" in table
    assert "domain" not in table, "a category with one value says nothing"
    assert "| full PARA-GRPO | 62.1 | 69.4 | 60.4 | 39.8 | 65.0 | 68.6 | 50.1 |" in table
    assert f"| **{bench.config.model.path}, parallel calls** | **50.0** (6) |" in table
    assert "6 questions, 0 of them answered before" in capsys.readouterr().out


def test_what_is_answered_is_not_asked_again(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.config.eval.samples = 2
    assert bench.run(by_turn(answer_text("B"))) == 0
    bench.config.eval.samples = 0
    assert bench.run(by_turn(answer_text("C"))) == 0
    assert bench.asked() == ["q2", "q3", "q4", "q5"]
    assert bench.run(never) == 0
    assert bench.specs == [] and "6 questions, 6 of them answered before" in capsys.readouterr().out
    assert "| accuracy | 6 | 33.3 |" in bench.table()


def test_errors_are_counted_apart_never_scored_and_asked_again(bench: Bench) -> None:
    def main(request: Request) -> Output:
        number = number_of(request)
        return EngineError("The engine is gone.") if number == 0 else "hm" if number == 1 else answer_text("B")

    assert bench.run(main) == 1
    assert len(bench.records()) == 5
    table = bench.table()
    assert "5 of 6 questions scored" in table and "Not scored: 1 of 6 (1 x engine)." in table
    assert "| accuracy | 5 | 80.0 |" in table, "no answer is wrong, an error is nothing"
    assert "Without an answer (scored as wrong): 20.0 %" in table
    assert bench.run(by_turn(answer_text("B"))) == 0
    assert bench.asked() == ["q0"]


def test_absent_videos_are_counted_and_not_asked(bench: Bench, tmp_path: Path) -> None:
    rows = json.loads((tmp_path / "videomme.json").read_text())
    rows[3]["videoID"] = "gone"
    (tmp_path / "videomme.json").write_text(json.dumps(rows))
    bench.config.data.max_unusable = 0.2
    assert bench.run(by_turn(answer_text("B"))) == 1
    assert "q3" not in bench.asked()
    assert "Not scored: 1 of 6 (1 x video missing)." in bench.table()


def test_results_of_another_model_protocol_or_question_are_not_used(bench: Bench, model: Path, tmp_path: Path) -> None:
    def asks(times: int) -> None:
        bench.run(by_turn(answer_text("B")))
        assert len(bench.specs) == times

    asks(COUNT)
    moved = shutil.copytree(model, tmp_path / "moved")
    bench.config.model.path = str(moved)
    asks(0)  # the same files elsewhere are the same model
    (moved / "model.safetensors").write_bytes(b"WEIGHTS")
    asks(COUNT)
    bench.config.rollout.dispatch = "sequential"
    asks(COUNT)
    bench.config.eval.tools = False
    asks(COUNT)
    bench.config.rollout.turn_timeout_s = 6.0  # decides nothing about an answer
    asks(0)
    rows = json.loads((tmp_path / "videomme.json").read_text())
    rows[0]["options"][1] = "B. azure"
    (tmp_path / "videomme.json").write_text(json.dumps(rows))
    asks(1)


def test_answers_that_were_scored_by_other_rules_are_scored_by_todays(bench: Bench) -> None:
    bench.run(lambda request: answer_text("B" if number_of(request) < 3 else "C"))
    file = bench.folder / "videomme.jsonl"
    file.write_text("".join(f"{json.dumps(r | {'result': r['result'] | {'score': 0.0}})}\n" for r in bench.records()))
    assert bench.run(never) == 0
    assert "| accuracy | 6 | 50.0 |" in bench.table()


@pytest.mark.parametrize(("open_ended", "scores"), [("judge", [0.25, 0.0, 1.0]), ("f1", [0.8, 0.0, 1.0])])
def test_what_a_judge_gave_is_kept(tmp_path: Path, open_ended: str, scores: list[float]) -> None:
    answers: list[tuple[Any, str | None, str]] = [
        ("oe", "a big red car", "red car"),
        ("oe", None, "x"),
        ("mcq", "B", "B"),
    ]
    results = [
        Result(0.25 if answer else 0.0, kind, {}, answer, gold, "answered", 0, 0, 0, 10, 1.0)
        for kind, answer, gold in answers
    ]
    lines = [
        {"model": "m", "protocol": "p", "question": f"q{number}", "result": asdict(result)}
        for number, result in enumerate(results)
    ]
    (tmp_path / "mmvu.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = read_results(tmp_path / "mmvu.jsonl", Owner("m", "p"), open_ended)
    assert [result.score for result in found.values()] == pytest.approx(scores)


def test_a_result_that_was_cut_off_by_a_crash_is_asked_again(bench: Bench) -> None:
    bench.run(by_turn(answer_text("B")))
    file = bench.folder / "videomme.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    assert bench.run(by_turn(answer_text("B"))) == 0
    assert len(bench.specs) == 1
    assert len(bench.records()) == COUNT


def test_a_damaged_result_is_named(bench: Bench) -> None:
    bench.run(by_turn(answer_text("B")))
    file = bench.folder / "videomme.jsonl"
    file.write_bytes(b"not a result\n" + file.read_bytes())
    with pytest.raises(InputError, match=r"Line 1 of .*videomme\.jsonl is no result"):
        bench.run(never)


def test_two_evaluations_do_not_write_the_same_results(bench: Bench) -> None:
    bench.folder.mkdir()
    with (bench.folder / "videomme.jsonl").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="being written by another evaluation"):
            bench.run(never)


def test_held_out_questions_are_evaluated_in_the_same_way(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"x")
    extras = [
        {"answer": "B", "question_type": "mcq"},
        {"answer": "[10, 20]", "question_type": "tvg"},
        {"answer": "a red ball", "question_type": "oe"},
    ]
    rows = [
        {
            "prompt": [{"role": "user", "content": f"<video>\nQuestion {number}: what?"}],
            "videos": [{"video": "clip.mp4"}],
            "extra_info": json.dumps(extra),
        }
        for number, extra in enumerate(extras)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "valid.parquet")
    bench.config.eval.split, bench.config.eval.data = "rl", ""
    bench.config.data.valid = str(tmp_path / "valid.parquet")
    assert bench.run(lambda r: answer_text(["B", "[10, 15]", "red ball"][number_of(r)])) == 0
    table = bench.table()
    assert "| accuracy | 1 | 100.0 |" in table and "| mIoU | 1 | 50.0 |" in table
    assert "| open-ended | 1 | 100.0 |" in table, "articles do not count"
    assert "paper" not in table
    assert {spec.answer_tokens for spec in bench.specs} == {64, 128}


# -- the protocol ------------------------------------------------------------------------------------------------------


def test_tools_are_used_and_counted(bench: Bench) -> None:
    bench.config.eval.samples = 2
    turns = by_turn(calls_text((1, 5), (10, 14), (70, 80)), answer_text("B"))
    assert bench.run(lambda r: turns(r) if number_of(r) == 0 else answer_text("B")) == 0
    table = bench.table()
    assert "Calls per question: 1.00; questions with a call: 50.0 %; calls answered with an error: 33.3 %" in table
    calls = next(record["episode"]["turns"][0]["calls"] for record in bench.records() if record["result"]["calls"])
    assert [call["status"] for call in calls] == ["served", "served", "invalid"]


def test_a_forced_answer_has_its_own_limit_and_begins_with_the_tag(bench: Bench) -> None:
    bench.config.eval.samples, bench.config.rollout.max_tool_turns = 1, 2
    windows = iter([(1.0, 2.0), (3.0, 4.0)])
    assert bench.run(lambda r: "B</answer>" if r.turn == 2 else calls_text(next(windows))) == 0
    assert bench.engine is not None
    requests = bench.engine.main_requests()
    assert [r.sampling.max_new_tokens for r in requests] == [2048, 2048, 64]
    assert requests[-1].text.endswith(f"{FORCE_ANSWER}<|im_end|>\n<|im_start|>assistant\n<think>\n</think>\n<answer>")
    (record,) = bench.records()
    assert record["result"]["answer"] == "B" and record["result"]["score"] == 1.0
    assert record["episode"]["end_reason"] == "answered"


@pytest.mark.parametrize("think_prefix", [True, False])
def test_a_forced_answer_may_be_cut_at_its_limit(bench: Bench, think_prefix: bool) -> None:
    bench.config.eval.samples, bench.config.rollout.max_tool_turns = 1, 1
    bench.config.rollout.think_prefix = think_prefix
    call = calls_text((1, 2)) if think_prefix else f"<think>{calls_text((1, 2))}"
    assert bench.run(by_turn(call, "B, " + "as is seen there, " * 200)) == 0
    (record,) = bench.records()
    assert record["episode"]["turns"][1]["tokens"] == 64
    assert record["result"]["score"] == 1.0, "the answer is there, though its tag is not closed"


def test_without_tools_none_is_offered_and_none_is_served(bench: Bench) -> None:
    bench.config.eval.samples, bench.config.eval.tools = 2, False
    assert bench.run(lambda r: answer_text("B") if number_of(r) == 0 else calls_text((1, 5))) == 0
    assert bench.engine is not None
    assert bench.engine.sub_requests() == []
    requests = bench.engine.main_requests()
    assert len(requests) == 2, "one turn a question"
    for request in requests:
        assert "crop_video" not in request.text and "<tools>" not in request.text
        assert request.text.endswith("<|im_start|>assistant\n<think>\n"), "it thinks as in any turn"
        assert request.sampling.max_new_tokens == 2048
    assert "Calls per question: 0.00" in bench.table() and "without tools" in bench.table()


def test_sequential_dispatch_serves_one_call_a_turn(bench: Bench) -> None:
    bench.config.eval.samples, bench.config.rollout.dispatch = 1, "sequential"
    assert bench.run(by_turn(calls_text((1, 5), (10, 14)), answer_text("B"))) == 0
    (record,) = bench.records()
    assert [call["status"] for call in record["episode"]["turns"][0]["calls"]] == ["served", "over_cap"]
    assert "sequential calls" in bench.table()


def test_samples_for_lmms_eval_hold_what_was_chosen(bench: Bench) -> None:
    bench.run(by_turn(answer_text("A looks wrong, so the answer is B")))
    lines = (bench.folder / "samples_videomme.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [sample["doc_id"] for sample in samples] == list(range(COUNT))
    assert all(sample["filtered_resps"] == ["B"] and sample["target"] == "B" for sample in samples)
    assert samples[0]["resps"] == [["A looks wrong, so the answer is B"]]
    assert len({sample["doc_hash"] for sample in samples}) == COUNT


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ("[3.2, 9.8]", "tvg", "The event happens in the 3.2 - 9.8 seconds."),
        ("00:03 to 01:09", "tvg", "The event happens in the 3 - 69 seconds."),
        ("never", "tvg", ""),
        ("(C)", "mcq", "C"),
        ("B or C", "mcq", ""),
        (None, "mcq", ""),
        ("depth-first search", "oe", "depth-first search"),
    ],
)
def test_responses_for_lmms_eval(answer: str | None, kind: Any, said: str) -> None:
    assert response(answer, kind) == said


def test_the_digest_of_a_model_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"1")
    (tmp_path / "README.md").write_text("x")
    first = model_digest(tmp_path)
    (tmp_path / "README.md").write_text("y")
    assert model_digest(tmp_path) == first
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    renamed = model_digest(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"2")
    assert len({first, renamed, model_digest(tmp_path)}) == 3


# -- tables ------------------------------------------------------------------------------------------------------------


def result(score: float, kind: Any = "mcq", **categories: list[str]) -> Result:
    return Result(score, kind, categories, "B", "B", "answered", 0, 0, 0, 10, 1.0)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0), (1, 2, 0.0945, 0.9055)],
)
def test_wilson_interval(right: int, count: int, low: float, high: float) -> None:
    """Against scipy.stats.binomtest(right, count).proportion_ci(method="wilson")."""
    score = wilson("x", [1.0] * right + [0.0] * (count - right))
    assert (score.low, score.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_bootstrap_interval_is_about_the_normal_one_and_repeats() -> None:
    values = [i / 99 for i in range(100)]
    score = bootstrap("x", [values])
    error = 1.96 * 0.2901 / 10  # the standard deviation of these values over the root of their number
    assert score.value == pytest.approx(0.5)
    assert score.low == pytest.approx(0.5 - error, abs=0.01) and score.high == pytest.approx(0.5 + error, abs=0.01)
    assert bootstrap("x", [values]) == score


def test_mlvu_is_averaged_over_tasks_and_over_questions() -> None:
    results = [*[result(1.0, task=["easy"])] * 8, *[result(0.0, task=["hard"])] * 2]
    rows = {score.name: score for score in scores("mlvu", results)}
    assert [score.name for score in scores("mlvu", results)][:2] == ["mean over tasks", "accuracy"]
    assert rows["mean over tasks"].value == pytest.approx(0.5) and rows["accuracy"].value == pytest.approx(0.8)
    assert rows["mean over tasks"].count == 10 and rows["task: hard"].count == 2


def test_a_question_may_belong_to_several_categories() -> None:
    rows = {s.name: s for s in scores("lvbench", [result(1.0, ability=["x", "y"]), result(0.0, ability=["y"])])}
    assert (rows["ability: x"].value, rows["ability: y"].value, rows["accuracy"].count) == (1.0, 0.5, 2)


def test_grounding_is_scored_by_overlap_and_recall() -> None:
    rows = {s.name: s.value for s in scores("charades", [result(iou, "tvg") for iou in (0.0, 0.3, 0.5, 0.8)])}
    assert rows == pytest.approx({"mIoU": 0.4, "R@0.3": 0.75, "R@0.5": 0.5, "R@0.7": 0.25})


def test_open_ended_answers_stand_apart() -> None:
    rows = scores("mmvu", [result(1.0), result(0.0), result(0.25, "oe")])
    assert [(score.name, score.value, score.count) for score in rows] == [("accuracy", 0.5, 2), ("open-ended", 0.25, 1)]


def test_nothing_scored_is_a_table_too() -> None:
    assert report("videomme", [], 3, {"engine": 3}) == (
        "## videomme: 0 of 3 questions scored\n\nNot scored: 3 of 3 (3 x engine)."
    )


def test_own_scores_stand_below_the_papers() -> None:
    lines = beside_paper("mine", {"mlvu": wilson("accuracy", [1.0, 0.0])}).splitlines()
    assert len(lines) == 2 + len(PAPER) + 1
    assert lines[-1] == "| **mine** |  |  |  |  | **50.0** (2) |  |  |"
    assert all(line.count("|") == lines[0].count("|") for line in lines)
