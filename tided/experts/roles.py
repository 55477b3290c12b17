"""Who is a resident and who an entry of the hot ring, among the pairs that lie in the arena, and who is on the way to
become one: a role is an entry in a book, and changes without a byte being moved.

No layer ever has fewer residents than its router picks, and of each size of records there are no more than places. A
step may begin and end dozens of reads, so nothing here looks at every entry for one of them.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tided.errors import PairError
from tided.experts.arena import Arena, Pair
from tided.experts.mask_hash import indices
from tided.experts.under_way import Reading

PairSwap = tuple[Pair, Pair]  # (leaves, takes its place)


class Roles:
    """`ring`: its entries, the oldest first. Residents are counted by layer and by class of records; entries of the
    ring, and reads under way by what they will become, by class."""

    def __init__(self, arena: Arena, layers: int, top_k: int) -> None:
        self._arena, self._top_k = arena, top_k
        self.ring: dict[Pair, None] = {}
        self.by_layer = [0] * layers
        self.of_kind = [0] * len(arena.classes)
        self._in_ring = [0] * len(arena.classes)
        self._coming: set[Pair] = set()
        self._leaving: set[Pair] = set()
        self._swaps = [0] * len(arena.classes)
        self._joining = [0] * len(arena.classes)
        self._entering = [0] * len(arena.classes)

    @property
    def residents(self) -> list[Pair]:
        """Sorted."""
        return [pair for pair in self._arena.pairs if pair not in self.ring]

    @property
    def count(self) -> int:
        return len(self._arena.directory) - len(self.ring)

    def is_resident(self, pair: Pair) -> bool:
        return pair not in self.ring and self._arena.slot_of(pair) is not None

    def joined(self, pairs: Collection[Pair]) -> None:
        """Residents more."""
        self._count(pairs, 1)

    def left(self, pairs: Collection[Pair]) -> None:
        """Residents less."""
        self._count(pairs, -1)

    def exchanged(self, swaps: Collection[PairSwap]) -> None:
        """Residents in place of others, of the same size."""
        for out, in_ in swaps:
            self.by_layer[out[0]] -= 1
            self.by_layer[in_[0]] += 1

    def entered(self, pairs: Collection[Pair]) -> None:
        """Entries of the ring more, in this order."""
        self.ring.update(dict.fromkeys(pairs))
        self._add(self._in_ring, pairs, 1)

    def withdrawn(self, pairs: Collection[Pair]) -> None:
        """Entries of the ring less."""
        for pair in pairs:
            del self.ring[pair]
        self._add(self._in_ring, pairs, -1)

    def adopted(self, pair: Pair) -> None:
        """An entry of the ring becomes a resident, in a place that is free and that nothing is read for."""
        kind = self._arena.kind_of(pair)
        if pair not in self.ring or self.of_kind[kind] + self._joining[kind] >= self._arena.classes[kind].residents:
            raise PairError(f"{pair} cannot become a resident: not in the ring, or there is no free place")
        self.withdrawn([pair])
        self.joined([pair])

    def begun(self, reading: Reading) -> None:
        """A read that `check_read` has allowed is under way."""
        self._coming.add(reading.pair)
        if reading.out is not None:
            self._leaving.add(reading.out)
        self._counted_as(reading)[self._arena.kind_of(reading.pair)] += 1

    def over(self, readings: Collection[Reading]) -> tuple[list[Pair], list[Pair], list[Pair]]:
        """They are published, or given up. Gives their pairs: of swaps, of those that join, and that enter the ring."""
        swaps, joining, entering = list[Pair](), list[Pair](), list[Pair]()
        for one in readings:
            self._coming.remove(one.pair)
            if one.out is not None:
                self._leaving.remove(one.out)
                swaps.append(one.pair)
            else:
                (joining if one.joins else entering).append(one.pair)
        self._add(self._swaps, swaps, -1)
        self._add(self._joining, joining, -1)
        self._add(self._entering, entering, -1)
        return swaps, joining, entering

    def promoted(self, out: Pair, in_: Pair) -> None:
        """A resident and an entry of the ring exchange roles."""
        if in_ not in self.ring or not self.is_resident(out):
            raise PairError(f"{out} and {in_} cannot exchange roles: not a resident and an entry of the ring")
        self.check_size(out, in_)
        del self.ring[in_]
        self.ring[out] = None
        self.exchanged([(out, in_)])

    def check_first(self, pairs: Sequence[Pair]) -> None:
        """Raises PairError unless these may be the first set."""
        places = [one.residents for one in self._arena.classes]
        wanted = Counter(map(self._arena.kind_of, pairs))
        if self.count or len(set(pairs)) != len(pairs) or any(wanted[kind] > most for kind, most in enumerate(places)):
            raise PairError(f"a first set of {len(pairs)} experts for {sum(places)} places, or given twice")
        self.check_floor(Counter(layer for layer, _ in pairs))

    def check_floor(self, count: Mapping[int, int] | Sequence[int] | None = None) -> None:
        """`count`: residents by layer; None: as they are."""
        count = self.by_layer if count is None else count
        for layer in range(len(self.by_layer)):
            if count[layer] < self._top_k:
                raise PairError(f"layer {layer} would keep {count[layer]} experts, the router needs {self._top_k}")

    def check_size(self, out: Pair, in_: Pair) -> None:
        if self._arena.kind_of(out) != self._arena.kind_of(in_):
            raise PairError(f"{out} and {in_} cannot exchange places: their records differ in size")

    def check_swaps(self, swaps: Sequence[PairSwap]) -> None:
        if not swaps:
            return
        outs = [out for out, _ in swaps]
        if len(set(outs)) != len(outs):
            raise PairError("a plan moves an expert twice")
        for out in outs:
            if not self.is_resident(out):
                raise PairError(f"a plan removes {out}, which is not resident")
        count = list(self.by_layer)
        for out, in_ in swaps:
            count[out[0]] -= 1
            count[in_[0]] += 1
        self.check_floor(count)

    def check_read(self, pair: Pair, out: Pair | None, joins: bool) -> None:
        """Raises PairError unless the pair may begin to be read now."""
        if pair in self._coming:
            raise PairError(f"{pair} is being read already")
        if self._arena.slot_of(pair) is not None:
            raise PairError(f"{pair} is to be read, and is here")
        kind = self._arena.kind_of(pair)
        places = self._arena.classes[kind]
        if out is not None:
            if not self.is_resident(out):
                raise PairError(f"a plan removes {out}, which is not resident")
            if out in self._leaving:
                raise PairError(f"{out} is to leave twice")
            self.check_size(out, pair)
            if self._swaps[kind] >= places.spare:
                raise PairError(f"more than {places.spare} swaps cannot be read at once")
        elif joins:
            if self.of_kind[kind] + self._joining[kind] >= places.residents:
                raise PairError(f"all {places.residents} places of residents are taken")
        elif self._in_ring[kind] + self._entering[kind] >= places.ring:
            raise PairError(f"the hot ring of {places.ring} slots is full")

    def check_without(self, evict: Sequence[Pair], residents: Sequence[int]) -> None:
        """Raises PairError unless these may leave, and the others have room in so many places of each class."""
        count, of_kind = list(self.by_layer), list(self.of_kind)
        for pair in evict:
            if not self.is_resident(pair):
                raise PairError(f"{pair} is to make room, and is not resident")
            count[pair[0]] -= 1
            of_kind[self._arena.kind_of(pair)] -= 1
        self.check_floor(count)
        if len(set(evict)) != len(evict) or any(n > most for n, most in zip(of_kind, residents, strict=True)):
            raise PairError(f"{of_kind} experts would be left for {list(residents)} places")

    def check(self, routable: npt.NDArray[np.bool_], reading: Collection[Reading]) -> None:
        """routable [layers, experts], which is changed; the reads under way. Raises PairError unless the books agree
        with them."""
        if self._coming != {one.pair for one in reading} or self._leaving != {one.out for one in reading if one.out}:
            raise PairError("the books of experts that are being read are wrong")
        for counts in (self._swaps, self._joining, self._entering):
            mine = Counter(self._arena.kind_of(one.pair) for one in reading if self._counted_as(one) is counts)
            if any(mine[kind] != count for kind, count in enumerate(counts)):
                raise PairError("the count of experts that are being read is wrong")
        if any(pair not in self._arena.directory for pair in self.ring) or not self._ring_fits():
            raise PairError("the hot ring and the expert directory differ")
        routable.ravel()[indices(self.ring, routable.shape[1])] = False
        if routable.sum(axis=1).tolist() != self.by_layer:
            raise PairError("the count of a layer's residents is wrong")
        of_kind = Counter(map(self._arena.kind_of, self.residents))
        if any(of_kind[kind] != count for kind, count in enumerate(self.of_kind)):
            raise PairError("the count of a size's residents is wrong")
        if any(count > one.residents for count, one in zip(self.of_kind, self._arena.classes, strict=True)):
            raise PairError("there are more residents than places")
        self.check_floor()

    def _ring_fits(self) -> bool:
        entries = Counter(map(self._arena.kind_of, self.ring))
        counts = zip(self._in_ring, self._arena.classes, strict=True)
        return all(entries[kind] == count <= one.ring for kind, (count, one) in enumerate(counts))

    def _counted_as(self, reading: Reading) -> list[int]:
        """By class, the reads that will become the same."""
        if reading.out is not None:
            return self._swaps
        return self._joining if reading.joins else self._entering

    def _count(self, pairs: Collection[Pair], more: int) -> None:
        for layer, _ in pairs:
            self.by_layer[layer] += more
        self._add(self.of_kind, pairs, more)

    def _add(self, counts: list[int], pairs: Collection[Pair], more: int) -> None:
        """`counts`: by class."""
        for kind, count in self._arena.kinds_of(pairs).items():
            counts[kind] += more * count
