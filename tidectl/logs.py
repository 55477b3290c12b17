"""`tidectl logs`: the ranks' log files; followed across truncation and rotation until the ranks have ended."""

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidectl.output import emit, is_terminal, say, styled, visible
from tided.errors import NotRunningError

POLL_S = 0.2
TAIL_BYTES = 4 << 20  # enough for any -n that a person reads, and a bound for a log without line ends

_LOG_NAME = re.compile(r"rank-(\d+)\.log$")

Line = tuple[int, str]  # rank and text


class Log:
    """One rank's log file: its last lines, then whatever is added to it."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank, self.path = rank, path
        self._file = path.open("rb")
        self._partial = b""

    def last(self, lines: int, since_bytes: int = 0) -> list[Line]:
        """The last whole lines, of those behind the first `since_bytes`; `added` goes on behind them."""
        size = os.fstat(self._file.fileno()).st_size
        begin = since_bytes if since_bytes <= size else 0  # a smaller file is a newer one
        start = max(begin, size - TAIL_BYTES)
        self._file.seek(start)
        found = self._whole_lines()
        if start > begin:
            del found[:1]  # begins in the middle
        return found[len(found) - lines :] if lines < len(found) else found

    def added(self) -> list[Line]:
        """Whole lines written since, whatever became of the file: grown, emptied, or replaced by another."""
        lines = self._whole_lines()
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._partial = b""
        elif self._replaced():
            self._file.close()
            self._file, self._partial = self.path.open("rb"), b""
        else:
            return lines
        return lines + self._whole_lines()

    def rest(self) -> list[Line]:
        """A last line without its end, once nothing more can come."""
        return [(self.rank, _text(self._partial))] if self._partial else []

    def close(self) -> None:
        self._file.close()

    def _whole_lines(self) -> list[Line]:
        *whole, self._partial = (self._partial + self._file.read(TAIL_BYTES)).split(b"\n")
        return [(self.rank, _text(line)) for line in whole]

    def _replaced(self) -> bool:
        try:
            return self.path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False  # between the renaming of the old file and the making of the new one


def show(state_dir: Path, rank: int | None, lines: int, follow: bool, as_json: bool, alive: Callable[[], bool]) -> None:
    """`alive` says whether any rank still runs: following ends when none does and all its lines are shown."""
    logs = _open(state_dir / "logs", rank)
    try:
        tail = [line for log in logs for line in log.last(lines)]
        if as_json and not follow:
            emit("logs/1", {"lines": [_fields(line) for line in tail]})
            return
        write = _json_line if as_json else _writer(prefixed=len(logs) > 1)
        _write_all(tail, write)
        if follow:
            _follow(logs, write, alive)
    finally:
        for log in logs:
            log.close()


def sizes(state_dir: Path) -> dict[int, int]:
    """Bytes in each rank's log: where the next run's lines will begin."""
    return {rank: path.stat().st_size for rank, path in _found(state_dir / "logs").items()}


def tail_of(state_dir: Path, rank: int, lines: int, since_bytes: int = 0) -> list[str]:
    """The end of a rank's log, for a message about how it ended; empty where there is none."""
    try:
        log = Log(rank, state_dir / "logs" / f"rank-{rank}.log")
    except OSError:
        return []
    found = [*log.last(lines, since_bytes), *log.rest()]
    log.close()
    return [text for _, text in found[-lines:]]


def _open(directory: Path, rank: int | None) -> list[Log]:
    found = _found(directory)
    wanted = sorted(found) if rank is None else [rank]
    if not wanted or any(number not in found for number in wanted):
        what = "no rank has written a log yet" if rank is None else f"there is no log of rank {rank}"
        raise NotRunningError(what, where=str(directory), hint="start a profile with `tidectl start PROFILE`")
    return [Log(number, found[number]) for number in wanted]


def _found(directory: Path) -> dict[int, Path]:
    """Logs in use by rank; a rotated one has a further suffix."""
    return {int(match[1]): path for path in directory.glob("rank-*.log") if (match := _LOG_NAME.match(path.name))}


def _follow(logs: list[Log], write: Callable[[Line], None], alive: Callable[[], bool]) -> None:
    while True:
        running = alive()  # asked before reading: what an ended rank wrote last is then still read
        fresh = [line for log in logs for line in log.added()]
        _write_all(fresh, write)
        if not running and not fresh:
            _write_all([line for log in logs for line in log.rest()], write)
            say("the ranks have ended")
            return
        time.sleep(POLL_S)


def _write_all(lines: list[Line], write: Callable[[Line], None]) -> None:
    for line in lines:
        write(line)
    sys.stdout.flush()


def _writer(prefixed: bool) -> Callable[[Line], None]:
    terminal = is_terminal(sys.stdout)

    def write(line: Line) -> None:
        prefix = styled(f"rank {line[0]} | ", "dim", sys.stdout) if prefixed else ""
        print(f"{prefix}{visible(line[1]) if terminal else line[1]}")

    return write


def _json_line(line: Line) -> None:
    emit("logs-line/1", _fields(line))


def _fields(line: Line) -> dict[str, Any]:
    return {"rank": line[0], "line": line[1]}


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\r")
