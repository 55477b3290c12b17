"""Which read comes next: the rules of the I/O scheduler, without threads or a clock.

- Strict priorities; within one, first come first served.
- What somebody waits for counts as SYNC_HOT, whatever it was submitted as: no stream of urgent reads can starve it.
- While serving, background reads (ASYNC_HOT and lower) start only while no urgent one is queued or in flight, and few
  at a time: a disk shares its bandwidth among all that is in flight, so each stretches the read that is waited for.
- At boot everything is as deep as the disk takes it.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, Literal, TypeVar

from tided.errors import PairError

Mode = Literal["boot", "serve"]
T = TypeVar("T")

MAX_QUEUED = 1 << 15  # of one priority: more than there are experts, each of which has a slot to be read into


class Priority(IntEnum):
    """Lower comes first. PREFIX: pieces of the caches' files, read and written (`IoScheduler.run`). Engram rows are
    small and read by threads of their own: they wait for nobody."""

    SYNC_HOT = 0
    ASYNC_HOT = 1
    SWAP = 2
    PREFIX = 3


ORDER = tuple(Priority)


@dataclass(frozen=True)
class Depths:
    """Reads in flight. `deep`: at boot, and of urgent ones. `background`: of the others while serving."""

    deep: int
    background: int

    def __post_init__(self) -> None:
        if self.deep < 1 or self.background < 1:
            raise ValueError(f"{self} lets nothing be read")

    @property
    def threads(self) -> int:
        """One more than the background takes: an urgent read never waits for a thread."""
        return max(self.deep, self.background + 1)


@dataclass(eq=False, slots=True)
class Entry(Generic[T]):
    """A read on its way. `rank` is the class that it counts as now."""

    item: T
    priority: Priority
    rank: Priority = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.priority


class ReadQueue(Generic[T]):
    """Not locked: its owner is."""

    def __init__(self, depths: Depths, limit: int = MAX_QUEUED) -> None:
        self.depths, self.limit = depths, limit
        self.mode: Mode = "boot"
        self._waiting: list[deque[Entry[T]]] = [deque() for _ in Priority]
        self._running = [0] * len(Priority)

    @property
    def queued(self) -> int:
        return sum(map(len, self._waiting))

    @property
    def in_flight(self) -> int:
        return sum(self._running)

    def room(self, priority: Priority) -> int:
        return max(0, self.limit - len(self._waiting[priority]))

    def push(self, item: T, priority: Priority) -> Entry[T]:
        """Raises PairError when the class is full: its owner submits without looking at what is on its way."""
        if len(self._waiting[priority]) >= self.limit:
            raise PairError(f"{self.limit} reads of class {priority.name} are queued already")
        entry = Entry(item, priority)
        self._waiting[priority].append(entry)
        return entry

    @property
    def startable(self) -> bool:
        """Whether `pop` has a read."""
        first = self._first()
        return first is not None and self._admits(first)

    def pop(self) -> Entry[T] | None:
        """The next read that may start now; it is in flight until `finish`."""
        first = self._first()
        if first is None or not self._admits(first):
            return None
        entry = self._waiting[first].popleft()
        self._running[entry.rank] += 1
        return entry

    def finish(self, entry: Entry[T]) -> None:
        self._running[entry.rank] -= 1

    def promote(self, entry: Entry[T]) -> None:
        """Somebody waits for it."""
        if entry.rank is Priority.SYNC_HOT:
            return
        if self._take_out(entry):
            self._waiting[Priority.SYNC_HOT].append(entry)
        else:  # in flight
            self._running[entry.rank] -= 1
            self._running[Priority.SYNC_HOT] += 1
        entry.rank = Priority.SYNC_HOT

    def cancel(self, entry: Entry[T]) -> bool:
        """False when it has started."""
        return self._take_out(entry)

    def clear(self) -> list[Entry[T]]:
        """Takes out everything that has not started."""
        entries = [entry for queue in self._waiting for entry in queue]
        for queue in self._waiting:
            queue.clear()
        return entries

    def _first(self) -> Priority | None:
        for priority in ORDER:
            if self._waiting[priority]:
                return priority
        return None

    def _admits(self, priority: Priority) -> bool:
        in_flight, urgent = sum(self._running), self._running[Priority.SYNC_HOT]
        if self.mode == "boot":
            return in_flight < self.depths.deep
        if priority is Priority.SYNC_HOT:
            return urgent < self.depths.deep
        return urgent == 0 and in_flight < self.depths.background

    def _take_out(self, entry: Entry[T]) -> bool:
        try:
            self._waiting[entry.rank].remove(entry)
        except ValueError:
            return False
        return True
