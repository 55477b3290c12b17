"""What is waited for: a live view on a terminal, elsewhere a line at each change of a state and each 10 s."""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from tidectl.output import console, is_terminal, plain, say

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_EVERY_S = 10.0
TICK_S = 1.0  # how often it is looked whether a line is due


class Item(NamedTuple):
    """`since`: Unix time at which the state began, 0 for that of the wait. `total` 0 or 1: there is no number that says
    how far it is. `ready`: nothing of it is waited for any more."""

    name: str
    state: str = ""
    since: float = 0.0
    detail: str = ""
    done: int = 0
    total: int = 0
    ready: bool = False


Show = Callable[[Sequence[Item]], None]


@contextmanager
def waiting() -> Iterator[Show]:
    """Shows the items it is called with in place of those before; at the end a terminal is as it was."""
    with _live() if is_terminal(sys.stderr) else _lines() as show:
        yield show


def line(items: Sequence[Item]) -> str:
    return ", ".join(_words(item) for item in items)


def _words(item: Item) -> str:
    state = f" {item.state}" if item.state else ""
    return f"{item.name}{state}" + (f" ({item.detail})" if item.detail else "")


@contextmanager
def _lines() -> Iterator[Show]:
    """A thread repeats the newest items, so that lines go on while the caller is busy."""
    show, over = _Lines(), threading.Event()

    def repeat() -> None:
        with suppress(OSError):  # nobody reads them any more
            while not over.wait(TICK_S):
                show.again()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        over.set()
        thread.join()


class _Lines:
    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._next_s = self._started_s
        self._told: list[str] = []
        self._items: Sequence[Item] = ()
        self._lock = threading.Lock()

    def __call__(self, items: Sequence[Item]) -> None:
        with self._lock:
            self._items = items
            self._tell(items)

    def again(self) -> None:
        with self._lock:
            if self._items:
                self._tell(self._items)

    def _tell(self, items: Sequence[Item]) -> None:
        now_s, states = time.monotonic(), [_state(item) for item in items]
        if states != self._told or now_s >= self._next_s:
            self._told, self._next_s = states, now_s + LINE_EVERY_S
            say(f"{line(items)} ({now_s - self._started_s:.0f} s)")


def _state(item: Item) -> str:
    """What an item is at, without the figures that say how far it is."""
    return re.sub(r"\d+", "", f"{item.name} {item.state}")


@contextmanager
def _live() -> Iterator[Show]:
    """A thread of rich's draws the newest items, so that the seconds go on while the caller is busy."""
    from rich.live import Live

    began, shown = time.time(), list[Item]()

    def show(items: Sequence[Item]) -> None:
        shown[:] = items

    screen = console(sys.stderr)
    try:
        with Live(get_renderable=lambda: _table(shown, began), console=screen, transient=True, redirect_stdout=False):
            yield show
    except KeyboardInterrupt:
        screen.show_cursor()  # Live has done so, unless a second one came in between
        raise


def _table(items: Sequence[Item], began: float) -> "RenderableType":
    """A row an item. A bar that runs to and fro says that there is no number."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table, now = Table.grid(padding=(0, 2, 0, 0)), time.time()
    for justify in ("left", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column()
    table.add_column(no_wrap=True)
    for item in items:
        seconds = "" if item.ready else f"{max(0.0, now - (item.since or began)):.0f} s"
        done, total = (1, 1) if item.ready else (item.done, item.total if item.total > 1 else None)
        bar = ProgressBar(total, done, 24, complete_style="cyan", finished_style="green", pulse_style="cyan")
        table.add_row(plain(item.name), plain(item.state), plain(seconds), bar, plain(item.detail))
    return table
