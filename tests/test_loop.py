"""The whole loop for real: Ray, vLLM, decoding, DeepSpeed, push and MLflow, with the packaged tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from waiting import wait_for

from paravt_ray.chat import Chat, main_messages, question_text
from paravt_ray.config import Config, model_directory
from paravt_ray.data.synth import SynthSizes, synthesize
from paravt_ray.episode import Frame
from paravt_ray.tracking.run_dir import read_metrics

REPOSITORY = Path(__file__).parent.parent
SMALL = (
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "trainer.eval_samples=4",
    "trainer.save_every=1",
    "tools.workers=1",
    "cluster.object_store_gb=0.3",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth")
    synthesize(folder, seed=1, sizes=SynthSizes(4, 2, 4, 4, 4, 4))
    return folder


def command(data: Path, run: Path, *overrides: str) -> list[str]:
    keys = (f"data.train={data}/train.parquet", f"data.valid={data}/valid.parquet", f"trainer.run_dir={run}")
    return [sys.executable, "-m", "paravt_ray.cli", "train", "configs/debug.yaml", *SMALL, *keys, *overrides]


def train(data: Path, run: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(data, run, *overrides), cwd=REPOSITORY, capture_output=True, text=True, timeout=400, check=False
    )


def episodes(run: Path, step: int) -> list[dict[str, Any]]:
    lines = (run / "episodes" / f"step_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    result = train(data, folder, "trainer.steps=2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Held-out questions" in result.stdout
    assert "ending the engines and Ray (about 10 s)" in result.stdout.partition("opens the curves")[2]
    return folder


@pytest.mark.slow
def test_every_step_is_exact_and_written_down(run: Path) -> None:
    """Generator and learner agree before the update, and the canary after it; records and metrics tell the same."""
    start, *steps = read_metrics(run / "metrics.jsonl")
    assert start["step"] == 0
    assert start["eval/scored"] == 4
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["train/logp_gap"] <= 1e-5
        assert line["sync/canary_gap"] <= 1e-4
        assert line["sync/version"] == line["step"]
        told = episodes(run, int(line["step"]))
        assert len(told) == line["rollout/episodes"] == 8
        assert sum(e["rewards"]["total"] for e in told) / 8 == pytest.approx(line["reward/total"])
        for group in {e["group"] for e in told}:
            assert len({e["frame_budget"] for e in told if e["group"] == group}) == 1
    assert steps[0]["train/grad_norm"] > 0


@pytest.mark.slow
def test_a_step_with_frames_as_a_video_is_exact_too(data: Path, tmp_path: Path) -> None:
    """One turn an episode, so that what was not sampled is the prompt: as long as the renderer makes it for a video."""
    settings = ("model.frames_as=video", "rollout.frame_budgets=[5]", "rollout.max_tool_turns=0", "data.valid=")
    result = train(data, tmp_path / "run", "trainer.steps=1", *settings)
    assert result.returncode == 0, result.stdout + result.stderr
    line = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (line["step"], line["rollout/failed"]) == (1, 0)
    assert line["train/logp_gap"] <= 1e-5
    assert line["sync/canary_gap"] <= 1e-4
    chat = Chat.from_pretrained(model_directory(Config()), "video")
    told = episodes(tmp_path / "run", 1)
    assert len(told) == 8
    for episode in told:
        frames = [Frame(np.zeros((32, 32, 3), np.uint8), time, f"{time}") for time in episode["overview_times"]]
        question = question_text(episode["sample"]["question"], episode["sample"]["videos"])
        prompt = chat.prompt(main_messages(question, [frames], tools={}), think_prefix=True)
        assert prompt.ids.count(chat.video_pad) == 3
        expanded = chat.expand(prompt.ids, prompt.frames)
        assert episode["tokens"]["sequence"] - episode["tokens"]["sampled"] == len(expanded)


@pytest.mark.slow
def test_mlflow_has_the_same_numbers(run: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.parent / 'mlflow.db'}")
    run_id = json.loads((run / "mlflow.json").read_text(encoding="utf-8"))["run_id"]
    assert client.get_run(run_id).info.status == "FINISHED"
    for line in read_metrics(run / "metrics.jsonl")[1:]:
        history = {point.step: point.value for point in client.get_metric_history(run_id, "reward/total")}
        assert history[int(line["step"])] == line["reward/total"]


@pytest.mark.slow
def test_the_checkpoint_loads_in_transformers(run: Path) -> None:
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    model = run / "checkpoints" / "step_000002" / "model"
    assert Qwen3VLForConditionalGeneration.from_pretrained(model).lm_head.weight.isfinite().all()
    assert AutoProcessor.from_pretrained(model).image_processor.patch_size == 16


@pytest.mark.slow
def test_a_run_that_cannot_go_on_is_refused_before_ray_is_started(run: Path, data: Path) -> None:
    ray = run / "logs" / "ray"
    before = ray.readlink()
    result = train(data, run, "trainer.steps=4", "trainer.resume=auto", "trainer.seed=7")
    assert result.returncode != 0
    assert "trainer.seed=0, this run has 7" in result.stdout + result.stderr
    assert ray.readlink() == before, "it points elsewhere as soon as this run's Ray has started"


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_alone(run: Path, data: Path) -> None:
    """SIGKILL of the driver after a step: what it started ends with it, and the next start goes on after that step."""
    again = command(data, run, "trainer.steps=4", "trainer.resume=auto")
    process = subprocess.Popen(again, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = run / "checkpoints" / "step_000003" / "COMPLETE"
    deadline = time.monotonic() + 300
    while not checkpoint.exists():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline, "no third step"
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)
    commands = [" ".join(child.cmdline()) for child in _alive(started)]
    for part in ("raylet", "ray::LearnerActor", "EngineCore", "mlflow_log"):
        assert any(part in command for command in commands), f"{part} is missing: {commands}"
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    # Ray's two agents of a node find out by themselves, in a minute or two.
    ours = [child for child in _alive(started) if not child.cmdline()[0].endswith("Agent")]
    wait_for(lambda: not _alive(ours), "the end of all that the run had started", 60)
    result = train(data, run, "trainer.steps=4", "trainer.resume=auto", "data.valid=")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    asked = [{e["sample"]["sample_id"] for e in episodes(run, step)} for step in (1, 2, 3, 4)]
    assert len(set.union(*asked)) == 8, "every prompt of the epoch is asked once"


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; one that ended and that nobody has waited for does not."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
