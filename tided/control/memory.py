"""How much memory this node could still give, and when a rank must let go of some, or end.

A node whose memory is used up freezes, with nothing in any log: unified memory has no killer that comes first. So each
rank looks at what the system could still give, four times a second. Below one threshold it gives up what it can do
without; below another, for a while without a break, it ends in order, and the other ranks with it.
"""

import asyncio
import ctypes
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

log = logging.getLogger("memory")

MEMINFO = Path("/proc/meminfo")
LOOK_EVERY_S = 0.25  # 21 GB went within 1.5 s on such a node
Verdict = Literal["fine", "shed", "end"]


def available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """What the system would give back included; None where nothing tells."""
    return _line("MemAvailable", meminfo)


def total_bytes(meminfo: Path = MEMINFO) -> int | None:
    """What the system has; None where nothing tells."""
    return _line("MemTotal", meminfo)


def _line(name: str, meminfo: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines[name].split()[0]) << 10
    except (OSError, ValueError, LookupError):
        return None


class Limits(NamedTuple):
    """0 of a threshold: never."""

    shed_below_bytes: int
    exit_below_bytes: int
    exit_after_s: float


class Watch:
    """Pure: told what is free and when, it says what is to be done. One that is told nothing is fine: where nothing
    tells what is free, nothing is known to be short."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._low_since_s: float | None = None

    def look(self, free_bytes: int | None, now_s: float) -> Verdict:
        """`now_s` never falls. "end" only when every look of the last `exit_after_s` was below, this one included."""
        if free_bytes is None:
            self._low_since_s = None
            return "fine"
        if free_bytes >= self.limits.exit_below_bytes:
            self._low_since_s = None
            return "shed" if free_bytes < self.limits.shed_below_bytes else "fine"
        if self._low_since_s is None:
            self._low_since_s = now_s
        return "end" if now_s - self._low_since_s >= self.limits.exit_after_s else "shed"


async def watch(
    limits: Limits,
    shed: Callable[[], int],
    end: Callable[[int], None],
    free: Callable[[], int | None] = available_bytes,
    every_s: float = LOOK_EVERY_S,
) -> None:
    """Until it is cancelled, or has ended the rank. `shed` gives memory back, on a thread of its own, and tells how
    much; `end` is called once, with what was free. However long `shed` takes, and however it ends, the watch looks on:
    on a machine that is short of everything a thread may not even begin."""
    one, was = Watch(limits), "fine"
    shedding: asyncio.Task[None] | None = None
    try:
        while True:
            found = free()
            verdict = one.look(found, time.monotonic())
            if verdict == "end":
                end(found or 0)
                return
            if verdict == "shed" and (shedding is None or shedding.done()):
                shedding = asyncio.create_task(_shed(shed, found or 0, tell=was == "fine"))
            was = verdict
            await asyncio.sleep(every_s)
    finally:
        if shedding is not None:
            shedding.cancel()


async def _shed(shed: Callable[[], int], free_bytes: int, tell: bool) -> None:
    """`tell`: of what it could not give, too."""
    try:
        given = await asyncio.to_thread(_given, shed)
    except Exception:
        if tell:
            log.exception("%.2f GB of this node's memory are free; none can be given up", free_bytes / 1e9)
        return
    if given or tell:
        log.warning("%.2f GB of this node's memory are free; %.2f GB given up", free_bytes / 1e9, given / 1e9)


def _given(shed: Callable[[], int]) -> int:
    given = shed()
    if given:
        release_heap()
    return given


def release_heap() -> None:
    """What the process has freed goes back to the system at once, where the C library can be told."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
