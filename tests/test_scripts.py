"""The shell scripts in cluster/: plain refusals, and that nothing is ended that they did not start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paravt_ray.config import load_config

REPOSITORY = Path(__file__).parent.parent
TOOLS = [
    "awk",
    "bash",
    "cat",
    "cut",
    "df",
    "dirname",
    "flock",
    "grep",
    "rm",
    "sed",
    "seq",
    "sha256sum",
    "tail",
    "tr",
    "uname",
    "wc",
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the scripts need of the repository, without an environment."""
    folder = tmp_path / "clone"
    shutil.copytree(REPOSITORY / "cluster", folder / "cluster")
    shutil.copytree(REPOSITORY / "configs", folder / "configs")
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def run(folder: Path, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment: dict[str, Any] = {**os.environ, **variables}
    command = ["bash", str(folder / "cluster" / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_setup_without_a_usable_python_says_so(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    old = tmp_path / "bin" / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")  # as any version that is too old answers the question
    old.chmod(0o755)
    result = run(copy, "setup.sh", "cpu", PATH=str(tmp_path / "bin"))
    assert result.returncode == 1
    assert "setup: No Python 3.11, 3.12 or 3.13 was found" in result.stderr
    assert not (copy / ".venv").exists()


def test_setup_refuses_a_kind_of_machine_that_it_does_not_know(copy: Path) -> None:
    result = run(copy, "setup.sh", "tpu")
    assert (result.returncode, result.stderr) == (1, "setup: 'tpu' is neither cpu nor gpu.\n")


def test_down_does_not_end_a_process_that_has_got_the_number(copy: Path) -> None:
    state = copy / "outputs" / "cluster"
    state.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        (state / "pid").write_text(f"{other.pid}\n")
        result = run(copy, "down.sh")
        assert "had ended already" in result.stdout
        assert other.poll() is None
        other.kill()
    assert not (state / "pid").exists()
    assert "No cluster" in run(copy, "down.sh").stdout


def test_submit_refuses_what_would_fail_there(copy: Path) -> None:
    (copy / ".venv").symlink_to(Path(sys.prefix))
    remote = {"ADDRESS": "http://127.0.0.1:1", "PYTHONPATH": str(REPOSITORY)}
    assert "No cluster is up here" in run(copy, "submit.sh", "configs/debug.yaml", PYTHONPATH=str(REPOSITORY)).stderr
    assert (
        "Did you mean trainer.steps?" in run(copy, "submit.sh", "configs/debug.yaml", "trainer.step=1", **remote).stderr
    )
    result = run(copy, "submit.sh", "configs/debug.yaml", **remote)
    assert "trainer.run_dir is outputs/debug, which would end with the job" in result.stderr


def test_mlflow_without_a_run_says_what_to_do(copy: Path) -> None:
    result = run(copy, "mlflow.sh")
    assert (result.returncode, "make debug" in result.stderr) == (1, True)


def test_cluster_files_name_the_pinned_ray() -> None:
    pinned = next(
        line for line in (REPOSITORY / "pyproject.toml").read_text().splitlines() if '"ray[default]==' in line
    )
    job = yaml.safe_load((REPOSITORY / "cluster" / "kuberay-rayjob.yaml").read_text())
    assert f'=={job["spec"]["rayClusterSpec"]["rayVersion"]}"' in pinned


def test_the_kubernetes_job_reads_and_writes_only_what_all_pods_share() -> None:
    job = yaml.safe_load((REPOSITORY / "cluster" / "kuberay-rayjob.yaml").read_text())
    command, subcommand, file, *overrides = job["spec"]["entrypoint"].split()
    assert (command, subcommand) == ("paravt", "train")
    config = load_config(REPOSITORY / file.removeprefix("/opt/paravt/"), overrides)
    paths = (config.model.path, config.data.train, config.data.valid, config.trainer.run_dir)
    assert [Path(path).parts[:2] for path in paths] == [("/", "shared")] * 4


@pytest.mark.parametrize("script", sorted((REPOSITORY / "cluster").glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
