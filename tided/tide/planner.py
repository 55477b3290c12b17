"""Which experts to keep, as pure functions: the same scores and residents give the same plan, anywhere.

Scores [layers, experts]: every layer sums to 1, so one ranking over all layers is defined. The aim is the largest sum
of scores over the resident set, with at least `floor` residents in every layer. Ties fall to the lower (layer, expert).

Records of one size are exchanged for each other. Where sizes differ, the budget is in bytes: `boot_set_of_bytes` shares
it out by score a byte, and what it gives each size stays with it, so that a swap never moves a record to make room. So
only what was observed may count a byte: were a guess to, the small would fill the memory for good, unseen.
"""

import heapq
from collections.abc import Iterable
from itertools import chain

import numpy as np
import numpy.typing as npt

Pair = tuple[int, int]  # (layer, expert)
PairSwap = tuple[Pair, Pair]  # (leaves the resident set, takes its place)
Scores = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Sizes = npt.NDArray[np.int64]  # [layers, experts] bytes of each record


def check_budget(layers: int, experts: int, budget: int, floor: int) -> None:
    """Raises ValueError for a budget that no resident set of this model has."""
    if not 0 < floor <= experts:
        raise ValueError(f"a floor of {floor} residents a layer, a layer has {experts} experts")
    if budget < layers * floor:
        raise ValueError(
            f"{budget} resident experts are too few: {layers} layers need {floor} each, {layers * floor} in all"
        )
    if budget > layers * experts:
        raise ValueError(f"{budget} resident experts are more than the model has: {layers} x {experts}")


def boot_set(scores: Scores, budget: int, floor: int) -> list[Pair]:
    """The best `floor` experts of each layer, then the best of all others, `budget` pairs in all, sorted."""
    chosen = _best(scores, budget, floor)
    return [(layer, expert) for layer, expert in np.argwhere(chosen).tolist()]


def _best(scores: Scores, budget: int, floor: int) -> Mask:
    """[layers, experts]: the set of `boot_set`."""
    layers, experts = _checked(scores).shape
    check_budget(layers, experts, budget, floor)
    chosen = np.zeros((layers, experts), dtype=bool)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :floor]
    np.put_along_axis(chosen, best, True, axis=1)
    ranking = np.argsort(-scores, axis=None, kind="stable")
    others = ranking[~chosen.ravel()[ranking]][: budget - layers * floor]
    chosen.ravel()[others] = True
    return chosen


def boot_set_of_bytes(
    scores: Scores, sizes: Sizes, budget_bytes: int, floor: int, guessed: Scores | None = None
) -> list[Pair]:
    """The best `floor` experts of each layer, then by score a byte whatever still fits, sorted. What is left over is
    less than the smallest record outside. `guessed`: the part of the scores that nobody observed. It counts as if every
    record had the mean size, which prefers none. Raises ValueError when the floors alone do not fit."""
    layers, experts = _checked(scores).shape
    if sizes.shape != scores.shape or (sizes <= 0).any():
        raise ValueError(f"record sizes are {list(sizes.shape)}, must be [{layers}, {experts}] and positive")
    check_budget(layers, experts, layers * floor, floor)
    chosen = np.zeros((layers, experts), dtype=bool)
    np.put_along_axis(chosen, np.argsort(-scores, axis=1, kind="stable")[:, :floor], True, axis=1)
    left = budget_bytes - int(sizes[chosen].sum())
    if left < 0:
        raise ValueError(f"{budget_bytes} bytes are too few for {floor} experts in each of {layers} layers")
    flat, taken = sizes.ravel().tolist(), chosen.ravel()
    smallest = min(flat)
    worth = scores / sizes if guessed is None else (scores - guessed) / sizes + guessed / sizes.mean()
    for pair in np.argsort(-worth, axis=None, kind="stable").tolist():
        if left < smallest:
            break
        if not taken[pair] and flat[pair] <= left:
            taken[pair] = True
            left -= flat[pair]
    return [(layer, expert) for layer, expert in np.argwhere(chosen).tolist()]


def first_set(layers: int, experts: int, budget: int, floor: int) -> list[Pair]:
    """What is kept when nothing at all is known: the first experts of each layer, as many in one as in another (the
    first layers take what does not divide)."""
    check_budget(layers, experts, budget, floor)
    each, left = divmod(budget, layers)
    return [(layer, expert) for layer in range(layers) for expert in range(each + (layer < left))]


def swap_plan(
    scores: Scores,
    residents: Iterable[Pair] | Mask,
    floor: int,
    max_swaps: int,
    min_gain: float,
    sizes: Sizes | None = None,
) -> list[PairSwap]:
    """Swaps towards the best set of the same size, the most wanted newcomer first, each against the least wanted
    resident of its record size that may leave: one of its own layer, or of a layer that has more than `floor`.

    A swap must gain more than `min_gain`. Newcomers belong to the best set and leavers do not, so no pair is in both
    roles. The floor holds after every swap. Of records of one size: once a newcomer found nobody, later ones (less
    wanted) can only trade inside their own layers, which unlocks no other: one pass leaves nothing for a second, unless
    `max_swaps` cut it.
    """
    experts = _checked(scores).shape[1]
    resident = _mask(residents, scores.shape)
    if (resident.sum(axis=1) < floor).any():
        raise ValueError(f"a layer has fewer than {floor} residents already")
    kind = np.zeros(scores.size, dtype=np.int64) if sizes is None else np.unique(sizes, return_inverse=True)[1].ravel()
    best = _best(scores, int(resident.sum()), floor) if kind.max() == 0 else _best_by_kind(scores, resident, kind)
    flat = scores.ravel()
    newcomers = np.flatnonzero((best & ~resident).ravel())
    newcomers = newcomers[np.argsort(-flat[newcomers], kind="stable")]
    out, in_, done = _unhindered(flat, resident, best, newcomers, kind, floor, min_gain)
    plan = list(zip(_pairs(out[:max_swaps], experts), _pairs(in_[:max_swaps], experts), strict=True))
    if len(plan) < max_swaps and done < len(newcomers):
        resident.ravel()[out], resident.ravel()[in_] = False, True
        leavers = _Leavers(scores, resident, best, floor, kind)
        for newcomer in newcomers[done:].tolist():
            if len(plan) >= max_swaps:
                break
            leaver = leavers.cheapest(newcomer)
            if leaver is not None and flat[newcomer] - flat[leaver] > min_gain:
                leavers.swap(leaver, newcomer // experts)
                plan.append((divmod(leaver, experts), divmod(newcomer, experts)))
    return plan


def _mask(residents: Iterable[Pair] | Mask, shape: tuple[int, ...]) -> Mask:
    """[layers, experts], the caller's own."""
    if isinstance(residents, np.ndarray):
        return residents.reshape(shape).copy()
    pairs = np.fromiter(chain.from_iterable(residents), dtype=np.int64).reshape(-1, 2)
    resident = np.zeros(shape, dtype=bool)
    resident[pairs[:, 0], pairs[:, 1]] = True
    return resident


def _pairs(indices: Sizes, experts: int) -> list[Pair]:
    layers, of_layer = np.divmod(indices, experts)
    return list(zip(layers.tolist(), of_layer.tolist(), strict=True))


def _unhindered(
    flat: Scores, resident: Mask, best: Mask, newcomers: Sizes, kind: Sizes, floor: int, min_gain: float
) -> tuple[Sizes, Sizes, int]:
    """The plan for as long as no floor is in the way, which is mostly all of it: of each size, the cheapest leaver for
    the most wanted newcomer, the next for the next. (leavers, newcomers, newcomers that were decided on)."""
    layers, experts = resident.shape
    leavers = _by_cost(flat, resident, best)
    partner = np.full(len(newcomers), -1, dtype=np.int64)
    for one in range(int(kind.max()) + 1):
        mine, theirs = np.flatnonzero(kind[newcomers] == one), leavers[kind[leavers] == one]
        both = min(len(mine), len(theirs))
        partner[mine[:both]] = theirs[:both]
    gain = np.where(partner >= 0, flat[newcomers] - flat[partner], -np.inf)
    at = np.flatnonzero(gain > min_gain)  # of each size the first ones: gains only fall
    out, in_ = partner[at], newcomers[at]
    from_, to = out // experts, in_ // experts
    step = np.arange(len(at))
    moves = np.zeros((len(at) + 1, layers), dtype=np.int32)
    np.add.at(moves, (step + 1, to), 1)
    np.subtract.at(moves, (step + 1, from_), 1)
    above = (resident.sum(axis=1) - floor + np.cumsum(moves, axis=0))[step, from_]
    stuck = np.flatnonzero((above <= 0) & (from_ != to))
    if len(stuck):
        first = int(stuck[0])
        return out[:first], in_[:first], int(at[first])
    return out, in_, len(newcomers)


def _by_cost(flat: Scores, resident: Mask, best: Mask) -> Sizes:
    """Residents outside the best set, the cheapest first; among equals the highest pair, which `boot_set` would have
    taken last."""
    leavers = np.flatnonzero((resident & ~best).ravel())[::-1]
    ordered: Sizes = leavers[np.argsort(flat[leavers], kind="stable")]
    return ordered


def _best_by_kind(scores: Scores, resident: Mask, kind: Sizes) -> Mask:
    """[layers, experts]: of each size as many as are resident now, the most wanted; the floors are the leavers'."""
    best, here, flat = np.zeros(scores.size, dtype=bool), resident.ravel(), scores.ravel()
    for one in range(int(kind.max()) + 1):
        own = np.flatnonzero(kind == one)
        best[own[np.argsort(-flat[own], kind="stable")][: int(here[own].sum())]] = True
    return best.reshape(scores.shape)


class _Leavers:
    """Residents outside the best set where floors are in the way: by record size and layer as places in the order of
    their cost, the cheapest last. `_open` holds the cheapest of each layer above its floor, once, and some that have
    left or may not leave any more, which are thrown away when they come up."""

    def __init__(self, scores: Scores, resident: Mask, best: Mask, floor: int, kind: Sizes) -> None:
        layers, self._experts = scores.shape
        self._above_floor: list[int] = (resident.sum(axis=1) - floor).tolist()
        leavers = _by_cost(scores.ravel(), resident, best)
        self._pair: list[int] = leavers.tolist()
        self._kind = kind
        self._layer = (leavers // self._experts).tolist()
        self._kinds = range(int(kind.max()) + 1)
        self._by_layer: list[list[list[int]]] = [[[] for _ in range(layers)] for _ in self._kinds]
        for place in reversed(range(len(leavers))):
            self._by_layer[int(kind[leavers[place]])][self._layer[place]].append(place)
        self._open: list[list[int]] = [[] for _ in self._kinds]
        for layer in range(layers):
            self._opened(layer)
        self._chosen = (0, 0)  # kind and place of the one that `cheapest` told last

    def cheapest(self, newcomer: int) -> int | None:
        kind = int(self._kind[newcomer])
        of_layer, heap = self._by_layer[kind][newcomer // self._experts], self._open[kind]
        while heap and not self._may_leave(kind, heap[0]):
            heapq.heappop(heap)
        place: int = min(of_layer[-1:] + heap[:1], default=-1)
        self._chosen = kind, place
        return None if place < 0 else self._pair[place]

    def swap(self, leaver: int, to_layer: int) -> None:
        """`leaver` is the one that `cheapest` told last."""
        kind, place = self._chosen
        layer = self._layer[place]
        of_layer = self._by_layer[kind][layer]
        of_layer.pop()
        self._above_floor[layer] -= 1
        if self._above_floor[layer] > 0 and of_layer:
            heapq.heappush(self._open[kind], of_layer[-1])
        self._above_floor[to_layer] += 1
        if self._above_floor[to_layer] == 1:
            self._opened(to_layer)

    def _opened(self, layer: int) -> None:
        """The layer has come above its floor."""
        if self._above_floor[layer] > 0:
            for kind in self._kinds:
                if self._by_layer[kind][layer]:
                    heapq.heappush(self._open[kind], self._by_layer[kind][layer][-1])

    def _may_leave(self, kind: int, place: int) -> bool:
        layer = self._layer[place]
        return self._above_floor[layer] > 0 and self._by_layer[kind][layer][-1:] == [place]


def _checked(scores: Scores) -> Scores:
    if scores.ndim != 2 or not np.isfinite(scores).all() or (scores < 0).any():
        raise ValueError("scores must be finite, not negative, [layers, experts]")
    return scores
