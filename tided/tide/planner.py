"""Which experts to keep, as pure functions: the same scores and residents give the same plan, anywhere.

Scores [layers, experts]: every layer sums to 1, so one ranking over all layers is defined. The aim is the largest sum
of scores over the resident set, with at least `floor` residents in every layer. Ties fall to the lower (layer, expert).
"""

import heapq
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Pair = tuple[int, int]  # (layer, expert)
PairSwap = tuple[Pair, Pair]  # (leaves the resident set, takes its place)
Scores = npt.NDArray[np.float64]


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
    layers, experts = _checked(scores).shape
    check_budget(layers, experts, budget, floor)
    chosen = np.zeros((layers, experts), dtype=bool)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :floor]
    np.put_along_axis(chosen, best, True, axis=1)
    ranking = np.argsort(-scores, axis=None, kind="stable")
    others = ranking[~chosen.ravel()[ranking]][: budget - layers * floor]
    chosen.ravel()[others] = True
    return [(int(layer), int(expert)) for layer, expert in np.argwhere(chosen)]


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
    resident = set(residents)
    best = set(boot_set(scores, len(resident), floor))
    leavers = _Leavers(scores, resident, best, floor)
    plan: list[PairSwap] = []
    for newcomer in sorted(best - resident, key=lambda pair: (-scores[pair], pair)):
        if len(plan) >= max_swaps:
            break
        leaver = leavers.cheapest(newcomer[0])
        if leaver is not None and scores[newcomer] - scores[leaver] > min_gain:
            leavers.swap(leaver, newcomer)
            plan.append((leaver, newcomer))
    return plan


class _Leavers:
    """Residents outside the best set, by layer and score. `_open` holds the cheapest of each layer above its floor,
    and some that have left since, which are thrown away when they come up."""

    def __init__(self, scores: Scores, resident: set[Pair], best: set[Pair], floor: int) -> None:
        layers = scores.shape[0]
        self._scores = scores
        self._above_floor = [-floor] * layers
        self._by_layer: list[list[Pair]] = [[] for _ in range(layers)]
        for layer, _ in resident:
            self._above_floor[layer] += 1
        if min(self._above_floor) < 0:
            raise ValueError(f"a layer has fewer than {floor} residents already")
        # The cheapest last; among equals the highest pair, which `boot_set` would have taken last.
        for pair in sorted(resident - best, key=lambda pair: (-scores[pair], pair)):
            self._by_layer[pair[0]].append(pair)
        self._open: list[tuple[float, int, int]] = []
        for layer in range(layers):
            self._offer(layer)

    def cheapest(self, for_layer: int) -> Pair | None:
        own = self._by_layer[for_layer][-1] if self._by_layer[for_layer] else None
        other = self._cheapest_open()
        if own is None or other is None:
            return own or other
        return min(own, other, key=self._cost)

    def swap(self, leaver: Pair, newcomer: Pair) -> None:
        self._by_layer[leaver[0]].pop()
        self._above_floor[leaver[0]] -= 1
        self._above_floor[newcomer[0]] += 1
        self._offer(leaver[0])
        self._offer(newcomer[0])

    def _cost(self, pair: Pair) -> tuple[float, int, int]:
        return (float(self._scores[pair]), -pair[0], -pair[1])

    def _offer(self, layer: int) -> None:
        if self._above_floor[layer] > 0 and self._by_layer[layer]:
            heapq.heappush(self._open, self._cost(self._by_layer[layer][-1]))

    def _cheapest_open(self) -> Pair | None:
        while self._open:
            _, layer, expert = self._open[0]
            pair = (-layer, -expert)
            if self._by_layer[pair[0]][-1:] == [pair]:
                return pair
            heapq.heappop(self._open)
        return None


def _checked(scores: Scores) -> Scores:
    if scores.ndim != 2 or not np.isfinite(scores).all() or (scores < 0).any():
        raise ValueError("scores must be finite, not negative, [layers, experts]")
    return scores
