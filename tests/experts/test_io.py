"""The threads of the I/O scheduler: every read is made once, its error reaches who waits, nothing hangs."""

import threading
import time
from collections import Counter

import pytest

from tided.errors import DataError, PairError
from tided.experts import io
from tided.experts.io import Depths, IoScheduler, Priority

BYTES = 64


class Gate:
    """A source whose reads wait until they are let go; it counts them."""

    def __init__(self, opened: bool = False) -> None:
        self.started: list[tuple[int, int]] = []
        self.most, self._running = 0, 0
        self._let: Counter[tuple[int, int]] = Counter()
        self._opened, self.fails = opened, {}
        self._changed = threading.Condition()

    def read(self, layer: int, expert: int, out: memoryview) -> None:
        with self._changed:
            self.started.append((layer, expert))
            self._running += 1
            self.most = max(self.most, self._running)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._opened or self._let[layer, expert], 30)
            self._running -= 1
        if (layer, expert) in self.fails:
            raise self.fails[layer, expert]
        out[:] = bytes([layer, expert]) * (len(out) // 2)

    def let(self, layer: int, expert: int) -> None:
        with self._changed:
            self._let[layer, expert] += 1
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._opened = True
            self._changed.notify_all()

    def wait_started(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.started) >= count, 30)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def scheduler(gate):
    made = IoScheduler(gate, Depths(deep=4, background=1))
    made.set_mode("serve")
    yield made
    gate.open()
    made.close()


def room() -> memoryview:
    return memoryview(bytearray(BYTES))


def test_a_read_fills_the_callers_memory(scheduler, gate):
    gate.open()
    out = room()
    ticket = scheduler.submit(Priority.SYNC_HOT, 3, 7, out)
    ticket.wait(30)
    assert ticket.done
    assert ticket.error is None
    assert bytes(out) == bytes([3, 7]) * 32


def test_a_landing_gets_the_read_and_runs_in_the_readers_thread(scheduler, gate):
    gate.open()
    out, threads = room(), []

    def land(read):
        staging = room()
        read(staging)
        out[:] = staging
        threads.append(threading.current_thread().name)

    scheduler.submit(Priority.SWAP, 1, 2, land).wait(30)
    assert bytes(out) == bytes([1, 2]) * 32
    assert threads[0].startswith("expert-reader")
    assert scheduler.counts[Priority.SWAP].bytes == BYTES


def test_a_sync_read_among_64_candidates_starts_at_once_and_next_to_one_of_them(scheduler, gate):
    candidates = [scheduler.submit(Priority.ASYNC_HOT, 0, n, room()) for n in range(64)]
    gate.wait_started(1)
    urgent = scheduler.submit(Priority.SYNC_HOT, 1, 0, room())
    gate.wait_started(2)
    assert gate.started == [(0, 0), (1, 0)]
    gate.let(1, 0)
    urgent.wait(30)
    assert not any(ticket.done for ticket in candidates)
    gate.open()
    for ticket in candidates:
        ticket.wait(30)
    assert len(gate.started) == len(set(gate.started)) == 65


def test_what_is_waited_for_overtakes_what_is_not(scheduler, gate):
    tickets = [scheduler.submit(Priority.PREFIX, 0, n, room()) for n in range(8)]
    gate.wait_started(1)
    waiter = threading.Thread(target=tickets[7].wait, args=(30,))
    waiter.start()
    gate.wait_started(2)  # at once, beside the one in flight
    assert gate.started == [(0, 0), (0, 7)]
    gate.open()
    waiter.join(30)
    for ticket in tickets:
        ticket.wait(30)


def test_an_error_reaches_who_waits_and_nobody_else(scheduler, gate):
    gate.fails[0, 1] = DataError("cannot be read: Input/output error", where="x.safetensors:4096")
    gate.open()
    good, bad = (scheduler.submit(Priority.SYNC_HOT, 0, n, room()) for n in (0, 1))
    good.wait(30)
    with pytest.raises(DataError, match=r"x\.safetensors:4096"):
        bad.wait(30)
    assert bad.done
    assert isinstance(bad.error, DataError)
    scheduler.submit(Priority.SYNC_HOT, 0, 2, room()).wait(30)
    counts = scheduler.counts[Priority.SYNC_HOT]
    assert (counts.reads, counts.failed, counts.bytes) == (2, 1, 2 * BYTES)


def test_a_bug_in_a_source_does_not_end_the_threads(scheduler, gate):
    gate.open()
    for n in range(8):
        gate.fails[0, n] = ZeroDivisionError("a bug")
    for n in range(8):
        with pytest.raises(ZeroDivisionError):
            scheduler.submit(Priority.SYNC_HOT, 0, n, room()).wait(30)
    scheduler.submit(Priority.SYNC_HOT, 1, 0, room()).wait(30)


def test_a_read_that_hangs_is_told_after_the_timeout(scheduler, gate):
    ticket = scheduler.submit(Priority.SYNC_HOT, 2, 5, room())
    gate.wait_started(1)
    with pytest.raises(PairError, match=r"expert 5 of layer 2 was not read within 0\.01 s"):
        ticket.wait(0.01)
    assert not ticket.done


def test_a_cancelled_read_never_touches_the_memory(scheduler, gate):
    out = room()
    running = scheduler.submit(Priority.ASYNC_HOT, 0, 0, room())
    gate.wait_started(1)
    queued = scheduler.submit(Priority.ASYNC_HOT, 9, 9, out)
    assert queued.cancel()
    assert not running.cancel()
    assert queued.done
    with pytest.raises(PairError, match="cancelled"):
        queued.wait(30)
    gate.open()
    running.wait(30)
    assert running.error is None
    assert gate.started == [(0, 0)]
    assert bytes(out) == bytes(BYTES)
    assert not running.cancel()


def test_modes_change_how_many_background_reads_are_in_flight(scheduler, gate):
    tickets = [scheduler.submit(Priority.SWAP, 0, n, room()) for n in range(12)]
    gate.wait_started(1)
    assert gate.most == 1
    scheduler.set_mode("boot")
    gate.wait_started(4)
    gate.open()
    for ticket in tickets:
        ticket.wait(30)
    assert gate.most == 4


def test_background_stays_at_one_through_a_whole_queue(gate):
    scheduler = IoScheduler(gate, Depths(deep=4, background=1))
    scheduler.set_mode("serve")
    gate.open()
    tickets = [scheduler.submit(Priority.ASYNC_HOT, 0, n, room()) for n in range(100)]
    deadline = time.monotonic() + 30
    while not all(ticket.done for ticket in tickets) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert all(ticket.done for ticket in tickets)
    assert gate.most == 1
    scheduler.close()


def test_all_that_may_start_after_an_urgent_read_starts_at_once(gate):
    scheduler = IoScheduler(gate, Depths(deep=4, background=3))
    scheduler.set_mode("serve")
    scheduler.submit(Priority.SYNC_HOT, 1, 0, room())
    gate.wait_started(1)
    for n in range(3):
        scheduler.submit(Priority.ASYNC_HOT, 0, n, room())
    gate.let(1, 0)
    gate.wait_started(4)
    gate.open()
    scheduler.close()


def test_counters_tell_the_class_that_was_asked_for(scheduler, gate):
    gate.open()
    for priority in (Priority.ASYNC_HOT, Priority.SWAP, Priority.SWAP):
        scheduler.submit(priority, 0, 0, room()).wait(30)
    counts = scheduler.counts
    assert {p: (c.reads, c.bytes) for p, c in counts.items() if c.reads} == {
        Priority.ASYNC_HOT: (1, BYTES),
        Priority.SWAP: (2, 2 * BYTES),
    }
    assert counts[Priority.SWAP].seconds > 0
    assert counts[Priority.SWAP].queue_ms > 0


def test_a_close_ends_what_waits_and_the_threads(gate):
    scheduler = IoScheduler(gate, Depths(2, 1))
    tickets = [scheduler.submit(Priority.SWAP, 0, n, room()) for n in range(5)]
    gate.wait_started(2)
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    with pytest.raises(PairError, match="closed"):
        tickets[4].wait(30)
    with pytest.raises(PairError, match="closed"):
        scheduler.submit(Priority.SWAP, 0, 9, room())
    gate.open()
    closing.join(30)
    assert not closing.is_alive()
    tickets[0].wait(30)
    assert not any(thread.is_alive() for thread in scheduler._threads)


def test_a_close_with_a_hanging_read_says_so(gate, monkeypatch):
    monkeypatch.setattr("tided.experts.io.CLOSE_S", 0.01)
    scheduler = IoScheduler(gate, Depths(1, 1))
    scheduler.submit(Priority.SYNC_HOT, 0, 0, room())
    gate.wait_started(1)
    with pytest.raises(PairError, match="hangs"):
        scheduler.close()
    gate.open()
    scheduler.close()


def test_a_full_class_is_refused_with_its_room(gate):
    scheduler = IoScheduler(gate, Depths(1, 1))
    limit = scheduler.room(Priority.ASYNC_HOT)
    for n in range(limit + 1):
        scheduler.submit(Priority.ASYNC_HOT, 0, n, room())
        if n == 0:
            gate.wait_started(1)
    assert scheduler.room(Priority.ASYNC_HOT) == 0
    assert scheduler.queued[Priority.ASYNC_HOT] == limit
    with pytest.raises(PairError, match="ASYNC_HOT"):
        scheduler.submit(Priority.ASYNC_HOT, 0, 0, room())
    scheduler.submit(Priority.SYNC_HOT, 1, 1, room())
    gate.open()
    scheduler.close()


# Files of the caches


class Work:
    """A piece of a file on a thread that waits for its turn."""

    def __init__(self, scheduler, patience_s: float, error: Exception | None = None) -> None:
        self.began, self.may_end, self.failed = threading.Event(), threading.Event(), None
        self._error = error
        self._thread = threading.Thread(target=self._run, args=(scheduler, patience_s), daemon=True)
        self._thread.start()

    def _run(self, scheduler, patience_s):
        try:
            scheduler.run(self._job, patience_s)
        except Exception as error:
            self.failed = error

    def _job(self):
        self.began.set()
        assert self.may_end.wait(30)
        if self._error:
            raise self._error

    def end(self):
        self.may_end.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def queued(scheduler, priority, count=1):
    deadline_s = time.monotonic() + 30
    while scheduler.queued[priority] != count:
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)


@pytest.mark.parametrize("priority", [Priority.SYNC_HOT, Priority.ASYNC_HOT, Priority.SWAP])
def test_a_cache_waits_for_every_read_of_an_expert_and_no_read_for_more_than_one_piece_of_it(scheduler, gate, priority):
    first = scheduler.submit(priority, 0, 0, room())
    gate.wait_started(1)
    work = Work(scheduler, 30)
    queued(scheduler, Priority.PREFIX)
    second = scheduler.submit(Priority.SWAP, 0, 1, room())  # came later, and goes first
    gate.let(0, 0)
    gate.wait_started(2)
    assert not work.began.is_set()
    gate.let(0, 1)
    assert work.began.wait(30)
    after = Work(scheduler, 30)  # the next piece
    queued(scheduler, Priority.PREFIX)
    third = scheduler.submit(priority, 0, 2, room())
    work.end()
    gate.wait_started(3)
    assert not after.began.is_set()
    gate.open()
    after.end()
    for ticket in (first, second, third):
        ticket.wait(30)
    assert work.failed is after.failed is None
    assert scheduler.counts[Priority.PREFIX].reads == 2


def test_a_cache_that_has_waited_long_enough_is_served_whatever_else_is_asked_for(scheduler, gate):
    tickets = [scheduler.submit(Priority.SYNC_HOT, 0, n, room()) for n in range(2)]
    gate.wait_started(2)
    work = Work(scheduler, 0.01)
    assert work.began.wait(30)
    work.end()
    assert not any(ticket.done for ticket in tickets)


def test_what_goes_wrong_with_a_caches_file_is_its_own(scheduler, gate):
    gate.open()
    work = Work(scheduler, 30, OSError("no space left"))
    work.end()
    assert str(work.failed) == "no space left"
    scheduler.submit(Priority.SWAP, 0, 0, room()).wait(30)


def test_a_cache_that_never_has_its_turn_is_told(gate, monkeypatch):
    monkeypatch.setattr(io, "JOB_WAIT_S", 0.01)
    made = IoScheduler(gate, Depths(deep=1, background=1))
    made.set_mode("serve")
    ticket = made.submit(Priority.SYNC_HOT, 0, 0, room())
    gate.wait_started(1)
    with pytest.raises(PairError, match="cancelled"):
        made.run(lambda: None, 0.001)
    gate.open()
    ticket.wait(30)
    made.close()
    with pytest.raises(PairError, match="closed"):
        made.run(lambda: None, 0.001)
