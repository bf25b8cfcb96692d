"""What every test may rely on."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser

from paravt_ray.tracking.mlflow_log import make_database


def pytest_configure(config: pytest.Config) -> None:
    """Let child processes be interrupted: a shell that runs the tests in the background has Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium is installed to open the page with")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    make_database(file)
    return file


@pytest.fixture
def database(tmp_path: Path, empty_database: Path) -> Path:
    """An empty MLflow database where runs in `tmp_path` look for it."""
    file = tmp_path / "mlflow.db"
    file.write_bytes(empty_database.read_bytes())
    return file
