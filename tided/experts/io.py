"""The one scheduler of a rank's disk: bounded queues by priority, a few threads, tickets for who asked.

`read_queue` holds the rules; here are the threads. A read runs in one of them: into the caller's memory, or through a
`Land`, which hands out the memory and does what must follow (the arena's copy to a device).

The threads share one interpreter with the engine's, and every line that they run may be one that it waits for: a read
takes the lock once, to be told and to find the next.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tided.errors import PairError
from tided.experts.read_queue import Depths, Entry, Mode, Priority, ReadQueue
from tided.experts.source import ExpertSource

__all__ = ["Depths", "IoScheduler", "Land", "Priority", "ReadCount", "Ticket"]

Read = Callable[[memoryview], None]
Land = Callable[[Read], None]

log = logging.getLogger("experts")

IDLE_S = 60.0  # a thread without work looks up this often
CLOSE_S = 10.0
JOB_WAIT_S = 60.0
NOTHING = memoryview(b"")


@dataclass(frozen=True)
class ReadCount:
    """Finished reads of one class: `seconds` in flight, `queue_ms` waited before, both summed over the reads."""

    reads: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    queue_ms: float = 0.0


class _Counting:
    """A `ReadCount` in the making."""

    __slots__ = ("_bytes", "_failed", "_queue_s", "_reads", "_seconds")

    def __init__(self) -> None:
        self._reads = self._failed = self._bytes = 0
        self._seconds = self._queue_s = 0.0

    def add(self, ticket: "Ticket", began_s: float, error: object) -> None:
        if error is None:
            self._reads += 1
            self._bytes += ticket.nbytes
        else:
            self._failed += 1
        self._seconds += time.perf_counter() - began_s
        self._queue_s += began_s - ticket.submitted_s

    def now(self) -> ReadCount:
        return ReadCount(self._reads, self._failed, self._bytes, self._seconds, 1e3 * self._queue_s)


class Ticket:
    """A read that was asked for. Any thread may use it. `done`: the record is there, or `error` says why not; nothing
    writes to the memory any more."""

    __slots__ = ("_entry", "_out", "_owner", "_waiter", "done", "error", "expert", "layer", "nbytes", "submitted_s")

    def __init__(self, owner: "IoScheduler", layer: int, expert: int, out: "memoryview | Land") -> None:
        self.layer, self.expert = layer, expert
        self.done, self.nbytes = False, 0
        self.error: BaseException | None = None
        self.submitted_s = time.perf_counter()
        self._owner, self._out = owner, out
        self._entry: Entry[Ticket] | None = None
        self._waiter: threading.Event | None = None  # few are waited for

    def wait(self, timeout_s: float) -> None:
        """Until the record is there; from now on the read is urgent. Raises its error; PairError after the timeout,
        when the read may still be writing."""
        if not self.done:
            self._owner._promote(self)
        if not self._owner._ended(self, timeout_s):
            raise PairError(
                f"expert {self.expert} of layer {self.layer} was not read within {timeout_s:g} s",
                hint="check the disk (dmesg)",
            )
        if self.error is not None:
            raise self.error

    def cancel(self) -> bool:
        """Whether the read is off: it was queued, and will never touch the memory. One that has started goes on."""
        return self._owner._cancel(self)


class IoScheduler:
    """Reads of `source`, at boot as deep as `depths.deep`. Begins in mode "boot"."""

    def __init__(self, source: ExpertSource, depths: Depths) -> None:
        self._source = source
        self._queue: ReadQueue[Ticket] = ReadQueue(depths)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._counts = [_Counting() for _ in Priority]
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"expert-reader-{i}", daemon=True) for i in range(depths.threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depths(self) -> Depths:
        return self._queue.depths

    @property
    def counts(self) -> dict[Priority, ReadCount]:
        """By the class that a read was submitted as."""
        with self._lock:
            return {priority: self._counts[priority].now() for priority in Priority}

    @property
    def queued(self) -> dict[Priority, int]:
        with self._lock:
            return {priority: self._queue.limit - self._queue.room(priority) for priority in Priority}

    def room(self, priority: Priority) -> int:
        """Reads of this class that `submit` takes now."""
        with self._lock:
            return self._queue.room(priority)

    def submit(self, priority: Priority, layer: int, expert: int, out: "memoryview | Land") -> Ticket:
        """Raises PairError when the class's queue is full or the scheduler is closed."""
        ticket = Ticket(self, layer, expert, out)
        with self._lock:
            if self._closed:
                raise PairError("expert reads are over: the scheduler is closed")
            ticket._entry = self._queue.push(ticket, priority)
            if self._queue.startable:
                self._changed.notify()
        return ticket

    def run(self, job: Callable[[], None], patience_s: float) -> None:
        """Other work on the same disk, in its turn: on a reader's thread, behind every read of an expert. What has
        waited for `patience_s` becomes urgent, so nobody starves. The job is a piece of some milliseconds, as what is
        asked for meanwhile waits for it. Raises what it raises, PairError when it never had its turn."""
        ticket = self.submit(Priority.PREFIX, -1, -1, lambda read: job())
        if not self._ended(ticket, patience_s):
            self._promote(ticket)
        while not self._ended(ticket, JOB_WAIT_S):
            if ticket.cancel():
                break
            # It runs, and its memory and file are in use: there is nothing to do but to wait and to say so.
            log.warning("a piece of a cache's file takes longer than %g s; check the disk (dmesg)", JOB_WAIT_S)
        if ticket.error is not None:
            raise ticket.error

    def set_mode(self, mode: Mode) -> None:
        with self._lock:
            self._queue.mode = mode
            self._changed.notify_all()

    def close(self) -> None:
        """Queued reads end with an error; those in flight are waited for. Raises PairError when one hangs."""
        with self._lock:
            self._closed = True
            for entry in self._queue.clear():
                self._end(entry.item, PairError("expert reads are over: the scheduler is closed"))
            self._changed.notify_all()
        deadline_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise PairError(f"a read of an expert hangs for {CLOSE_S:g} s", hint="check the disk (dmesg)")

    def _ended(self, ticket: Ticket, timeout_s: float) -> bool:
        """Whether it ends within that time."""
        with self._lock:
            if ticket.done:
                return True
            waiter = ticket._waiter = ticket._waiter or threading.Event()
        return waiter.wait(timeout_s)

    def _promote(self, ticket: Ticket) -> None:
        with self._lock:
            if not ticket.done and ticket._entry is not None:
                self._queue.promote(ticket._entry)
                self._changed.notify_all()

    def _cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            off = ticket._entry is not None and self._queue.cancel(ticket._entry)
            if off:
                self._end(ticket, PairError("the read was cancelled"))
                self._changed.notify_all()
            return off

    def _work(self) -> None:
        entry, error, began_s = self._next(), None, 0.0
        while entry is not None:
            began_s = time.perf_counter()
            error = self._run(entry.item)
            entry = self._next(entry, error, began_s)

    def _next(
        self, before: Entry[Ticket] | None = None, error: BaseException | None = None, began_s: float = 0.0
    ) -> Entry[Ticket] | None:
        """`before`: the thread's read that is over, with what went wrong. None: the scheduler is closed."""
        with self._lock:
            if before is not None:
                ticket = before.item
                self._queue.finish(before)
                self._counts[before.priority].add(ticket, began_s, error)
                self._end(ticket, error)
            while not self._closed:
                if (entry := self._queue.pop()) is not None:
                    if self._queue.startable:  # each wakes the next: nobody wakes to find nothing
                        self._changed.notify()
                    return entry
                self._changed.wait(IDLE_S)
        return None

    def _run(self, ticket: Ticket) -> BaseException | None:
        """What went wrong: an error belongs to who waits, not to the thread."""
        out = ticket._out

        def read(memory: memoryview) -> None:
            self._source.read(ticket.layer, ticket.expert, memory)
            ticket.nbytes = memory.nbytes

        try:
            if isinstance(out, memoryview):
                read(out)
            else:
                out(read)
        except BaseException as error:
            return error
        return None

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        """The lock is held."""
        ticket.error, ticket._out = error, NOTHING  # the memory is the caller's again
        ticket.done = True
        if ticket._waiter is not None:
            ticket._waiter.set()
