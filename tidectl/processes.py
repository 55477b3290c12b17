"""Processes by identity: a pid is used again, a pid together with its start time is not. Linux /proc."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from tided.errors import UnavailableError

POLL_S = 0.05
KILL_WAIT_S = 20.0  # the kernel takes back the memory of a large process


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`start_ticks`: kernel clock ticks from boot to the start of the process."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        fields = _stat(self.pid)
        return fields is not None and int(fields[19]) == self.start_ticks and fields[0] not in "ZX"

    def is_stopped(self) -> bool:
        """Held by SIGSTOP or a debugger: it will not react to SIGTERM."""
        fields = _stat(self.pid)
        return fields is not None and fields[0] in "Tt"

    def send(self, number: signal.Signals) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def identify(pid: int) -> Identity:
    """Raises ProcessLookupError."""
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(pid)
    return Identity(pid, int(fields[19]))


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on; the name before may hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def end(processes: Iterable[Identity], grace_s: float) -> None:
    """SIGTERM, then SIGKILL for those that are left after the grace time, or cannot hear SIGTERM. Returns when all
    have ended; raises UnavailableError for one that even SIGKILL does not end."""
    left = [process for process in processes if process.is_alive()]
    for process in left:
        process.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while left := [process for process in left if process.is_alive()]:
        now = time.monotonic()
        if now > deadline + KILL_WAIT_S:
            raise UnavailableError(f"process {left[0].pid} does not end, not even by SIGKILL")
        for process in left:
            if now > deadline or process.is_stopped():
                process.send(signal.SIGKILL)
        time.sleep(POLL_S)
