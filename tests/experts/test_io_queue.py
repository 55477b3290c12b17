"""Which read comes next, and what a read that is waited for costs on a disk that shares its bandwidth. No threads, no
clock: the disk is simulated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tided.errors import PairError
from tided.experts.read_queue import Depths, Priority, ReadQueue

SYNC, ASYNC, SWAP, PREFIX = Priority
DEPTHS = Depths(deep=8, background=1)


def serving(depths=DEPTHS, limit=1024) -> ReadQueue[str]:
    queue = ReadQueue(depths, limit)
    queue.mode = "serve"
    return queue


class Disk:
    """All reads in flight share one bandwidth: n of them take n times as long, as one NVMe was measured to do."""

    def __init__(self, queue):
        self.queue, self.now, self.left, self.ended = queue, 0.0, {}, {}

    def start(self):
        while (entry := self.queue.pop()) is not None:
            self.left[entry] = 1.0

    def run(self, until):
        """Until this moment, or as long as there is anything to read."""
        self.start()
        while self.left and self.now < until:
            n = len(self.left)
            step = min(min(self.left.values()) * n, until - self.now)
            self.now += step
            for entry in list(self.left):
                self.left[entry] -= step / n
                if self.left[entry] < 1e-9:
                    del self.left[entry]
                    self.queue.finish(entry)
                    self.ended[entry.item] = self.now
            self.start()
        self.now = max(self.now, until if until < float("inf") else self.now)


def latency_of_a_sync_read(depths, arrives, candidates=64, awaited_as=SYNC):
    queue = serving(depths)
    for n in range(candidates):
        queue.push(f"async {n}", ASYNC)
    disk = Disk(queue)
    disk.run(arrives)
    entry = queue.push("sync", awaited_as)
    if awaited_as is not SYNC:
        queue.promote(entry)
    disk.run(float("inf"))
    assert len(disk.ended) == candidates + 1, "everything is read in the end"
    return disk.ended["sync"] - arrives


@pytest.mark.parametrize("awaited_as", [SYNC, ASYNC, PREFIX])
@pytest.mark.parametrize("arrives", [0.0, 0.01, 0.5, 0.99, 3.3, 20.7])
def test_a_flood_of_64_candidates_at_most_doubles_the_wait_for_a_read(arrives, awaited_as):
    alone = latency_of_a_sync_read(DEPTHS, arrives, candidates=0)
    assert alone == pytest.approx(1)
    assert latency_of_a_sync_read(DEPTHS, arrives, awaited_as=awaited_as) <= 2 * alone + 1e-6


def test_the_simulated_flood_hurts_without_the_limit():
    assert latency_of_a_sync_read(Depths(8, 8), 0.5) > 8
    queue = serving()
    queue.mode = "boot"
    for n in range(64):
        queue.push(f"async {n}", ASYNC)
    disk = Disk(queue)
    disk.run(0.5)
    queue.push("sync", SYNC)
    disk.run(float("inf"))
    assert disk.ended["sync"] - 0.5 > 8


def test_urgent_reads_of_a_layer_go_together_and_nothing_else_starts_beside_them():
    queue = serving()
    for n in range(4):
        queue.push(f"async {n}", ASYNC)
    first = queue.pop()
    assert (first.item, queue.pop()) == ("async 0", None)
    for n in range(3):
        queue.push(f"sync {n}", SYNC)
    urgent = [queue.pop() for _ in range(3)]
    assert [entry.item for entry in urgent] == ["sync 0", "sync 1", "sync 2"]
    queue.finish(first)
    assert queue.pop() is None
    for entry in urgent:
        assert queue.pop() is None
        queue.finish(entry)
    assert queue.pop().item == "async 1"


def test_a_background_read_that_somebody_waits_for_holds_back_the_others():
    queue = serving(Depths(8, 2))
    entries = [queue.push(f"async {n}", ASYNC) for n in range(4)]
    assert [queue.pop(), queue.pop(), queue.pop()] == [entries[0], entries[1], None]
    queue.promote(entries[1])
    queue.finish(entries[0])
    assert queue.pop() is None
    queue.finish(entries[1])
    assert queue.pop() is entries[2]


def test_classes_are_strict_and_each_is_first_come_first_served():
    queue = serving(Depths(1, 1))
    for n in range(2):
        for priority in reversed(Priority):
            queue.push(f"{priority.name} {n}", priority)
    order = []
    while (entry := queue.pop()) is not None:
        order.append(entry.item)
        queue.finish(entry)
    assert order == [f"{priority.name} {n}" for priority in Priority for n in range(2)]


def test_a_full_class_refuses_and_the_others_do_not():
    queue = serving(limit=2)
    queue.push("a", ASYNC), queue.push("b", ASYNC)
    assert (queue.room(ASYNC), queue.room(SYNC)) == (0, 2)
    with pytest.raises(PairError, match="2 reads of class ASYNC_HOT are queued already"):
        queue.push("c", ASYNC)
    queue.push("d", SYNC)


def test_what_is_cancelled_never_starts_and_what_has_started_is_not_cancelled():
    queue = serving()
    a, b = queue.push("a", ASYNC), queue.push("b", ASYNC)
    assert queue.pop() is a
    assert not queue.cancel(a)
    assert queue.cancel(b)
    assert not queue.cancel(b)
    queue.finish(a)
    assert queue.pop() is None


def test_boot_is_deep_for_every_class():
    queue = ReadQueue(Depths(3, 1))
    for n in range(5):
        queue.push(f"{n}", SWAP)
    assert [entry and entry.item for entry in (queue.pop() for _ in range(4))] == ["0", "1", "2", None]


def test_depths_that_let_nothing_through_are_refused():
    for deep, background in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="lets nothing be read"):
            Depths(deep, background)
    assert Depths(1, 1).threads == 2


@given(st.lists(st.sampled_from(["push", "pop", "finish", "promote", "cancel"]), max_size=80), st.data())
def test_nothing_is_lost_or_read_twice_whatever_is_asked(actions, data):
    queue, waiting, running, ended = serving(Depths(3, 2)), [], [], 0
    for number, action in enumerate(actions):
        if action == "push":
            waiting.append(queue.push(str(number), data.draw(st.sampled_from(Priority))))
        elif action == "pop" and (entry := queue.pop()) is not None:
            waiting.remove(entry)
            running.append(entry)
        elif action == "finish" and running:
            queue.finish(running.pop(data.draw(st.integers(0, len(running) - 1))))
            ended += 1
        elif action == "promote" and waiting + running:
            queue.promote(data.draw(st.sampled_from(waiting + running)))
        elif action == "cancel" and waiting:
            assert queue.cancel(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
        assert (queue.queued, queue.in_flight) == (len(waiting), len(running))
    for entry in running:
        queue.finish(entry)
    running = len(waiting)
    while (entry := queue.pop()) is not None:
        queue.finish(entry)
        running -= 1
    assert running == queue.queued == queue.in_flight == 0
