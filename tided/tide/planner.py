"""Which experts to keep, as pure functions: the same scores and residents give the same plan, anywhere.

Scores [layers, experts]: every layer sums to 1, so one ranking over all layers is defined. The aim is the largest sum
of scores over the resident set, with at least `floor` residents in every layer. Ties fall to the lower (layer, expert).
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


def first_set(layers: int, experts: int, budget: int, floor: int) -> list[Pair]:
    """What is kept when nothing at all is known: the first experts of each layer, as many in one as in another (the
    first layers take what does not divide)."""
    check_budget(layers, experts, budget, floor)
    each, left = divmod(budget, layers)
    return [(layer, expert) for layer in range(layers) for expert in range(each + (layer < left))]


def swap_plan(scores: Scores, residents: Iterable[Pair], floor: int, max_swaps: int, min_gain: float) -> list[PairSwap]:
    """Swaps towards the best set of the same size, the most wanted newcomer first, each against the least wanted
    resident that may leave: one of its own layer, or of a layer that has more than `floor`.

    A swap must gain more than `min_gain`. Newcomers belong to the best set and leavers do not, so no pair is in both
    roles. The floor holds after every swap. Once a newcomer found nobody, later ones (less wanted) can only trade
    inside their own layers, which unlocks no other: one pass leaves nothing for a second, unless `max_swaps` cut it.
    """
    layers, experts = _checked(scores).shape
    pairs = np.fromiter(chain.from_iterable(residents), dtype=np.int64).reshape(-1, 2)
    resident = np.zeros((layers, experts), dtype=bool)
    resident[pairs[:, 0], pairs[:, 1]] = True
    best = _best(scores, int(resident.sum()), floor)
    leavers = _Leavers(scores, resident, best, floor)
    flat = scores.ravel()
    newcomers = np.flatnonzero((best & ~resident).ravel())
    plan: list[PairSwap] = []
    for newcomer in newcomers[np.argsort(-flat[newcomers], kind="stable")].tolist():
        if len(plan) >= max_swaps:
            break
        leaver = leavers.cheapest(newcomer // experts)
        if leaver is not None and flat[newcomer] - flat[leaver] > min_gain:
            leavers.swap(leaver, newcomer // experts)
            plan.append((divmod(leaver, experts), divmod(newcomer, experts)))
    return plan


class _Leavers:
    """Residents outside the best set, as layer * experts + expert, by layer and score. `_open` holds the cheapest of
    each layer above its floor, and some that have left since, which are thrown away when they come up."""

    def __init__(self, scores: Scores, resident: Mask, best: Mask, floor: int) -> None:
        layers, self._experts = scores.shape
        self._scores = scores.ravel()
        self._above_floor: list[int] = (resident.sum(axis=1) - floor).tolist()
        if min(self._above_floor) < 0:
            raise ValueError(f"a layer has fewer than {floor} residents already")
        self._by_layer: list[list[int]] = [[] for _ in range(layers)]
        # The cheapest last; among equals the highest pair, which `boot_set` would have taken last.
        leavers = np.flatnonzero((resident & ~best).ravel())
        for leaver in leavers[np.argsort(-self._scores[leavers], kind="stable")].tolist():
            self._by_layer[leaver // self._experts].append(leaver)
        self._open: list[tuple[float, int]] = []
        for layer in range(layers):
            self._offer(layer)

    def cheapest(self, for_layer: int) -> int | None:
        own = self._by_layer[for_layer][-1] if self._by_layer[for_layer] else None
        other = self._cheapest_open()
        if own is None or other is None:
            return own if other is None else other
        return min(own, other, key=self._cost)

    def swap(self, leaver: int, to_layer: int) -> None:
        layer = leaver // self._experts
        self._by_layer[layer].pop()
        self._above_floor[layer] -= 1
        self._above_floor[to_layer] += 1
        self._offer(layer)
        self._offer(to_layer)

    def _cost(self, pair: int) -> tuple[float, int]:
        return (float(self._scores[pair]), -pair)

    def _offer(self, layer: int) -> None:
        if self._above_floor[layer] > 0 and self._by_layer[layer]:
            heapq.heappush(self._open, self._cost(self._by_layer[layer][-1]))

    def _cheapest_open(self) -> int | None:
        while self._open:
            pair = -self._open[0][1]
            if self._by_layer[pair // self._experts][-1:] == [pair]:
                return pair
            heapq.heappop(self._open)
        return None


def _checked(scores: Scores) -> Scores:
    if scores.ndim != 2 or not np.isfinite(scores).all() or (scores < 0).any():
        raise ValueError("scores must be finite, not negative, [layers, experts]")
    return scores
