"""A terminal for a program to write to."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable


def on_a_terminal(code: str, **variables: str) -> str:
    """What a Python program writes whose three streams are a terminal of 80 columns."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "", **variables}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    shown = b""
    try:
        while data := os.read(parent, 1024):
            shown += data
    except OSError:  # how a terminal says that its last user is gone
        pass
    finally:
        os.close(parent)
    assert process.wait(20) == 0, shown
    return shown.decode()


class Terminal:
    """A program on a terminal that a test can type on and look at."""

    def __init__(self, *command: str, columns: int = 80, rows: int = 24, **variables: str) -> None:
        self._parent, child = pty.openpty()
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(child)
        self._child = child
        environment = {**os.environ, "TERM": "xterm", **variables}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            if name not in variables:
                environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.sent = b""

    def resize(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        fcntl.ioctl(self._parent, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._parent, keys)

    def until(self, seen: Callable[[], bool], seconds: float = 30.0) -> None:
        """Reads what the program writes until a condition holds."""
        deadline = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < deadline, self.screen()
            self.read(0.05)

    def read(self, seconds: float) -> None:
        if self._is_told(seconds):
            self.sent += os.read(self._parent, 65536)

    def _is_told(self, seconds: float) -> bool:
        poll = select.poll()  # `select` takes no descriptor beyond 1023, and a process of many tests has some
        poll.register(self._parent, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def screen(self) -> list[str]:
        """The lines as they stand: of what our programs send, cursor addresses, erasing and styles."""
        return shown(self.sent.decode(errors="replace"), self.columns, self.rows)

    def end(self, seconds: float = 30.0) -> int:
        """Its exit code; what it leaves the terminal in is in `left_modes`."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.screen()
            self.read(0.05)
        while self._is_told(0):
            self.sent += os.read(self._parent, 65536)
        self.left_modes = termios.tcgetattr(self._child)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._parent)
        os.close(self._child)


SEQUENCE = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n])")


def shown(text: str, columns: int, rows: int) -> list[str]:
    cells, row, column = [[" "] * columns for _ in range(rows)], 0, 0
    for given, command, control, letter in SEQUENCE.findall(text):
        if letter:
            if row < rows and column < columns:
                cells[row][column] = letter
            column += 1
        elif control:
            row, column = (row, 0) if control == "\r" else (min(row + 1, rows - 1), column)
        elif command == "H":
            row, column = (int(part) - 1 for part in (given or "1;1").split(";"))
        elif command == "A":
            row = max(0, row - int(given or 1))
        elif command == "K" and row < rows:
            first = 0 if given == "2" else min(column, columns)
            cells[row][first:] = [" "] * (columns - first)
        elif command == "J":
            cells = [[" "] * columns for _ in range(rows)]
    return ["".join(line).rstrip() for line in cells]
