"""The resident set of a rank: fills it at boot and changes it by plans that rank 0 made.

Swaps land in spare slots first; only when every record of them is there do the tables change, and only then are the
old slots free. That runs between two steps, when no kernel reads the arena. Any failure is final: a rank that skipped a
swap would route differently from the others, and nobody would notice.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np

from tided.errors import PairError
from tided.experts.arena import Arena, Pair
from tided.experts.io import IoScheduler, Priority, Ticket
from tided.experts.tables import RoutingTables

PairSwap = tuple[Pair, Pair]  # (leaves, takes its place)
Progress = Callable[[int, int], None]  # (records read, records in all)

READ_TIMEOUT_S = 60.0  # for the read that has waited longest: the disk is gone
MAX_QUEUED = 512  # of a first set that is larger than the scheduler's queue
_U64 = (1 << 64) - 1


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
        self.generation = 0  # plans applied since the fill
        self.mask_hash = 0  # xor of the residents' keys, kept up to date at no cost
        self._failed = False

    @property
    def pairs(self) -> list[Pair]:
        return self.arena.pairs

    def fill(self, pairs: Sequence[Pair], progress: Progress) -> None:
        """Reads and publishes the first resident set. Raises PairError for a set that cannot be, DataError."""
        self._check_alive()
        if self.pairs or len(pairs) > self.arena.residents or len(set(pairs)) != len(pairs):
            raise PairError(f"a first set of {len(pairs)} experts for {self.arena.residents} places, or given twice")
        self._check_range(pairs)
        self._check_floor(Counter(layer for layer, _ in pairs))
        self._publish(self._read(pairs, progress))

    def apply(self, swaps: Sequence[PairSwap]) -> None:
        """Changes the set by these swaps, all or none: nothing is read before every swap is found valid, nothing is
        published before everything is read. Raises PairError or DataError; after a failed read the set is unusable."""
        self._check_alive()
        self._check_plan(swaps)
        landed = self._read([in_ for _, in_ in swaps])
        for out, _ in swaps:
            self._withdraw(out)
        self._publish(landed)
        for out, _ in swaps:
            self.arena.drop(out)
        self.generation += bool(swaps)

    def digest(self) -> str:
        """sha256 over the sorted routable pairs, taken from the tables that the model reads."""
        self._check_alive()
        routable = self.tables.routable.cpu().numpy()
        ids = np.flatnonzero(routable).astype("<u4")
        return hashlib.sha256(f"{routable.shape};".encode() + ids.tobytes()).hexdigest()

    def check_integrity(self) -> None:
        """Raises PairError unless arena, directory and tables agree: what an idle moment can afford to verify."""
        self._check_alive()
        self.arena.check()
        expected = np.full((self.layers, self.experts), -1, dtype=np.int32)
        for (layer, expert), slot in self.arena.directory.items():
            expected[layer, expert] = slot
        if not np.array_equal(self.tables.slot_of.cpu().numpy(), expected):
            raise PairError("the routing table and the expert directory differ")
        if not np.array_equal(self.tables.routable.cpu().numpy(), expected >= 0):
            raise PairError("the routable mask and the expert directory differ")
        if self.mask_hash != mask_hash(self.pairs, self.experts):
            raise PairError("the running hash of the resident set is wrong")
        self._check_floor(Counter(layer for layer, _ in self.pairs))

    def _check_alive(self) -> None:
        if self._failed:
            raise PairError("the resident set is unusable since a read of an expert failed")

    def _check_range(self, pairs: Iterable[Pair]) -> None:
        for layer, expert in pairs:
            if not (0 <= layer < self.layers and 0 <= expert < self.experts):
                raise PairError(f"there is no expert {expert} in layer {layer}")

    def _check_floor(self, count: Counter[int]) -> None:
        for layer in range(self.layers):
            if count[layer] < self.top_k:
                raise PairError(f"layer {layer} would keep {count[layer]} experts, the router needs {self.top_k}")

    def _check_plan(self, swaps: Sequence[PairSwap]) -> None:
        if len(swaps) > self.arena.free:
            raise PairError(f"{len(swaps)} experts cannot land in {self.arena.free} free slots at once")
        outs, ins = [out for out, _ in swaps], [in_ for _, in_ in swaps]
        self._check_range([*outs, *ins])
        if len(set(outs)) != len(outs) or len(set(ins)) != len(ins):
            raise PairError("a plan moves an expert twice")
        for out in outs:
            if self.arena.slot_of(out) is None:
                raise PairError(f"a plan removes {out}, which is not resident")
        for in_ in ins:
            if self.arena.slot_of(in_) is not None:
                raise PairError(f"a plan loads {in_}, which is resident")
        count = Counter(layer for layer, _ in self.pairs)
        count.subtract(layer for layer, _ in outs)
        count.update(layer for layer, _ in ins)
        self._check_floor(count)

    def _read(self, pairs: Sequence[Pair], progress: Progress = lambda done, total: None) -> dict[Pair, int]:
        """pair -> taken slot that holds its record. A failure makes the set unusable; its slots stay taken, because a
        read that hangs may still write into its own."""
        jobs = {pair: self.arena.take() for pair in pairs}
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

    def _publish(self, landed: Mapping[Pair, int]) -> None:
        for pair, slot in landed.items():
            self.arena.hold(slot, pair)
            self.tables.publish(*pair, slot)
            self.mask_hash ^= _key(pair, self.experts)

    def _withdraw(self, pair: Pair) -> None:
        self.tables.withdraw(*pair)
        self.mask_hash ^= _key(pair, self.experts)


def mask_hash(pairs: Iterable[Pair], experts: int) -> int:
    """64 bits that name a resident set, whatever its order: the xor of a well-mixed key for each pair."""
    value = 0
    for pair in pairs:
        value ^= _key(pair, experts)
    return value


def _key(pair: Pair, experts: int) -> int:
    """splitmix64 of the pair's number: neighbours get unrelated keys, so two masks do not cancel by chance."""
    z = ((pair[0] * experts + pair[1] + 1) * 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)
