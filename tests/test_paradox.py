"""The comparison of the method's parts: fair arms, honest numbers, a figure that its records alone give again."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from paradox_runs import ROOT, STEPS, finish, make_plan
from scripted import LocalFleet, Request, ScriptedEngine, answer_text, calls_text, sample, small_config
from tiny import make_tiny_checkpoint, make_tokenizer

from paravt_ray import cli
from paravt_ray.chat import Chat
from paravt_ray.config import config_items
from paravt_ray.errors import InputError
from paravt_ray.evaluation.heldout import in_process
from paravt_ray.learner.checkpoint import COMPLETE
from paravt_ray.paradox import measure, schedule
from paravt_ray.paradox.arms import ANCHORED, ARMS, BY_NAME
from paravt_ray.paradox.draw import draw
from paravt_ray.paradox.mechanism import GroupRecord, gap_within, pooled, tag_survival, write_records
from paravt_ray.paradox.plan import Plan, check_begun
from paravt_ray.paradox.results import MECHANISM_FILE, Estimate, at_end, read_comparison
from paravt_ray.paradox.schedule import ParadoxError
from paravt_ray.tracking.progress import Progress
from paravt_ray.tracking.run_dir import RunDir
from paravt_ray.trainer import Trainer

COMMITTED = ROOT / "docs" / "paradox"
DRAWN = ("figure.svg", "contrast.svg", "tables.md")


def record(prior: str, model: str, budget: int, called: list[bool], accuracy: list[float]) -> GroupRecord:
    closed = [True] * len(called)
    fields = {"called": called, "accuracy": accuracy, "total": accuracy, "think": closed, "answer": closed}
    return GroupRecord(
        prior, model, "q", budget, 1.0, "budget", 0, **fields, call=[True if c else None for c in called]
    )


def measured(plan: Plan, prior: str) -> list[GroupRecord]:
    model = measure.model_digest(Path(plan.config.trainer.run_dir).parent / prior)
    return [record(prior, model, k, [True, False], [1.0, 0.0]) for k in (4, 64)]


def make_comparison(folder: Path, *overrides: str, **options: bool) -> Path:
    plan = make_plan(folder, *overrides, **options)
    for prior in plan.priors():
        cold = Path(plan.config.trainer.run_dir) / "cold_start" / prior
        cold.mkdir(parents=True)
        write_records(cold / MECHANISM_FILE, measured(plan, prior))
    for arm, seed in plan.runs():
        finish(plan.settings(arm, seed), arm)
    schedule.publish(plan)
    return plan.output


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_comparison(tmp_path_factory.mktemp("comparison"))


# ---- arms ----------------------------------------------------------------------------------------------------------


def differences(one: str, other: str) -> set[str]:
    a, b = BY_NAME[one].settings, BY_NAME[other].settings
    assert a.keys() == b.keys()
    return {key for key in a if a[key] != b[key]}


def test_each_arm_switches_what_its_name_says_and_nothing_else() -> None:
    assert differences("grpo", "anchoring") == set(ANCHORED)
    assert differences("grpo", "gating") == differences("anchoring", "para_grpo") == {"rollout.gating"}
    assert differences("para_grpo", "no_tool_reward") == {"reward.tool"}
    assert differences("para_grpo", "no_unclosed_penalty") == {"reward.unclosed_penalty"}
    assert differences("para_grpo", "anchor_all") == {"algorithm.anchoring_scope"}
    assert differences("para_grpo", "sequential") == {"rollout.dispatch"}
    assert not differences("grpo", "weak_grpo") and not differences("para_grpo", "weak_para_grpo")


def test_what_train_is_given_resolves_to_the_arms_settings(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    grpo, para = (config_items(plan.settings(BY_NAME[name], 1)) for name in ("grpo", "para_grpo"))
    assert {key for key in grpo if grpo[key] != para[key]} == {*ANCHORED, "rollout.gating", "trainer.run_dir"}
    assert (grpo["rollout.gating"], grpo["rollout.overview_frames"], grpo["reward.anchor_weight"]) == (False, 64, 0.0)
    assert (para["trainer.seed"], para["trainer.resume"]) == (1, "auto")
    weak = config_items(plan.settings(BY_NAME["weak_grpo"], 1))
    assert {key for key in grpo if grpo[key] != weak[key]} == {"model.path", "trainer.run_dir"}


def test_every_arm_comes_once_before_any_comes_twice(tmp_path: Path) -> None:
    assert make_plan(tmp_path).runs() == [(arm, seed) for seed in range(3) for arm in ARMS]
    without = make_plan(tmp_path, "paradox.seeds=1", "trainer.seed=5", weak=False).runs()
    assert without == [(arm, 5) for arm in ARMS if arm.prior == "strong"]


def test_a_quick_look_has_its_own_folder() -> None:
    file = str(ROOT / "configs" / "paradox.yaml")
    look = Plan.load(file, ["steps=4", "seeds=1"])
    assert (look.config.trainer.steps, look.config.paradox.seeds) == (4, 1)
    assert look.output == Path("outputs/paradox-look/comparison")
    full = Plan.load(file, [])
    assert (full.config.trainer.steps, len(full.runs())) == (50, 3 * 10)
    assert full.output == Path("outputs/paradox/comparison")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.gating=false", "rollout.gating is set by `paravt paradox` itself"),
        ("trainer.resume=never", "trainer.resume is set by"),
        ("paradox.weak_model=nowhere", "There is no checkpoint at model.path=nowhere"),
        ("paradox.seeds=0", "paradox.seeds is 0, but must be between 1 and 10"),
        ("data.valid=", "must name data.train and data.valid"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        make_plan(tmp_path, override)


# ---- what is drawn -------------------------------------------------------------------------------------------------


def test_records_alone_give_the_same_figures_again(comparison: Path, tmp_path: Path) -> None:
    shutil.copytree(comparison / "runs", tmp_path / "runs")
    shutil.copy(comparison / MECHANISM_FILE, tmp_path)
    # In a process of its own, to see that no heavy library is needed.
    code = (
        f"import sys; from paravt_ray.cli import main; assert main(['paradox', '--draw', {str(tmp_path)!r}]) == 0\n"
        "heavy = {'torch', 'ray', 'vllm', 'mlflow', 'transformers', 'deepspeed'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for name in DRAWN:
        assert (tmp_path / name).read_bytes() == (comparison / name).read_bytes()


@pytest.mark.skipif(not COMMITTED.is_dir(), reason="no comparison is committed yet")
def test_the_committed_figures_are_those_of_the_committed_records(tmp_path: Path) -> None:
    shutil.copytree(COMMITTED, tmp_path / "paradox")
    drawn = draw(tmp_path / "paradox")
    assert [file.name for file in drawn if file.read_bytes() != (COMMITTED / file.name).read_bytes()] == []


def test_the_figure_has_the_papers_panels_with_means_and_bands_over_seeds(comparison: Path) -> None:
    text = (comparison / "figure.svg").read_text()
    panels = re.findall(r'<svg viewBox.*?aria-label="([^"]*)".*?data-values="([^"]*)".*?>(.*?)</svg>', text)
    assert [spoken.split(" over steps")[0] for spoken, _, _ in panels] == [
        "Accuracy reward",
        "Format reward",
        "Tool calls per sample",
    ]
    labels = ["GRPO", "+ Exploration Anchoring", "+ nFrames Gating", "PARA-GRPO"]
    for _, _, marks in panels:
        assert re.findall(r'data-label="([^"]*)"', marks) == labels
        assert marks.count("<polygon") == 4
    # GRPO's format reward is 0.05, 0.06 and 0.07 with the three seeds: a flat curve in the middle of a flat band.
    low, high = map(float, panels[1][1].split())
    (curve,) = re.findall(r'<polyline class="raw c0"[^>]*points="([^"]*)"', panels[1][2])
    (band,) = re.findall(r'<polygon class="band c0" points="([^"]*)"', panels[1][2])

    def values(points: str) -> set[float]:
        heights = [float(point.split(",")[1]) for point in points.split()]
        return {round(high - (y - 8) / 160 * (high - low), 3) for y in heights}

    assert values(curve) == {0.06}
    assert values(band) == {0.05, 0.07}
    assert "GRPO (3 seeds)" in text


def test_the_contrast_is_drawn_only_where_there_is_one(comparison: Path, tmp_path: Path) -> None:
    assert 'data-label="PARA-GRPO, weak prior"' in (comparison / "contrast.svg").read_text()
    alone = make_comparison(tmp_path, "paradox.seeds=1", weak=False)
    assert not (alone / "contrast.svg").exists()
    assert "Not run: GRPO, weak prior, PARA-GRPO, weak prior." in (alone / "tables.md").read_text()
    assert "±" not in (alone / "tables.md").read_text()  # one seed has no interval


def test_tables_by_hand(comparison: Path) -> None:
    text = (comparison / "tables.md").read_text()
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("|")}
    # f: 0.05, 0.06, 0.07, so 4.303 * 0.01 / sqrt(3); kappa: mean of 1/3 ... 1/12; width: steps without calls left out.
    training = next(line for line in text.splitlines() if line.startswith("| GRPO | 3 |"))
    assert training.startswith("| GRPO | 3 | 0.06 ± 0.02 | 0.13 | 0.16 ± 0.00 | 0.02 | 3.00 ± 2.48 | 0.90 ± 0.00 | – |")
    start = next(line for line in text.splitlines() if line.startswith("| cold start | 3 |"))
    assert "| 2.50 |" in start and "| 1.00 ± 0.00 |" in start  # kappa of the first step alone
    held_out = [line for line in text.splitlines() if line.startswith("| sequential dispatch | ")]
    assert held_out[0].startswith("| sequential dispatch | 51.0 ± 2.5 |") and held_out[0].endswith(
        "| 61.4 | 37.5 | 64.1 |"
    )
    assert "| 64 | 1.00 (1) | 0.00 (1) | 1.00 1 | 1.00 1 |" in text
    assert rows.keys() >= {arm.label for arm in ARMS}


def test_one_step_counts_as_the_end_of_a_short_run(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "trainer.steps=4")
    arm = BY_NAME["grpo"]
    finish(plan.settings(arm, 0), arm, range(5))
    runs = tmp_path / "x" / "runs" / "grpo"
    shutil.copytree(plan.run_dir(arm, 0), runs / "seed_0")
    found = read_comparison(tmp_path / "x")
    assert found.estimate("grpo", at_end("tool/call_rate", last=1)) == Estimate(0.25, None)
    assert found.estimate("grpo", at_end("tool/error_rate")) is None


def edit(comparison: Path, target: Path, file: str, old: str, new: str) -> Path:
    shutil.copytree(comparison, target)
    text = (target / "runs" / file).read_text()
    assert old in text
    (target / "runs" / file).write_text(text.replace(old, new, 1))
    return target


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("gating/seed_1/config.yaml", "lr: 5.0e-05", "lr: 0.001", "(learner.lr: 5e-05 and 0.001)"),
        ("para_grpo/seed_0/config.yaml", "steps: 12", "steps: 13", "(trainer.steps: 12 and 13)"),
        ("weak_grpo/seed_2/config.yaml", "/weak", "/strong", "(model.path (weak prior): "),
        ("grpo/seed_0/config.yaml", "gating: false", "gating: true", "no run of its arm: rollout.gating is True"),
        ("grpo/seed_0/metrics.jsonl", '{"step"', '{"stop"', "1 lines of metrics.jsonl cannot be read"),
    ],
)
def test_unfair_or_damaged_records_are_not_drawn(
    comparison: Path, tmp_path: Path, file: str, old: str, new: str, message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        draw(edit(comparison, tmp_path / "copy", file, old, new))


# ---- the mechanism -------------------------------------------------------------------------------------------------


def test_calling_and_skipping_are_compared_within_the_questions_that_have_both() -> None:
    mixed = record("strong", "m", 4, [True, True, False, False], [1.0, 0.0, 0.0, 0.0])
    other = record("strong", "m", 4, [True, False], [1.0, 1.0])
    only_skipped = record("strong", "m", 4, [False, False], [1.0, 1.0])
    gap = gap_within([mixed, other, only_skipped], "accuracy")
    assert gap is not None and (gap.value, gap.count) == (0.25, 2)
    assert pooled([mixed, other, only_skipped], "accuracy") == ([1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0, 1.0])
    assert gap_within([only_skipped], "accuracy") is None


def test_a_closed_call_counts_only_where_there_was_one() -> None:
    first = record("strong", "m", 4, [True, False], [1.0, 1.0])
    second = record("strong", "m", 4, [False, False], [1.0, 1.0])
    first.call = [False, None]
    closed = tag_survival([first, second], "call")
    assert closed is not None and (closed.value, closed.count) == (0.0, 1)
    assert tag_survival([second], "call") is None


def test_a_cold_start_is_sampled_at_every_budget_and_temperature(tmp_path: Path) -> None:
    """It calls where it sees four frames, and is then right; one question has no answer of its type."""
    chat = Chat(make_tokenizer(["<answer>A</answer> crop_video seconds video"] * 4), 32)

    def main(request: Request) -> str:
        if len(request.frames) == 4 and request.turn == 0 and request.sampling.seed % 2:
            return calls_text((1, 2), (3, 4))
        return answer_text("C" if request.turn else "B")

    (tmp_path / "config.json").write_text("{}")
    config = small_config()
    config.model.path, config.rollout.frame_budgets, config.rollout.group_size = str(tmp_path), [4, 8], 6
    config.paradox.temperatures = [0.0, 1.3]
    said: list[str] = []
    fleet = LocalFleet(ScriptedEngine(chat, main), config)
    samples = [sample("a", "C"), sample("b", "no letter")]
    records = measure.sample_mechanism(fleet, samples, config, "strong", said.append)
    assert [(r.sweep, r.temperature) for r in records[::2]] == [
        ("budget", config.rollout.temperature),
        ("budget", config.rollout.temperature),
        ("temperature", 0.0),
        ("temperature", 1.3),
    ]
    assert said[0] == "strong prior, 2 questions at K=4" and said[3] == "strong prior, 2 questions at temperature 1.3"
    four, unscored, eight = records[:3]
    assert four.accuracy == [float(called) for called in four.called] and len(set(four.called)) == 2
    assert four.call == [True if called else None for called in four.called]
    assert (unscored.called, unscored.failed) == ([], 6)
    assert eight.called == [False] * 6 and eight.budget == 8
    assert (len(records[4].called), len(records[6].called)) == (1, 6)  # greedy rollouts are all the same
    assert {r.model for r in records} == {measure.model_digest(tmp_path)}


def test_training_asks_its_held_out_questions_at_every_budget_of_the_tables(tmp_path: Path) -> None:
    config, planned = small_config(), make_plan(tmp_path).config
    assert planned.trainer.eval_budgets == planned.rollout.frame_budgets == [4, 8, 16, 32, 64]
    config.trainer.eval_budgets, config.trainer.run_dir = planned.trainer.eval_budgets, str(tmp_path / "run")
    model = make_tiny_checkpoint(tmp_path / "model")
    with RunDir(config) as run:
        trainer = Trainer(config, model, [sample("a")], run, Progress(1))
        trainer.fleet = LocalFleet(ScriptedEngine(trainer.chat, lambda request: answer_text("B")), config)  # type: ignore[assignment]
        trainer.rewards = SimpleNamespace(score=in_process(config), judge_metrics=lambda: {"reward/judge_calls": 3.0})  # type: ignore[assignment]
        found = trainer.evaluate([sample("a"), sample("b")])
    assert {f"eval/accuracy/k{k}" for k in (4, 8, 16, 32, 64)} < found.keys()
    assert found["eval/scored"] == 10
    assert found["eval/reward/judge_calls"] == 3.0, "they are not the next step's"


# ---- how it runs ---------------------------------------------------------------------------------------------------

STAND_IN = """\
#!{python}
# In place of the interpreter: called as `-m paravt_ray.paradox.child PID CONFIG key=value ...`, trains nothing.
import sys; sys.path[:0] = [{tests!r}, {root!r}]
from paradox_runs import finish
from paravt_ray.paradox.arms import BY_NAME
from paravt_ray.config import load_config
from pathlib import Path
config = load_config(sys.argv[4], sys.argv[5:])
run = Path(config.trainer.run_dir)
with open({calls!r}, "a") as file: file.write(f"{{run.parent.name}}/{{run.name}}\\n")
if Path({broken!r}).exists():
    finish(config, BY_NAME[run.parent.name], range(6))
    sys.exit("paravt: The disk is full.")
finish(config, BY_NAME[run.parent.name])
checkpoint = run / "checkpoints" / "step_000012"
checkpoint.mkdir(parents=True)
(checkpoint / {complete!r}).touch()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes that write what a run writes, in place of training; no engine is asked anything."""
    script, calls = tmp_path / "stand_in", tmp_path / "calls"
    values = {"python": sys.executable, "tests": str(ROOT / "tests"), "root": str(ROOT), "calls": str(calls)}
    script.write_text(STAND_IN.format(**values, broken=str(tmp_path / "broken"), complete=COMPLETE))
    script.chmod(0o755)
    calls.touch()
    monkeypatch.setattr(schedule.sys, "executable", str(script))
    monkeypatch.setattr(schedule, "POLL_S", 0.05)
    monkeypatch.setattr(measure, "measure", lambda config, prior, run, say: measured(make_plan(tmp_path), prior))
    monkeypatch.setattr(
        measure, "evaluate_checkpoint", lambda config, model, run: run.log_metrics(STEPS, {"eval/x": 1})
    )
    return calls


def test_a_failed_run_stops_it_and_the_next_start_goes_on_there(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(tmp_path, "paradox.seeds=1", weak=False)
    for arm, seed in plan.runs():
        if arm.name not in ("para_grpo", "anchor_all", "sequential"):
            finish(plan.settings(arm, seed), arm)
    (tmp_path / "broken").touch()
    with pytest.raises(ParadoxError, match=r"para_grpo/seed_0 ended with exit code 1: paravt: The disk is full\."):
        schedule.run(plan)
    assert not plan.run_dir(BY_NAME["sequential"], 0).exists()
    assert not (plan.output / "runs" / "para_grpo").exists()  # half a run is not compared
    (tmp_path / "broken").unlink()
    assert schedule.run(plan) == 0
    assert stand_in.read_text().split() == ["para_grpo/seed_0", "para_grpo/seed_0", "anchor_all/seed_0"]
    assert sorted(path.name for path in (plan.output / "runs").iterdir()) == sorted(arm.name for arm, _ in plan.runs())
    shown = capsys.readouterr().out
    assert "8 runs of 12 steps" in shown and "5 are finished" in shown
    assert "run 1 of 3: PARA-GRPO, seed 0" in shown
    assert shown.index("84/84") > 0  # the last step of the last of seven trained arms
    assert schedule.run(plan) == 0
    assert len(stand_in.read_text().split()) == 3  # nothing was left to do


def test_a_comparison_is_not_continued_with_other_settings_or_another_model(stand_in: Path, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "paradox.seeds=1", weak=False)
    for arm, seed in plan.runs():
        finish(plan.settings(arm, seed), arm)
    assert schedule.run(plan) == 0
    with pytest.raises(InputError, match=r"learner\.lr: 5e-05 and 0\.1"):
        schedule.run(make_plan(tmp_path, "learner.lr=0.1", weak=False))
    with pytest.raises(InputError, match="was begun with more steps"):
        schedule.run(make_plan(tmp_path, "trainer.steps=3", weak=False))
    (tmp_path / "strong" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(InputError, match="was begun with another checkpoint"):
        schedule.run(plan)


def test_a_comparison_goes_on_where_only_its_records_are_left(stand_in: Path, tmp_path: Path) -> None:
    here, there = f"paradox.output={tmp_path}/kept", f"trainer.run_dir={tmp_path}/another_machine"
    plan = make_plan(tmp_path, "paradox.seeds=1", here, weak=False)
    for arm, seed in plan.runs():
        if arm.name != "anchor_all":
            finish(plan.settings(arm, seed), arm)
    schedule._measure(plan, "strong", Progress(1))
    schedule.publish(plan)
    records = {file: file.read_bytes() for file in (tmp_path / "kept").rglob("*.jsonl")}
    with pytest.raises(InputError, match=r"kept/runs/grpo/seed_0 and .*learner\.lr: 5e-05 and 0\.1"):
        schedule.run(make_plan(tmp_path, "paradox.seeds=1", here, there, "learner.lr=0.1", weak=False))
    assert schedule.run(make_plan(tmp_path, "paradox.seeds=1", here, there, weak=False)) == 0
    assert stand_in.read_text().split() == ["anchor_all/seed_0"]
    assert all(file.read_bytes() == content for file, content in records.items())


def test_a_run_may_be_longer_than_it_was_begun(tmp_path: Path) -> None:
    arm = BY_NAME["grpo"]
    finish(make_plan(tmp_path).settings(arm, 0), arm)
    longer = make_plan(tmp_path, "trainer.steps=20")
    check_begun(longer.settings(arm, 0), arm)
    assert (longer.steps_done(arm, 0), longer.is_finished(arm, 0)) == (STEPS, False)


def test_a_run_that_ended_before_its_last_checkpoint_is_not_finished(tmp_path: Path) -> None:
    plan, arm = make_plan(tmp_path), BY_NAME["grpo"]
    finish(plan.settings(arm, 0), arm)
    assert plan.is_finished(arm, 0)  # its checkpoints may have been removed
    for step, finished in ((11, False), (12, True)):
        checkpoint = plan.run_dir(arm, 0) / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir()
        (checkpoint / COMPLETE).touch()
        assert plan.is_finished(arm, 0) == finished


def test_ctrl_c_ends_the_run_in_good_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "stand_in"
    code = """
        trap 'echo stopped > {0}/stopped; exit 130' INT
        echo '{{"step": 1}}' > {0}/run/metrics.jsonl
        while :; do sleep 0.1; done
    """
    script.write_text(f"#!/bin/bash\n{textwrap.dedent(code).format(tmp_path)}")
    script.chmod(0o755)
    monkeypatch.setattr(schedule.sys, "executable", str(script))

    class Interrupted(Progress):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        schedule.train(["x.yaml"], tmp_path / "run", Interrupted(1), 0, "x")
    assert (tmp_path / "stopped").read_text() == "stopped\n"


def test_a_run_whose_parent_is_killed_ends_too() -> None:
    child = """
        import sys, time
        from paravt_ray import cli
        from paravt_ray.paradox import child
        cli.main = lambda arguments: print("up", flush=True) or time.sleep(60)
        child.main([sys.argv[1], "x.yaml"])
    """
    parent = "import os, subprocess, sys, time\n"
    parent += f"subprocess.Popen([sys.executable, '-c', {textwrap.dedent(child)!r}, str(os.getpid())]); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
        process.communicate(timeout=20)  # returns once the child, which holds the pipes too, is gone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name a configuration (paravt paradox configs/paradox.yaml)"),
        (["--draw", "nowhere"], "nowhere holds no comparison"),
        (["none.yaml"], "There is no configuration file none.yaml"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paradox", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_refused_configuration_of_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ParadoxError, match=r"exit code 2: paravt: There is no configuration file none\.yaml"):
        schedule.train(["none.yaml"], tmp_path / "run", Progress(1), 0, "x")
