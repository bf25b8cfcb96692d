"""What every test may rely on."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import Browser

from paravt_ray.tracking.mlflow_log import make_database

if TYPE_CHECKING:
    from paravt_ray.chat import Chat
    from paravt_ray.episode import TrainRow


def pytest_configure(config: pytest.Config) -> None:
    """Let child processes be interrupted: a shell that runs the tests in the background has Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = ("test_loop", "test_cluster_jobs", "test_lora", "test_generator", "test_learner_ranks", "test_crop_pool")
"""Files that come first: where several processes share the tests, none is left alone with a long one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, otherwise in their order."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


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


# What the learner is tested with. Imported where it is asked for: torch would delay the tests that do without.


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint that tests only read; who changes one makes one."""
    from tiny import make_tiny_checkpoint

    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def tiny_chat(tiny_path: Path) -> Chat:
    """Its renderer, which holds no state."""
    from paravt_ray.chat import Chat

    return Chat.from_pretrained(tiny_path)


@pytest.fixture
def tiny_rows(tiny_chat: Chat) -> list[TrainRow]:
    """`learning.make_rows`, anew for each test: what one test fills in, another expects to be missing."""
    from learning import make_rows

    return make_rows(tiny_chat)


@pytest.fixture
def quick_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet whose patience fits generators that answer at once."""
    from paravt_ray.rollout import member

    monkeypatch.setattr(member, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(member, "SUSPECT_S", 0.1)
    monkeypatch.setattr(member, "GRACE_S", 0.2)
    monkeypatch.setattr(member, "POLL_S", 0.01)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch with a single thread: the tiny model is so small that more of them only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
