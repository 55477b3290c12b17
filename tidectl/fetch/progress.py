"""How much of a plan is here, and how fast it comes."""

import threading
import time
from collections import deque

from tidectl.fetch.plan import Plan
from tidectl.room import size
from tidectl.waiting import Item

RATE_S = 15.0  # over which a rate is told


class Progress:
    """Bytes that are here, and how fast they come."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._lock = plan, threading.Lock()
        whole = sum(target.nbytes for target in plan.targets if target.name in plan.here)
        self._done = whole + sum(plan.part_bytes(target) for target in plan.missing)
        self._seen: deque[tuple[float, int, int]] = deque()

    def came(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes

    @property
    def _fetched(self) -> int:
        return self._plan.repository.fetched_bytes

    def items(self) -> list[Item]:
        """For the screen. The rate is of what comes over the network: files that are read again here are none of it."""
        now_s, fetched, done, total = time.monotonic(), self._fetched, self._done, self._plan.total_bytes
        self._seen.append((now_s, fetched, done))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > RATE_S:
            self._seen.popleft()
        since_s, before, done_before = self._seen[0]
        rate = (fetched - before) / (now_s - since_s) if now_s > since_s else 0.0
        how = "comparing what is here" if fetched == before and done > done_before else speed(rate, total - done)
        detail = f"{len(self._plan.here)} of {len(self._plan.targets)} files, {how}"
        state = f"{size(done)} of {size(total)}"
        return [Item("fetching", state, detail=detail, done=done >> 20, total=max(2, total >> 20))]


def speed(rate: float, left_bytes: int) -> str:
    """No time is told where nothing comes: it would be a lie."""
    if rate < 1:
        return "nothing comes at the moment"
    left_s = left_bytes / rate
    left = (
        f"{left_s:.0f} s" if left_s < 120 else f"{left_s / 60:.0f} min" if left_s < 7200 else f"{left_s / 3600:.1f} h"
    )
    return f"{rate / 1e6:.1f} MB/s, {left} left"
