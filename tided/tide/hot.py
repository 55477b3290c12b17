"""Hot reads, as rank 0 decides them: which absent experts to read now, and which entries of the ring they overwrite.

Rank 0 owns one `HotReads`:

    hot = HotReads(shape, residents, ring_slots, floor, pilot.scores())
    each step, prompts too        hot.observe(pairs, weights, tokens)      what the router wanted, as means by layer
    each step after that          moves = hot.moves(reads)                 `reads`: what the step's disk time is worth
        moves.promote             roles are exchanged, nothing is read: the resident is an entry of the ring from now on
                                  and the entry a resident (`pilot.applied(moves.promote)`); both stay routable
        moves.withdraw            entries of the ring that stop being routable in this step; their slots are free
        moves.load                read these into free slots of the ring
    every rank has one            hot.published(pair)                      routable from this step on
    a read failed                 hot.failed(pair)                         its slot is free again
    for a while                   hot.leave_alone(pair)                    it is not asked for, neither here nor by a
                                                                           plan, until hot.ask_again(pair)
    a lane's prompt is through    hot.prompt_done(mass, lane)
    a lane's request has ended    hot.request_done(mass, lane); hot.rebase(pilot.scores())

Plans (after a prompt, between chunks, every so many tokens) come from the same estimate, so that plans and
hot reads never undo each other:

    swaps = hot.plan(max_swaps, pilot.steadied)
    swaps = hot.rest_plan(max_swaps, pilot.rest_scores())       when idle: for nobody's tokens
    a read of one begins          hot.swap_begun(out, in_)
    every rank has it             hot.swapped(out, in_)                    published; `pilot.applied([(out, in_)])`
    it is given up                hot.swap_dropped(out, in_)

When the budget of experts changes (`tide.budget`):

    fewer places              hot.evicted(pairs)
    a read begins for a free place, every rank has it, it is given up
                              hot.join_begun(pair), hot.joined(pair), hot.join_dropped(pair)
    an entry of the ring takes a free place
                              hot.adopted(pair)

Ring and residents are ranked together: what is read overwrites the entry that is expected to be needed least, in
whichever of the two it is; an entry that was used in the last step survives. Pure: no clock, no chance, no torch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tided.errors import PairError
from tided.tide.demand import Grid, RouterShape
from tided.tide.heat import Heat, Indices, Weights
from tided.tide.kin import Kin
from tided.tide.kinds import Kinds
from tided.tide.planner import Pair, PairSwap, swap_plan

MARGIN = 1.2  # a newcomer must be expected to carry so many times what its victim carries
MIN_GAIN = 0.3  # of the mean expected weight: what gains less is not worth a read
PLAN_GAIN = 1.0  # the same for a plan, which reads what nobody has missed yet
REST_GAIN = 0.2  # and at rest, when the disks have nothing else to do


@dataclass(frozen=True)
class Moves:
    """To be published in one step, in this order."""

    promote: list[PairSwap] = field(default_factory=list)  # (resident that becomes an entry, entry that becomes one)
    withdraw: list[Pair] = field(default_factory=list)
    load: list[Pair] = field(default_factory=list)


class HotReads:
    """`residents`, and a ring of `ring_slots` more; `floor` residents a layer are always left. Where records differ in
    size (`kinds`), each kind has a part of the ring, and all exchanges are within it. One thread uses it."""

    def __init__(
        self,
        shape: RouterShape,
        residents: Iterable[Pair],
        ring_slots: int,
        floor: int,
        base: Grid,
        kinds: Kinds | None = None,
    ) -> None:
        self.shape, self.ring_slots, self.floor = shape, ring_slots, floor
        self.kinds = kinds
        self._kind: Indices = np.zeros(shape.layers * shape.experts, np.int64) if kinds is None else kinds.of.ravel()
        self._places = (ring_slots,) if kinds is None else kinds.ring
        self.heat, self.kin = Heat(shape, base), Kin(shape, base)
        self._resident = self._flags(map(self._index, residents))
        # Residents of a layer that stay whatever becomes of the swaps that are being read.
        self._sure: Indices = self._resident.reshape(shape.layers, shape.experts).sum(axis=1)
        self._ring: set[int] = set()  # routable entries
        self._loading: set[int] = set()  # into the ring
        self._leaving: set[int] = set()  # residents whose swap is being read
        self._arriving: set[int] = set()  # what takes their places
        self._joining: set[int] = set()  # into places that nobody has
        self._alone: set[int] = set()  # not to be asked for
        self._used: Indices = np.zeros(0, dtype=np.int64)  # in the last step
        self._like: dict[int, Grid] = {}  # by lane: what requests like its request asked for

    @property
    def ring(self) -> list[Pair]:
        """Routable entries, sorted."""
        return [self._pair(index) for index in sorted(self._ring)]

    @property
    def loading(self) -> list[Pair]:
        """On their way into the ring, sorted."""
        return [self._pair(index) for index in sorted(self._loading)]

    @property
    def residents(self) -> list[Pair]:
        """Sorted; those that leave with a swap are residents until it is published."""
        return [self._pair(int(index)) for index in np.flatnonzero(self._resident)]

    def served(self, scores: Grid) -> float:
        """Of `scores` [layers, experts], of which each layer sums to 1, what residents serve; see `tide.coverage`."""
        return float(scores.ravel()[self._resident].sum() / self.shape.layers)

    def observe(self, pairs: npt.ArrayLike, weights: npt.ArrayLike, tokens: int) -> None:
        """The router's true top-k of `tokens` tokens, before residency, over all lanes: pairs [n] as layer * experts +
        expert, weights [n] as means over the rows of their layer that count (`Heat.observe`)."""
        index, weight = np.asarray(pairs, dtype=np.int64).ravel(), np.asarray(weights, dtype=np.float64).ravel()
        self._used = np.unique(index)
        self.heat.observe(index, weight, tokens)

    def rebase(self, scores: Grid) -> None:
        """New scores of the pilot [layers, experts]."""
        self.heat.rebase(scores)

    def prompt_done(self, mass: Grid, lane: int) -> None:
        """mass [layers, experts]: what the lane's prompt picked, in any unit. One of which nothing was computed, as it
        came from the cache, says nothing."""
        if mass.any():
            self._like[lane] = self.kin.like(mass)
            self.heat.set_kin(np.mean([self._like[at] for at in sorted(self._like)], axis=0))

    def request_done(self, mass: Grid, lane: int) -> None:
        """mass [layers, experts]: what the lane's whole request picked, prompt and answer. One without picks (cancelled
        before its first chunk, or all of it from the cache) takes no other's place in the memory."""
        self._like.pop(lane, None)
        if mass.any():
            self.kin.remember(mass)

    def check(self, residents: Iterable[Pair], ring: Iterable[Pair]) -> None:
        """Between two steps. Raises PairError unless these are the rank's, and what leaves and comes agrees with them:
        what an idle moment can afford to verify."""
        if not np.array_equal(self._resident, self._flags(map(self._index, residents))):
            raise PairError("hot reads take other experts for residents than the rank has")
        if self._ring != set(map(self._index, ring)):
            raise PairError("hot reads take other experts for entries of the ring than the rank has")
        coming = [self._ring, self._loading, self._arriving, self._joining]
        absent = not self._resident[sorted(set().union(*coming))].any()
        if (
            not absent
            or len(set().union(*coming)) != sum(map(len, coming))
            or len(self._leaving) != len(self._arriving)
        ):
            raise PairError("an expert is in two books of hot reads")
        sure = (self._resident & ~self._flags(self._leaving)).reshape(self.shape.layers, -1).sum(axis=1)
        if not self._resident[sorted(self._leaving)].all() or not np.array_equal(sure, self._sure):
            raise PairError("hot reads count other residents of a layer that stay than there are")

    def kind_of(self, pair: Pair) -> int:
        return int(self._kind[self._index(pair)])

    def scores(self) -> Grid:
        """[layers, experts]: the expected routing weight of every pair; each layer sums to about 1."""
        grid: Grid = self.heat.expected.reshape(self.shape.layers, self.shape.experts)
        return grid

    def plan(self, max_swaps: int, steadied: Callable[[Grid], Grid] = lambda scores: scores) -> list[PairSwap]:
        """Swaps of residents for pairs that are neither routable nor on their way. Swaps that are being read stay.
        `steadied`: the pilot's word on pairs that have just come or gone (`Pilot.steadied`)."""
        expected = self.scores()
        return self._plan(steadied(expected), max_swaps, PLAN_GAIN * float(expected.mean()))

    def rest_plan(self, max_swaps: int, scores: Grid) -> list[PairSwap]:
        """The same for nobody's tokens: `scores` [layers, experts] are what the next request may want."""
        return self._plan(scores, max_swaps, REST_GAIN * float(scores.mean()))

    def _plan(self, scores: Grid, max_swaps: int, least: float) -> list[PairSwap]:
        worth = scores.ravel().copy()
        worth[sorted(self._ring | self._loading | self._arriving | self._joining | self._alone)] = 0.0
        worth[sorted(self._leaving)] = 1.0
        of = None if self.kinds is None else self.kinds.of
        return swap_plan(worth.reshape(scores.shape), self._resident, self.floor, max_swaps, least, of)

    def moves(self, reads: int) -> Moves:
        """At most `reads` reads, the most wanted first, each with the slot that it takes."""
        moves, expected = Moves(), self.heat.expected
        held = np.bincount(self._kind[sorted(self._ring | self._loading)], minlength=len(self._places))
        free = [places - int(taken) for places, taken in zip(self._places, held, strict=True)]
        victims = [iter(self._victims(2 * reads, kind)) for kind in range(len(free))]
        full = set[int]()  # kinds of which nothing gives way any more
        least = MIN_GAIN * float(expected.mean())
        for newcomer in self._wanted(reads):
            worth = float(expected[newcomer] - least)
            if worth <= 0:
                break
            kind = int(self._kind[newcomer])
            if kind in full:
                continue
            if free[kind]:
                free[kind] -= 1
            elif not self._make_room(moves, victims[kind], worth / MARGIN):
                full.add(kind)
                continue
            self._loading.add(newcomer)
            moves.load.append(self._pair(newcomer))
        return moves

    def published(self, pair: Pair) -> None:
        index = self._index(pair)
        self._loading.remove(index)
        self._ring.add(index)

    def failed(self, pair: Pair) -> None:
        self._loading.remove(self._index(pair))

    def leave_alone(self, pair: Pair) -> None:
        self._alone.add(self._index(pair))

    def ask_again(self, pair: Pair) -> None:
        self._alone.discard(self._index(pair))

    def swap_begun(self, out: Pair, in_: Pair) -> None:
        """Raises ValueError when the swap is out of date: moves since the plan have overtaken it, or its newcomer
        could not be read. Drop it then."""
        leaves, comes = self._index(out), self._index(in_)
        floor = self._sure[out[0]] <= self.floor and out[0] != in_[0]
        unlike = self._kind[leaves] != self._kind[comes]
        gone = not self._resident[leaves] or leaves in self._leaving
        if unlike or floor or gone or self._is_here(comes):
            raise ValueError(f"the swap of {out} for {in_} is out of date")
        if comes in self._alone:
            raise ValueError(f"{in_} is left alone for a while: it could not be read")
        self._leaving.add(leaves)
        self._arriving.add(comes)
        self._sure[out[0]] -= 1

    def swapped(self, out: Pair, in_: Pair) -> None:
        leaves, comes = self._index(out), self._index(in_)
        self._leaving.remove(leaves)
        self._arriving.remove(comes)
        self._resident[leaves], self._resident[comes] = False, True
        self._sure[in_[0]] += 1

    def swap_dropped(self, out: Pair, in_: Pair) -> None:
        self._leaving.remove(self._index(out))
        self._arriving.remove(self._index(in_))
        self._sure[out[0]] += 1

    def evicted(self, pairs: Iterable[Pair]) -> None:
        """These residents are no more; nothing is being read. Raises ValueError for one that is none, or where a layer
        would keep fewer than its floor."""
        leaving = [self._index(pair) for pair in pairs]
        gone = np.bincount([index // self.shape.experts for index in leaving], minlength=self.shape.layers)
        if not self._resident[leaving].all() or ((self._sure - gone < self.floor) & (gone > 0)).any():
            raise ValueError("a change of the budget evicts what is not resident, or may not leave")
        self._resident[leaving] = False
        self._sure -= gone

    def residents_of_kind(self, kinds: int) -> tuple[int, ...]:
        """By kind, those that are residents, and those that are being read to become some."""
        flags = self._resident.copy()
        flags[list(self._joining)] = True
        return tuple(np.bincount(self._kind[flags], minlength=kinds).tolist())

    def adopted(self, pair: Pair) -> None:
        index = self._index(pair)
        self._ring.remove(index)
        self._resident[index] = True
        self._sure[pair[0]] += 1

    def in_ring(self, pair: Pair) -> bool:
        return self._index(pair) in self._ring

    def next_resident(self, scores: Grid, kind: int) -> Pair | None:
        """Of what may take a free place for this kind, what `scores` most: an entry of the ring, or what is to be read.
        None: there is nothing."""
        allowed = self._absent()
        allowed[list(self._ring)] = True
        allowed &= self._kind == kind
        if not allowed.any():
            return None
        return self._pair(int(np.argmax(np.where(allowed, scores.ravel(), -np.inf))))

    def join_begun(self, pair: Pair) -> None:
        self._joining.add(self._index(pair))

    def joined(self, pair: Pair) -> None:
        index = self._index(pair)
        self._joining.remove(index)
        self._resident[index] = True
        self._sure[pair[0]] += 1

    def join_dropped(self, pair: Pair) -> None:
        self._joining.remove(self._index(pair))

    def _make_room(self, moves: Moves, victims: Iterator[int], worth: float) -> bool:
        """Frees the slot of the next victim that is expected to carry less than `worth`."""
        for victim in victims:
            if self.heat.expected[victim] >= worth:
                return False
            if self._resident[victim]:
                entry = self._best_entry(victim)
                if entry is None:
                    continue
                self._promote(victim, entry)
                moves.promote.append((self._pair(victim), self._pair(entry)))
            else:
                self._ring.remove(victim)
            moves.withdraw.append(self._pair(victim))
            return True
        return False

    def _best_entry(self, victim: int) -> int | None:
        """The ring entry to take a resident's place: the most wanted that the floor of the victim's layer allows."""
        layer, experts = victim // self.shape.experts, self.shape.experts
        above = self._sure[layer] > self.floor
        alike = (entry for entry in self._ring if self._kind[entry] == self._kind[victim])
        allowed = [entry for entry in alike if above or entry // experts == layer]
        return max(allowed, key=lambda entry: (self.heat.expected[entry], -entry), default=None)

    def _promote(self, out: int, entry: int) -> None:
        self._resident[out], self._resident[entry] = False, True
        self._ring.remove(entry)
        self._sure[out // self.shape.experts] -= 1
        self._sure[entry // self.shape.experts] += 1

    def _is_here(self, index: int) -> bool:
        return bool(self._resident[index]) or index in self._ring | self._loading | self._arriving | self._joining

    def _wanted(self, count: int) -> list[int]:
        """The most wanted absentees, the most wanted first."""
        return _first(np.where(self._absent(), -self.heat.expected, np.inf), count)

    def _absent(self) -> npt.NDArray[np.bool_]:
        """Neither here nor on their way, and not left alone."""
        absent: npt.NDArray[np.bool_] = ~self._resident
        absent[list(self._ring | self._loading | self._arriving | self._joining | self._alone)] = False
        return absent

    def _victims(self, count: int, kind: int) -> list[int]:
        """The least wanted of ring and residents of a kind, the least wanted first, without those used in the last
        step."""
        present = self._resident.copy()
        present[list(self._ring)] = True
        present &= self._kind == kind
        present[list(self._leaving)] = False
        present[self._used] = False
        return _first(np.where(present, self.heat.expected, np.inf), count)

    def _flags(self, indices: Iterable[int]) -> npt.NDArray[np.bool_]:
        flags = np.zeros(self.shape.layers * self.shape.experts, dtype=bool)
        flags[list(indices)] = True
        return flags

    def _index(self, pair: Pair) -> int:
        return pair[0] * self.shape.experts + pair[1]

    def _pair(self, index: int) -> Pair:
        return divmod(index, self.shape.experts)


def _first(keys: Weights, count: int) -> list[int]:
    """Indices of the `count` lowest finite keys, lowest first, ties to the lower index."""
    count = min(count, len(keys) - 1)
    if count <= 0:
        return []
    chosen = np.flatnonzero(keys <= np.partition(keys, count - 1)[count - 1])
    chosen = chosen[np.argsort(keys[chosen], kind="stable")][:count]
    return [int(index) for index in chosen if np.isfinite(keys[index])]
