"""Which model a directory holds, whatever it is called and wherever it lies."""

from __future__ import annotations

import hashlib
from pathlib import Path

NOT_THE_MODEL = (".md", ".log")


def model_digest(directory: Path) -> str:
    """Digest of a checkpoint's files, by name and content; where it lies does not matter."""
    digest = hashlib.sha256()
    files = (p for p in directory.iterdir() if p.is_file() and not p.name.startswith("."))
    for file in sorted(file for file in files if file.suffix not in NOT_THE_MODEL):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.name}\0{content}\n".encode())
    return digest.hexdigest()[:16]
