"""What a run shows on the screen: one line a step, what it is doing right now, and how long that will take.

On a terminal the current stage stands in a live last line; elsewhere (a log file, CI) long stages are announced in
plain lines, so that no wait is unexplained.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

PLAIN_EVERY_S = 20.0
"""Off a terminal, a stage that goes on is mentioned this often."""
HEADER_EVERY = 20

# Name, metric, format; a line fits into 80 characters.
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward/total", "6.2f"),
    ("accuracy", "reward/accuracy", "8.2f"),
    ("format", "format/compliance", "6.2f"),
    ("calls", "tool/call_rate", "5.2f"),
    ("kl", "train/kl", "7.4f"),
    ("tokens/s", "rollout/tokens_per_s", "8.0f"),
    ("rollout", "time/rollout", "7.1f"),
    ("train", "time/train", "6.1f"),
    ("step", "time/step", "6.1f"),
)
_LEGEND = (
    "Means over a step's episodes: reward, accuracy, share with the right format, tool calls; then KL to the start, "
    "tokens sampled, and seconds."
)
_CLOSING = (
    ("accuracy", "reward/accuracy"),
    ("accuracy where the tool was called", "accuracy/called"),
    ("accuracy where it was not", "accuracy/not_called"),
    ("well-formed episodes", "format/compliance"),
    ("episodes that call the tool", "tool/usage_rate"),
    ("calls per episode", "tool/call_rate"),
)


class Progress:
    """A run's display. Use it as a context manager; all methods may be called from one thread."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        """`steps` is the last step of the run; the console is standard output unless given."""
        self._steps = steps
        self._console = console or Console(highlight=False)
        self._stage, self._hint, self._since = "", "", time.monotonic()
        self._durations: deque[float] = deque(maxlen=10)
        self._done, self._shown = 0, 0
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._last_line, console=self._console, refresh_per_second=4, transient=True)
        self._stop = threading.Event()
        self._announcer = threading.Thread(target=self._announce, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._announcer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._live.stop()

    def stage(self, name: str, hint: str = "") -> None:
        """Say what begins now, and in `hint` how long it usually takes ("25 to 45 s")."""
        self._stage, self._hint, self._since = name, hint, time.monotonic()
        if hint and not self._console.is_terminal:
            self.say(f"{name} ({hint})")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a line that stays and stands out."""
        self._console.print(Text(f"Warning: {text}", style="yellow"), soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a finished step's line."""
        if self._shown % HEADER_EVERY == 0:
            names = " ".join(f"{name:>{_width(name, spec)}}" for name, _, spec in _COLUMNS)
            if not self._shown:
                self.say(_LEGEND)
            self._console.print(Text(f"{'step':>8} {names}", style="bold"), soft_wrap=True)
        self._shown += 1
        self._done = step
        if "time/step" in metrics:
            self._durations.append(metrics["time/step"])
        cells = [
            f"{format(metrics[key], spec) if key in metrics else '-':>{_width(name, spec)}}"
            for name, key, spec in _COLUMNS
        ]
        self.say(f"{f'{step}/{self._steps}':>8} {' '.join(cells)}")

    def closing(self, history: Sequence[Mapping[str, float]], run_dir: Path) -> None:
        """Print what the run changed, from the first and the last held-out evaluation, and where to look next.

        Args:
            history: the lines of `metrics.jsonl`.
            run_dir: the run directory.
        """
        evaluations = [line for line in history if "eval/scored" in line]
        if len(evaluations) > 1:
            before, after = evaluations[0], evaluations[-1]
            rows = [
                (name, f"eval/{key}") for name, key in _CLOSING if f"eval/{key}" in before or f"eval/{key}" in after
            ]
            table = Table("", "before", "after", title="Held-out questions", title_justify="left")
            for name, key in rows:
                table.add_row(name, *(f"{line[key]:.2f}" if key in line else "-" for line in (before, after)))
            self._console.print(table)
        self.say(f"Metrics, trajectories and checkpoints are in {run_dir}.")
        self.say(f"`paravt report {run_dir}` makes one page of curves and trajectories of it.")
        self.say("`make mlflow` serves the curves of all runs to a browser on this machine.")

    def _last_line(self) -> Spinner:
        """The live last line: what is going on, for how long, and how long the whole will take."""
        text = f"{self._stage} {time.monotonic() - self._since:.0f} s"
        text += f" (usually {self._hint})" if self._hint else ""
        if self._durations and self._done < self._steps:
            left = fmean(self._durations) * (self._steps - self._done)
            text += f"  ·  step {self._done + 1} of {self._steps}, about {_duration(left)} left"
        self._spinner.update(text=Text(text))
        return self._spinner

    def _announce(self) -> None:
        announced = self._since
        while not self._stop.wait(1.0):
            now = time.monotonic()
            if self._stage and now - max(announced, self._since) >= PLAIN_EVERY_S:
                announced = now
                self.say(f"  ... {self._stage}: {now - self._since:.0f} s so far")


def _width(name: str, spec: str) -> int:
    return max(len(name), int(spec[0]))


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
