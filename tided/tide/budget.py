"""Another budget of experts while serving: who makes room, and how many places each size of records gets.

Pure: the same scores and residents give the same answer. A budget is `resident` experts; where records differ in size,
the bytes of so many mean ones, of whole experts, so that any number of ranks decides alike.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tided.tide.demand import Grid
from tided.tide.kinds import Kinds
from tided.tide.planner import Pair

Array = npt.NDArray[Any]


class Budget(NamedTuple):
    """`places`: by size of records, residents that there is room for; `evict`: who leaves, the least worth first."""

    places: tuple[int, ...]
    evict: tuple[Pair, ...]


def rebudget(
    scores: Grid, residents: Iterable[Pair], resident: int, floor: int, most: Sequence[int], kinds: Kinds | None = None
) -> Budget:
    """`scores` [layers, experts] are what the sets are worth, `floor` residents a layer stay. `most`: by size, pairs
    that there are. Fewer places: residents leave by the least score a byte. More: places for what has the most. Never
    both. Raises ValueError for a budget that the floors do not fit into, or that is more than there is."""
    layers, experts = scores.shape
    of = np.zeros(layers * experts, dtype=np.int64) if kinds is None else kinds.of.ravel()
    sizes = np.ones(layers * experts, dtype=np.int64) if kinds is None else kinds.sizes.ravel()
    allowed = resident if kinds is None else kinds.budget_bytes(resident)
    if not layers * floor <= resident <= layers * experts:
        raise ValueError(f"{resident} experts: {layers * floor} to {layers * experts} are possible")
    here = np.zeros(layers * experts, dtype=bool)
    here[[layer * experts + expert for layer, expert in residents]] = True
    held = int(sizes[here].sum())
    worth = scores.ravel() / sizes
    evict = _leavers(here, worth, sizes, held - allowed, floor, layers)
    here[evict] = False
    places = np.bincount(of[here], minlength=len(most))
    if not evict:
        places += _newcomers(here, worth, sizes, of, allowed - held, len(most))
    elif int(sizes[here].sum()) > allowed:
        raise ValueError(f"{resident} experts' bytes are too few for {floor} experts in each of {layers} layers")
    return Budget(tuple(places.tolist()), tuple(divmod(index, experts) for index in evict))


def _leavers(here: Array, worth: Array, sizes: Array, over: int, floor: int, layers: int) -> list[int]:
    """The least worth first, ties to the higher pair, until what is over is gone or the floors hold the rest."""
    experts = len(here) // layers
    left = here.reshape(layers, experts).sum(axis=1)
    found: list[int] = []
    candidates = np.flatnonzero(here)[::-1]
    for index in candidates[np.argsort(worth[candidates], kind="stable")].tolist():
        if over <= 0:
            break
        if left[index // experts] > floor:
            left[index // experts] -= 1
            over -= int(sizes[index])
            found.append(index)
    return found


def _newcomers(here: Array, worth: Array, sizes: Array, of: Array, room: int, kinds: int) -> Array:
    """[kinds]: places for the most worth that fits, and then for whatever still does."""
    more = np.zeros(kinds, dtype=np.int64)
    absent = np.flatnonzero(~here)
    for index in absent[np.argsort(-worth[absent], kind="stable")].tolist():
        if sizes[index] <= room:
            room -= int(sizes[index])
            more[of[index]] += 1
    return more
