"""Waiting for what other threads and processes do, never for ever."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    """Return once the condition holds; an AssertionError that names `what` after `seconds`."""
    deadline, pause_s = time.monotonic() + seconds, 0.005
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:g} s"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)  # some conditions look through all processes


def answers(uri: str) -> bool:
    """Whether an MLflow server does."""
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
