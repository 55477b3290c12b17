"""How much of what the router asks for a resident set serves, by its size: what another budget is worth."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tided.tide.demand import Grid
from tided.tide.kinds import Kinds
from tided.tide.planner import Pair, boot_set, boot_set_of_bytes


class Point(NamedTuple):
    """`covered`: of the demand of a mean layer, what the best set of so many experts serves."""

    resident: int
    covered: float


def best_set(scores: Grid, resident: int, floor: int, kinds: Kinds | None = None) -> list[Pair]:
    """The set of `resident` experts (where records differ in size: of so many mean ones' bytes) that serves most of
    `scores` [layers, experts], of which each layer sums to 1."""
    if kinds is None:
        return boot_set(scores, resident, floor)
    return boot_set_of_bytes(scores, kinds.sizes, kinds.budget_bytes(resident), floor)


def covered(scores: Grid, pairs: Iterable[Pair]) -> float:
    kept = tuple(np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2).T)
    return float(scores[kept].sum() / len(scores))


def curve(scores: Grid, floor: int, budgets: Sequence[int], kinds: Kinds | None = None) -> list[Point]:
    """Of each budget. One at which the floors alone do not fit has no set, and no point."""
    found = []
    for resident in budgets:
        try:
            found.append(Point(resident, covered(scores, best_set(scores, resident, floor, kinds))))
        except ValueError:
            continue
    return found
