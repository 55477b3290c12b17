"""What a change of a slot costs does not grow with the arena, nor what a read costs with ring and reads under way."""

import gc
import sys
import threading
import time
from collections.abc import Callable

import torch
from expert_fakes import FakeSource, fake_residents, first, quiet

from kernels.record import ExpertRecord
from tided.experts.arena import Arena

RECORD = ExpertRecord(hidden=32, intermediate=32, ranks=1)
ROUNDS = 50


def lines_of_a_swap(slots: int) -> int:
    """Lines of Python that ROUNDS exchanges take in an arena of so many residents."""
    arena = Arena(RECORD, slots, 1, torch.device("cpu"))
    for expert in range(slots):
        arena.hold({(0, expert): arena.take()})

    def swaps() -> None:
        for expert in range(ROUNDS):
            slot = arena.take()
            arena.hold({(1, expert): slot})
            assert arena.slot_of((1, expert)) == slot
            arena.drop((0, expert))

    return lines_of(swaps)


def lines_of_reads(ring: int) -> int:
    """Lines of Python that ROUNDS reads take of the engine's thread where so many entries are in the ring, and as many
    on their way to it."""
    source = FakeSource()
    residents = fake_residents(2, 1000, 1, 2, 1, source, ring=2 * ring + ROUNDS)
    residents.fill(first(2, 1), quiet)
    for expert in range(ring):
        residents.read(expert, (0, 1 + expert), None)
    for expert in range(ring):
        residents._reading[expert].ticket.wait(30)
    residents.landed()
    residents.publish(range(ring))
    before, source.holds = source.reads, threading.Event()
    for expert in range(ring):
        residents.read(expert, (1, 1 + expert), None)

    def reads() -> None:
        for expert in range(ROUNDS):
            residents.read(ring + expert, (0, 900 + expert), None)

    while source.reads == before:  # the first is in flight, and the others wait behind it
        time.sleep(0.0005)
    count = lines_of(reads)
    source.holds.set()
    residents._io.close()
    return count


def lines_of(work: Callable[[], None]) -> int:
    """Of its own: a collection begins whenever enough was allocated since the last, by whomever, and runs callbacks in
    the thread that is counted (those of weak sets, and hypothesis's, of 9 lines, where it was used before)."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


def test_a_slot_is_found_in_as_many_steps_in_a_large_arena_as_in_a_small_one():
    assert lines_of_a_swap(4000) == lines_of_a_swap(ROUNDS) > 0


def test_a_read_begins_in_as_many_steps_beside_a_large_ring_as_beside_a_small_one():
    assert lines_of_reads(200) == lines_of_reads(2) > 0
