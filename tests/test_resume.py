"""Going on from a checkpoint: only as the same run, and a run that cannot go on is left as it was."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learning import make_config, make_learner
from rich.console import Console

from paravt_ray.config import Config
from paravt_ray.episode import Sample
from paravt_ray.learner.checkpoint import CheckpointError
from paravt_ray.learner.resume import Resume
from paravt_ray.tracking.progress import Progress
from paravt_ray.tracking.run_dir import RunDir
from paravt_ray.trainer import Trainer

SAMPLES = [Sample(f"s{number}", "Which ball?", ("/clips/x.mp4",), "B", "mcq") for number in range(4)]
STREAM = {"position": 8}


@pytest.fixture(scope="module")
def killed(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a checkpoint after the second."""
    config = settings(tmp_path_factory.mktemp("runs") / "killed")
    with RunDir(config) as run, closing(make_learner(tiny_path, config)) as learner:
        for step in (1, 2, 3):
            run.episodes_file(step).write_text("{}\n")
            run.log_metrics(step, {"train/loss": step})
        origin = trainer(config, tiny_path, SAMPLES, run).origin
        learner.save(run.checkpoint(2), origin.state(2, stream=STREAM), keep=1)
        (run.path / "mlflow.json").write_text('{"run_id": "1", "sent_step": 3}')
    return run.path


@pytest.fixture
def folder(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run"))


def settings(folder: Path, **learner: Any) -> Config:
    config = make_config(**learner)
    config.trainer.run_dir, config.trainer.steps = str(folder), 10
    return config


def again(folder: Path, **learner: Any) -> Config:
    config = settings(folder, **learner)
    config.trainer.resume = "auto"
    return config


def trainer(config: Config, model: Path, samples: list[Sample], run: RunDir) -> Trainer:
    return Trainer(config, model, samples, run, Progress(config.trainer.steps, Console(file=io.StringIO())))


def contents(folder: Path) -> dict[Path, bytes]:
    """All files of a run, without what libraries say."""
    files = (file for file in folder.rglob("*") if file.is_file() and "logs" not in file.parts)
    return {file: file.read_bytes() for file in files if file.name != ".lock"}


def other_seed(config: Config) -> None:
    config.trainer.seed = 7


def other_precision(config: Config) -> None:
    config.model.dtype, config.learner.zero_stage = "bfloat16", 1


def other_frames(config: Config) -> None:
    config.model.frames_as = "video"


def other_rank(config: Config) -> None:
    config.learner.lora_rank = 8


def other_alpha(config: Config) -> None:
    config.learner.lora_alpha = 7


def other_rate(config: Config) -> None:
    config.learner.lr = 0.5


def same(_: Config) -> None:
    pass


def rebuilt(model: Path, folder: Path) -> Path:
    """The same name and shapes; one weight is another."""
    changed = Path(shutil.copytree(model, folder / "tiny"))
    with (changed / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    return changed


@pytest.mark.parametrize(
    ("change", "samples", "reason"),
    [
        (other_rate, SAMPLES, "another learning rate"),
        (other_seed, SAMPLES, r"trainer\.seed=0, this run has 7\. Set trainer\.seed=0"),
        (other_precision, SAMPLES, r"model\.dtype=float32, this run has bfloat16"),
        (other_frames, SAMPLES, r"model\.frames_as=images, this run has video"),
        (other_rank, SAMPLES, r"learner\.lora_rank=0, this run has 8"),
        (other_alpha, SAMPLES, r"learner\.lora_alpha=\d+, this run has 7"),
        (same, SAMPLES[:3], r"data\.train are not those of"),
        (same, [*SAMPLES[:3], replace(SAMPLES[3], answer="C")], r"data\.train are not those of"),
    ],
)
def test_a_run_that_cannot_go_on_is_left_as_it_was(
    tiny_path: Path, folder: Path, change: Callable[[Config], None], samples: list[Sample], reason: str
) -> None:
    config, before = again(folder), contents(folder)
    change(config)
    with RunDir(config) as run, pytest.raises(CheckpointError, match=reason):
        trainer(config, tiny_path, samples, run)
    assert contents(folder) == before


def test_another_model_is_another_reference_and_is_refused(tiny_path: Path, folder: Path, tmp_path: Path) -> None:
    config, before = again(folder), contents(folder)
    other = rebuilt(tiny_path, tmp_path)
    with RunDir(config) as run, pytest.raises(CheckpointError, match=r"another model than the one at model\.path"):
        trainer(config, other, SAMPLES, run)
    assert contents(folder) == before


@pytest.mark.parametrize("lost", ["origin", "model.frames_as"])
def test_a_checkpoint_that_does_not_say_all_of_its_origin_is_refused(tiny_path: Path, folder: Path, lost: str) -> None:
    file = next(folder.glob("checkpoints/*/state.json"))
    state = json.loads(file.read_text())
    del (state if lost == "origin" else state["origin"]["settings"])[lost]
    file.write_text(json.dumps(state))
    config = again(folder)
    with RunDir(config) as run, pytest.raises(CheckpointError, match="does not say which model"):
        trainer(config, tiny_path, SAMPLES, run)


def resume(config: Config, model: Path, samples: list[Sample]) -> Resume | None:
    with RunDir(config) as run:
        return trainer(config, model, samples, run).resume


def test_the_same_run_goes_on_wherever_its_files_lie(tiny_path: Path, folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(tiny_path, tmp_path / "elsewhere"))
    samples = [replace(sample, videos=("/other/disk/x.mp4",)) for sample in SAMPLES]
    found = resume(again(folder, ranks=2, micro_batch_tokens=99), moved, samples)
    assert found is not None
    assert (found.checkpoint.name, found.step, found.state["stream"]) == ("step_000002", 2, STREAM)


def test_a_run_without_a_checkpoint_begins_anew(tiny_path: Path, tmp_path: Path) -> None:
    assert resume(settings(tmp_path / "new"), tiny_path, SAMPLES) is None
