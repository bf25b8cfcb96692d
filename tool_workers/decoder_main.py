"""The process that decodes: `python -m tool_workers.decoder_main DESCRIPTOR PARENT` (see `decoder`)."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import OrderedDict
from multiprocessing.connection import Connection

from tool_workers.decoder import Job, Result
from tool_workers.reader import Reader
from tool_workers.records import ErrorKind, ToolError
from tool_workers.stats import resident_bytes

_OPEN_FILES = 8
"""Files kept open."""


class _OpenFiles:
    """Open readers, least recently used first."""

    def __init__(self) -> None:
        self._readers: OrderedDict[tuple[str, int, int], Reader] = OrderedDict()

    def get(self, path: str) -> Reader:
        try:
            status = os.stat(path)  # noqa: PTH116 - a bare call: pathlib would only add its own errors
            key = (path, status.st_mtime_ns, status.st_size)
        except (OSError, ValueError) as error:
            raise ToolError(ErrorKind.NOT_FOUND, f"There is no video file {path} ({error}).") from error
        reader = self._readers.pop(key, None) or Reader(path)
        self._readers[key] = reader
        while len(self._readers) > _OPEN_FILES:
            self._readers.popitem(last=False)[1].close()
        return reader

    def drop(self, path: str) -> None:
        """Close a file whose reader may be in a state of its own after an error."""
        for key in [k for k in self._readers if k[0] == path]:
            self._readers.pop(key).close()


def _do(job: Job, files: _OpenFiles) -> Result | ToolError:
    try:
        reader = files.get(job.path)
        read, decoded = reader.bytes_read, reader.frames_decoded
        shots = reader.shots(job.targets, job.limits, job.optional) if job.limits else []
        return Result(
            reader.examined() if job.thorough else reader.info,
            shots,
            reader.bytes_read - read,
            reader.frames_decoded - decoded,
            resident_bytes(),
        )
    except ToolError as error:
        files.drop(job.path)
        return error
    except Exception as error:  # whatever a broken file provokes: this call's error, not the decoder's end
        files.drop(job.path)
        return ToolError(ErrorKind.UNREADABLE, f"{job.path} cannot be read: {type(error).__name__}: {error}.")


def _leave_with_parent(parent: int) -> None:
    """End this process when its parent is gone, even in the middle of a decode that never returns."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def main() -> None:
    """Serve jobs from the connection whose descriptor is the first argument until the parent closes it."""
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_leave_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    connection.send(True)
    files = _OpenFiles()
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            connection.send(_do(connection.recv(), files))


if __name__ == "__main__":
    main()
