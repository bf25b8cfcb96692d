"""Run directories, step metrics, trajectory files, the screen, and MLflow that never stops a run."""

from __future__ import annotations

import io
import json
import math
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from waiting import wait_for

from paravt_ray.config import Config, load_config
from paravt_ray.episode import CallRecord, CallStatus, Episode, Group, Rewards, Sample, Trajectory, TurnRecord
from paravt_ray.parsing import parse_turn
from paravt_ray.tracking.episodes import write_episodes
from paravt_ray.tracking.metrics import step_metrics
from paravt_ray.tracking.mlflow_log import Follower, MlflowLogger
from paravt_ray.tracking.progress import Progress
from paravt_ray.tracking.run_dir import RunDir, RunDirError, read_metrics
from paravt_ray.tracking.tracker import Tracker

CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}\n</tool_call>'
GOOD = ["a thought\n</think>\n" + CALL * 2, "seen\n</think>\n<answer>B</answer>"]


def config(folder: Path, **trainer: Any) -> Config:
    result = Config()
    result.trainer.run_dir = str(folder / "run")
    for key, value in trainer.items():
        setattr(result.trainer, key, value)
    return result


def trajectory(version: int, sampled: int) -> Trajectory:
    result = Trajectory()
    result.append_prompt([1, 2], [1, 2], [])
    result.append_generated([3] * sampled, [-0.1] * sampled, version)
    return result


def episode(
    texts: list[str], statuses: list[list[CallStatus]] | None = None, version: int = 3, total: float = 1.0
) -> Episode:
    turns = []
    for number, text in enumerate(texts):
        turn = parse_turn(text, think_prefilled=True)
        given = statuses[number] if statuses else [CallStatus.SERVED] * len(turn.calls)
        calls = [
            CallRecord(call, status, "0 to 2 s: a ball", latency_s=2.0 if status is CallStatus.SERVED else 0.0)
            for call, status in zip(turn.calls, given, strict=True)
        ]
        turns.append(TurnRecord(turn, 2, 12, "stop", calls))
    rewards = Rewards(total=total, accuracy=total / 2, format=0.5, anchor=0.1, tool=0.3)
    sample = Sample("s", "Which ball?", ("/clips/x.mp4",), "B", "mcq")
    main = trajectory(version, 10 * len(texts))
    return Episode(sample, "g", 0, 4, main, turns, [1.0, 2.5], True, "answered", rewards=rewards)


def group(*episodes: Episode, failures: list[str] | None = None) -> Group:
    return Group("g", episodes[0].sample, 4, list(episodes), failures or [])


# Metrics


def test_metrics_of_one_step() -> None:
    served, duplicate, invalid = CallStatus.SERVED, CallStatus.DUPLICATE, CallStatus.INVALID
    caller = episode(GOOD, [[served, duplicate], []], version=2, total=2.0)
    silent = episode(["seen\n</think>\n<answer>A</answer>"], version=3, total=0.0)
    broken = episode(["never closed " + CALL, "seen\n</think>\n<answer>B"], [[invalid], []], version=3)
    metrics = step_metrics([group(caller, silent), group(broken, failures=["timeout: 1 s"])], 10.0, version=3)
    assert metrics["rollout/episodes"] == 3
    assert metrics["rollout/failed"] == 1
    assert metrics["rollout/turns"] == pytest.approx(5 / 3)
    assert metrics["rollout/new_tokens"] == 50
    assert metrics["rollout/tokens_per_s"] == 5.0
    assert metrics["rollout/staleness"] == pytest.approx(1 / 3)
    assert metrics["rollout/duplicate_rate"] == 0.5
    assert metrics["reward/total"] == 1.0
    assert metrics["reward/accuracy"] == 0.5
    assert metrics["tool/call_rate"] == pytest.approx(2 / 3)  # valid calls per rollout
    assert metrics["tool/usage_rate"] == pytest.approx(1 / 3)
    assert metrics["tool/width"] == 2.0
    assert metrics["tool/error_rate"] == pytest.approx(1 / 3)
    assert metrics["tool/latency_p50"] == 2.0  # the duplicate was not run
    assert metrics["format/compliance"] == pytest.approx(2 / 3)
    assert metrics["format/answer_closed"] == pytest.approx(2 / 3)
    assert metrics["format/calls_closed"] == 1.0


def test_a_subagent_shared_by_duplicates_is_counted_once() -> None:
    caller = episode(GOOD)
    shared = trajectory(3, 7)
    for record in caller.call_records:
        record.subagent = shared
    assert step_metrics([group(caller)], 1.0, 3)["rollout/new_tokens"] == 20 + 7


def test_metrics_say_nothing_about_what_did_not_happen() -> None:
    silent = episode(["seen\n</think>\n<answer>A</answer>"])
    metrics = step_metrics([group(silent)], 1.0, 3)
    assert "tool/latency_p50" not in metrics
    assert "format/calls_closed" not in metrics
    assert metrics["tool/call_rate"] == metrics["tool/width"] == 0.0
    assert step_metrics([], 1.0, 3) == {"rollout/episodes": 0.0, "rollout/failed": 0.0}


# Trajectory files


def test_a_step_file_holds_whole_trajectories(tmp_path: Path) -> None:
    caller = episode(GOOD, [[CallStatus.SERVED, CallStatus.DUPLICATE], []])
    caller.call_records[0].subagent = trajectory(3, 7)
    write_episodes(tmp_path / "step_000001.jsonl", [group(caller, failures=["timeout: 900 s"])])
    first, failed = map(json.loads, (tmp_path / "step_000001.jsonl").read_text().splitlines())
    assert [turn["text"] for turn in first["turns"]] == GOOD
    assert [call["status"] for call in first["turns"][0]["calls"]] == ["served", "duplicate"]
    assert first["turns"][0]["calls"][0]["reply"] == "0 to 2 s: a ball"
    assert first["turns"][0]["calls"][0]["subagent_tokens"] == 7
    assert first["rewards"]["total"] == 1.0
    assert (first["frame_budget"], first["policy_version"], first["answer"]) == (4, 3, "B")
    assert first["tokens"] == {"sequence": 22, "sampled": 27}
    assert failed["failed"] == "timeout: 900 s"
    assert [file.name for file in tmp_path.iterdir()] == ["step_000001.jsonl"]


def test_half_a_character_does_not_end_the_run(tmp_path: Path) -> None:
    write_episodes(tmp_path / "e.jsonl", [group(episode(["\ud83d 球\u2028 </think><answer>B</answer>"]))])
    (line,) = (tmp_path / "e.jsonl").read_bytes().splitlines()
    assert json.loads(line)["turns"][0]["text"].startswith("? 球")


# Run directories


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    RunDir(config(tmp_path)).close()
    with pytest.raises(RunDirError, match=r"already holds a run.*trainer\.resume=auto"):
        RunDir(config(tmp_path))


def test_a_run_has_its_old_configuration_until_it_goes_on(tmp_path: Path) -> None:
    """Whatever refuses to go on comes before `rewind`, and must find the run as it was."""
    RunDir(config(tmp_path, steps=11)).close()
    with RunDir(config(tmp_path, resume="auto", steps=99)) as run:
        assert load_config(run.path / "config.yaml").trainer.steps == 11
        run.rewind(-1)
        assert load_config(run.path / "config.yaml").trainer.steps == 99


def test_the_same_run_is_not_started_twice(tmp_path: Path) -> None:
    with RunDir(config(tmp_path)):
        code = (
            "import sys; from paravt_ray.config import Config; from paravt_ray.tracking.run_dir import RunDir\n"
            "c = Config(); c.trainer.run_dir = sys.argv[1]; c.trainer.resume = 'auto'; RunDir(c)"
        )
        second = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=False
        )
    assert "is being written by process" in second.stderr
    RunDir(config(tmp_path, resume="auto")).close()


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="cannot be written"):
        RunDir(config(tmp_path / "file"))


def test_what_came_after_the_checkpoint_is_forgotten(tmp_path: Path) -> None:
    with RunDir(config(tmp_path)) as run:
        for step in (1, 2, 3):
            run.log_metrics(step, {"train/loss": step})
            write_episodes(run.episodes_file(step), [group(episode(GOOD))])
        with run.metrics_file.open("a") as file:
            file.write('{"step": 4, "train/lo')  # killed while it wrote
        (run.episodes / "step_000002.jsonl.part").touch()
    with RunDir(config(tmp_path, resume="auto")) as run:
        run.rewind(2)
        run.log_metrics(3, {"train/loss": 33})
        assert [(line["step"], line["train/loss"]) for line in read_metrics(run.metrics_file)] == [
            (1, 1),
            (2, 2),
            (3, 33),
        ]
        assert sorted(file.name for file in run.episodes.iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]


# MLflow


def points(database: Path, key: str) -> list[tuple[int, float]]:
    with sqlite3.connect(database) as connection:
        return connection.execute(
            "select step, value from metrics where key = ? order by step, timestamp", (key,)
        ).fetchall()


def rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute(query).fetchall()


def follower(run: RunDir, database: Path) -> Follower:
    return Follower(run.path, f"sqlite:///{database}", "paravt")


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(tmp_path: Path, database: Path) -> None:
    with RunDir(config(tmp_path)) as run:
        for step in (1, 2, 3):
            run.log_metrics(step, {"train/loss": step, "tracking/dropped": 0})
        first = follower(run, database)
        first.sync()
        first.sync()
        first.finish("KILLED")
        (run.path / "mlflow.json").write_text(json.dumps(first.state("")))
    with RunDir(config(tmp_path, resume="auto", save_every=7)) as run:
        run.rewind(2)
        for step in (3, 4):
            run.log_metrics(step, {"train/loss": 10 * step, "tracking/dropped": 0})
        for _ in range(2):  # the second finds everything there
            follower(run, database).sync()
    # Step 3 was there already, from weights that no longer exist: its new point comes last.
    assert points(database, "train/loss") == [(1, 1), (2, 2), (3, 3), (3, 30), (4, 40)]
    assert rows(database, "select name, status from runs") == [("run", "RUNNING")]
    assert rows(database, "select value from params where key = 'trainer.save_every'") == [("5",)]
    assert ("changed.trainer.save_every", "5 -> 7") in rows(database, "select key, value from tags")


def test_an_mlflow_run_that_was_deleted_is_made_anew(tmp_path: Path, database: Path) -> None:
    with RunDir(config(tmp_path)) as run:
        run.log_metrics(1, {"train/loss": 1, "tracking/dropped": 0})
        (run.path / "mlflow.json").write_text(json.dumps({"run_id": "0" * 32}))
        follower(run, database).sync()
    assert points(database, "train/loss") == [(1, 1)]


def test_a_database_may_be_named_from_the_working_directory(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `configs/paradox.yaml` does; artifacts need an absolute place."""
    monkeypatch.chdir(database.parent)
    with RunDir(config(tmp_path)) as run:
        Follower(run.path, f"sqlite:///{database.name}", "another").sync()
    places = rows(database, "select artifact_location from experiments where name = 'another'")
    assert places == [((database.parent / "mlflow_artifacts").as_uri(),)]


def test_a_line_that_is_still_being_written_waits(tmp_path: Path, database: Path) -> None:
    with RunDir(config(tmp_path)) as run:
        run.log_metrics(1, {"train/loss": 1, "tracking/dropped": 0})
        with run.metrics_file.open("a") as file:
            file.write('{"step": 2, "time": 1, ')
        copy = follower(run, database)
        copy.sync()
        with run.metrics_file.open("a") as file:
            file.write('"train/loss": 2, "tracking/dropped": 0}\n')
        copy.sync()
    assert points(database, "train/loss") == [(1, 1), (2, 2)]


class _HangingServer:
    """A tracking server that takes connections and never answers."""

    def __init__(self) -> None:
        self.asked, self._released = asked, released = threading.Event(), threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.set()
                released.wait(60)

            do_POST = do_GET  # noqa: N815

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._released.set()
        self._server.shutdown()


@pytest.fixture
def screen() -> Console:
    return Console(file=io.StringIO(), width=140)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_server_that_hangs_slows_nothing_and_gets_the_rest_later(
    tmp_path: Path, database: Path, screen: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _HangingServer()
    monkeypatch.setattr("paravt_ray.tracking.mlflow_log.LAST_TRIES_S", -9.0)  # the parent's patience: 1 s
    settings = config(tmp_path)
    settings.tracking.uri = server.uri
    with RunDir(settings) as run, Progress(3, screen) as progress:
        tracker = Tracker(run, progress, logger := MlflowLogger(run, settings))
        assert server.asked.wait(60)
        started = time.monotonic()
        for step in (1, 2, 3):
            tracker.log_step(step, {"train/loss": float(step)})
        assert time.monotonic() - started < 1.0
        logger.close("FINISHED")
        assert time.monotonic() - started < 5.0
        server.stop()
        follower(run, database).sync()
    assert points(database, "train/loss") == [(1, 1), (2, 2), (3, 3)]


def test_the_process_copies_while_the_run_goes_on_and_ends_with_it(
    tmp_path: Path, database: Path, screen: Console
) -> None:
    with RunDir(config(tmp_path)) as run, Progress(2, screen) as progress:
        logger = MlflowLogger(run, config(tmp_path))
        tracker = Tracker(run, progress, logger)
        tracker.log_step(1, {"train/loss": math.nan, "train/kl": math.inf, "reward/total": 0.5})
        wait_for(lambda: points(database, "reward/total"), "the copy of step 1")
        logger._process.kill()
        logger._process.wait()
        tracker.log_step(2, {"train/loss": 2.0})
        logger.close("FINISHED")
    assert points(database, "train/loss") == [(2, 2)]
    assert points(database, "tracking/dropped") == [(1, 2), (2, 0)]
    assert rows(database, "select status from runs") == [("FINISHED",)]
    assert ("step 1: 2 metrics were NaN or infinite",) in rows(database, "select value from tags where key = 'alarm'")
    assert "NaN or infinite in step 1: train/kl, train/loss." in shown(screen)
    assert [line["tracking/dropped"] for line in read_metrics(run.metrics_file)] == [2, 0]


def test_the_process_ends_when_the_run_is_killed(tmp_path: Path, database: Path) -> None:
    code = (
        "import sys, time; from paravt_ray.config import Config; from paravt_ray.tracking.run_dir import RunDir\n"
        "from paravt_ray.tracking.mlflow_log import MlflowLogger\n"
        "c = Config(); c.trainer.run_dir = sys.argv[1]; run = RunDir(c); logger = MlflowLogger(run, c)\n"
        "run.log_metrics(1, {'train/loss': 1.0}); print(logger._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        copier = int(run.stdout.readline())
        wait_for(lambda: rows(database, "select status from runs") == [("RUNNING",)], "the start in MLflow")
        run.kill()
    wait_for(lambda: not Path(f"/proc/{copier}").exists(), "the end of the process")
    assert rows(database, "select status from runs") == [("KILLED",)]
    assert points(database, "train/loss") == [(1, 1)]


# The screen


def test_plain_output_explains_long_waits_and_closes_with_a_comparison(
    screen: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paravt_ray.tracking.progress.PLAIN_EVERY_S", 1.0)
    with Progress(20, screen) as progress:
        progress.stage("Starting vLLM", "25 to 45 s")
        wait_for(lambda: "... Starting vLLM: " in shown(screen), "the line", 10.0)
        progress.step(1, {"reward/total": 0.5, "time/step": 7.25})
        start = {"step": 0, "eval/scored": 40.0, "eval/reward/accuracy": 0.25}
        end = {"step": 20, "eval/scored": 40.0, "eval/reward/accuracy": 0.5, "eval/tool/call_rate": 2.0}
        progress.closing([start, {"step": 1}, end], Path("outputs/run"))
    text = shown(screen)
    assert "Starting vLLM (25 to 45 s)" in text
    assert "1/20   0.50" in text
    assert "0.25" in text
    assert "0.50" in text
    assert "outputs/run" in text
    assert "make mlflow" in text
    assert "\x1b" not in text


def test_a_terminal_shows_the_stage_and_the_time_left() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    with Progress(21, console) as progress:
        progress.stage("rollout")
        progress.step(1, {"time/step": 30.0})
        wait_for(lambda: "step 2 of 21, about 10 min left" in shown(console), "the line", 10.0)
    assert "rollout" in shown(console)
