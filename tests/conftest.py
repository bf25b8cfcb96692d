"""What every test may rely on."""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Let child processes be interrupted: a shell that runs the tests in the background has Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
