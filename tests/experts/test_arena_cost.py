"""What a change of a slot costs does not grow with the arena."""

import sys

import torch

from kernels.record import ExpertRecord
from tided.experts.arena import Arena

RECORD = ExpertRecord(hidden=32, intermediate=32, ranks=1)
ROUNDS = 50


def lines_of_a_swap(slots: int) -> int:
    """Lines of Python that ROUNDS exchanges take in an arena of so many residents."""
    arena = Arena(RECORD, slots, 1, torch.device("cpu"))
    for expert in range(slots):
        arena.hold(arena.take(), (0, expert))
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for expert in range(ROUNDS):
            slot = arena.take()
            arena.hold(slot, (1, expert))
            assert arena.slot_of((1, expert)) == slot
            arena.drop((0, expert))
    finally:
        sys.settrace(before)
    return count


def test_a_slot_is_found_in_as_many_steps_in_a_large_arena_as_in_a_small_one():
    assert lines_of_a_swap(4000) == lines_of_a_swap(ROUNDS) > 0
