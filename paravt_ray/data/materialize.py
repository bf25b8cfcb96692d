"""Point a data set at the files of this machine: virtual video paths become local ones, what is missing is listed.

The released data name videos under virtual roots: `longvt_source/<source>/<path>`, `museg/charades/<id>.mp4`,
`museg/et_instruct_164k/<id>.mp4`, `selfqa/<id>.mp4`. A root is mapped to a folder; what follows it is looked for there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow
import pyarrow.parquet

from paravt_ray.data.reader import DataError, split_fragment
from paravt_ray.errors import InputError

ROOTS = ("longvt_source", "museg/charades", "museg/et_instruct_164k", "selfqa")
OTHER_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov")
"""A source may hold the same clip in another container than the data set says."""
SHOWN = 5


@dataclass
class MaterializeReport:
    """What became of the media references of one file."""

    found: int = 0
    missing: dict[str, list[str]] = field(default_factory=dict)
    """References without a file, by root; `other` for those under no known root."""

    @property
    def complete(self) -> bool:
        """Whether every reference has its file."""
        return not self.missing

    def lines(self) -> list[str]:
        """The report for people."""
        total = self.found + sum(map(len, self.missing.values()))
        lines = [f"{self.found} of {total} references point to files of this machine."]
        for root, references in sorted(self.missing.items()):
            counted = Counter(references)
            examples = ", ".join(list(counted)[:SHOWN])
            more = f" and {len(counted) - SHOWN} more" if len(counted) > SHOWN else ""
            lines.append(f"{root}: {len(counted)} files are missing: {examples}{more}")
        return lines


def run(parquet: str, output: str, assignments: Sequence[str]) -> int:
    """`paravt data materialize`: 0 if everything was found, 1 if something is missing (the file is written anyway)."""
    report = materialize(Path(parquet), Path(output), parse_roots(assignments))
    print("\n".join(report.lines()))
    print(f"Wrote {output}; references without a file stand in it as before.")
    return 0 if report.complete else 1


def parse_roots(assignments: Sequence[str]) -> dict[str, Path]:
    """`ROOT=FOLDER` pairs.

    Raises:
        InputError: one is no pair, names an unknown root or a folder that is not there.
    """
    roots: dict[str, Path] = {}
    for assignment in assignments:
        root, separator, folder = assignment.partition("=")
        if not separator or root.strip("/") not in ROOTS:
            raise InputError(f"'{assignment}' is not ROOT=FOLDER with one of the roots {', '.join(ROOTS)}.")
        if not Path(folder).is_dir():
            raise InputError(f"There is no folder {folder} for the root {root}.")
        roots[root.strip("/")] = Path(folder).absolute()
    return roots


def materialize(parquet: Path, output: Path, roots: Mapping[str, Path]) -> MaterializeReport:
    """Copy a parquet file of questions (`videos`) or conversations (`messages`) with its references made local.

    Raises:
        DataError: the file cannot be read, or has neither column.
    """
    try:
        table = pyarrow.parquet.read_table(parquet)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{parquet} cannot be read as a parquet file: {str(error).splitlines()[0]}") from error
    report = MaterializeReport()

    def locate(reference: str) -> str:
        bare, fragment = split_fragment(reference)
        root, path = _local_file(bare, roots)
        if path is None:
            report.missing.setdefault(root, []).append(bare)
            return reference
        report.found += 1
        return f"{path}{fragment}"

    rewriters: dict[str, Callable[[Any, Callable[[str], str]], Any]] = {"videos": _videos, "messages": _messages}
    present = [name for name in rewriters if name in table.column_names]
    if not present:
        raise DataError(
            f"{parquet} has the columns {', '.join(table.column_names) or 'none'}: it holds neither questions "
            f"(videos) nor conversations (messages)."
        )
    for name in present:
        rewritten = [rewriters[name](value, locate) for value in table.column(name).to_pylist()]
        column = pyarrow.array(rewritten, type=table.schema.field(name).type)
        table = table.set_column(table.column_names.index(name), name, column)
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f"{output.name}.part")
    pyarrow.parquet.write_table(table, part)
    part.replace(output)
    return report


def _local_file(reference: str, roots: Mapping[str, Path]) -> tuple[str, Path | None]:
    """The root that a reference lies under, and its file if there is one."""
    bare = PurePosixPath(reference.removeprefix("file://"))
    root = next((name for name in ROOTS if bare.is_relative_to(name)), "other")
    if root == "other":
        return root, Path(bare) if bare.is_absolute() and Path(bare).is_file() else None
    if root not in roots or ".." in bare.parts:
        return root, None
    path = roots[root] / bare.relative_to(root)
    candidates = [path, *(path.with_suffix(suffix) for suffix in OTHER_SUFFIXES)]
    return root, next((candidate for candidate in candidates if candidate.is_file()), None)


def _videos(videos: Any, locate: Callable[[str], str]) -> Any:
    return [{**video, "video": locate(video["video"])} for video in videos or []]


def _messages(messages: Any, locate: Callable[[str], str]) -> Any:
    as_text = isinstance(messages, str)
    rewritten = [
        {**message, "content": [_part(part, locate) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in (json.loads(messages) if as_text else messages)
    ]
    return json.dumps(rewritten, ensure_ascii=False) if as_text else rewritten


def _part(part: dict[str, Any], locate: Callable[[str], str]) -> dict[str, Any]:
    """A content part with the address of its video or image made local; parts of a struct column have null fields."""
    changed = dict(part)
    for kind in ("video_url", "image_url"):
        if part.get(kind) and part[kind].get("url"):
            changed[kind] = {**part[kind], "url": locate(part[kind]["url"])}
    return changed
