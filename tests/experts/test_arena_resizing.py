"""Whatever is taken, held, dropped and resized in whatever order: a pair's bytes are its own, and books agree."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kernels.record import PAGE_BYTES
from tided.errors import PairError
from tided.experts.arena import Arena
from tided.experts.slot_classes import SlotClass

SIZES = (PAGE_BYTES, 3 * PAGE_BYTES)
KINDS = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1]], dtype=np.int64)
MOST = [int((kind == KINDS).sum()) for kind in (0, 1)]
SPARE, RING = 1, 1


class Resizing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        classes = [SlotClass(size, 2, SPARE, RING, most) for size, most in zip(SIZES, MOST, strict=True)]
        self.arena = Arena.of_sizes(classes, KINDS, torch.device("cpu"), urgent=1)
        self.bytes: dict[tuple[int, int], int] = {}
        self.taken: list[int] = []
        self.serial = 0

    def held(self, kind: int) -> int:
        return sum(KINDS[pair] == kind for pair in self.bytes)

    @rule(pair=st.tuples(st.integers(0, 1), st.integers(0, 5)))
    def hold(self, pair: tuple[int, int]) -> None:
        kind = int(KINDS[pair])
        if pair in self.bytes or not self.arena._free[kind]:
            return
        slot = self.arena.take(kind)
        self.serial = self.serial % 250 + 1
        self.arena.load(slot, lambda out: out.__setitem__(slice(None), bytes([self.serial]) * SIZES[kind]))
        self.arena.hold({pair: slot})
        self.bytes[pair] = self.serial

    @rule(at=st.integers(0, 11))
    def drop(self, at: int) -> None:
        if self.bytes:
            pair = sorted(self.bytes)[at % len(self.bytes)]
            self.arena.drop(pair)
            del self.bytes[pair]

    @rule(kind=st.integers(0, 1))
    def take(self, kind: int) -> None:
        if self.arena._free[kind]:
            self.taken.append(self.arena.take(kind))

    @precondition(lambda self: self.taken)
    @rule()
    def release(self) -> None:
        self.arena.release(self.taken.pop())

    @rule(first=st.integers(0, 7), second=st.integers(0, 7))
    def resize(self, first: int, second: int) -> None:
        wanted, before = [first, second], {pair: self.arena.slot_of(pair) for pair in self.bytes}
        books = [(one.residents, list(free)) for one, free in zip(self.arena.classes, self.arena._free, strict=True)]
        taken = [sum(self.arena._kind_of_slot[slot] == kind for slot in self.taken) for kind in (0, 1)]
        room = all(self.held(k) + taken[k] <= wanted[k] + SPARE + RING and wanted[k] <= MOST[k] for k in (0, 1))
        behind = any(
            slot in self.arena._numbers[k][wanted[k] + SPARE + RING : self.arena.classes[k].slots]
            for slot in self.taken
            for k in (0, 1)
        )
        if room and not behind:
            moved = self.arena.resize(wanted)
            assert moved == {p: self.arena.slot_of(p) for p, slot in before.items() if slot != self.arena.slot_of(p)}
            assert [one.residents for one in self.arena.classes] == wanted
            return
        with pytest.raises(PairError):
            self.arena.resize(wanted)
        after = [(one.residents, list(free)) for one, free in zip(self.arena.classes, self.arena._free, strict=True)]
        assert after == books
        assert before == {pair: self.arena.slot_of(pair) for pair in self.bytes}

    @invariant()
    def agrees(self) -> None:
        self.arena.check()
        used = sum(size * one.slots for size, one in zip(SIZES, self.arena.classes, strict=True))
        assert self.arena.held_bytes == used + 2 * SIZES[1]
        for pair, value in self.bytes.items():
            assert self.arena._room(self.arena.slot_of(pair)).eq(value).all()
            assert self.arena.slot_of(pair) in self.arena._numbers[KINDS[pair]][: self.arena.classes[KINDS[pair]].slots]


TestResizing = Resizing.TestCase
TestResizing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
