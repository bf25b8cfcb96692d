"""One side of a comparison in a process of its own: own threads, own memory, nothing of the other side's."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paravt_ray.errors import UserError
from paravt_ray.rollout.generator import log_tail

TIMEOUT_S = 600.0
"""Deadline of one call, the start included."""
_END_S = 20.0

THREADS = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""As in our own actors: threads that wait sleep, so that the side whose turn it is has the cores."""


class PeerError(UserError):
    """One side of a comparison failed; the message ends with its last words."""


class Peer:
    """An object whose methods are called in another process. Use it as a context manager."""

    def __init__(
        self, log: Path, make: Callable[..., Any], *args: Any, env: Mapping[str, str] = THREADS, **kwargs: Any
    ) -> None:
        """Start the process and make the object there.

        Args:
            log: file for everything that the process prints.
            make: returns the object; named at the top of a module, as must be what it is given.
            args: of `make`, as `kwargs`.
            env: environment variables of the process, beside those of this one.

        Raises:
            PeerError: it could not be made.
        """
        self._log = log
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, log, make, args, kwargs))
        with _environment(env):
            self._process.start()
        theirs.close()  # so that the pipe ends when the process does
        try:
            self._answer("start")
        except PeerError:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object and return its result.

        Raises:
            PeerError: it raised, took longer than TIMEOUT_S, or its process died.
        """
        self._pipe.send((method, args))
        return self._answer(method)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, what: str) -> Any:
        try:
            if not self._pipe.poll(TIMEOUT_S):
                raise PeerError(f"'{what}' was not done within {TIMEOUT_S:g} s.\n{log_tail(self._log)}")
            failed, result = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise PeerError(f"The process died in '{what}'.\n{log_tail(self._log)}") from error
        if failed:
            raise PeerError(f"'{what}' failed:\n{result}")
        return result


def _serve(
    pipe: Connection, log: Path, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make the object, then answer calls until the other end is closed."""
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        served = make(*args, **kwargs)
    except Exception:  # whatever it is, the other side is told
        pipe.send((True, traceback.format_exc()))
        return
    pipe.send((False, None))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, getattr(served, method)(*arguments)))
        except Exception:
            pipe.send((True, traceback.format_exc()))


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for what is started meanwhile."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
