"""The command line: quick to answer, one sentence for what people get wrong, exit codes that scripts can use."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paravt_ray import cli
from paravt_ray.config import Config
from paravt_ray.errors import InputError, UserError
from paravt_ray.learner.checkpoint import COMPLETE

REPOSITORY = Path(__file__).parent.parent
DEBUG = str(REPOSITORY / "configs" / "debug.yaml")


def paravt(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paravt_ray.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_help_is_quick_and_names_every_command() -> None:
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        result = paravt("--help")
        seconds.append(time.perf_counter() - started)
    assert result.returncode == 0
    for command in ("train", "sft", "eval", "ask", "data", "report", "doctor", "bench", "make debug"):
        assert command in result.stdout
    assert min(seconds) < 0.5  # 0.1 s where nothing else runs


@pytest.mark.parametrize("command", [["train"], ["data"], ["data", "check"], ["ask"], ["bench"]])
def test_every_command_explains_itself(command: list[str]) -> None:
    result = paravt(*command, "--help")
    assert result.returncode == 0
    assert "usage: paravt" in result.stdout


def test_no_heavy_library_is_loaded_to_refuse_a_configuration() -> None:
    code = (
        f"import sys; from paravt_ray.cli import main; assert main(['train', '{DEBUG}', 'trainer.steps=0']) == 2\n"
        "heavy = {'torch', 'ray', 'vllm', 'mlflow', 'transformers', 'deepspeed'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage"),
        (["fly"], "invalid choice"),
        (["train"], "CONFIG.yaml"),
        (["train", "none.yaml"], "There is no configuration file none.yaml"),
        (["train", DEBUG, "trainer.step=3"], "Did you mean trainer.steps?"),
        (["train", DEBUG, "trainer.steps=0"], "trainer.steps is 0, but must be at least 1"),
        (["ask", "x.mp4"], 'paravt ask VIDEO "QUESTION"'),
        (["ask", "none.yaml", "x.mp4", "What?"], "There is no configuration file none.yaml"),
        (["data", "check", "none.parquet"], "There is no data file none.parquet"),
        (["data", "materialize", "in.parquet", "out.parquet", "x"], "is not ROOT=FOLDER"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = paravt(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """In place of `paravt_ray.trainer`; a test says what its `train` does."""
    module = ModuleType("paravt_ray.trainer")
    monkeypatch.setitem(sys.modules, "paravt_ray.trainer", module)
    monkeypatch.setattr("paravt_ray.trainer", module, raising=False)
    return module


def run_with(trainer: ModuleType, error: BaseException, *overrides: str) -> int:
    def train(config: Config) -> int:
        raise error

    trainer.train = train  # type: ignore[attr-defined]
    return cli.main(["train", DEBUG, *overrides])


def test_failures_are_one_sentence(trainer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(trainer, UserError("The cluster is gone.")) == 1
    assert run_with(trainer, InputError("The path is wrong.")) == 2
    assert capsys.readouterr().err == "paravt: The cluster is gone.\nparavt: The path is wrong.\n"


def test_an_error_from_an_actor_is_shown_without_its_traceback(
    trainer: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.exceptions import RayTaskError

    inner = InputError("The path is wrong.")
    wrapped = RayTaskError("f", "Traceback (most recent call last): ...", inner).as_instanceof_cause()
    assert isinstance(wrapped, InputError)
    assert run_with(trainer, wrapped) == 2
    assert capsys.readouterr().err == "paravt: The path is wrong.\n"


def test_a_full_disk_is_one_sentence(trainer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "outputs/run/metrics.jsonl")
    assert run_with(trainer, full) == 1
    assert "The disk is full, writing outputs/run/metrics.jsonl" in capsys.readouterr().err


def test_a_fault_of_ours_keeps_its_traceback(trainer: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError):
        run_with(trainer, ZeroDivisionError())


def test_ctrl_c_says_what_is_kept(trainer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override = f"trainer.run_dir={tmp_path}"
    assert run_with(trainer, KeyboardInterrupt(), override) == 130
    assert f"No checkpoint was written yet; what was logged is in {tmp_path}" in capsys.readouterr().err
    checkpoint = tmp_path / "checkpoints" / "step_000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / COMPLETE).touch()
    assert run_with(trainer, KeyboardInterrupt(), override) == 130
    error = capsys.readouterr().err
    assert f"{checkpoint} is kept: the same command with trainer.resume=auto goes on from there." in error


def test_ctrl_c_of_a_real_process_is_no_traceback() -> None:
    # A sleep stands for any long command.
    code = "import sys, time; from paravt_ray import cli; cli._bench = lambda args: time.sleep(60); "
    code += "print('up', flush=True); sys.exit(cli.main(['bench', 'x']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Stopped" in error
    assert "Traceback" not in error
