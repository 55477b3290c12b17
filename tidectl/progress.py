"""How far a long command is: a bar on a terminal, a line now and then elsewhere. All of it on stderr."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tidectl.output import console, is_terminal, say

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LINE_EVERY_S = 10.0  # off a terminal: enough to see that it lives, few enough for a log


class Progress:
    """`with Progress("requests", total=12) as progress: progress.say("prose"); progress.advance()`.

    `total` 0: it is not known. Ends its line whatever happens; an interruption passes through.
    """

    def __init__(self, unit: str, total: int) -> None:
        self.unit, self.total, self.done, self.words = unit, total, 0, ""
        self._began_s = self._told_s = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if is_terminal(sys.stderr):
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, TimeRemainingColumn(), console=console(sys.stderr), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self.total or None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, words: str) -> None:
        """What is being done now."""
        self.words = words
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=words)

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, count)
        elif (now_s := time.monotonic()) - self._told_s >= LINE_EVERY_S:
            self._told_s = now_s
            of = f" of {self.total}" if self.total else ""
            say(f"{self.done}{of} {self.unit}, {now_s - self._began_s:.0f} s{': ' + self.words if self.words else ''}")
