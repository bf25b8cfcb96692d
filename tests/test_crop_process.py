"""Decoding can be stopped: deadlines, crashes, orphans, growth; and what waiting calls share of one decode."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import clips
import pytest

from tool_workers.cache import FileId, ShotCache, ShotKey
from tool_workers.calls import CropCall
from tool_workers.cropper import Cropper
from tool_workers.decoder import DecoderProcess, DecoderStartError, Job, Result
from tool_workers.planning import Target
from tool_workers.records import Crop, ErrorKind, Limits, ToolError
from tool_workers.shot import Shot

LIMITS = Limits(50176, 784, 32)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clips.make("h264", tmp_path_factory.mktemp("clips")).path


def call(path: Path, start: float, end: float, fps: float = 1.0) -> CropCall:
    return CropCall(str(path), start, end, fps, 1000, LIMITS)


def gone(pid: int) -> bool:
    """Whether the process has ended (or is only waiting to be collected)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_hung_decoder_is_stopped_at_the_deadline_and_replaced(clip: Path) -> None:
    decoder = DecoderProcess()
    decoder.run(Job(str(clip)), 30.0)
    hung = decoder.pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(ToolError) as error:
        decoder.run(Job(str(clip)), 0.5)
    assert error.value.kind is ErrorKind.TIMEOUT
    assert time.monotonic() - started < 3.0
    assert gone(hung)
    assert decoder.run(Job(str(clip)), 30.0).info.frames == 100
    decoder.stop()


def test_a_crashed_decoder_is_replaced_within_the_call(clip: Path) -> None:
    cropper = Cropper(30.0, 0)
    assert isinstance(cropper.serve(call(clip, 0, 2)), Crop)
    assert cropper.decoder.pid is not None
    os.kill(cropper.decoder.pid, signal.SIGKILL)
    reply = cropper.serve(call(clip, 0, 2))
    assert isinstance(reply, Crop)
    assert [clips.read_number(frame) for frame in reply.frames] == [0, 25]
    assert cropper.decoder.started == 2
    cropper.stop()


def test_a_file_that_keeps_crashing_the_decoder_is_refused_at_once(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cropper = Cropper(30.0, 0)
    jobs = []

    def crash(job: Job, timeout_s: float) -> None:
        jobs.append(job)
        raise ToolError(ErrorKind.WORKER_DIED, "The decoder died.")

    monkeypatch.setattr(cropper.decoder, "run", crash)
    for _ in range(5):
        with pytest.raises(ToolError) as error:
            cropper.serve(call(clip, 0, 2))
        assert error.value.kind is ErrorKind.WORKER_DIED
    assert len(jobs) == 6  # three calls, each tried twice; the last two calls cost nothing


def test_looks_decodes_and_retries_share_the_deadline_of_their_call(
    clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client waits for one deadline: a worker that took one for each job would be replaced while it is healthy."""
    cropper = Cropper(30.0, 0)
    run, left = cropper.decoder.run, []

    def slow(job: Job, timeout_s: float) -> Result:
        left.append(timeout_s)
        time.sleep(0.3)
        if len(left) == 1:
            raise ToolError(ErrorKind.WORKER_DIED, "The decoder died.")
        return run(job, timeout_s)

    monkeypatch.setattr(cropper.decoder, "run", slow)
    assert isinstance(cropper.serve(call(clip, 0, 2)), Crop)
    assert len(left) == 3  # the look, which is tried again, and the frames
    assert left[0] <= 30.0 and left[1] <= left[0] - 0.3 and left[2] <= left[1] - 0.3
    cropper.stop()


def test_a_slow_start_ends_at_the_deadline_and_goes_on_for_the_next_call(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 3\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    decoder = DecoderProcess()
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(DecoderStartError) as error:
            decoder.run(Job(str(clip)), 0.2)
        assert error.value.kind is ErrorKind.TIMEOUT
        assert time.monotonic() - started < 2.0
    assert decoder.run(Job(str(clip)), 30.0).info.frames == 100
    assert decoder.started == 1
    decoder.stop()


def test_the_decoder_ends_with_its_parent(clip: Path) -> None:
    script = (
        "import sys, time\n"
        "from tool_workers.decoder import DecoderProcess, Job\n"
        "decoder = DecoderProcess()\n"
        f"decoder.run(Job({str(clip)!r}), 30.0)\n"
        "print(decoder.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert gone(child)


def test_a_forked_child_has_a_decoder_of_its_own(clip: Path) -> None:
    """Parent and child that shared one connection would read each other's replies."""
    script = (
        "import os, sys, tool_workers\n"
        f"path = {str(clip)!r}\n"
        "tool_workers.probe(path)\n"
        "child = os.fork()\n"
        "start = 0 if child else 2\n"
        "for _ in range(50):\n"
        "    times = tool_workers.crop(path, start, start + 2).timestamps.tolist()\n"
        "    assert times == [start, start + 1], times\n"
        "if child:\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)


def test_a_decoder_is_recycled_past_its_limit(clip: Path) -> None:
    decoder = DecoderProcess(max_jobs=3)
    pids = set()
    for _ in range(7):
        decoder.run(Job(str(clip)), 30.0)
        pids.add(decoder.pid)
    assert decoder.started == 3
    decoder.stop()
    grown = DecoderProcess(max_resident_bytes=1)
    grown.run(Job(str(clip)), 30.0)
    assert grown.pid is None


def test_memory_and_descriptors_stay_flat(clip: Path, tmp_path: Path) -> None:
    """Every call reads another file, more of them than the decoder keeps open."""
    copies = [tmp_path / f"{i}.mp4" for i in range(20)]
    for copy in copies:
        os.link(clip, copy)
    decoder = DecoderProcess()
    sizes = []
    for i in range(240):
        target = Target(round(i % 90 * 0.04, 6), 0.0, 0.0)
        result = decoder.run(Job(str(copies[i % 20]), (target,), LIMITS), 30.0)
        assert clips.read_number(result.shots[0].pixels) == i % 90
        if i in (79, 239):
            sizes.append((result.resident_bytes, len(list(Path(f"/proc/{decoder.pid}/fd").iterdir()))))
    (early_bytes, early_files), (late_bytes, late_files) = sizes
    assert late_files == early_files
    assert late_bytes < early_bytes * 1.1
    decoder.stop()


def test_waiting_and_later_similar_calls_share_one_decode(tmp_path: Path) -> None:
    path = clips.encode(clips.Recipe(frames=500, size=(96, 64), options={"g": "50"}), tmp_path / "20s.mp4").path
    cropper = Cropper(30.0, 64 << 20)
    first, near, far = call(path, 2.5, 5.5), call(path, 4.2, 8.9), call(path, 14.0, 17.0)
    cropper.serve(first, neighbours=[near, far])
    decoded = cropper.frames_decoded
    assert isinstance(cropper.cached(near), Crop)  # it was waiting
    assert isinstance(cropper.cached(call(path, 1.2, 6.8)), Crop)  # it comes later, and is similar
    assert cropper.cached(far) is None  # too far away: not at the first one's cost
    cropper.serve(near)
    assert cropper.frames_decoded == decoded
    cropper.stop()


def test_frames_that_nobody_needs_are_not_decoded(clip: Path) -> None:
    """Of a clip with three B-frames between references, about half the frames can be left out."""
    cropper = Cropper(30.0, 0)
    cropper.serve(call(clip, 0.0, 4.0, fps=0.5))
    assert cropper.frames_decoded < 75  # of the 100
    cropper.stop()


def test_the_cache_is_bounded_in_bytes() -> None:
    import numpy as np

    cache = ShotCache(10_000)
    keys = [ShotKey(FileId("x", 0, 0), Target(i, 0.0, 0.0), LIMITS) for i in range(10)]
    for key in keys:
        cache.put(key, Shot(key.target.time, np.zeros((32, 32, 3), np.uint8)))
        assert cache.bytes <= 10_000
    assert cache.get(keys[0]) is None
    assert cache.get(keys[-1]) is not None
    cache.put(keys[-1], Shot(0.0, np.zeros((64, 64, 3), np.uint8)))  # larger than all there is room for
    assert cache.bytes <= 10_000
