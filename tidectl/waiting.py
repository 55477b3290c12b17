"""What is waited for: a live view on a terminal, elsewhere the first line and then one each 10 s."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from tidectl.output import console, is_terminal, say, visible

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 10.0


class Item(NamedTuple):
    """`total` 0 or 1: its progress has no number that says anything. `ready`: nothing of it is waited for any more."""

    name: str
    state: str = ""
    detail: str = ""
    done: int = 0
    total: int = 0
    ready: bool = False


Show = Callable[[Sequence[Item]], None]


@contextmanager
def waiting() -> Iterator[Show]:
    """Shows the items it is called with in place of those before; at the end a terminal is as it was."""
    if not is_terminal(sys.stderr):
        yield _Lines()
        return
    with _bars() as show:
        yield show


def line(items: Sequence[Item]) -> str:
    return ", ".join(_words(item) for item in items)


def _words(item: Item) -> str:
    state = f" {item.state}" if item.state else ""
    return f"{item.name}{state}" + (f" ({item.detail})" if item.detail else "")


class _Lines:
    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._next_s = self._started_s

    def __call__(self, items: Sequence[Item]) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LINE_EVERY_S
            say(f"{line(items)} ({now_s - self._started_s:.0f} s)")


@contextmanager
def _bars() -> Iterator[Show]:
    """One row an item. A thread of rich's draws them, so that the seconds go on while the caller is busy."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    def text(what: str) -> TextColumn:
        return TextColumn(f"{{task.{what}}}", markup=False)

    bar = BarColumn(24, complete_style="cyan", finished_style="green", pulse_style="cyan")
    columns = (text("description"), text("fields[state]"), TimeElapsedColumn(), bar, text("fields[detail]"))
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console(sys.stderr), transient=True, redirect_stdout=False) as progress:

        def show(items: Sequence[Item]) -> None:
            for gone in tasks.keys() - {item.name for item in items}:
                progress.remove_task(tasks.pop(gone))
            for item in items:
                if item.name not in tasks:
                    tasks[item.name] = progress.add_task(visible(item.name), total=None, state="", detail="")
                _update(progress, tasks[item.name], item)

        yield show


def _update(progress: "Progress", task: "TaskID", item: Item) -> None:
    """A bar that runs to and fro says that there is no number."""
    done, total = (1, 1) if item.ready else (item.done, item.total) if item.total > 1 else (0, None)
    progress.update(task, completed=done, total=total, state=visible(item.state), detail=visible(item.detail))
    if item.ready:
        progress.stop_task(task)
