"""Which experts to keep, as pure functions: the same scores and residents give the same plan, anywhere.

Scores [layers, experts]: every layer sums to 1, so one ranking over all layers is defined. The aim is the largest sum
of scores over the resident set, with at least `floor` residents in every layer. Ties fall to the lower (layer, expert).

Records of one size are exchanged for each other. Where sizes differ, the budget is in bytes: `boot_set_of_bytes` shares
it out by score a byte, and what it gives each size stays with it, so that a swap never moves a record to make room.
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


def boot_set_of_bytes(scores: Scores, sizes: Sizes, budget_bytes: int, floor: int) -> list[Pair]:
    """The best `floor` experts of each layer, then by score a byte whatever still fits, sorted. What is left over is
    less than the smallest record outside. Raises ValueError when the floors alone do not fit."""
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
    for pair in np.argsort(-(scores / sizes), axis=None, kind="stable").tolist():
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
    residents: Iterable[Pair],
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
    layers, experts = _checked(scores).shape
    pairs = np.fromiter(chain.from_iterable(residents), dtype=np.int64).reshape(-1, 2)
    resident = np.zeros((layers, experts), dtype=bool)
    resident[pairs[:, 0], pairs[:, 1]] = True
    kind = np.zeros(scores.size, dtype=np.int64) if sizes is None else np.unique(sizes, return_inverse=True)[1].ravel()
    best = _best(scores, int(resident.sum()), floor) if kind.max() == 0 else _best_by_kind(scores, resident, kind)
    leavers = _Leavers(scores, resident, best, floor, kind)
    flat = scores.ravel()
    newcomers = np.flatnonzero((best & ~resident).ravel())
    plan: list[PairSwap] = []
    for newcomer in newcomers[np.argsort(-flat[newcomers], kind="stable")].tolist():
        if len(plan) >= max_swaps:
            break
        leaver = leavers.cheapest(newcomer)
        if leaver is not None and flat[newcomer] - flat[leaver] > min_gain:
            leavers.swap(leaver, newcomer // experts)
            plan.append((divmod(leaver, experts), divmod(newcomer, experts)))
    return plan


def _best_by_kind(scores: Scores, resident: Mask, kind: Sizes) -> Mask:
    """[layers, experts]: of each size as many as are resident now, the most wanted; the floors are the leavers'."""
    best, here, flat = np.zeros(scores.size, dtype=bool), resident.ravel(), scores.ravel()
    for one in range(int(kind.max()) + 1):
        own = np.flatnonzero(kind == one)
        best[own[np.argsort(-flat[own], kind="stable")][: int(here[own].sum())]] = True
    return best.reshape(scores.shape)


class _Leavers:
    """Residents outside the best set, as layer * experts + expert, by record size, layer and score. `_open` holds the
    cheapest of each layer above its floor, and some that have left since, which are thrown away when they come up."""

    def __init__(self, scores: Scores, resident: Mask, best: Mask, floor: int, kind: Sizes) -> None:
        layers, self._experts = scores.shape
        self._scores, self._kind = scores.ravel(), kind
        self._above_floor: list[int] = (resident.sum(axis=1) - floor).tolist()
        if min(self._above_floor) < 0:
            raise ValueError(f"a layer has fewer than {floor} residents already")
        kinds = range(int(kind.max()) + 1)
        self._by_layer: list[list[list[int]]] = [[[] for _ in range(layers)] for _ in kinds]
        # The cheapest last; among equals the highest pair, which `boot_set` would have taken last.
        leavers = np.flatnonzero((resident & ~best).ravel())
        for leaver in leavers[np.argsort(-self._scores[leavers], kind="stable")].tolist():
            self._by_layer[kind[leaver]][leaver // self._experts].append(leaver)
        self._open: list[list[tuple[float, int]]] = [[] for _ in kinds]
        for layer in range(layers):
            self._offer(layer)

    def cheapest(self, newcomer: int) -> int | None:
        kind = int(self._kind[newcomer])
        of_layer = self._by_layer[kind][newcomer // self._experts]
        own, other = of_layer[-1] if of_layer else None, self._cheapest_open(kind)
        if own is None or other is None:
            return own if other is None else other
        cheapest: int = min(own, other, key=self._cost)
        return cheapest

    def swap(self, leaver: int, to_layer: int) -> None:
        layer = leaver // self._experts
        self._by_layer[self._kind[leaver]][layer].pop()
        self._above_floor[layer] -= 1
        self._above_floor[to_layer] += 1
        self._offer(layer)
        self._offer(to_layer)

    def _cost(self, pair: int) -> tuple[float, int]:
        return (float(self._scores[pair]), -pair)

    def _offer(self, layer: int) -> None:
        if self._above_floor[layer] > 0:
            for by_layer, heap in zip(self._by_layer, self._open, strict=True):
                if by_layer[layer]:
                    heapq.heappush(heap, self._cost(by_layer[layer][-1]))

    def _cheapest_open(self, kind: int) -> int | None:
        heap = self._open[kind]
        while heap:
            pair = -heap[0][1]
            layer = pair // self._experts
            if self._above_floor[layer] > 0 and self._by_layer[kind][layer][-1:] == [pair]:
                return pair
            heapq.heappop(heap)
        return None


def _checked(scores: Scores) -> Scores:
    if scores.ndim != 2 or not np.isfinite(scores).all() or (scores < 0).any():
        raise ValueError("scores must be finite, not negative, [layers, experts]")
    return scores
