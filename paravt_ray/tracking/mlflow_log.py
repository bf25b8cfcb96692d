"""MLflow beside a run: a process of its own copies it to the tracking server, so that nothing waits.

Its files are the queue: `metrics.jsonl`, and `episodes/`, of which a few become traces. They are complete whether the
server answers or not, so an outage loses nothing: the process tries again, at ever longer intervals, and sends what the
server lacks. A run that is resumed goes on in the same MLflow run. Steps that it does again are new lines of the file
and are sent as such: MLflow keeps the earlier points beside them, with their time, and the new traces replace the old.
A line that the server has is never sent twice. After a long outage the rest can be sent by hand:

    echo FINISHED | python -m paravt_ray.tracking.mlflow_log RUN_DIR URI EXPERIMENT
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paravt_ray.config import Config, config_items, load_config
from paravt_ray.tracking.run_dir import METRICS_FILE, RunDir, episodes_file, replace_file
from paravt_ray.tracking.traces import sampled_episodes, send_traces

if TYPE_CHECKING:
    from mlflow import MlflowClient

STATE_FILE = "mlflow.json"
SQLITE = "sqlite:///"
DROPPED = "tracking/dropped"
"""Metric that every step has: how many of its values were NaN or infinite and were left out."""
TRACED, TRACED_AT = "traced_step", "traced_time"
"""Tags of an MLflow run: step and time of the last line of `metrics.jsonl` whose traces it has."""

POLL_S = 1.0
LONGEST_RETRY_S = 60.0
LAST_TRIES_S = 20.0
"""How long the rest is tried to be sent once the run has ended."""
TRACE_ATTEMPTS = 3
"""Times that a server which is there is asked to take the traces of a step, before the run goes on without them."""
PARAMS_PER_REQUEST = 100  # MLflow's own limit
LONGEST_VALUE = 5000

log = logging.getLogger("paravt.mlflow")


def tracking_uri(config: Config) -> str:
    """The configured tracking server, or the SQLite file beside the run directory."""
    return config.tracking.uri or f"{SQLITE}{Path(config.trainer.run_dir).absolute().parent / 'mlflow.db'}"


class MlflowLogger:
    """The run's side: starts the process, and ends it with the run."""

    def __init__(self, run: RunDir, config: Config) -> None:
        """Start copying; returns at once."""
        self._run = run
        self._arguments = [str(run.path), tracking_uri(config), config.tracking.experiment]
        self._restarts = 3
        self._process = self._start()

    def problem(self) -> str:
        """Why MLflow lags behind, in a sentence; empty while all is well. Starts the process again if it has died."""
        if self._process.poll() is not None and self._restarts > 0:
            self._restarts -= 1
            self._process = self._start()
        return str(_read_state(self._run.path).get("error", ""))

    def __enter__(self) -> MlflowLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        self.close("FINISHED" if error is None else "KILLED" if stopped else "FAILED")

    def close(self, status: str) -> None:
        """End the MLflow run as `FINISHED`, `FAILED` or `KILLED`; waits until the rest is sent, for a bounded time."""
        assert self._process.stdin is not None
        try:
            self._process.communicate(status.encode(), timeout=LAST_TRIES_S + 10.0)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        quiet = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "OMP_NUM_THREADS": "1"}
        with (self._run.logs / "mlflow.log").open("ab") as output:
            # In a session of its own: Ctrl-C reaches the run, which then ends this process in good order.
            return subprocess.Popen(
                [sys.executable, "-m", __name__, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **quiet, "MLFLOW_DISABLE_TELEMETRY": "true"},
            )


class Follower:
    """The process's side: brings one MLflow run up to what stands in the run directory.

    MLflow cannot take a point back: those of steps that were done again stay, with their earlier time.
    """

    def __init__(self, run_dir: Path, uri: str, experiment: str) -> None:
        """Nothing is sent yet and no server is needed."""
        self._dir = run_dir
        self._uri = uri
        self._experiment = experiment
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._experiment_id = ""
        self._had: set[tuple[int, int]] = set()
        """(Step, time) of the lines that the server had when this process first reached it."""
        self._sent = -1
        """Step of the last line that the server has."""
        self._read_bytes = 0
        self._traces_per_step = 0
        self._traced = self._traced_at = -1
        """Step and time of the last line whose traces the server has."""
        self._untraced: deque[tuple[int, int]] = deque()
        """(Step, time) of the lines that the server has and whose traces it lacks, in order."""

    def sync(self) -> None:
        """Send what the server lacks. Raises whatever MLflow raises where it does not answer."""
        if self._client is None:
            self._client = self._connect()
        for line in self._unread():
            metrics = json.loads(line)
            step, at = _step_and_time(metrics)
            if (step, at) not in self._had:
                self._send(self._client, metrics)
            self._sent = step
            # A step that is done again is written later than whatever the server has of it.
            if self._traces_per_step and (step > self._traced or at > self._traced_at):
                self._untraced.append((step, at))
            self._read_bytes += len(line)
        while self._untraced:
            self._trace(self._client, *self._untraced[0])
            self._traced, self._traced_at = self._untraced.popleft()

    def finish(self, status: str) -> None:
        """Set the MLflow run's final status."""
        if self._client is not None:
            self._client.set_terminated(self._run_id, status)

    def state(self, error: str) -> dict[str, Any]:
        """What others may want to know: the MLflow run and how far it is."""
        sent = {"sent_step": self._sent, "traced_step": self._traced}
        return {"uri": self._uri, "run_id": self._run_id, **sent, "error": error}

    def _unread(self) -> list[bytes]:
        """Whole lines of the file that have not been dealt with; it only grows while a run has its directory."""
        file = self._dir / METRICS_FILE
        if not file.exists():
            return []
        with file.open("rb") as stream:
            stream.seek(self._read_bytes)
            return [line for line in stream if line.endswith(b"\n")]

    def _connect(self) -> MlflowClient:
        from mlflow import MlflowClient

        if self._uri.startswith(SQLITE):
            make_database(Path(self._uri.removeprefix(SQLITE)))
        client = MlflowClient(tracking_uri=self._uri)
        config = load_config(self._dir / "config.yaml")
        items = {key: _text(value) for key, value in config_items(config).items()}
        self._traces_per_step = config.tracking.traces_per_step
        run_id = str(_read_state(self._dir).get("run_id", ""))
        if run_id and self._resume(client, run_id, items):
            return client
        run = client.create_run(
            self._find_experiment(client), run_name=self._dir.name, tags={"run_dir": str(self._dir)}
        )
        self._run_id, self._experiment_id = run.info.run_id, run.info.experiment_id
        self._had = set()
        self._sent = self._traced = self._traced_at = -1
        _write_state(self._dir, self.state(""))
        self._log_params(client, items)
        return client

    def _find_experiment(self, client: MlflowClient) -> str:
        found = client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        # Without a server artifacts would land in the current folder, wherever the run was started from.
        beside = Path(self._uri.removeprefix(SQLITE)).absolute().parent / "mlflow_artifacts"
        location = beside.as_uri() if self._uri.startswith(SQLITE) else None
        return str(client.create_experiment(self._experiment, artifact_location=location))

    def _resume(self, client: MlflowClient, run_id: str, items: dict[str, str]) -> bool:
        """Go on in an earlier MLflow run; False where the server no longer has it."""
        from mlflow.exceptions import MlflowException

        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            log.warning("The MLflow run %s is gone; everything is sent to a new one.", run_id)
            return False
        client.update_run(run_id, status="RUNNING")
        self._run_id, self._experiment_id = run_id, run.info.experiment_id
        self._had = {(point.step, point.timestamp) for point in client.get_metric_history(run_id, DROPPED)}
        self._traced, self._traced_at = (int(run.data.tags.get(tag, -1)) for tag in (TRACED, TRACED_AT))
        logged = run.data.params
        self._log_params(client, {key: value for key, value in items.items() if key not in logged})
        for key, value in items.items():
            # A parameter cannot be changed in MLflow; a second value is refused.
            if key in logged and logged[key] != value and key != "trainer.resume":
                client.set_tag(run_id, f"changed.{key}", f"{logged[key]} -> {value}")
        return True

    def _log_params(self, client: MlflowClient, items: dict[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in items.items()]
        for start in range(0, len(params), PARAMS_PER_REQUEST):
            client.log_batch(self._run_id, params=params[start : start + PARAMS_PER_REQUEST])

    def _send(self, client: MlflowClient, line: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        step, milliseconds = _step_and_time(line)
        values = {key: value for key, value in line.items() if key not in ("step", "time", DROPPED)}
        points = [Metric(key, value, milliseconds, step) for key, value in values.items()]
        # Last, since it says that the step is complete.
        points.append(Metric(DROPPED, line.get(DROPPED, 0.0), milliseconds, step))
        if line.get(DROPPED):  # before the points: once they are there, a successor takes the step for complete
            client.set_tag(self._run_id, "alarm", f"step {step}: {line[DROPPED]:g} metrics were NaN or infinite")
        client.log_batch(self._run_id, metrics=points)

    def _trace(self, client: MlflowClient, step: int, at: int) -> None:
        """Send the traces of a step written at this time; without them if the server is there and takes none."""
        from mlflow.entities import RunTag

        file = episodes_file(self._dir, step)
        if not file.exists():  # step 0
            return
        for _ in range(TRACE_ATTEMPTS):
            try:
                records = sampled_episodes(file, self._traces_per_step)
                send_traces(self._uri, (self._experiment_id, self._run_id), step, records)
                break
            except Exception as problem:  # as in `follow`
                client.get_run(self._run_id)  # raises where nothing answers: then the step is not given up
                log.warning("The traces of step %d were not taken: %r", step, problem)
                time.sleep(POLL_S)
        else:
            client.set_tag(self._run_id, "alarm", f"step {step}: its traces were not taken")
        client.log_batch(self._run_id, tags=[RunTag(TRACED, str(step)), RunTag(TRACED_AT, str(at))])


def make_database(file: Path) -> None:
    """Make an empty MLflow database where there is none, whole or not at all.

    MLflow creates some 40 tables one by one. Where two runs start at once, or one is killed meanwhile, it leaves a
    database that it can never open again.
    """
    from mlflow import MlflowClient

    with file.with_name(f"{file.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists():
            return
        new = file.with_name(f"{file.name}.new")
        new.unlink(missing_ok=True)
        MlflowClient(tracking_uri=f"{SQLITE}{new}").search_experiments(max_results=1)
        new.replace(file)


def follow(follower: Follower, run_dir: Path) -> int:
    """Copy until standard input says how the run ended, or closes because the run is gone."""
    status, error, delay = "", "", POLL_S
    give_up = 0.0
    while True:
        try:
            follower.sync()
            if status:
                follower.finish(status)
            error, delay = "", POLL_S
        except Exception as problem:  # MLflow passes on what its server, database and HTTP library raise
            error = f"MLflow does not answer ({_first_line(problem)}); the rest is sent when it does."
            delay = min(2.0 * delay, LONGEST_RETRY_S)
            log.warning("%s", error)
        _write_state(run_dir, follower.state(error))
        if status and (not error or time.monotonic() > give_up):
            return 1 if error else 0
        if status:
            time.sleep(POLL_S)
        elif select.select([sys.stdin], [], [], delay)[0]:
            status = sys.stdin.readline().strip() or "KILLED"
            give_up = time.monotonic() + LAST_TRIES_S


def _step_and_time(line: dict[str, Any]) -> tuple[int, int]:
    """Which line of `metrics.jsonl` it is, also where a step was done again: (step, milliseconds since 1970)."""
    return int(line["step"]), int(line["time"] * 1000)


def _first_line(problem: Exception) -> str:
    return (str(problem) or repr(problem)).splitlines()[0][:200]


def _text(value: Any) -> str:
    return str(value)[:LONGEST_VALUE]


def _read_state(run_dir: Path) -> dict[str, Any]:
    file = run_dir / STATE_FILE
    state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return state


def _write_state(run_dir: Path, state: dict[str, Any]) -> None:
    replace_file(run_dir / STATE_FILE, json.dumps(state))


def main() -> int:
    """Run the process: `RUN_DIR URI EXPERIMENT`."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stdout)
    run_dir, uri, experiment = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.nice(5)
    return follow(Follower(run_dir, uri, experiment), run_dir)


if __name__ == "__main__":
    sys.exit(main())
