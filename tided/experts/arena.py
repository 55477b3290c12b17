"""The expert memory of a rank: one range of addresses, cut into slots of one record, and who lies where.

slots [0, null)      residents, entries of the hot ring, and free ones that reads land in: a pair may lie in any of
                     them, so a role changes without a byte being moved
slots in `urgent`    of reads that a layer waits for (`tided.experts.fetch`), which alone says who lies there
slot  null (last)    all zeros, never given away: what a kernel may read for a pair that has no slot

A slot's number is that of its first unit. Where all records are of one size, a unit is a slot. Else it is a page, and
every size has slots of its own: a pair takes one of its size, so nothing is lost to padding and nothing ever moves.

How many residents there are places for may change while it serves (`resize`), where there are addresses for more than
are used. What is used of a class are its first slots. When it gets fewer, pairs behind the last are copied to free ones
before it, and the pages behind go back to the system; addresses stay, so whoever holds them (captured graphs do) finds
the same slots there as ever.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.record import PAGE_BYTES, ExpertRecord
from tided.errors import PairError
from tided.experts.landing import Fences, Staging
from tided.experts.placement import Memory, slots_on
from tided.experts.slot_classes import Places, Sizes, SlotClass, numbered

log = logging.getLogger("experts")

Pair = tuple[int, int]  # (layer, expert); layers with routed experts count from 0


class Arena:
    """`data` [units, unit bytes]: the slots of every class, then `urgent` ones and the null slot, of the largest size.
    A slot of the pool is free, taken (being filled), or a pair's."""

    def __init__(
        self,
        record: ExpertRecord,
        residents: int,
        spare: int,
        device: torch.device,
        ring: int = 0,
        urgent: int = 0,
        most: int = 0,
    ) -> None:
        if residents < 1 or spare < 1:
            raise ValueError(f"an arena of {residents} residents and {spare} spare slots")
        one = SlotClass(record.slot_bytes, residents, spare, ring, most)
        self._lay_out([one], None, record.slot_bytes, device, urgent)

    @classmethod
    def of_sizes(
        cls, classes: Sequence[SlotClass], kind_of: npt.NDArray[np.int64], device: torch.device, urgent: int = 0
    ) -> "Arena":
        """kind_of [layers, experts]: which class a pair's record belongs to. Sizes are whole pages."""
        if not classes or any(one.nbytes % PAGE_BYTES or one.nbytes < 1 for one in classes):
            raise ValueError(f"slots of {[one.nbytes for one in classes]} bytes are not whole pages")
        arena = cls.__new__(cls)
        arena._lay_out(classes, kind_of, PAGE_BYTES, device, urgent)
        return arena

    def _lay_out(
        self,
        classes: Sequence[SlotClass],
        kind_of: npt.NDArray[np.int64] | None,
        unit_bytes: int,
        device: torch.device,
        urgent: int,
    ) -> None:
        self.classes, self._kind_of, self._unit_bytes = tuple(classes), kind_of, unit_bytes
        self._kinds: list[list[int]] | None = None if kind_of is None else kind_of.tolist()
        self._largest_bytes = max(one.nbytes for one in classes)
        self.data: Tensor
        self._host: Tensor | None
        self._memory: Memory | None
        elastic = any(one.most for one in classes)
        refused = self._refused(device, urgent) if elastic else None
        if refused is not None:
            self._let_go()  # or there would be two arenas for a while
            log.warning("the budget of experts cannot change while serving: %s", refused)
        if refused is not None or not elastic:
            self._take_memory(device, urgent, elastic=False)
        # The slot that was freed first is taken first, on every rank alike: a slot rests as long as it can.
        used = zip(self._numbers, self.classes, strict=True)
        self._free = [deque(numbers[: one.slots]) for numbers, one in used]
        self._kind_of_slot = {slot: kind for kind, slots in enumerate(self._free) for slot in slots}
        self._slot_of: dict[Pair, int] = {}
        self._pair_in: dict[int, Pair] = {}
        self._taken: set[int] = set()
        self._fences = Fences(device)
        self._staging = Staging()
        # Of slots that were read into; addresses stay.
        self._rooms: dict[int, Tensor] = {}
        self._places: dict[int, memoryview] = {}

    def _refused(self, device: torch.device, urgent: int) -> str | None:
        """Takes memory of which parts can be given back; why a device refuses a part of what it may allow whole. What
        it raised is gone with this frame, and with it the last that holds what was taken, but for `_let_go`."""
        try:
            self._take_memory(device, urgent, elastic=True)
        except RuntimeError as e:
            return str(e)
        return None

    def _let_go(self) -> None:
        self.data, self._host, self._memory = torch.empty(0, 0, dtype=torch.uint8), None, None

    def _take_memory(self, device: torch.device, urgent: int, elastic: bool) -> None:
        """`elastic`: with addresses for all slots that there may come to be, where these can be had."""
        unit_bytes, step = self._unit_bytes, self._largest_bytes // self._unit_bytes
        behind = (urgent + 1) * step  # urgent slots and the null slot
        used, most = ([one.slots for one in self.classes], [one.most_slots for one in self.classes])
        units, most_units = (self._units(counts) + behind for counts in (used, most))
        slots = slots_on(device, units, unit_bytes, most_units=most_units * elastic)
        self.data, self._host, self.placement, self._memory = slots.data, slots.host, slots.placement, slots.memory
        places = used if self._memory is None else most
        self._numbers = numbered(self.classes, places, unit_bytes)
        pool_units = self._units(places)
        self.urgent = range(pool_units, pool_units + urgent * step, step)
        self.null = pool_units + urgent * step
        self._behind = pool_units * unit_bytes, (pool_units + behind) * unit_bytes
        if self._memory is not None:
            for part in self._parts(used):
                self._memory.use(*part)

    def _parts(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Bytes [begin, end) of so many slots of each class, and of those behind them."""
        return [*(self._bytes(kind, 0, count) for kind, count in enumerate(counts)), self._behind]

    def _units(self, counts: Sequence[int]) -> int:
        """That so many slots of each class have."""
        return sum(count * one.nbytes for count, one in zip(counts, self.classes, strict=True)) // self._unit_bytes

    @property
    def pool(self) -> int:
        return len(self._kind_of_slot)

    @property
    def held_bytes(self) -> int:
        """Of memory that is its own; addresses that are not used are none."""
        return self.bytes_with([one.residents for one in self.classes])

    def bytes_with(self, residents: Sequence[int]) -> int:
        """The same with places for so many residents of each class: memory may be had in larger units than slots."""
        counts = [replace(one, residents=count).slots for one, count in zip(self.classes, residents, strict=True)]
        parts = self._parts(counts)
        return sum(end - begin for begin, end in parts) if self._memory is None else self._memory.held(parts)

    @property
    def places(self) -> Places:
        nbytes, residents = zip(*((one.nbytes, one.residents) for one in self.classes), strict=True)
        by_writing = self._memory is not None and self._memory.by_writing
        return Places(nbytes, residents, self.most_residents, by_writing)

    @property
    def most_residents(self) -> tuple[int, ...] | None:
        """By class, places that there may come to be; None: they cannot change."""
        return None if self._memory is None else tuple(max(one.residents, one.most) for one in self.classes)

    @property
    def slots(self) -> int:
        """Records that it can hold, those of reads before use included."""
        return self.pool + len(self.urgent)

    @property
    def ring(self) -> int:
        return sum(one.ring for one in self.classes)

    @property
    def sizes(self) -> Sizes | None:
        """None: all records are of one size."""
        if self._kind_of is None:
            return None
        nbytes, spare, ring = zip(*((one.nbytes, one.spare, one.ring) for one in self.classes), strict=True)
        return Sizes(self._kind_of, nbytes, spare, ring)

    def kind_of(self, pair: Pair) -> int:
        """Which of `classes` the pair's record belongs to."""
        return 0 if self._kinds is None else self._kinds[pair[0]][pair[1]]

    def kinds_of(self, pairs: Collection[Pair]) -> Mapping[int, int]:
        """How many of the pairs' records belong to each class."""
        return {0: len(pairs)} if self._kinds is None else Counter(map(self.kind_of, pairs))

    @property
    def free(self) -> int:
        return sum(map(len, self._free))

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
        return self._pair_in.get(slot)

    def take(self, kind: int = 0) -> int:
        """A free slot of the class to read into; `hold` makes it a pair's."""
        if not self._free[kind]:
            raise PairError("no free expert slot is left", hint="raise `spare_slots` of the [experts] section")
        slot = self._free[kind].popleft()
        self._taken.add(slot)
        return slot

    def hold(self, slots: Mapping[Pair, int]) -> None:
        """The taken slots now hold the pairs' records. Raises PairError, and changes nothing, for a slot that was not
        taken, is of another size or comes twice, and for a pair that has one already."""
        numbers = set(slots.values())
        if len(numbers) < len(slots) or not self._taken >= numbers or not self._slot_of.keys().isdisjoint(slots):
            raise PairError(f"expert slots cannot hold {dict(slots)}: not taken, or a pair has a slot already")
        if any(self._kind_of_slot[slot] != self.kind_of(pair) for pair, slot in slots.items() if self._kinds):
            raise PairError(f"an expert slot of {dict(slots)} is of another size than its pair")
        self._taken -= numbers
        self._slot_of.update(slots)
        self._pair_in.update(zip(slots.values(), slots, strict=True))

    def release(self, slot: int) -> None:
        """The taken slot is free again: what was read into it is nobody's, and nothing was launched that reads it."""
        if slot not in self._taken:
            raise PairError(f"expert slot {slot} was not taken")
        self._taken.remove(slot)
        self._free[self._kind_of_slot[slot]].append(slot)

    def drop(self, *pairs: Pair) -> None:
        """The pairs' slots are free again. No later step may read them: withdraw the pairs from the tables first."""
        slots = [self._slot_of.pop(pair, None) for pair in pairs]
        gone = [slot for slot in slots if slot is not None]
        if len(gone) < len(pairs):
            raise PairError(f"one of {list(pairs)} has no expert slot")
        for slot in gone:
            del self._pair_in[slot]
            self._free[self._kind_of_slot[slot]].append(slot)
        self.fence(*gone)

    def resize(self, residents: Sequence[int]) -> dict[Pair, int]:
        """Between two steps: by class, how many residents there are places for from now on. What lies behind the last
        slot moves before it; gives the new slots of those. Raises PairError, and changes nothing, where places cannot
        change, where a slot is being read into that is to go, and where more lies in a class than it would hold."""
        most = self.most_residents
        if most is None or self._memory is None:
            raise PairError("the arena is one allocation, whose size stands", hint="experts.resident, and a new start")
        classes = [replace(one, residents=count) for one, count in zip(self.classes, residents, strict=True)]
        held = Counter(self._kind_of_slot[slot] for slot in (*self._pair_in, *self._taken))
        for kind, (one, limit) in enumerate(zip(classes, most, strict=True)):
            if not 0 <= one.residents <= limit or held[kind] > one.slots:
                raise PairError(f"{one.residents} places for residents of {one.nbytes} bytes: {limit} at most, {held}")
            going = set(self._numbers[kind][one.slots : self.classes[kind].slots])
            if going & self._taken:
                raise PairError("a slot that is being read into was to go")
        if self.data.device.type == "cuda":
            torch.cuda.synchronize(self.data.device)  # nothing that runs reads what moves or goes
        moved: dict[Pair, int] = {}
        for kind, one in enumerate(classes):
            before, after = self.classes[kind].slots, one.slots
            if after > before:
                self._memory.use(*self._bytes(kind, before, after))
                self._free[kind].extend(self._numbers[kind][before:after])
                self._kind_of_slot |= dict.fromkeys(self._numbers[kind][before:after], kind)
            elif after < before:
                moved |= self._withdraw(kind, self._numbers[kind][after:before])
                self._memory.give_back(*self._bytes(kind, after, before))
        self.classes = tuple(classes)
        return moved

    def _withdraw(self, kind: int, going: range) -> dict[Pair, int]:
        """These slots are no more. In order, so that every rank moves the same pairs to the same slots."""
        gone = set(going)
        self._free[kind] = deque(slot for slot in self._free[kind] if slot not in gone)
        moved = {}
        for slot in going:
            del self._kind_of_slot[slot]
            self._fences.take(slot)
            pair = self._pair_in.pop(slot, None)
            if pair is not None:
                to = moved[pair] = self._slot_of[pair] = self._free[kind].popleft()
                self._pair_in[to] = pair
                self._copy(kind, slot, to)
        return moved

    def _copy(self, kind: int, slot: int, to: int) -> None:
        nbytes = self.classes[kind].nbytes
        assert self._host is not None, "what can be given back is the system's memory"
        flat = self._host.view(-1)
        source, target = slot * self._unit_bytes, to * self._unit_bytes
        flat[target : target + nbytes] = flat[source : source + nbytes]

    def _bytes(self, kind: int, first: int, last: int) -> tuple[int, int]:
        """Of a class's slots [first, last): where they begin and end."""
        begin = self._numbers[kind].start * self._unit_bytes
        return begin + first * self.classes[kind].nbytes, begin + last * self.classes[kind].nbytes

    def fence(self, *slots: int) -> None:
        """What was launched up to now may still read the slots: the next `load` of each waits. On CPU nothing is."""
        if slots and self.data.is_cuda:
            self._fences.put(slots)

    def load(self, slot: int, read: Callable[[memoryview], None]) -> None:
        """Fills a taken slot or an urgent one: `read` writes a record into the slot itself where reads can fill it
        (`placement`), else into pinned memory. Any thread may call; when it returns, any stream may read the slot."""
        if slot not in self._taken and slot not in self.urgent:
            raise PairError(f"expert slot {slot} was not taken")
        if self._host is not None:
            fence = self._fences.take(slot)
            if fence is not None:
                fence.synchronize()  # what was launched before may read the slot still
            place = self._places.get(slot)
            if place is None:
                place = self._places[slot] = self._room(slot, self._host).numpy().data
            read(place)
            return
        room = self._rooms.get(slot)
        if room is None:
            room = self._rooms[slot] = self._room(slot)
        memory, seen, stream = self._staging.of(room.nbytes, self._largest_bytes, self.data.device)
        read(seen)
        with torch.cuda.stream(stream):
            fence = self._fences.take(slot)
            if fence is not None:
                stream.wait_event(fence)
            room.copy_(memory, non_blocking=True)
        stream.synchronize()

    def _room(self, slot: int, data: Tensor | None = None) -> Tensor:
        """[bytes of the slot's class, of the largest for an urgent one] uint8"""
        kind = self._kind_of_slot.get(slot)
        nbytes = self._largest_bytes if kind is None else self.classes[kind].nbytes
        data = self.data if data is None else data
        return data.view(-1)[slot * self._unit_bytes :][:nbytes]

    def check(self) -> None:
        """Raises PairError unless every slot is in exactly one state, both directions of the directory agree and the
        null slot is still zero."""
        if {pair: slot for slot, pair in self._pair_in.items()} != self._slot_of:
            raise PairError("the two directions of the expert directory differ")
        free = [slot for slots in self._free for slot in slots]
        if sorted([*self._pair_in, *self._taken, *free]) != sorted(self._kind_of_slot):
            raise PairError("an expert slot is in two states or in none")
        if any(self._kind_of_slot[slot] != kind for kind, slots in enumerate(self._free) for slot in slots):
            raise PairError("a free expert slot is among those of another size")
        if any(self._kind_of_slot[slot] != self.kind_of(pair) for slot, pair in self._pair_in.items()):
            raise PairError("an expert lies in a slot of another size")
        if bool(self._room(self.null).any()):
            raise PairError("the null expert slot was written to")
