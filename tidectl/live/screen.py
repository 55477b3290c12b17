"""A whole terminal, drawn line by line: what has not changed is not sent, which matters over a slow line."""

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[0m\x1b[?25h\x1b[?1049l"


class Screen:
    """Use `opened`. `keys`: what is typed comes letter by letter and is not shown."""

    def __init__(self) -> None:
        self._shown: list[str] = []
        self._size = (0, 0)
        self._input = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._input)

    def size(self) -> tuple[int, int]:
        """Columns and lines, as of now."""
        size = os.get_terminal_size(sys.stdout.fileno())
        if size != self._size:
            self._size, self._shown = size, []
            self._write("\x1b[2J")
        return size

    def show(self, lines: Sequence[str]) -> None:
        """Lines as a terminal takes them, none wider than it is."""
        before = self._shown if len(self._shown) == len(lines) else [""] * len(lines)
        changed = [f"\x1b[{at + 1};1H{line}\x1b[0m\x1b[K" for at, line in enumerate(lines) if line != before[at]]
        self._shown = list(lines)
        if changed:
            self._write("".join(changed))

    def key(self, wait_s: float) -> str:
        """What was typed within `wait_s`; "" for nothing. The end of the input is like a wish to quit."""
        ready, _, _ = select.select([self._input], [], [], wait_s)
        if not ready:
            return ""
        typed = os.read(self._input, 64)
        return typed.decode(errors="replace") if typed else "q"

    def enter(self) -> None:
        tty.setcbreak(self._input)  # Ctrl-C and Ctrl-Z stay what they are
        self._shown, self._size = [], (0, 0)
        self._write(ENTER)

    def leave(self) -> None:
        self._write(LEAVE)
        termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def opened() -> Iterator[Screen]:
    """Whatever ends it, the terminal is as it was; so it is while the program is stopped (Ctrl-Z)."""
    screen = Screen()

    def suspend(number: int, _frame: object) -> None:
        screen.leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), number)  # sent to the process, another thread may have it: later
        signal.signal(signal.SIGTSTP, suspend)
        screen.enter()

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    former = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    former[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, suspend)
    screen.enter()
    try:
        yield screen
    finally:
        screen.leave()
        for number, handler in former.items():
            signal.signal(number, handler)
