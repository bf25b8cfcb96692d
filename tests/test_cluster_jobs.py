"""Jobs on a cluster kept up by the project's own scripts: `make up`, `make submit`, `make down`, guarded by a token."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from waiting import wait_for

from paravt_ray.chat import Chat, main_messages, question_text
from paravt_ray.config import Config, model_directory
from paravt_ray.data.synth import SynthSizes, synthesize
from paravt_ray.episode import Frame
from paravt_ray.tracking.run_dir import read_metrics

REPOSITORY = Path(__file__).parent.parent
CPUS = 4
"""Logical ones: a learner rank, a generator, a tool worker and a reward actor."""
SMALL = (
    "trainer.steps=3",
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "rollout.kv_cache_gb=0.2",
    "trainer.eval_samples=2",
    "trainer.save_every=0",
    "tools.workers=1",
)
COLOCATED = ("cluster.colocate=true", "learner.zero_stage=2")


class Checkout:
    """A folder with what the scripts need, and a home of its own for the token."""

    def __init__(self, folder: Path, rays: Path) -> None:
        self.folder, self.rays = folder, rays
        for name in ("cluster", "configs"):
            shutil.copytree(REPOSITORY / name, folder / name)
        shutil.copy(REPOSITORY / "Makefile", folder)
        (folder / ".venv").symlink_to(Path(sys.prefix))
        (folder / "home").mkdir()
        # Ray's files have a place of their own: it is a mark on every process of this cluster, and other clusters on
        # the machine are not found by mistake.
        own = {"HOME": str(folder / "home"), "PYTHONPATH": str(REPOSITORY), "RAY_TMPDIR": str(rays)}
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | own

    def start(self, target: str, *variables: str) -> subprocess.Popen[str]:
        """`make TARGET`, the environment taken as set up."""
        command = ["make", "--old-file=setup", target, *variables]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, **output)  # type: ignore[call-overload,no-any-return]

    def make(self, target: str, *variables: str, seconds: float = 300.0) -> tuple[int, str]:
        """The exit code and what was printed."""
        with self.start(target, *variables) as process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, output

    def processes(self, *places: Path) -> list[str]:
        """Living processes of this cluster, and those that hold a file open in one of the folders or name it.

        Ray's workers write over their environment when they change their title, so their open logs tell.
        """
        mark, known, found = f"RAY_TMPDIR={self.rays}\0".encode(), tuple(map(str, (self.rays, *places))), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                files = [str(link.readlink()) for link in (entry / "fd").iterdir()]
                if (
                    mark in (entry / "environ").read_bytes()
                    or any(place in title for place in known)
                    or any(file.startswith(known) for file in files)
                ):
                    found.append(title[:200])
            except OSError:  # it has just ended, or is not ours
                continue
        return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A checkout whose cluster is up."""
    rays = Path(tempfile.mkdtemp(prefix="r"))  # short: sockets lie in it
    made = Checkout(tmp_path_factory.mktemp("checkout"), rays)
    try:
        code, output = made.make("up", f"ARGS={CPUS}")
        assert code == 0, output
        yield made
    finally:
        made.make("down")
        shutil.rmtree(rays, ignore_errors=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth")
    synthesize(folder, seed=1, sizes=SynthSizes(4, 2, 4, 4, 4, 4))
    return folder


def job(data: Path, run: Path, *overrides: str) -> tuple[str, str]:
    """The variables of `make submit`."""
    keys = (f"data.train={data}/train.parquet", f"data.valid={data}/valid.parquet", f"trainer.run_dir={run}")
    return "CONFIG=configs/debug.yaml", f"ARGS={' '.join((*SMALL, *keys, *overrides))}"


def at_work(checkout: Checkout, run: Path) -> list[str]:
    """What of a job is still there: its driver, actors and their children. Workers of Ray may wait for the next job."""
    names = (
        str(run),
        "ray::Generator",
        "ray::Learner",
        "ray::Crop",
        "ray::Supervisor",
        "ray::Reward",
        "VLLM",
        "decoder",
    )
    return [title for title in checkout.processes(run) if any(name in title for name in names)]


def check_video_prompts(file: Path) -> None:
    """What was not sampled in an episode of one turn is its prompt: as long as the renderer makes it for a video."""
    chat = Chat.from_pretrained(model_directory(Config()), "video")
    told = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    single = [episode for episode in told if len(episode["turns"]) == 1]
    assert single, "no episode of one turn"
    for episode in single:
        frames = [Frame(np.zeros((32, 32, 3), np.uint8), time, f"{time}") for time in episode["overview_times"]]
        question = question_text(episode["sample"]["question"], episode["sample"]["videos"])
        prompt = chat.prompt(main_messages(question, [frames]), think_prefix=episode["think_prefix"])
        expanded = chat.expand(prompt.ids, prompt.frames)
        assert episode["tokens"]["sequence"] - episode["tokens"]["sampled"] == len(expanded)


@pytest.mark.slow
def test_without_the_token_nothing_is_answered(checkout: Checkout) -> None:
    address = (checkout.folder / "outputs" / "cluster" / "address").read_text().strip()
    for path in ("/api/jobs/", "/api/cluster_status"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{address}{path}", timeout=10)
        assert refused.value.code in (401, 403)
    token = checkout.folder / "home" / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o077 == 0, "the token is its owner's alone"


@pytest.mark.slow
def test_a_job_trains_and_ends_with_its_exit_code(checkout: Checkout, data: Path, tmp_path: Path) -> None:
    """With frames as a video, and engine and learner sharing GPUs: what other whole runs do not have."""
    run = tmp_path / "run"
    code, output = checkout.make("submit", *job(data, run, "model.frames_as=video", *COLOCATED))
    assert code == 0, output
    assert "Held-out questions" in output, "the job's own output is shown"
    start, *steps = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in (start, *steps)] == [0, 1, 2, 3]
    for line in steps:
        assert (line["rollout/episodes"], line["rollout/failed"]) == (8, 0)
        assert line["train/logp_gap"] <= 1e-5
        assert line["sync/canary_gap"] <= 1e-4
        check_video_prompts(run / "episodes" / f"step_{int(line['step']):06d}.jsonl")
    assert (run / "checkpoints" / "step_000003" / "COMPLETE").exists()
    wait_for(lambda: not at_work(checkout, run), "the end of all actors", 30)


@pytest.mark.slow
def test_a_job_that_fails_there_says_why_and_fails_here(checkout: Checkout, data: Path, tmp_path: Path) -> None:
    code, output = checkout.make("submit", *job(data, tmp_path / "run", "data.train=/nowhere/train.parquet"))
    assert code != 0
    assert "/nowhere/train.parquet" in output
    code, output = checkout.make("submit", *job(data, tmp_path / "run", "trainer.step=3"), seconds=60)
    assert code != 0
    assert "Did you mean trainer.steps?" in output


@pytest.mark.slow
def test_down_ends_a_job_in_mid_run_and_leaves_nothing(checkout: Checkout, data: Path, tmp_path: Path) -> None:
    with checkout.start("submit", *job(data, tmp_path / "run")) as submit:
        log = tmp_path / "run" / "logs" / "generator_00.log"
        wait_for(log.exists, "the start of the engine", 120)
        code, output = checkout.make("down", seconds=90)
        assert (code, "Ended." in output) == (0, True), output
        assert submit.wait(60) != 0
    wait_for(lambda: not checkout.processes(tmp_path), "the end of everything", 30)
    assert "No cluster" in checkout.make("down")[1]
