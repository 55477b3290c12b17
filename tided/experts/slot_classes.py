"""Slots by the size of the records that they are for: how many of each there are, and how they are numbered."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class SlotClass:
    """Slots of `nbytes` each: of residents, of swaps that are being read, of the hot ring. `most`: residents that there
    may come to be."""

    nbytes: int
    residents: int
    spare: int
    ring: int
    most: int = 0

    @property
    def slots(self) -> int:
        return self.residents + self.spare + self.ring

    @property
    def most_slots(self) -> int:
        return max(self.residents, self.most) + self.spare + self.ring


class Sizes(NamedTuple):
    """`of` [layers, experts]: the class of a pair's record. By class: bytes of a slot, spare ones, ring."""

    of: npt.NDArray[np.int64]
    nbytes: tuple[int, ...]
    spare: tuple[int, ...]
    ring: tuple[int, ...]


class Places(NamedTuple):
    """By class of records: bytes of a slot, residents that there are places for, and that there may come to be. None:
    it stands. `by_writing`: a place takes memory once it is filled, not before."""

    nbytes: tuple[int, ...]
    residents: tuple[int, ...]
    most: tuple[int, ...] | None
    by_writing: bool = False

    @property
    def resident_bytes(self) -> int:
        return sum(size * count for size, count in zip(self.nbytes, self.residents, strict=True))


def numbered(classes: Sequence[SlotClass], places: Sequence[int], unit_bytes: int) -> list[range]:
    """Of each class's slots, those that are used and those that may come to be."""
    found, begin = [], 0
    for one, count in zip(classes, places, strict=True):
        step = one.nbytes // unit_bytes
        found.append(range(begin, begin + count * step, step))
        begin += count * step
    return found
