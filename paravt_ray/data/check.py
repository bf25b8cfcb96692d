"""Open every video of a data set before a run does, and list those that cannot be used.

Frames are decoded by the service that serves the run, in a process of its own that is ended where a file hangs it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paravt_ray.data.reader import DataError, local_path, read_rows, split_fragment
from tool_workers import ToolError, overview, probe

SHORTEST_S = 1.0
SHOWN_FRAMES = 8
"""Frames decoded from each video, spread over the whole clip."""
TABLE_ROWS = 50


@dataclass(frozen=True)
class Finding:
    """What is wrong with one video."""

    video: str
    problem: str
    """`not_found`, `unreadable`, `no_video`, `damaged`, `timeout`, ... (as the crop service says), or `short`."""
    detail: str


def run(parquet: str, video_root: str, as_json: bool) -> int:
    """`paravt data check`: 0 if every video can be used, else 1."""
    videos = list_videos(Path(parquet), video_root)
    console = Console(stderr=as_json)
    findings = [
        f for video in track(videos, "Opening videos", console=console) if (f := check_video(video)) is not None
    ]
    counts = Counter(finding.problem for finding in findings)
    if as_json:
        report = {"videos": len(videos), "problems": dict(counts), "findings": [asdict(f) for f in findings]}
        print(json.dumps(report, indent=2))
    else:
        _print(console, len(videos), findings, counts)
    return 1 if findings else 0


def list_videos(parquet: Path, video_root: str) -> list[Path]:
    """Each video that a file of questions or conversations names, once, in order.

    Raises:
        DataError: the file cannot be read, or names no video.
    """
    if not parquet.is_file():
        raise DataError(f"There is no data file {parquet}.")
    root = Path(video_root) if video_root else parquet.parent
    try:
        names = pyarrow.parquet.read_schema(parquet).names
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{parquet} cannot be read as a parquet file: {str(error).splitlines()[0]}") from error
    column = "messages" if "messages" in names else "videos"
    rows = read_rows(parquet, [column])
    references = [reference for row in rows for reference in _references(row[column])]
    if not references:
        raise DataError(f"{parquet} names no video.")
    return list(dict.fromkeys(local_path(reference, root) for reference in references))


def check_video(video: Path) -> Finding | None:
    """What is wrong with a video; None for nothing."""
    try:
        info = probe(video)
        frames = overview(video, SHOWN_FRAMES)
    except ToolError as error:
        return Finding(str(video), error.kind.value, str(error))
    if info.damage or frames.note:
        return Finding(str(video), "damaged", info.damage or frames.note)
    if info.duration < SHORTEST_S:
        return Finding(str(video), "short", f"It lasts {info.duration:.2f} s.")
    return None


def _references(value: Any) -> Iterator[str]:
    """The video references in a `videos` or `messages` cell; anything malformed is left to the readers to report."""
    parts = json.loads(value) if isinstance(value, str) else value or []
    for part in parts:
        if isinstance(part.get("video"), str):
            yield part["video"]
        content = part.get("content")
        for piece in content if isinstance(content, list) else []:
            if piece.get("video_url"):
                yield split_fragment(piece["video_url"]["url"])[0]


def _print(console: Console, total: int, findings: list[Finding], counts: Counter[str]) -> None:
    if findings:
        table = Table("problem")
        table.add_column("video", overflow="fold")  # a path that is cut names no file
        table.add_column("detail", overflow="fold")
        for finding in findings[:TABLE_ROWS]:
            table.add_row(finding.problem, finding.video, finding.detail)
        console.print(table)
        if len(findings) > TABLE_ROWS:
            console.print(f"... and {len(findings) - TABLE_ROWS} more (--json lists all).")
    summary = ", ".join(f"{count} {problem}" for problem, count in counts.most_common())
    console.print(f"{total - len(findings)} of {total} videos can be used" + (f"; {summary}." if summary else "."))
