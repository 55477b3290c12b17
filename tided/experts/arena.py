"""The expert memory of a rank: one allocation, cut into slots of one record, and who lies where.

slots [0, pool)      residents, entries of the hot ring, and free ones that reads land in: a pair may lie in any of
                     them, so a role changes without a byte being moved
slots in `urgent`    of reads that a layer waits for (`tided.experts.fetch`), which alone says who lies there
slot  null (last)    all zeros, never given away: what a kernel may read for a pair that has no slot
"""

import mmap
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.record import ExpertRecord
from tided.errors import PairError

Pair = tuple[int, int]  # (layer, expert); layers with routed experts count from 0


class Arena:
    """`data` [residents + spare + ring + urgent + 1, record.slot_bytes] uint8. A slot of the pool is free, taken (being
    filled), or a pair's."""

    def __init__(
        self, record: ExpertRecord, residents: int, spare: int, device: torch.device, ring: int = 0, urgent: int = 0
    ) -> None:
        if residents < 1 or spare < 1:
            raise ValueError(f"an arena of {residents} residents and {spare} spare slots")
        self.record, self.residents, self.spare, self.ring = record, residents, spare, ring
        self.pool = residents + spare + ring
        self.urgent = range(self.pool, self.pool + urgent)
        self.null = self.pool + urgent
        self.data: Tensor = _zeros(self.null + 1, record.slot_bytes, device)
        self._slot_of: dict[Pair, int] = {}
        self._pair_in: list[Pair | None] = [None] * self.pool
        self._taken: set[int] = set()
        # The slot that was freed first is taken first, on every rank alike: a slot rests as long as it can.
        self._free = deque(range(self.pool))
        self._fences: dict[int, torch.cuda.Event] = {}
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
        slot = self._free.popleft()
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
        """The pair's slot is free again. No later step may read it: withdraw the pair from the tables first."""
        slot = self._slot_of.pop(pair, None)
        if slot is None:
            raise PairError(f"{pair} has no expert slot")
        self._pair_in[slot] = None
        self._free.append(slot)
        self.fence(slot)

    def fence(self, slot: int) -> None:
        """What was launched up to now may still read the slot: the next `load` waits for it. On CPU nothing is."""
        if self.data.device.type == "cuda":
            event = self._fences[slot] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.data.device))

    def load(self, slot: int, read: Callable[[memoryview], None]) -> None:
        """Fills a taken slot or an urgent one: `read` writes a record into the slot itself on CPU, into pinned memory
        elsewhere. Any thread may call; when it returns, any stream may read the slot."""
        if slot not in self._taken and slot not in self.urgent:
            raise PairError(f"expert slot {slot} was not taken")
        if self.data.device.type == "cpu":
            read(self.data[slot].numpy().data)
            return
        staging, stream = self._staging.of(self.record.slot_bytes, self.data.device)
        read(staging.numpy().data)
        with torch.cuda.stream(stream):
            fence = self._fences.pop(slot, None)
            if fence is not None:
                stream.wait_event(fence)
            self.data[slot].copy_(staging, non_blocking=True)
        stream.synchronize()

    def check(self) -> None:
        """Raises PairError unless every slot is in exactly one state, both directions of the directory agree and the
        null slot is still zero."""
        held = {slot: pair for slot, pair in enumerate(self._pair_in) if pair is not None}
        if {pair: slot for slot, pair in held.items()} != self._slot_of or len(held) != len(self._slot_of):
            raise PairError("the two directions of the expert directory differ")
        if sorted([*held, *self._taken, *self._free]) != list(range(self.pool)):
            raise PairError("an expert slot is in two states or in none")
        if bool(self.data[self.null].any()):
            raise PairError("the null expert slot was written to")


class _Staging(threading.local):
    """The calling thread's pinned memory for one record, and the stream that copies it."""

    def __init__(self) -> None:
        self._made: tuple[Tensor, torch.cuda.Stream] | None = None

    def of(self, nbytes: int, device: torch.device) -> tuple[Tensor, torch.cuda.Stream]:
        if self._made is None:
            memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self._made = memory, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._made


def _zeros(slots: int, slot_bytes: int, device: torch.device) -> Tensor:
    """[slots, slot_bytes] uint8. On CPU an anonymous map: page-aligned, zero, and real memory only once written."""
    if device.type != "cpu":
        zeros = torch.zeros((slots, slot_bytes), dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # records come on other streams, and must not be overtaken by the zeros
        return zeros
    memory = mmap.mmap(-1, slots * slot_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(slots, slot_bytes)
