"""A real MLflow server is killed while a run goes on, and comes back: it then has everything, once."""

from __future__ import annotations

import io
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console
from sample_run import episode
from waiting import answers, wait_for

from paravt_ray.config import Config
from paravt_ray.episode import Group, Sample
from paravt_ray.tracking.mlflow_log import MlflowLogger
from paravt_ray.tracking.progress import Progress
from paravt_ray.tracking.run_dir import RunDir, read_metrics
from paravt_ray.tracking.traces import episode_spans, sampled_episodes
from paravt_ray.tracking.tracker import Tracker

SAMPLE = Sample("red ball", "Where is the red ball?", ("/gone/x.mp4",), "B", "mcq")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(database: Path, port: int) -> Iterator[Callable[[], None]]:
    """An MLflow server on this machine; gives the function that kills it with all its processes."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--no-serve-artifacts"]
    command += ["--default-artifact-root", str(database.parent / "artifacts")]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (database.parent / "server.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **quiet}
        )

    def kill() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}"), "the start of the server")
        yield kill
    finally:
        kill()


def train(tracker: Tracker, enough: threading.Event) -> None:
    """Report steps as training does, one every quarter of a second."""
    for step in count(1):
        episodes = [episode(kind, SAMPLE, 4, index, step) for index, kind in enumerate(("right", "wrong", "cut"))]
        metrics = {"train/loss": 1 / step, "reward/total": float(step), "time/step": 0.25}
        tracker.log_step(step, metrics, [Group(f"{step}/0", SAMPLE, 4, episodes)])
        if enough.wait(0.25):
            return


def traces_in(database: Path) -> int:
    with sqlite3.connect(database) as connection:
        return int(connection.execute("select count(*) from trace_info").fetchone()[0])


def check(uri: str, run: RunDir) -> None:
    """The server has every metric of every step and the traces of every step, whole, and nothing twice."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("paravt").experiment_id])
    run_id = found.info.run_id
    assert found.info.status == "FINISHED"
    lines = read_metrics(run.metrics_file)
    for key in set(lines[0]) - {"step", "time"}:
        history = client.get_metric_history(run_id, key)
        assert sorted((p.step, p.value) for p in history) == [(line["step"], line[key]) for line in lines]

    spans: dict[int, list[int]] = {line["step"]: [] for line in lines}
    page = None
    while page is None or page.token:
        page = client.search_traces(
            locations=[found.info.experiment_id], run_id=run_id, page_token=page.token if page else None
        )
        for trace in page:
            spans[int(trace.info.tags["step"])].append(len(trace.data.spans))
    for step, counts in spans.items():
        expected = [len(episode_spans(record)) for record in sampled_episodes(run.episodes_file(step), 2)]
        assert sorted(counts) == sorted(expected), f"traces of step {step}"


@pytest.mark.slow
def test_a_server_that_is_down_at_the_start_and_killed_later_has_everything_once(
    tmp_path: Path, database: Path
) -> None:
    config, port = Config(), free_port()
    config.trainer.run_dir, config.tracking.traces_per_step = str(tmp_path / "run"), 2
    config.tracking.uri = uri = f"http://127.0.0.1:{port}"
    screen, enough = io.StringIO(), threading.Event()
    with RunDir(config) as run, Progress(9999, Console(file=screen, width=140)) as progress, ExitStack() as the_run:
        logger = the_run.enter_context(MlflowLogger(run, config))
        trainer = threading.Thread(target=train, args=(Tracker(run, progress, logger), enough), daemon=True)
        trainer.start()
        wait_for(logger.problem, "the notice that there is no server yet")
        with server(database, port) as kill:
            wait_for(lambda: traces_in(database) >= 3, "the first traces' arrival")
            kill()  # with the rest of what has piled up
        assert 3 <= traces_in(database) < 2 * len(read_metrics(run.metrics_file))
        wait_for(logger.problem, "the notice of the outage")
        with server(database, port):
            wait_for(lambda: not logger.problem(), "the end of the outage")
            enough.set()
            trainer.join(30)
            the_run.close()
            check(uri, run)
    assert 1 <= screen.getvalue().count("MLflow does not answer") <= 2, "not at every step"
