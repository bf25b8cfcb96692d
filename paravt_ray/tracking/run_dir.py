"""A run's directory: who may write to it, what is in it, and how it is cut back when a run goes on from a checkpoint.

config.yaml                    the resolved configuration
metrics.jsonl                  one object a step
episodes/step_000012.jsonl     whole trajectories of a step
checkpoints/step_000012/       written by the learner; complete once its mark is there
logs/                          what the libraries have to say
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from paravt_ray.config import Config, save_config
from paravt_ray.errors import InputError

METRICS_FILE = "metrics.jsonl"
EPISODES = "episodes"

_STEP_NAME = re.compile(r"step_(\d{6,})")


class RunDirError(InputError):
    """The run directory is in use, holds another run, or cannot be written."""


def step_name(step: int) -> str:
    """`step_000012`: sorts by step."""
    return f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """The step in a name like `step_000012` or `step_000012.jsonl`; None where there is none."""
    match = _STEP_NAME.fullmatch(path.name.split(".")[0])
    return int(match[1]) if match else None


def episodes_file(run_dir: Path, step: int) -> Path:
    """Where a step's trajectories are."""
    return run_dir / EPISODES / f"{step_name(step)}.jsonl"


class RunDir:
    """A run directory that this process holds. Held until `close` or until the process ends, however it ends."""

    def __init__(self, config: Config) -> None:
        """Create the directory, or take over the one whose run goes on (`trainer.resume=auto`).

        A run that goes on is not changed before the caller has decided from which checkpoint, and calls `rewind`.

        Raises:
            RunDirError: it holds a run and `trainer.resume` is `never`; another process holds it; it is not writable.
        """
        self.path = Path(config.trainer.run_dir).absolute()
        self._config_file = self.path / "config.yaml"
        self.metrics_file = self.path / METRICS_FILE
        self.episodes = self.path / EPISODES
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        try:
            for folder in (self.episodes, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
        except OSError as error:
            raise RunDirError(f"The run directory {self.path} cannot be written: {error.strerror}.") from error
        self._config = config
        if not self._config_file.exists():
            self._write_config()
        elif config.trainer.resume == "never":
            self._lock.close()
            raise RunDirError(
                f"{self.path} already holds a run. Go on with it (trainer.resume=auto), start another one "
                f"(trainer.run_dir=outputs/NAME), or remove the directory."
            )

    def rewind(self, step: int) -> None:
        """Go on after `step` with this configuration. What came later is forgotten, so that nothing counts twice."""
        self._write_config()
        if self.metrics_file.exists():
            lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
            replace_file(self.metrics_file, "".join(f"{line}\n" for line in lines if _is_until(line, step)))
        for file in self.episodes.iterdir():
            written = step_of(file)
            if written is None or written > step or file.suffix != ".jsonl":
                file.unlink()

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step to `metrics.jsonl`, on the disk when this returns. Values must be finite."""
        line = json.dumps({"step": step, "time": round(time.time(), 3), **metrics}, allow_nan=False)
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
            file.flush()
            os.fsync(file.fileno())

    def episodes_file(self, step: int) -> Path:
        """Where a step's trajectories are written."""
        return episodes_file(self.path, step)

    def checkpoint(self, step: int) -> Path:
        """Where a step's checkpoint is written."""
        return self.checkpoints / step_name(step)

    def close(self) -> None:
        """Let another process take the directory."""
        self._lock.close()

    def _write_config(self) -> None:
        part = self._config_file.with_name(f"{self._config_file.name}.part")
        save_config(self._config, part)
        part.replace(self._config_file)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The steps of a `metrics.jsonl`, without a last line that is still being written."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _lock(path: Path) -> IO[str]:
    """Hold `.lock` in the directory; the system lets go of it when the process ends, also when it is killed."""
    file = (path / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RunDirError(
            f"{path} is being written by {holder}. Wait for it to end, or choose another trainer.run_dir."
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _is_until(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except json.JSONDecodeError:  # the process was killed while it wrote this line
        return False


def replace_file(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    with part.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
