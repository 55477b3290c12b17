"""The routable set of a rank: residents and the hot ring beside them, filled at boot, changed as rank 0 says.

    read      a record is read into a free slot, while steps go on; nothing changes that a step can see
    landed    which reads have ended well since the last time, and `failed`: which have not; each rank tells rank 0
    publish   every rank has it: the pair is routable from this step on. A swap's newcomer takes a resident's place,
              whose slot is then free; others join the ring
    promote   a resident and an entry of the ring exchange roles; nothing is read, both stay routable
    give_up   some rank could not read it: every rank frees its slot, and nothing of it was ever routable
    withdraw  an entry of the ring leaves
    adopt     an entry of the ring takes a free place among the residents
    resize    there are places for more residents, which reads that `join` fill, or for fewer: those named leave, and
              the memory behind the last place goes back to the system

All of them but `read`'s own work run between two steps, when nothing that is launched later may read a slot that they
free. Any other failure is final: a rank that skipped a change would route differently from the others, and nobody would
notice.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import numpy as np

from tided.errors import PairError
from tided.experts.arena import Arena, Pair
from tided.experts.first_set import Progress, read_first
from tided.experts.io import IoScheduler, Priority, ReadCount
from tided.experts.mask_hash import indices, keys_of_all, mask_hash
from tided.experts.roles import PairSwap, Roles
from tided.experts.slot_classes import Places, Sizes
from tided.experts.tables import RoutingTables
from tided.experts.under_way import Reading, newly_failed, newly_landed


class Residents:
    """`layers` x `experts` pairs, of which at least `top_k` a layer are always resident. One thread uses it."""

    def __init__(
        self,
        arena: Arena,
        tables: RoutingTables,
        io: IoScheduler,
        layers: int,
        experts: int,
        top_k: int,
    ) -> None:
        self.arena, self.tables, self._io = arena, tables, io
        self.layers, self.experts = layers, experts
        self.generation = 0  # steps that changed who is resident, since the fill
        self.mask_hash = 0  # xor of the routable pairs' keys, kept up to date at no cost
        self._keys = keys_of_all(layers, experts)
        self._roles = Roles(arena, layers, top_k)
        self._reading: dict[int, Reading] = {}
        self._failed = False

    @property
    def pairs(self) -> list[Pair]:
        """The residents, sorted."""
        return self._roles.residents

    @property
    def ring(self) -> list[Pair]:
        """Routable beside the residents, the oldest first."""
        return list(self._roles.ring)

    @property
    def ring_slots(self) -> int:
        return self.arena.ring

    @property
    def sizes(self) -> Sizes | None:
        """How records differ in size; None: they do not."""
        return self.arena.sizes

    @property
    def slots(self) -> int:
        """Of the arena: records that it can hold, those of reads before use included."""
        return self.arena.slots

    @property
    def arena_bytes(self) -> int:
        return self.arena.held_bytes

    def arena_bytes_with(self, places: Sequence[int]) -> int:
        """With places for so many residents of each class of records."""
        return self.arena.bytes_with(places)

    @property
    def places(self) -> Places:
        """Of residents, by class of records."""
        return self.arena.places

    def slot_of(self, pair: Pair) -> int | None:
        """Where a pair that can be routed to lies."""
        return self.arena.slot_of(pair)

    @property
    def count(self) -> int:
        return self._roles.count

    @property
    def bytes_share(self) -> float | None:
        """What places of residents take of the bytes that the records of all experts have; None: all are of one
        size."""
        if self.sizes is None:
            return None
        nbytes = np.array(self.sizes.nbytes, dtype=np.int64)
        held = sum(one.nbytes * one.residents for one in self.arena.classes)
        return held / int(nbytes[self.sizes.of].sum())

    @property
    def by_layer(self) -> tuple[int, ...]:
        """How many residents each layer has."""
        return tuple(self._roles.by_layer)

    @property
    def reads(self) -> Mapping[Priority, ReadCount]:
        """Reads of the rank that ended, by class, whoever asked for them."""
        return self._io.counts

    @property
    def reading(self) -> int:
        """Reads that are not published yet."""
        return len(self._reading)

    def at_once(self) -> AbstractContextManager[None]:
        """What changes in here is seen by what is launched behind it: the device is told once, at its end."""
        return self.tables.at_once()

    def fill(self, pairs: Sequence[Pair], progress: Progress) -> None:
        """Reads and publishes the first resident set. Raises PairError for a set that cannot be, DataError."""
        self._check_alive()
        self._check_range(pairs)
        self._roles.check_first(pairs)
        slots = {pair: self.arena.take(self.arena.kind_of(pair)) for pair in pairs}
        with self._final():
            read_first(self.arena, self._io, slots, progress)
        self.arena.hold(slots)
        self._roles.joined(pairs)
        self._set(slots)

    def read(self, number: int, pair: Pair, out: Pair | None, joins: bool = False) -> None:
        """Begins to read an absent pair, to take the place of the resident `out`, a free one (`joins`), or to join the
        ring. Raises PairError for a pair that is here or on its way, and when its place is not free."""
        self._check_alive()
        self._check_range([pair])
        if number in self._reading:
            raise PairError(f"read {number} of {pair} is under way already")
        self._roles.check_read(pair, out, joins)
        slot = self.arena.take(self.arena.kind_of(pair))
        priority = Priority.SWAP if joins or out is not None else Priority.ASYNC_HOT
        ticket = self._io.submit(priority, *pair, partial(self.arena.load, slot))
        reading = self._reading[number] = Reading(pair, out, joins, slot, ticket)
        self._roles.begun(reading)

    def landed(self) -> list[int]:
        """Reads that ended well since the last call. Raises PairError for one that hangs: it may still write to its
        slot, and the set is unusable."""
        self._check_alive()
        with self._final():
            return newly_landed(self._reading)

    def failed(self) -> list[int]:
        """Reads that ended since the last call, and whose record could not be had. Raises what else went wrong with
        one: that is no matter of one record, and the set is unusable."""
        self._check_alive()
        with self._final():
            return newly_failed(self._reading)

    def give_up(self, numbers: Sequence[int]) -> None:
        """These reads are over, however they ended here; their slots are free. Raises PairError for one that has not
        ended: it would write to a slot of somebody else."""
        self._check_alive()
        for number in numbers:
            reading = self._reading.get(number)
            if reading is None or not reading.ticket.done:
                raise PairError(f"read {number} was to be given up before it had ended on this rank")
        over = [self._reading.pop(number) for number in numbers]
        self._roles.over(over)
        for reading in over:
            self.arena.release(reading.slot)

    def publish(self, numbers: Sequence[int]) -> None:
        """Makes these reads routable, all or none, in their order; a swap's outgoing pair leaves at once. Raises
        PairError for one that has not landed here, and for a swap that cannot be."""
        self._check_alive()
        landed = [self._landed(number) for number in numbers]
        swaps = [(r.out, r.pair) for r in landed if r.out is not None]
        self._roles.check_swaps(swaps)
        for number in numbers:
            del self._reading[number]
        slots, outs = {r.pair: r.slot for r in landed}, [out for out, _ in swaps]
        _, joining, entering = self._roles.over(landed)
        self.arena.hold(slots)
        self._roles.exchanged(swaps)
        self._roles.joined(joining)
        self._roles.entered(entering)
        self._set(slots | dict.fromkeys(outs, -1))
        self.arena.drop(*outs)
        self.generation += bool(joining or swaps)

    def promote(self, swaps: Sequence[PairSwap]) -> None:
        """(resident that becomes an entry of the ring, entry that becomes a resident), in their order."""
        self._check_alive()
        for out, in_ in swaps:
            self._roles.promoted(out, in_)
        self._roles.check_floor()
        self.generation += bool(swaps)

    def withdraw(self, pairs: Sequence[Pair]) -> None:
        """These entries of the ring stop being routable; their slots are free."""
        self._check_alive()
        for pair in pairs:
            if pair not in self._roles.ring:
                raise PairError(f"{pair} is to leave the ring, and is not in it")
        self._set(dict.fromkeys(pairs, -1))
        self._roles.withdrawn(pairs)
        self.arena.drop(*pairs)

    def adopt(self, pairs: Sequence[Pair]) -> None:
        """These entries of the ring are residents from now on, in places that are free. Nothing is read."""
        self._check_alive()
        for pair in pairs:
            self._roles.adopted(pair)
        self.generation += bool(pairs)

    def resize(self, residents: Sequence[int], evict: Sequence[Pair]) -> None:
        """By class of records, how many residents there are places for; those of `evict` leave at once. Raises
        PairError, and changes nothing, while something is being read, and for what the arena or a floor refuses."""
        self._check_alive()
        if self._reading:
            raise PairError("places cannot change while experts are being read")
        self._roles.check_without(evict, residents)
        most = self.arena.most_residents
        if most is None:
            self.arena.resize(residents)  # says why not
        elif any(n > limit for n, limit in zip(residents, most, strict=True)):
            raise PairError(f"{list(residents)} places for residents: {list(most)} at most")
        self._set(dict.fromkeys(evict, -1))
        self.arena.drop(*evict)
        self._roles.left(evict)
        self.tables.change(self.arena.resize(residents))
        self.generation += bool(evict)

    def digest(self) -> str:
        """sha256 over the sorted routable pairs, taken from the tables that the model reads."""
        self._check_alive()
        routable = self.tables.routable.cpu().numpy()
        ids = np.flatnonzero(routable).astype("<u4")
        return hashlib.sha256(f"{routable.shape};".encode() + ids.tobytes()).hexdigest()

    def state(self) -> str:
        """Where everything lies and what is on its way, from the tables and the books: equal on ranks that were told
        the same."""
        reading = [(number, r.pair, r.out, r.joins, r.slot) for number, r in self._reading.items()]
        slots = hashlib.sha256(self.tables.slot_of.cpu().numpy().tobytes()).hexdigest()
        return f"{self.digest()} {slots} {self.ring} {reading} {self.generation}"

    def check_integrity(self) -> None:
        """Raises PairError unless arena, directory and tables agree: what an idle moment can afford to verify."""
        self._check_alive()
        self.arena.check()
        directory = self.arena.directory
        expected = np.full((self.layers, self.experts), -1, dtype=np.int32)
        expected.ravel()[indices(directory, self.experts)] = np.fromiter(directory.values(), np.int32, len(directory))
        if not np.array_equal(self.tables.slot_of.cpu().numpy(), expected):
            raise PairError("the routing table and the expert directory differ")
        if not np.array_equal(self.tables.routable.cpu().numpy(), expected >= 0):
            raise PairError("the routable mask and the expert directory differ")
        if self.mask_hash != mask_hash(directory, self.experts):
            raise PairError("the running hash of the routable set is wrong")
        self._roles.check(expected >= 0, self._reading.values())

    def _check_alive(self) -> None:
        if self._failed:
            raise PairError("the resident set is unusable since a read of an expert failed")

    @contextmanager
    def _final(self) -> Iterator[None]:
        """What fails in here leaves a set that nobody may use."""
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def _check_range(self, pairs: Iterable[Pair]) -> None:
        for layer, expert in pairs:
            if not (0 <= layer < self.layers and 0 <= expert < self.experts):
                raise PairError(f"there is no expert {expert} in layer {layer}")

    def _landed(self, number: int) -> Reading:
        reading = self._reading.get(number)
        if reading is None or not reading.landed:
            raise PairError(f"read {number} was to be used before this rank had it")
        return reading

    def _set(self, slots: Mapping[Pair, int]) -> None:
        """pair -> its slot as the model sees it from now on, -1: none."""
        self.tables.change(slots)
        found, keys = self.mask_hash, self._keys
        for layer, expert in slots:
            found ^= keys[layer][expert]
        self.mask_hash = found
