"""Looks through a data set before it is used: which files are unreadable, damaged, too short, without video, and why.

`python -m tool_workers.scan PATH...` prints a table of the unusable files (folders are searched) and ends with 1 if
there are any.
"""

from __future__ import annotations

import os
import queue
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tool_workers.calls import OverviewCall
from tool_workers.cropper import Cropper
from tool_workers.local import PATCH_FACTOR
from tool_workers.records import Crop, Limits, ToolError

TOO_SHORT = "too_short"
_FRAMES = 8
"""Frames decoded of each video."""
_TIMEOUT_S = 600.0
"""For one file: it is read from beginning to end."""


@dataclass(frozen=True)
class Finding:
    """What there is to say of one video."""

    video: str
    problem: str
    """An `ErrorKind` or `TOO_SHORT`; empty for a sound file."""
    detail: str
    duration: float
    """Seconds; 0.0 where unknown."""


def scan(videos: Iterable[str | Path], *, workers: int = 2, min_duration_s: float = 1.0) -> Iterator[Finding]:
    """Yield a finding for each video, in order: all its data is read, and a few frames spread over it are decoded."""
    croppers: queue.SimpleQueue[Cropper] = queue.SimpleQueue()
    for _ in range(workers):
        croppers.put(Cropper(_TIMEOUT_S, 0))

    def look(video: str | Path) -> Finding:
        cropper = croppers.get()
        try:
            return _look(cropper, str(video), min_duration_s)
        finally:
            croppers.put(cropper)

    with ThreadPoolExecutor(workers) as threads:
        try:
            yield from threads.map(look, videos)
        finally:
            threads.shutdown(cancel_futures=True)
            while not croppers.empty():
                croppers.get().stop()


def _look(cropper: Cropper, video: str, min_duration_s: float) -> Finding:
    try:
        info = cropper.examine(video)
        overview = cropper.serve(OverviewCall(video, _FRAMES, Limits(PATCH_FACTOR**2, 1, PATCH_FACTOR)))
    except ToolError as error:
        return Finding(video, error.kind.value, error.message, 0.0)
    damage = info.damage or (overview.note if isinstance(overview, Crop) else "")
    if damage:
        return Finding(video, "damaged", damage, info.duration)
    if info.duration < min_duration_s:
        return Finding(video, TOO_SHORT, f"It lasts {info.duration:.2f} s.", info.duration)
    return Finding(video, "", "", info.duration)


def table(findings: Sequence[Finding]) -> str:
    """Return the unusable videos as lines of text, with a count of each problem at the end."""
    bad = [finding for finding in findings if finding.problem]
    lines = [f"{finding.problem:12} {finding.video}\n{'':12} {finding.detail}" for finding in bad]
    counts = Counter(finding.problem for finding in bad)
    summary = "".join(f", {count} {problem}" for problem, count in counts.most_common())
    hours = sum(finding.duration for finding in findings) / 3600
    return "\n".join([*lines, f"{len(findings)} files, {hours:.2f} h: {len(findings) - len(bad)} sound{summary}."])


def main() -> int:
    """Scan the files and folders named on the command line."""
    if len(sys.argv) < 2:
        print("usage: python -m tool_workers.scan PATH...", file=sys.stderr)
        return 2
    files: list[Path] = []
    for path in map(Path, sys.argv[1:]):
        files += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    findings = list(scan(files, workers=max(1, (os.cpu_count() or 2) // 2)))
    print(table(findings))
    return 1 if any(finding.problem for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
