"""Hot reads, as rank 0 decides them: which absent experts to read now, and which entries of the ring they overwrite.

Rank 0 owns one `HotReads` and asks it once a step:

    hot = HotReads(shape, residents, ring_slots, floor, pilot.scores())
    each step, prompts too        hot.observe(pairs, weights, tokens)      what the router wanted
    each decode step              moves = hot.moves(reads)                 `reads`: what the step's disk time is worth
        moves.promote             roles are exchanged, nothing is read: `out` is an entry of the ring from now on, `in_`
                                  a resident (tell the pilot: `pilot.applied(moves.promote)`); both stay routable
        moves.withdraw            entries of the ring that stop being routable in this step; their slots are free
        moves.load                read these into free slots of the ring
    every rank has one            hot.published(pair)                      routable from this step on
    a read failed                 hot.failed(pair)                         its slot is free again
    a plan's swap is published    hot.swapped(out, in_)                    the resident set, and only it, has changed
    the pilot has new scores      hot.rebase(pilot.scores())               before a plan is made, and after a request

`plan` gives a plan's swaps (to be read beside serving) from the same estimate, so plans and hot reads never undo each
other. Ring and residents are ranked together: what is read overwrites the entry that is expected to be needed least,
whichever of the two it is in; an entry that was used in the last step survives. Pure: no clock, no chance, no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tided.tide.demand import Grid, RouterShape
from tided.tide.heat import Heat, Indices, Weights
from tided.tide.planner import Pair, PairSwap, swap_plan

MARGIN = 1.1  # a newcomer must be expected to carry so many times what its victim carries
MIN_GAIN = 0.02  # of the mean expected weight: less is noise, and not worth a read


@dataclass(frozen=True)
class Moves:
    """To be published in one step, in this order."""

    promote: list[PairSwap] = field(
        default_factory=list
    )  # (resident that becomes a ring entry, entry that becomes one)
    withdraw: list[Pair] = field(default_factory=list)
    load: list[Pair] = field(default_factory=list)


class HotReads:
    """`residents` and a ring of `ring_slots` more; `floor` residents a layer are always left. One thread uses it."""

    def __init__(self, shape: RouterShape, residents: Iterable[Pair], ring_slots: int, floor: int, base: Grid) -> None:
        self.shape, self.ring_slots, self.floor = shape, ring_slots, floor
        self.heat = Heat(shape, base)
        pairs = shape.layers * shape.experts
        self._resident: npt.NDArray[np.bool_] = np.zeros(pairs, dtype=bool)
        self._resident[[self._index(pair) for pair in residents]] = True
        self._residents_of = self._resident.reshape(shape.layers, shape.experts).sum(axis=1)
        self._ring: set[int] = set()  # routable entries
        self._loading: set[int] = set()
        self._used: Indices = np.zeros(0, dtype=np.int64)  # in the last step

    @property
    def ring(self) -> list[Pair]:
        """Routable entries, sorted."""
        return [self._pair(index) for index in sorted(self._ring)]

    @property
    def loading(self) -> list[Pair]:
        return [self._pair(index) for index in sorted(self._loading)]

    def observe(self, pairs: npt.ArrayLike, weights: npt.ArrayLike, tokens: int) -> None:
        """The router's true top-k of one step, before residency, over all lanes: pairs [n] as layer * experts + expert,
        weights [n] normalised to 1 a row and layer (0 for rows of rejected drafts); `tokens`: rows that count."""
        index, weight = np.asarray(pairs, dtype=np.int64).ravel(), np.asarray(weights, dtype=np.float64).ravel()
        self._used = np.unique(index)
        self.heat.observe(index, weight, tokens)

    def rebase(self, scores: Grid) -> None:
        self.heat.rebase(scores)

    def scores(self) -> Grid:
        """[layers, experts]: the expected routing weight of every pair; each layer sums to 1."""
        grid: Grid = self.heat.expected.reshape(self.shape.layers, self.shape.experts)
        return grid

    def plan(self, max_swaps: int) -> list[PairSwap]:
        """Swaps of residents for pairs that are neither resident nor in the ring nor on their way there."""
        scores = self.scores().copy()
        scores.ravel()[sorted(self._ring | self._loading)] = 0.0
        residents = [self._pair(int(index)) for index in np.flatnonzero(self._resident)]
        return swap_plan(scores, residents, self.floor, max_swaps, MIN_GAIN * float(scores.mean()))

    def moves(self, reads: int) -> Moves:
        """At most `reads` reads, the most wanted first, each with the slot that it takes."""
        moves, expected = Moves(), self.heat.expected
        free = self.ring_slots - len(self._ring) - len(self._loading)
        victims = iter(self._victims(reads))
        least = MIN_GAIN * float(expected.mean())
        for newcomer in self._wanted(reads):
            if expected[newcomer] <= least:
                break
            if free:
                free -= 1
            elif not self._make_room(moves, victims, (expected[newcomer] - least) / MARGIN):
                break
            self._loading.add(newcomer)
            moves.load.append(self._pair(newcomer))
        return moves

    def published(self, pair: Pair) -> None:
        index = self._index(pair)
        self._loading.remove(index)
        self._ring.add(index)

    def failed(self, pair: Pair) -> None:
        self._loading.remove(self._index(pair))

    def swapped(self, out: Pair, in_: Pair) -> None:
        """A plan's swap. If the newcomer is an entry of the ring by now, that entry is dropped (withdraw its slot)."""
        self._exchange(self._index(out), self._index(in_))
        self._ring.discard(self._index(in_))

    def _make_room(self, moves: Moves, victims: Iterable[int], worth: float) -> bool:
        """Frees the slot of the next victim that is expected to carry less than `worth`."""
        for victim in victims:
            if self.heat.expected[victim] >= worth:
                return False
            if self._resident[victim]:
                entry = self._best_entry(victim)
                if entry is None:
                    continue
                self._exchange(victim, entry)
                self._ring.remove(entry)
                moves.promote.append((self._pair(victim), self._pair(entry)))
            else:
                self._ring.remove(victim)
            moves.withdraw.append(self._pair(victim))
            return True
        return False

    def _best_entry(self, victim: int) -> int | None:
        """The ring entry to take a resident's place: the most wanted that the floor of the victim's layer allows."""
        layer, experts = victim // self.shape.experts, self.shape.experts
        above = self._residents_of[layer] > self.floor
        allowed = [entry for entry in self._ring if above or entry // experts == layer]
        return max(allowed, key=lambda entry: (self.heat.expected[entry], -entry), default=None)

    def _exchange(self, out: int, in_: int) -> None:
        self._resident[out], self._resident[in_] = False, True
        self._residents_of[out // self.shape.experts] -= 1
        self._residents_of[in_ // self.shape.experts] += 1

    def _wanted(self, count: int) -> list[int]:
        """The most wanted absentees, the most wanted first."""
        absent = ~self._resident
        absent[list(self._ring | self._loading)] = False
        return _first(np.where(absent, -self.heat.expected, np.inf), count)

    def _victims(self, count: int) -> list[int]:
        """The least wanted of ring and residents, the least wanted first, without those used in the last step."""
        present = self._resident.copy()
        present[list(self._ring)] = True
        present[self._used] = False
        return _first(np.where(present, self.heat.expected, np.inf), 2 * count)

    def _index(self, pair: Pair) -> int:
        return pair[0] * self.shape.experts + pair[1]

    def _pair(self, index: int) -> Pair:
        return divmod(index, self.shape.experts)


def _first(keys: Weights, count: int) -> list[int]:
    """Indices of the `count` lowest finite keys, lowest first, ties to the lower index."""
    count = min(count, len(keys) - 1)
    if count <= 0:
        return []
    limit = np.partition(keys, count - 1)[count - 1]
    chosen = np.flatnonzero(keys <= limit)
    chosen = chosen[np.argsort(keys[chosen], kind="stable")][:count]
    return [int(index) for index in chosen if np.isfinite(keys[index])]
