"""Several ranks of one job as processes of this machine, without a daemon: started together, ended together.

A rank is `python COMMAND... FOLDER RANK`. Its words go to FOLDER/rank-N.log, it ends with the exit code of its
error, and leaves what it computed in the folder.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tided.errors import ConfigError, DataError, PairError, PermissionError_, TideError, UnavailableError, UsageError

POLL_S = 0.05
END_S = 10.0
LOG_TAIL_LINES = 12
KINDS: tuple[type[TideError], ...] = (ConfigError, DataError, UnavailableError, PermissionError_, UsageError)


def run_ranks(
    command: Sequence[str], folder: Path, ranks: int, timeout_s: float, watch: Callable[[], None] = lambda: None
) -> None:
    """Returns when every rank ended well. Raises the error of the rank that failed, PairError after `timeout_s`; no
    process is left behind. `watch` is called while they run, and once at their end."""
    with _started(command, folder, ranks) as processes:
        _wait(folder, processes, time.monotonic() + timeout_s, watch)


def free_port() -> int:
    """A TCP port of this machine that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _started(command: Sequence[str], folder: Path, ranks: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            line = [sys.executable, *command, str(folder), str(rank)]
            with _log(folder, rank).open("wb") as log:
                processes.append(subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(END_S)


def _wait(
    folder: Path, processes: Sequence[subprocess.Popen[bytes]], deadline: float, watch: Callable[[], None]
) -> None:
    while True:
        codes = [process.poll() for process in processes]
        watch()
        if any(codes):
            raise _failure(folder, codes)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            late = ", ".join(f"rank {rank}" for rank, code in enumerate(codes) if code is None)
            raise PairError(f"{late} did not end in time")
        time.sleep(POLL_S)


def _failure(folder: Path, codes: Sequence[int | None]) -> TideError:
    """A rank that lost its peer says little; one that ended for another reason says why."""
    _, rank, code = min((code == PairError.exit_code, rank, code) for rank, code in enumerate(codes) if code)
    lines = _log(folder, rank).read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
    kind = next((kind for kind in KINDS if kind.exit_code == code), PairError)
    return kind("\n".join(lines) or f"ended with code {code}", where=f"rank {rank}")


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"
