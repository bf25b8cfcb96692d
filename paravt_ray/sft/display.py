"""What supervised training shows on the screen."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_EVERY_S = 10.0
"""Off a terminal, a line is printed this often."""
_LOSSES = (("loss", "train/loss"), ("held-out", "valid/loss"))


class Display:
    """A bar with the loss and the time left on a terminal; a line now and then elsewhere."""

    def __init__(self, first: int, steps: int, console: Console | None = None) -> None:
        """Training goes on at step `first` of `steps`."""
        self._console = console or Console(highlight=False)
        self._first, self._steps, self._start, self._shown = first, steps, 0.0, -float("inf")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("loss      -", total=steps, completed=first)

    def __enter__(self) -> Display:
        self._start = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._bar.console.print(text, markup=False, soft_wrap=True)

    def step(self, done: int, metrics: dict[str, float]) -> None:
        """Show that `done` steps are done."""
        speed = metrics.get("train/tokens_per_s", 0.0)
        text = "  ".join(f"{name} {metrics[key]:.4f}" for name, key in _LOSSES if key in metrics)
        self._bar.update(self._task, completed=done, description=f"{text}  {speed:6.0f} tokens/s")
        now = time.monotonic()
        due = "valid/loss" in metrics or now - self._shown >= PLAIN_EVERY_S or done == self._steps
        if self._bar.disable and due:
            self._shown = now
            left = (now - self._start) / (done - self._first) * (self._steps - done)
            self.say(f"step {done}/{self._steps}  {text}  {speed:.0f} tokens/s  about {left:.0f} s left")
