"""Sampled episodes as MLflow traces, in a real MLflow database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_run import STARTED_AT, episode

from paravt_ray.config import Config
from paravt_ray.episode import CallStatus, Group, Sample, Trajectory
from paravt_ray.tracking import mlflow_log
from paravt_ray.tracking.episodes import episode_record, write_episodes
from paravt_ray.tracking.mlflow_log import Follower
from paravt_ray.tracking.run_dir import RunDir
from paravt_ray.tracking.traces import episode_spans, sampled_episodes

SAMPLE = Sample("red ball", "Where is the red ball?", ("/gone/x.mp4",), "B", "mcq")


def rollout(kind: str, index: int = 0, step: int = 1) -> Any:
    """A rollout of `sample_run`, with a sub-agent behind its first call if that was served."""
    made = episode(kind, SAMPLE, 4, index, step)
    if made.call_records and made.call_records[0].status is CallStatus.SERVED:
        made.call_records[0].subagent = subagent = Trajectory()
        subagent.append_prompt([1] * 9, [1] * 9, [])
        subagent.append_generated([2] * 7, [-0.1] * 7, step - 1)
    return made


def record(kind: str, step: int = 1) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(episode_record(rollout(kind, step=step))))
    return made


def settings(folder: Path, traces: int = 2, resume: str = "never") -> Config:
    config = Config()
    config.trainer.run_dir, config.trainer.resume, config.tracking.traces_per_step = str(folder / "run"), resume, traces
    return config


def do_step(run: RunDir, step: int, *kinds: str) -> None:
    """What `Tracker.log_step` leaves behind."""
    episodes = [rollout(kind, index, step) for index, kind in enumerate(kinds)]
    write_episodes(run.episodes_file(step), [Group(f"{step}/0", SAMPLE, 4, episodes, ["timeout: 900 s"])])
    run.log_metrics(step, {"train/loss": step, "tracking/dropped": 0})


def follow(run: RunDir, database: Path) -> Follower:
    """Bring a new process's follower up to date and leave its state behind, as the process does."""
    follower = Follower(run.path, f"sqlite:///{database}", "paravt")
    follower.sync()
    (run.path / "mlflow.json").write_text(json.dumps(follower.state("")))
    return follower


def traces(database: Path, run: RunDir) -> list[Any]:
    """The run's traces as MLflow's page asks for them, oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    run_id = json.loads((run.path / "mlflow.json").read_text())["run_id"]
    experiment = client.get_run(run_id).info.experiment_id
    return list(client.search_traces(locations=[experiment], run_id=run_id, order_by=["timestamp_ms ASC"]))


def alarm(database: Path, run: RunDir) -> str | None:
    from mlflow import MlflowClient

    run_id = json.loads((run.path / "mlflow.json").read_text())["run_id"]
    tag: str | None = MlflowClient(tracking_uri=f"sqlite:///{database}").get_run(run_id).data.tags.get("alarm")
    return tag


# ---- from a record to spans ------------------------------------------------------------------------------------------


def test_every_turn_call_crop_and_subagent_has_its_place_in_time() -> None:
    spans = episode_spans(record("right"))
    start = STARTED_AT + 10
    assert [(s.name, s.parent, round(s.start - start, 3), round(s.end - start, 3)) for s in spans] == [
        ("episode", None, 0.0, 1.6),
        ("turn 1", 0, 0.0, 1.2),
        ("generation", 1, 0.0, 0.4),
        ("call 1", 1, 0.4, 1.2),
        ("crop", 3, 0.4, 0.7),
        ("sub-agent", 3, 0.7, 1.2),
        ("call 2", 1, 0.4, 0.4),  # answered from the first
        ("turn 2", 0, 1.2, 1.6),
        ("generation", 7, 1.2, 1.6),
    ]
    assert all(span.ok for span in spans)


def test_what_failed_is_an_error_and_ends_where_it_failed() -> None:
    no_summary = record("right")
    call = no_summary["turns"][0]["calls"][0]
    call["status"], call["subagent_tokens"] = "failed", 0
    assert [(s.name, s.ok) for s in episode_spans(no_summary)][3:6] == [
        ("call 1", False),
        ("crop", True),
        ("sub-agent", False),
    ]
    call["frames"] = []
    assert [(s.name, s.ok) for s in episode_spans(no_summary)][3:6] == [
        ("call 1", False),
        ("crop", False),
        ("call 2", True),
    ]
    invalid = episode_spans(record("invalid"))
    assert [(s.name, s.ok) for s in invalid][3:5] == [("call 1", False), ("turn 2", True)]


def test_a_call_whose_frames_were_shown_has_no_subagent() -> None:
    shown = record("right")
    shown["turns"][0]["calls"][0]["subagent_tokens"] = 0
    assert "sub-agent" not in [span.name for span in episode_spans(shown)]


def test_a_sample_spans_the_step_and_leaves_failures_out(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    episodes = [[rollout("right", index) for index in range(4)] for _ in range(3)]
    write_episodes(file, [Group(f"1/{n}", SAMPLE, 4, made, ["timeout"]) for n, made in enumerate(episodes)])
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(sampled_episodes(file, 99)) == 12
    kept = [line for line in records if "failed" not in line]
    assert sampled_episodes(file, 3) == kept[::4]


# ---- in MLflow -------------------------------------------------------------------------------------------------------


def test_a_trace_says_what_the_record_says(tmp_path: Path, database: Path) -> None:
    with RunDir(settings(tmp_path)) as run:
        do_step(run, 1, "right", "wrong")
        follow(run, database)
        (first, second) = sorted(traces(database, run), key=lambda trace: len(trace.data.spans), reverse=True)
        told = record("right")
    assert first.info.request_preview == "Where is the red ball?"
    assert (first.info.response_preview, second.info.response_preview) == ("B", "A")
    assert first.info.request_time == int((STARTED_AT + 10) * 1000)
    assert first.info.execution_duration == 1600
    assert {key: first.info.tags[key] for key in ("step", "frame_budget", "policy_version")} == {
        "step": "1",
        "frame_budget": "4",
        "policy_version": "0",
    }
    assert float(first.info.tags["reward.total"]) == pytest.approx(told["rewards"]["total"], rel=1e-3)
    spans = {span.name: span for span in first.data.spans}
    root = spans["episode"]
    assert root.attributes["rewards"] == told["rewards"]
    assert root.attributes["frame_budget"] == 4
    assert spans["turn 1"].parent_id == root.span_id
    assert spans["sub-agent"].parent_id == spans["call 1"].span_id
    assert spans["call 1"].attributes["status"] == "served"
    assert spans["call 2"].attributes["status"] == "duplicate"
    assert spans["call 1"].outputs == {"reply": "1 to 2.5 s: the ball is red"}
    assert spans["crop"].end_time_ns - spans["crop"].start_time_ns == pytest.approx(0.3e9, abs=1e6)
    texts = [span.outputs["text"] for span in first.data.spans if span.name == "generation"]
    assert texts == [turn["text"] for turn in told["turns"]]


def test_no_trace_is_there_twice_whoever_sends_it(tmp_path: Path, database: Path) -> None:
    """A follower that goes on, its successor, and a run that does its last step again."""
    with RunDir(settings(tmp_path)) as run:
        do_step(run, 1, "right", "wrong", "cut")
        first = follow(run, database)
        do_step(run, 2, "right", "wrong", "cut")
        first.sync()
        follow(run, database)
        sent = {trace.info.trace_id for trace in traces(database, run)}
        assert len(sent) == 4
    with RunDir(settings(tmp_path, resume="auto")) as run:
        run.rewind(1)
        follow(run, database)
        assert {trace.info.trace_id for trace in traces(database, run)} == sent, "nothing is new yet"
        do_step(run, 2, "cut", "cut", "cut")
        do_step(run, 3, "right", "wrong", "cut")
        follow(run, database)
        found = traces(database, run)
    assert [trace.info.tags["step"] for trace in found] == ["1", "1", "2", "2", "3", "3"]
    assert sent < {trace.info.trace_id for trace in found}
    again = [trace for trace in found if trace.info.tags["step"] == "2"]
    assert [trace.info.response_preview for trace in again] == ["(length)"] * 2, "traces of what was abandoned"


def test_a_step_whose_traces_were_cut_short_is_sent_anew(tmp_path: Path, database: Path) -> None:
    """Killed after some of its traces had arrived, and done again with shorter episodes: nothing of the old is left."""
    from mlflow import MlflowClient

    with RunDir(settings(tmp_path)) as run:
        do_step(run, 1, "right", "right")
        state = follow(run, database).state("")
        MlflowClient(tracking_uri=state["uri"]).set_tag(state["run_id"], mlflow_log.TRACED, "0")
        do_step(run, 1, "cut", "cut")
        follow(run, database)
        found = traces(database, run)
    assert [[span.name for span in trace.data.spans] for trace in found] == [["episode", "turn 1", "generation"]] * 2


def test_a_damaged_record_costs_its_own_traces_alone(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_log, "POLL_S", 0.0)
    with RunDir(settings(tmp_path)) as run:
        do_step(run, 1, "right", "wrong")
        run.episodes_file(1).write_text('{"group": "1/0", "ind\n')
        do_step(run, 2, "right", "wrong")
        state = follow(run, database).state("")
        assert (state["sent_step"], state["traced_step"]) == (2, 2)
        assert [trace.info.tags["step"] for trace in traces(database, run)] == ["2", "2"]
        assert alarm(database, run) == "step 1: its traces were not taken"


def test_a_step_is_not_given_up_while_nothing_answers(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is gone for the length of all attempts is an outage, not a refusal."""
    from mlflow import MlflowClient

    def gone(*_: object) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(mlflow_log, "POLL_S", 0.0)
    with RunDir(settings(tmp_path)) as run:
        do_step(run, 1, "right", "wrong")
        follower = Follower(run.path, f"sqlite:///{database}", "paravt")
        with monkeypatch.context() as outage, pytest.raises(ConnectionError):
            outage.setattr(mlflow_log, "send_traces", gone)
            outage.setattr(MlflowClient, "get_run", gone)
            follower.sync()
        assert (follower.state("")["sent_step"], follower.state("")["traced_step"]) == (1, -1)
        follower.sync()
        assert [trace.info.tags["step"] for trace in traces(database, run)] == ["1", "1"]
        assert alarm(database, run) is None


def test_none_are_sent_where_none_are_wanted(tmp_path: Path, database: Path) -> None:
    with RunDir(settings(tmp_path, traces=0)) as run:
        do_step(run, 1, "right", "wrong")
        follow(run, database)
        assert traces(database, run) == []
