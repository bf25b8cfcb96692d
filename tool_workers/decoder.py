"""A handle on a process that decodes, and that can be stopped in the middle of it (its side: `decoder_main`)."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tool_workers.planning import Target
from tool_workers.records import ErrorKind, Limits, ToolError, VideoInfo
from tool_workers.shot import Shot

_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Job:
    """One request to a decoder: shots of one file, or without `limits` only what it is."""

    path: str
    targets: tuple[Target, ...] = ()
    limits: Limits | None = None
    optional: frozenset[Target] = frozenset()
    """Those of the targets that are left out if reaching them means to start at an earlier keyframe."""
    thorough: bool = False
    """Read the whole file and report in `VideoInfo.damage` what is wrong anywhere in it."""


@dataclass(frozen=True)
class Result:
    """A decoder's reply to one job."""

    info: VideoInfo
    shots: Sequence[Shot | None]
    """One for each target; None for an optional one that was left out."""
    bytes_read: int
    frames_decoded: int
    resident_bytes: int
    """Memory of the decoder process after the job."""


class DecoderStartError(ToolError):
    """No decoder process is there, or not in time: the fault is the machine's, not the file's."""


class DecoderProcess:
    """The parent's handle: starts the child when needed, kills it at a deadline, replaces it when it has grown."""

    def __init__(self, max_resident_bytes: int = 2 << 30, max_jobs: int = 5000) -> None:
        self._max_resident = max_resident_bytes
        self._max_jobs = max_jobs
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._dying: list[subprocess.Popen[bytes]] = []
        self._starts_by: float | None = None
        """On the monotonic clock; None where the child has said that it is ready."""
        self._jobs = 0
        self.started = 0
        """Children started so far."""
        self.resident_bytes = 0

    @property
    def pid(self) -> int | None:
        """Process id of the child, None where none runs."""
        return self._process.pid if self._process else None

    def run(self, job: Job, timeout_s: float) -> Result:
        """Do the job in the child, within the deadline, which holds for the start of a child too.

        Raises:
            ToolError: timeout or worker_died; or what the reader found.
        """
        deadline = time.monotonic() + timeout_s
        connection = self._connection or self._start()
        self._wait_until_ready(connection, deadline)
        assert self._process is not None
        # The timer is for a child that stops in the middle of a message, where `poll` has no say.
        left_s = max(0.0, deadline - time.monotonic())
        timer = threading.Timer(left_s, self._process.kill)
        timer.start()
        try:
            connection.send(job)
            reply: Result | ToolError | None = connection.recv() if connection.poll(left_s) else None
        except (EOFError, OSError) as error:
            status = self.stop()
            if time.monotonic() < deadline:
                raise ToolError(
                    ErrorKind.WORKER_DIED, f"The decoder died while reading {job.path} (exit status {status})."
                ) from error
            reply = None
        finally:
            timer.cancel()
        if reply is None:
            self.stop()
            message = f"Reading {job.path} was stopped after {timeout_s:.3g} s, at the deadline of its call."
            raise ToolError(ErrorKind.TIMEOUT, message)
        self._jobs += 1
        if isinstance(reply, Result):
            self.resident_bytes = reply.resident_bytes
        if self._jobs >= self._max_jobs or self.resident_bytes > self._max_resident:
            self.stop()
        if isinstance(reply, ToolError):
            raise reply
        return reply

    def stop(self) -> int | None:
        """Kill the child, if there is one, and return its exit status."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if process is None:
            return None
        process.kill()
        self._dying = [p for p in [*self._dying, process] if _still_there(p)]
        return process.returncode

    def _start(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        search_path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)  # it finds what we find
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tool_workers.decoder_main", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": search_path, "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        self._connection = ours
        self._starts_by = time.monotonic() + _START_TIMEOUT_S
        self._jobs = self.resident_bytes = 0
        self.started += 1
        return ours

    def _wait_until_ready(self, connection: Connection, deadline: float) -> None:
        """Wait for a child that is starting. One that is not ready by the deadline goes on, for the next job."""
        if self._starts_by is None:
            return
        try:
            if connection.poll(max(0.0, min(deadline, self._starts_by) - time.monotonic())):
                connection.recv()
                self._starts_by = None
                return
            failed = time.monotonic() >= self._starts_by
        except (EOFError, OSError):
            failed = True
        if not failed:
            raise DecoderStartError(ErrorKind.TIMEOUT, "The decoder process was still starting at the call's deadline.")
        status = self.stop()
        raise DecoderStartError(
            ErrorKind.WORKER_DIED, f"A decoder process could not be started (exit status {status})."
        )


def _still_there(process: subprocess.Popen[bytes]) -> bool:
    """Collect a killed process; one that is stuck in a read of a dead file system goes only when that returns."""
    try:
        process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return True
    return False
