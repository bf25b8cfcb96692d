"""Counters and latencies of a worker, and their sum over a pool."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_WINDOW = 2048
"""Calls over which percentiles are taken."""


class Latencies:
    """Seconds of the most recent calls."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_WINDOW)

    def add(self, seconds: float) -> None:
        """Count one call."""
        self._seconds.append(seconds)

    def percentile(self, share: float) -> float:
        """Return the percentile (0 to 100) in seconds; 0.0 before the first call."""
        return float(np.percentile(self._seconds, share)) if self._seconds else 0.0


@dataclass(frozen=True)
class WorkerStats:
    """One worker's counters since it started. Latencies in seconds, from arrival to answer, queue included."""

    slot: int
    pid: int
    calls: int
    cache_hits: int
    """Calls answered without decoding for them."""
    errors: dict[str, int]
    """By kind."""
    queue_depth: int
    latency_p50: float
    latency_p95: float
    latency_p99: float
    bytes_read: int
    """Compressed bytes read for decoding."""
    frames_decoded: int
    cache_bytes: int
    decoder_pid: int | None
    decoder_starts: int
    decoder_resident_bytes: int
    resident_bytes: int
    """Memory of the worker process itself, its cache included."""


def resident_bytes() -> int:
    """Return the memory of this process in bytes, without what it shares (libraries, the object store)."""
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - on every job: the cheapest way
        _, resident, shared, *_ = map(int, statm.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def pool_metrics(workers: Sequence[WorkerStats]) -> dict[str, float]:
    """Sum up the workers of a pool as flat numbers, for a metrics log. Latencies are the worst worker's."""
    calls = sum(w.calls for w in workers)
    errors: dict[str, int] = {}
    for worker in workers:
        for kind, count in worker.errors.items():
            errors[kind] = errors.get(kind, 0) + count
    failed = sum(errors.values())
    return {
        "calls": calls,
        "errors": failed,
        "error_rate": failed / calls if calls else 0.0,
        "cache_hit_rate": sum(w.cache_hits for w in workers) / calls if calls else 0.0,
        "queue_depth": sum(w.queue_depth for w in workers),
        "latency_p50": max((w.latency_p50 for w in workers), default=0.0),
        "latency_p95": max((w.latency_p95 for w in workers), default=0.0),
        "latency_p99": max((w.latency_p99 for w in workers), default=0.0),
        "bytes_read": sum(w.bytes_read for w in workers),
        "frames_decoded": sum(w.frames_decoded for w in workers),
        "cache_bytes": sum(w.cache_bytes for w in workers),
        "decoder_starts": sum(w.decoder_starts for w in workers),
        "resident_bytes": sum(w.resident_bytes + w.decoder_resident_bytes for w in workers),
        **{f"errors_{kind}": count for kind, count in sorted(errors.items())},
    }
