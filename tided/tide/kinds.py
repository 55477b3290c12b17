"""Pairs by the size of their records. A slot of memory is of one size, so what is exchanged is exchanged for its own
kind; how many slots each kind has is settled when the memory is laid out."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tided.tide.demand import Grid
from tided.tide.planner import Pair, Sizes


class Kinds(NamedTuple):
    """`of` [layers, experts]: which kind a pair is. By kind, the smallest first: bytes of a rank's record, swaps that
    are read at once, slots of the hot ring, bytes of a whole expert. Sets are made by these last: any number of ranks
    makes the same."""

    of: npt.NDArray[np.int64]
    nbytes: tuple[int, ...]
    spare: tuple[int, ...]
    ring: tuple[int, ...]
    whole: tuple[int, ...] = ()

    @property
    def sizes(self) -> Sizes:
        """[layers, experts] bytes of every whole expert."""
        return np.array(self.whole, dtype=np.int64)[self.of]

    def budget_bytes(self, resident: int) -> int:
        """What `resident` whole experts of the mean size take."""
        return int(self.sizes.sum()) * resident // self.of.size

    def most_bytes(self, resident: int) -> int:
        """What the records of any such set take at most on a rank."""
        dearest = max(nbytes / whole for nbytes, whole in zip(self.nbytes, self.whole, strict=True))
        return int(self.budget_bytes(resident) * dearest)


def kinds_of(whole: Sizes, spare_slots: int, ring_slots: int, records: Sizes | None = None) -> Kinds:
    """whole [layers, experts] bytes of every expert; records: of a rank's, where that holds a share. Experts of one
    size have records of one."""
    sizes, first, of = np.unique(whole, return_index=True, return_inverse=True)
    nbytes = (whole if records is None else records).ravel()[first]
    pairs, of = np.bincount(of.ravel()).tolist(), of.reshape(whole.shape).astype(np.int64)
    spare, ring = _shares(spare_slots, pairs), _shares(ring_slots, pairs)
    return Kinds(of, tuple(map(int, nbytes)), spare, ring, tuple(map(int, sizes)))


def _shares(slots: int, pairs: Sequence[int]) -> tuple[int, ...]:
    """`slots` shared out like the pairs of all kinds; where there are any, each kind has one at least."""
    exact = slots * np.array(pairs) / sum(pairs)
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: slots - int(whole.sum())]] += 1
    return tuple(int(max(share, min(slots, 1))) for share in whole)


def first_order(of: npt.NDArray[np.int64], start: Sequence[Pair]) -> Grid:
    """[layers, experts]: falling in the order in which experts are kept that are not told apart. The layers are kept in
    the proportions of `start`, and within a layer the kinds `of` [layers, experts] in those of its experts."""
    layers, experts = of.shape
    spread = np.zeros((layers, experts))
    for kind in range(int(of.max()) + 1):  # each evenly over the layer
        own = of == kind
        spread[own] = ((np.cumsum(own, axis=1) - 0.5) / np.maximum(own.sum(axis=1, keepdims=True), 1))[own]
    place = np.argsort(np.argsort(spread, axis=1, kind="stable"), axis=1)
    counts = np.bincount([layer for layer, _ in start], minlength=layers)
    order: Grid = 1.0 / (1.0 + place / counts[:, None])
    return order
