"""Episodes as MLflow traces: a few of each step's trajectories, span by span, at their places in time.

    episode                       the rollout of one question
      turn 1                      until all its calls are answered
        generation
        call 1                    the calls of a turn run at the same time
          crop
          sub-agent               begins when its crop is there

What is drawn is what `episodes/step_*.jsonl` says; a call that was not run (repeated, over a cap, not readable) takes
no time.

MLflow's own span API (`start_span`) drops what it cannot send and gives a trace another id each time. Here finished
traces are sent with ids that follow from the run, the step and their number, and a failure is raised: sending a step
again replaces it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paravt_ray.episode import CallStatus

if TYPE_CHECKING:
    from mlflow.entities import Span, TraceInfo

PREVIEW = 1000
"""Characters of question and answer in MLflow's list of traces: its own limit."""


@dataclass(frozen=True)
class SpanRecord:
    """A finished span. Times are seconds since 1970."""

    name: str
    kind: str
    """MLflow's type of span, which chooses its icon."""
    parent: int | None
    """Index in the episode's list of spans; None for the first, the episode itself."""
    start: float
    end: float
    ok: bool = True
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)


def sampled_episodes(file: Path, count: int) -> list[dict[str, Any]]:
    """At most `count` episodes of a step's file, evenly spaced in it, so that they are of different questions."""
    with file.open("rb") as stream:
        records = [record for record in map(json.loads, stream) if "failed" not in record]
    count = min(count, len(records))
    return [records[number * len(records) // count] for number in range(count)]


def episode_spans(record: Mapping[str, Any]) -> list[SpanRecord]:
    """The spans of one episode as `write_episodes` wrote it; a parent stands before its children.

    Raises:
        LookupError, TypeError: it is no such record.
    """
    start = record["started_at"]
    sample = record["sample"]
    spans = [
        SpanRecord(
            "episode",
            "AGENT",
            None,
            start,
            start + record["seconds"],
            inputs={"question": sample["question"], "videos": sample["videos"]},
            outputs={"answer": record["answer"], "end_reason": record["end_reason"]},
            attributes={
                "group": record["group"],
                "index": record["index"],
                "sample_id": sample["sample_id"],
                "gold_answer": sample["answer"],
                "question_type": sample["question_type"],
                "frame_budget": record["frame_budget"],
                "overview_times": record["overview_times"],
                "policy_version": record["policy_version"],
                "rewards": record["rewards"],
                "tokens": record["tokens"],
            },
        )
    ]
    for number, turn in enumerate(record["turns"], start=1):
        spans += _turn_spans(turn, number, start + turn["started_s"], parent=len(spans))
    return spans


def _turn_spans(turn: Mapping[str, Any], number: int, start: float, parent: int) -> Iterator[SpanRecord]:
    """A turn, its generation and its calls; `parent` is the index that the turn itself gets."""
    calls = turn["calls"]
    written = start + turn["seconds"]
    served = written + max((call["latency_s"] for call in calls), default=0.0)
    yield SpanRecord(f"turn {number}", "CHAIN", 0, start, served, attributes={"calls": len(calls)})
    kept = {key: turn[key] for key in ("tokens", "finish_reason", "forced")}
    yield SpanRecord("generation", "LLM", parent, start, written, outputs={"text": turn["text"]}, attributes=kept)
    index = parent + 2
    for position, call in enumerate(calls, start=1):
        for span in _call_spans(call, position, written, parent, index):
            index += 1
            yield span


def _call_spans(call: Mapping[str, Any], position: int, start: float, parent: int, index: int) -> Iterator[SpanRecord]:
    """A call and what was run for it; `index` is the one that the call itself gets."""
    status, end = CallStatus(call["status"]), start + call["latency_s"]
    reply = {"reply": call["reply"]}
    yield SpanRecord(
        f"call {position}",
        "TOOL",
        parent,
        start,
        end,
        ok=status in (CallStatus.SERVED, CallStatus.DUPLICATE),
        inputs={"raw": call["raw"]},
        outputs=reply,
        attributes={"status": status, "video": call["video"], "window": call["window"]},
    )
    if status not in (CallStatus.SERVED, CallStatus.FAILED):
        return
    cropped, frames, tokens = start + call["crop_s"], call["frames"], call["subagent_tokens"]
    asked = {"video": call["video"], "window": call["window"]}
    yield SpanRecord("crop", "RETRIEVER", index, start, cropped, bool(frames), asked, {"frames": frames})
    if tokens or (frames and status is CallStatus.FAILED):
        yield SpanRecord(
            "sub-agent", "LLM", index, cropped, end, status is CallStatus.SERVED, asked, reply, {"tokens": tokens}
        )


def send_traces(uri: str, run: tuple[str, str], step: int, records: list[dict[str, Any]]) -> None:
    """Make these episodes the traces of a step, in place of any that an interrupted attempt has left there.

    Args:
        uri: tracking server or database.
        run: ids of the MLflow experiment and of the run in it.
        step: of the training run.
        records: as in the step's file.

    Raises:
        Exception: whatever MLflow raises where it does not answer, and what `episode_spans` raises.
    """
    from mlflow.tracing.client import TracingClient

    experiment_id, run_id = run
    client = TracingClient(uri)
    traces = [(_trace_id(run_id, step, number), episode_spans(record)) for number, record in enumerate(records)]
    if not traces:
        return
    client.delete_traces(experiment_id, trace_ids=[trace_id for trace_id, _ in traces])
    for trace_id, spans in traces:
        client.start_trace(_trace_info(trace_id, run, step, spans[0]))
    try:
        client.log_spans(experiment_id, [span for trace_id, spans in traces for span in _mlflow_spans(trace_id, spans)])
    except NotImplementedError:
        # MLflow asks a server once for its version and keeps "unknown" for good, also where it was only down or slow.
        client.store._get_server_version.cache_clear()
        raise


def _trace_id(run_id: str, step: int, number: int) -> str:
    return f"tr-{hashlib.sha256(f'{run_id}/{step}/{number}'.encode()).hexdigest()[:32]}"


def _trace_info(trace_id: str, run: tuple[str, str], step: int, episode: SpanRecord) -> TraceInfo:
    from mlflow.entities import TraceInfo, TraceLocation, TraceState

    experiment_id, run_id = run
    kept, rewards = episode.attributes, episode.attributes["rewards"]
    return TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=int(episode.start * 1000),
        execution_duration=int((episode.end - episode.start) * 1000),
        state=TraceState.OK,
        request_preview=episode.inputs["question"][:PREVIEW],
        response_preview=(episode.outputs["answer"] or f"({episode.outputs['end_reason']})")[:PREVIEW],
        trace_metadata={"mlflow.sourceRun": run_id},
        tags={
            "mlflow.traceName": f"step {step}: {kept['sample_id']}"[:PREVIEW],
            "step": str(step),
            "frame_budget": str(kept["frame_budget"]),
            "policy_version": str(kept["policy_version"]),
        }
        | {f"reward.{name}": f"{value:.4g}" for name, value in (rewards or {}).items()},
    )


def _mlflow_spans(trace_id: str, spans: list[SpanRecord]) -> Iterator[Span]:
    from mlflow.entities import Span

    for index, span in enumerate(spans):
        attributes = {
            "mlflow.traceRequestId": trace_id,
            "mlflow.spanType": span.kind,
            "mlflow.spanInputs": span.inputs,
            "mlflow.spanOutputs": span.outputs,
            **span.attributes,
        }
        yield Span.from_dict(
            {
                "trace_id": trace_id,
                "span_id": f"{index + 1:016x}",
                "parent_span_id": None if span.parent is None else f"{span.parent + 1:016x}",
                "name": span.name,
                "start_time_unix_nano": int(span.start * 1e9),
                "end_time_unix_nano": int(span.end * 1e9),
                "status": {"code": "STATUS_CODE_OK" if span.ok else "STATUS_CODE_ERROR"},
                "attributes": {key: json.dumps(value, ensure_ascii=False) for key, value in attributes.items()},
            }
        )
