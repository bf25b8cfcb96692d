"""The whole loop for real: Ray, vLLM, decoding, DeepSpeed, push and MLflow, with the packaged tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_for

from paravt_ray.data.synth import SynthSizes, synthesize
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


def episodes(run: Path, step: int) -> list[dict[str, Any]]:
    lines = (run / "episodes" / f"step_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class KilledRun:
    """Three steps, the driver killed after the first and started again."""

    path: Path
    started: list[str]
    """Commands of the processes that lived when the driver was killed."""
    left: list[str]
    """Those of them that still lived a minute later."""


@pytest.fixture(scope="module")
def killed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    path = tmp_path_factory.mktemp("runs") / "run"
    once, again = command(data, path, "trainer.steps=3"), command(data, path, "trainer.steps=3", "trainer.resume=auto")
    process = subprocess.Popen(once, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = path / "checkpoints" / "step_000001" / "COMPLETE"

    def saved() -> bool:
        assert process.poll() is None, f"the run ended by itself; see {path / 'logs'}"
        return checkpoint.exists()

    wait_for(saved, "the first step", 300)
    children = _alive(psutil.Process(process.pid).children(recursive=True))
    started = [" ".join(child.cmdline()) for child in children]
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    # Ray's two agents of a node find out by themselves, in a minute or two.
    ours = {child: name for child, name in zip(children, started, strict=True) if not name.strip().endswith("Agent")}
    deadline = time.monotonic() + 60
    while _alive(ours) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [ours[child] for child in _alive(ours)]
    result = subprocess.run(again, cwd=REPOSITORY, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Held-out questions" in result.stdout
    assert "ending the engines and Ray" in result.stdout.partition("serves the curves")[2]
    return KilledRun(path, started, left)


@pytest.fixture(scope="module")
def run(killed: KilledRun) -> Path:
    return killed.path


@pytest.mark.slow
def test_a_killed_run_ends_alone_and_goes_on(killed: KilledRun) -> None:
    """SIGKILL of the driver: what it started ends with it, and the next start goes on after the last saved step."""
    for part in ("raylet", "ray::LearnerActor", "EngineCore", "mlflow_log"):
        assert any(part in command for command in killed.started), f"{part} is missing: {killed.started}"
    assert not killed.left
    assert [line["step"] for line in read_metrics(killed.path / "metrics.jsonl")] == [0, 1, 2, 3]
    asked = [{e["sample"]["sample_id"] for e in episodes(killed.path, step)} for step in (1, 2, 3)]
    assert len(set.union(*asked)) == 6, "no prompt of the epoch is asked twice"


@pytest.mark.slow
def test_every_step_is_exact_and_written_down(run: Path) -> None:
    """Generator and learner agree before the update, and the canary after it; records and metrics tell the same."""
    start, *steps = read_metrics(run / "metrics.jsonl")
    assert start["step"] == 0
    assert start["eval/scored"] == 4
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

    model = run / "checkpoints" / "step_000003" / "model"
    assert Qwen3VLForConditionalGeneration.from_pretrained(model).lm_head.weight.isfinite().all()
    assert AutoProcessor.from_pretrained(model).image_processor.patch_size == 16


@pytest.mark.slow
def test_a_run_that_cannot_go_on_is_refused_before_ray_is_started(run: Path, data: Path) -> None:
    ray = run / "logs" / "ray"
    before = ray.readlink()
    other = command(data, run, "trainer.steps=4", "trainer.resume=auto", "trainer.seed=7")
    result = subprocess.run(other, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode != 0
    assert "trainer.seed=0, this run has 7" in result.stdout + result.stderr
    assert ray.readlink() == before, "it points elsewhere as soon as this run's Ray has started"


def _alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; one that ended and that nobody has waited for does not."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
