"""The log files of ranks: their last lines, and what is added to them across truncation and rotation.

A rank's file outlives its run and goes on with the next; the supervisor writes a line between two runs (`run_mark`)."""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from tidectl.supervisor import Status
from tided.errors import NotRunningError, UsageError

POLL_S = 0.2
TAIL_BYTES = 4 << 20  # enough for any -n that a person reads, and a bound for a log without line ends

_RUN_MARK = re.compile(r"==== \d{4}-\d\d-\d\d \d\d:\d\d:\d\d start of .* ====$")
_LOG_NAME = re.compile(r"rank-(\d+)\.log$")

Line = tuple[int, str]  # rank and text


def run_mark(profile: Path) -> str:
    """The line before the first of a run."""
    return f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} start of {profile} ====\n"


class Log:
    """One rank's log file: its last lines, then whatever is added to it."""

    def __init__(self, rank: int, path: Path) -> None:
        self.rank, self.path = rank, path
        self._file = path.open("rb")
        self._partial = b""

    def last(self, lines: int, all_runs: bool = False) -> list[Line]:
        """The last whole lines, of the last run alone or of all; `added` goes on behind them."""
        start = max(0, os.fstat(self._file.fileno()).st_size - TAIL_BYTES)
        self._file.seek(start)
        found = self._whole_lines()
        if start:
            del found[:1]  # begins in the middle
        marks = [number for number, (_, text) in enumerate(found) if _RUN_MARK.match(text)]
        if marks and not all_runs:
            del found[: marks[-1] + 1]
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


def choose(found: Sequence[int], rank: int | None, all_runs: bool, now: Status) -> list[int]:
    """The ranks whose logs are asked for, of those that have one: those of this run, or of the last one; with
    `all_runs` all. Raises UsageError for a rank that is not among them, NotRunningError when there is none."""
    ran = [child.rank for child in now.run.ranks] if now.run else [r.rank for r in now.last.ranks] if now.last else []
    candidates = [number for number in found if all_runs or not ran or number in ran]
    if not candidates:
        hint = "start a profile with `tidectl start PROFILE`"
        raise NotRunningError("no rank has written a log yet", hint=hint)
    if rank is None or rank in candidates:
        return candidates if rank is None else [rank]
    did = ("run here" if now.run else "ran last") if len(candidates) > 1 else "runs here" if now.run else "ran last"
    hint = "--all shows its log" if rank in found else ""
    raise UsageError(f"there is no rank {rank}: {_listed(candidates)} {did}", hint=hint)


def _listed(ranks: Sequence[int]) -> str:
    *others, last = (str(rank) for rank in ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def log_path(state_dir: Path, rank: int) -> Path:
    return state_dir / "logs" / f"rank-{rank}.log"


def found(directory: Path) -> list[int]:
    """The ranks that have a log; a rotated one has a further suffix."""
    return sorted(int(match[1]) for path in directory.glob("rank-*.log") if (match := _LOG_NAME.match(path.name)))


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\r")
