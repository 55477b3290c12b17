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
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from tided.errors import DataError, PairError
from tided.experts.arena import Arena, Pair, Places, Sizes
from tided.experts.io import IoScheduler, Priority, ReadCount, Ticket
from tided.experts.tables import RoutingTables

log = logging.getLogger("experts")

PairSwap = tuple[Pair, Pair]  # (leaves, takes its place)
Indices = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]  # (records read, records in all)

HUNG_S = 300.0  # a read beside the steps, which waits for all that is more urgent
READ_TIMEOUT_S = 60.0  # for the read that has waited longest: the disk is gone
MAX_QUEUED = 512  # of a first set that is larger than the scheduler's queue
_U64 = (1 << 64) - 1


@dataclass
class _Reading:
    """A pair on its way into a taken slot; `out` is the resident that it will replace, None: it joins the ring, or the
    residents, where it `joins` them."""

    pair: Pair
    out: Pair | None
    joins: bool
    slot: int
    ticket: Ticket
    landed: bool = False
    failed: bool = False


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
        self.layers, self.experts, self.top_k = layers, experts, top_k
        self.generation = 0  # steps that changed who is resident, since the fill
        self.mask_hash = 0  # xor of the routable pairs' keys, kept up to date at no cost
        self._ring: dict[Pair, None] = {}
        self._residents_of = [0] * layers
        self._of_kind = [0] * len(arena.classes)
        self._reading: dict[int, _Reading] = {}
        self._failed = False

    @property
    def pairs(self) -> list[Pair]:
        """The residents, sorted."""
        return [pair for pair in self.arena.pairs if pair not in self._ring]

    @property
    def ring(self) -> list[Pair]:
        """Routable beside the residents, the oldest first."""
        return list(self._ring)

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
        return len(self.arena.directory) - len(self._ring)

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
        return tuple(self._residents_of)

    @property
    def reads(self) -> Mapping[Priority, ReadCount]:
        """Reads of the rank that ended, by class, whoever asked for them."""
        return self._io.counts

    @property
    def reading(self) -> int:
        """Reads that are not published yet."""
        return len(self._reading)

    def fill(self, pairs: Sequence[Pair], progress: Progress) -> None:
        """Reads and publishes the first resident set. Raises PairError for a set that cannot be, DataError."""
        self._check_alive()
        places = [one.residents for one in self.arena.classes]
        wanted = Counter(map(self.arena.kind_of, pairs))
        if self.count or len(set(pairs)) != len(pairs) or any(wanted[kind] > most for kind, most in enumerate(places)):
            raise PairError(f"a first set of {len(pairs)} experts for {sum(places)} places, or given twice")
        self._check_range(pairs)
        self._check_floor(Counter(layer for layer, _ in pairs))
        slots = self._fill(pairs, progress)
        for pair, slot in slots.items():
            self.arena.hold(slot, pair)
            self._count(pair, 1)
        self._set(slots)

    def read(self, number: int, pair: Pair, out: Pair | None, joins: bool = False) -> None:
        """Begins to read an absent pair, to take the place of the resident `out`, a free one (`joins`), or to join the
        ring. Raises PairError for a pair that is here or on its way, and when its place is not free."""
        self._check_alive()
        self._check_range([pair])
        if number in self._reading or any(reading.pair == pair for reading in self._reading.values()):
            raise PairError(f"{pair} is being read already")
        if self.arena.slot_of(pair) is not None:
            raise PairError(f"{pair} is to be read, and is here")
        if out is not None and not self._is_resident(out):
            raise PairError(f"a plan removes {out}, which is not resident")
        if out is not None and any(reading.out == out for reading in self._reading.values()):
            raise PairError(f"{out} is to leave twice")
        self._check_room(pair, out, joins)
        slot = self.arena.take(self.arena.kind_of(pair))
        priority = Priority.SWAP if joins or out is not None else Priority.ASYNC_HOT
        ticket = self._io.submit(priority, *pair, partial(self.arena.load, slot))
        self._reading[number] = _Reading(pair, out, joins, slot, ticket)

    def landed(self) -> list[int]:
        """Reads that ended well since the last call. Raises PairError for one that hangs: it may still write to its
        slot, and the set is unusable."""
        self._check_alive()
        now_s = time.perf_counter()
        done = [number for number, r in self._reading.items() if not r.landed and r.ticket.done and not r.ticket.error]
        for number in done:
            self._reading[number].landed = True
        for reading in self._reading.values():
            if not reading.ticket.done and now_s - reading.ticket.submitted_s > HUNG_S:
                self._failed = True
                raise PairError(f"the read of {reading.pair} hangs for {HUNG_S:g} s", hint="check the disk (dmesg)")
        return done

    def failed(self) -> list[int]:
        """Reads that ended since the last call, and whose record could not be had. Raises what else went wrong with
        one: that is no matter of one record, and the set is unusable."""
        self._check_alive()
        ended = [(n, r) for n, r in self._reading.items() if r.ticket.done and not r.failed]
        done = [(n, r, r.ticket.error) for n, r in ended if r.ticket.error]
        for _, reading, error in done:
            if not isinstance(error, DataError):
                self._failed = True
                raise error
            reading.failed = True
            log.warning("expert %d of layer %d is not read: %s", reading.pair[1], reading.pair[0], error)
        return [number for number, _, _ in done]

    def give_up(self, numbers: Sequence[int]) -> None:
        """These reads are over, however they ended here; their slots are free. Raises PairError for one that has not
        ended: it would write to a slot of somebody else."""
        self._check_alive()
        for number in numbers:
            reading = self._reading.get(number)
            if reading is None or not reading.ticket.done:
                raise PairError(f"read {number} was to be given up before it had ended on this rank")
        for number in numbers:
            self.arena.release(self._reading.pop(number).slot)

    def publish(self, numbers: Sequence[int]) -> None:
        """Makes these reads routable, all or none, in their order; a swap's outgoing pair leaves at once. Raises
        PairError for one that has not landed here, and for a swap that cannot be."""
        self._check_alive()
        landed = [self._landed(number) for number in numbers]
        self._check_swaps([(r.out, r.pair) for r in landed if r.out is not None])
        for number, reading in zip(numbers, landed, strict=True):
            del self._reading[number]
            self.arena.hold(reading.slot, reading.pair)
            if reading.out is not None:
                self._exchange(reading.out, reading.pair)
            elif reading.joins:
                self._count(reading.pair, 1)
            else:
                self._ring[reading.pair] = None
        self._set({r.pair: r.slot for r in landed} | {r.out: -1 for r in landed if r.out is not None})
        self.arena.drop(*(reading.out for reading in landed if reading.out is not None))
        self.generation += any(reading.joins or reading.out is not None for reading in landed)

    def promote(self, swaps: Sequence[PairSwap]) -> None:
        """(resident that becomes an entry of the ring, entry that becomes a resident), in their order."""
        self._check_alive()
        for out, in_ in swaps:
            if in_ not in self._ring or not self._is_resident(out):
                raise PairError(f"{out} and {in_} cannot exchange roles: not a resident and an entry of the ring")
            self._check_size(out, in_)
            del self._ring[in_]
            self._ring[out] = None
            self._exchange(out, in_)
        self._check_floor(self._residents_of)
        self.generation += bool(swaps)

    def withdraw(self, pairs: Sequence[Pair]) -> None:
        """These entries of the ring stop being routable; their slots are free."""
        self._check_alive()
        for pair in pairs:
            if pair not in self._ring:
                raise PairError(f"{pair} is to leave the ring, and is not in it")
        self._set(dict.fromkeys(pairs, -1))
        for pair in pairs:
            del self._ring[pair]
        self.arena.drop(*pairs)

    def adopt(self, pairs: Sequence[Pair]) -> None:
        """These entries of the ring are residents from now on, in places that are free. Nothing is read."""
        self._check_alive()
        for pair in pairs:
            kind = self.arena.kind_of(pair)
            joining = sum(one.joins and self.arena.kind_of(one.pair) == kind for one in self._reading.values())
            if pair not in self._ring or self._of_kind[kind] + joining >= self.arena.classes[kind].residents:
                raise PairError(f"{pair} cannot become a resident: not in the ring, or there is no free place")
            del self._ring[pair]
            self._count(pair, 1)
        self.generation += bool(pairs)

    def resize(self, residents: Sequence[int], evict: Sequence[Pair]) -> None:
        """By class of records, how many residents there are places for; those of `evict` leave at once. Raises
        PairError, and changes nothing, while something is being read, and for what the arena or a floor refuses."""
        self._check_alive()
        if self._reading:
            raise PairError("places cannot change while experts are being read")
        count, of_kind = list(self._residents_of), list(self._of_kind)
        for pair in evict:
            if not self._is_resident(pair):
                raise PairError(f"{pair} is to make room, and is not resident")
            count[pair[0]] -= 1
            of_kind[self.arena.kind_of(pair)] -= 1
        self._check_floor(count)
        if len(set(evict)) != len(evict) or any(n > most for n, most in zip(of_kind, residents, strict=True)):
            raise PairError(f"{of_kind} experts would be left for {list(residents)} places")
        most = self.arena.most_residents
        if most is None:
            self.arena.resize(residents)  # says why not
        elif any(n > limit for n, limit in zip(residents, most, strict=True)):
            raise PairError(f"{list(residents)} places for residents: {list(most)} at most")
        self._set(dict.fromkeys(evict, -1))
        self.arena.drop(*evict)
        for pair in evict:
            self._count(pair, -1)
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
        expected.ravel()[_indices(directory, self.experts)] = np.fromiter(directory.values(), np.int32, len(directory))
        if not np.array_equal(self.tables.slot_of.cpu().numpy(), expected):
            raise PairError("the routing table and the expert directory differ")
        if not np.array_equal(self.tables.routable.cpu().numpy(), expected >= 0):
            raise PairError("the routable mask and the expert directory differ")
        if self.mask_hash != mask_hash(directory, self.experts):
            raise PairError("the running hash of the routable set is wrong")
        if any(pair not in directory for pair in self._ring) or not self._ring_fits():
            raise PairError("the hot ring and the expert directory differ")
        resident = expected >= 0
        resident.ravel()[_indices(self._ring, self.experts)] = False
        if resident.sum(axis=1).tolist() != self._residents_of:
            raise PairError("the count of a layer's residents is wrong")
        of_kind = Counter(map(self.arena.kind_of, self.pairs))
        if any(of_kind[kind] != count for kind, count in enumerate(self._of_kind)):
            raise PairError("the count of a size's residents is wrong")
        if any(count > one.residents for count, one in zip(self._of_kind, self.arena.classes, strict=True)):
            raise PairError("there are more residents than places")
        self._check_floor(self._residents_of)

    def _check_alive(self) -> None:
        if self._failed:
            raise PairError("the resident set is unusable since a read of an expert failed")

    def _check_range(self, pairs: Iterable[Pair]) -> None:
        for layer, expert in pairs:
            if not (0 <= layer < self.layers and 0 <= expert < self.experts):
                raise PairError(f"there is no expert {expert} in layer {layer}")

    def _check_room(self, pair: Pair, out: Pair | None, joins: bool) -> None:
        """Raises PairError unless a pair of this size may begin to be read now."""
        kind_of = self.arena.kind_of
        kind, places = kind_of(pair), self.arena.classes[kind_of(pair)]
        reading = [one for one in self._reading.values() if kind_of(one.pair) == kind]
        swaps, joining = sum(one.out is not None for one in reading), sum(one.joins for one in reading)
        if out is not None:
            self._check_size(out, pair)
            if swaps >= places.spare:
                raise PairError(f"more than {places.spare} swaps cannot be read at once")
        elif joins:
            if self._of_kind[kind] + joining >= places.residents:
                raise PairError(f"all {places.residents} places of residents are taken")
        elif sum(kind_of(one) == kind for one in self._ring) + len(reading) - swaps - joining >= places.ring:
            raise PairError(f"the hot ring of {places.ring} slots is full")

    def _check_size(self, out: Pair, in_: Pair) -> None:
        if self.arena.kind_of(out) != self.arena.kind_of(in_):
            raise PairError(f"{out} and {in_} cannot exchange places: their records differ in size")

    def _ring_fits(self) -> bool:
        entries = Counter(map(self.arena.kind_of, self._ring))
        return all(entries[kind] <= one.ring for kind, one in enumerate(self.arena.classes))

    def _check_floor(self, count: Mapping[int, int] | Sequence[int]) -> None:
        for layer in range(self.layers):
            if count[layer] < self.top_k:
                raise PairError(f"layer {layer} would keep {count[layer]} experts, the router needs {self.top_k}")

    def _check_swaps(self, swaps: Sequence[PairSwap]) -> None:
        outs = [out for out, _ in swaps]
        if len(set(outs)) != len(outs):
            raise PairError("a plan moves an expert twice")
        for out in outs:
            if not self._is_resident(out):
                raise PairError(f"a plan removes {out}, which is not resident")
        count = list(self._residents_of)
        for out, in_ in swaps:
            count[out[0]] -= 1
            count[in_[0]] += 1
        self._check_floor(count)

    def _is_resident(self, pair: Pair) -> bool:
        return pair not in self._ring and self.arena.slot_of(pair) is not None

    def _landed(self, number: int) -> _Reading:
        reading = self._reading.get(number)
        if reading is None or not reading.landed:
            raise PairError(f"read {number} was to be used before this rank had it")
        return reading

    def _exchange(self, out: Pair, in_: Pair) -> None:
        self._count(out, -1)
        self._count(in_, 1)

    def _count(self, pair: Pair, more: int) -> None:
        self._residents_of[pair[0]] += more
        self._of_kind[self.arena.kind_of(pair)] += more

    def _set(self, slots: Mapping[Pair, int]) -> None:
        """pair -> its slot as the model sees it from now on, -1: none."""
        self.tables.change(slots)
        for pair in slots:
            self.mask_hash ^= _key(pair, self.experts)

    def _fill(self, pairs: Sequence[Pair], progress: Progress) -> dict[Pair, int]:
        """pair -> taken slot that holds its record. A failure makes the set unusable; its slots stay taken, because a
        read that hangs may still write into its own."""
        jobs = {pair: self.arena.take(self.arena.kind_of(pair)) for pair in pairs}
        running = deque[Ticket]()
        try:
            for done in self._landing(jobs, running):
                progress(done, len(jobs))
        except BaseException:
            self._failed = True
            for ticket in running:
                ticket.cancel()
            raise
        return jobs

    def _landing(self, jobs: Mapping[Pair, int], running: deque[Ticket]) -> Iterator[int]:
        """Reads every job into its slot, few of them queued at a time; yields how many are there."""
        waiting = iter(jobs.items())
        for done in range(1, len(jobs) + 1):
            for pair, slot in islice(waiting, MAX_QUEUED - len(running)):
                running.append(self._io.submit(Priority.SWAP, *pair, partial(self.arena.load, slot)))
            running[0].wait(READ_TIMEOUT_S)
            running.popleft()
            yield done


def mask_hash(pairs: Iterable[Pair], experts: int) -> int:
    """64 bits that name a resident set, whatever its order: the xor of a well-mixed key for each pair."""
    z = (_indices(pairs, experts).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # `_key` of all
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(np.bitwise_xor.reduce(z ^ (z >> np.uint64(31)), initial=0))


def _indices(pairs: Iterable[Pair], experts: int) -> Indices:
    """[n] int64: layer * experts + expert"""
    flat = np.fromiter(chain.from_iterable(pairs), dtype=np.int64)
    found: Indices = flat[0::2] * experts + flat[1::2]
    return found


def _key(pair: Pair, experts: int) -> int:
    """splitmix64 of the pair's number: neighbours get unrelated keys, so two masks do not cancel by chance."""
    z = ((pair[0] * experts + pair[1] + 1) * 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)
