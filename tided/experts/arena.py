"""The expert memory of a rank: one allocation, cut into slots of one record, and who lies where.

slots [0, residents + spare)    a resident's record, or free; swaps land in the free ones, so a resident may be anywhere
slot  null (the last)           all zeros, never given away: what a kernel may read for a pair that has no slot
"""

import mmap
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.record import ExpertRecord
from tided.errors import PairError

Pair = tuple[int, int]  # (layer, expert); layers with routed experts count from 0


class Arena:
    """`data` [residents + spare + 1, record.slot_bytes] uint8. A slot is free, taken (being filled), or a pair's."""

    def __init__(self, record: ExpertRecord, residents: int, spare: int, device: torch.device) -> None:
        if residents < 1 or spare < 1:
            raise ValueError(f"an arena of {residents} residents and {spare} spare slots")
        self.record, self.residents, self.spare = record, residents, spare
        self.null = residents + spare
        self.data: Tensor = _zeros(self.null + 1, record.slot_bytes, device)
        self._slot_of: dict[Pair, int] = {}
        self._pair_in: list[Pair | None] = [None] * self.null
        self._taken: set[int] = set()
        self._free = list(range(self.null - 1, -1, -1))  # a stack: the lowest slot first, the same on every rank
        self._staging = _Staging()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def pairs(self) -> list[Pair]:
        """Those that lie in the arena, sorted."""
        return sorted(self._slot_of)

    @property
    def directory(self) -> Mapping[Pair, int]:
        """pair -> slot, for reading only."""
        return MappingProxyType(self._slot_of)

    def slot_of(self, pair: Pair) -> int | None:
        return self._slot_of.get(pair)

    def pair_in(self, slot: int) -> Pair | None:
        return self._pair_in[slot]

    def take(self) -> int:
        """A free slot to read into; `hold` makes it a pair's."""
        if not self._free:
            raise PairError("no free expert slot is left", hint="raise `spare_slots` of the [experts] section")
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def hold(self, slot: int, pair: Pair) -> None:
        """The taken slot now holds the pair's record."""
        if slot not in self._taken or pair in self._slot_of:
            raise PairError(f"expert slot {slot} cannot hold {pair}: not taken, or the pair has a slot already")
        self._taken.remove(slot)
        self._slot_of[pair] = slot
        self._pair_in[slot] = pair

    def drop(self, pair: Pair) -> None:
        """The pair's slot is free again. Nothing may read it any more: withdraw the pair from the tables first."""
        slot = self._slot_of.pop(pair, None)
        if slot is None:
            raise PairError(f"{pair} has no expert slot")
        self._pair_in[slot] = None
        self._free.append(slot)

    def load(self, slot: int, read: Callable[[memoryview], None]) -> None:
        """Fills a taken slot: `read` writes a record into the slot itself on CPU, into pinned memory elsewhere."""
        if slot not in self._taken:
            raise PairError(f"expert slot {slot} was not taken")
        if self.data.device.type == "cpu":
            read(self.data[slot].numpy().data)
            return
        staging = self._staging.tensor(self.record.slot_bytes)
        read(staging.numpy().data)
        self.data[slot].copy_(staging)

    def check(self) -> None:
        """Raises PairError unless every slot is in exactly one state, both directions of the directory agree and the
        null slot is still zero."""
        held = {slot: pair for slot, pair in enumerate(self._pair_in) if pair is not None}
        if {pair: slot for slot, pair in held.items()} != self._slot_of or len(held) != len(self._slot_of):
            raise PairError("the two directions of the expert directory differ")
        if sorted([*held, *self._taken, *self._free]) != list(range(self.null)):
            raise PairError("an expert slot is in two states or in none")
        if bool(self.data[self.null].any()):
            raise PairError("the null expert slot was written to")


class _Staging(threading.local):
    """The calling thread's pinned memory for one record."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None

    def tensor(self, nbytes: int) -> Tensor:
        if self._tensor is None:
            self._tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._tensor


def _zeros(slots: int, slot_bytes: int, device: torch.device) -> Tensor:
    """[slots, slot_bytes] uint8. On CPU an anonymous map: page-aligned, zero, and real memory only once written."""
    if device.type != "cpu":
        return torch.zeros((slots, slot_bytes), dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, slots * slot_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(slots, slot_bytes)
