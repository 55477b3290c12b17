"""64 bits that name a routable set, whatever its order: the xor of a well-mixed key for each pair."""

from collections.abc import Iterable
from itertools import chain

import numpy as np
import numpy.typing as npt

from tided.experts.arena import Pair

Indices = npt.NDArray[np.int64]


def mask_hash(pairs: Iterable[Pair], experts: int) -> int:
    return int(np.bitwise_xor.reduce(_keys_of(indices(pairs, experts)), initial=0))


def keys_of_all(layers: int, experts: int) -> list[list[int]]:
    """[layers][experts], for whoever keeps a set's hash up to date: a pair that comes or goes changes it by its key."""
    found: list[list[int]] = _keys_of(np.arange(layers * experts)).reshape(layers, experts).tolist()
    return found


def _keys_of(numbers: Indices) -> npt.NDArray[np.uint64]:
    """splitmix64 of each pair's number: neighbours get unrelated keys, so two masks do not cancel by chance."""
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return found


def indices(pairs: Iterable[Pair], experts: int) -> Indices:
    """[n] int64: layer * experts + expert"""
    flat = np.fromiter(chain.from_iterable(pairs), dtype=np.int64)
    found: Indices = flat[0::2] * experts + flat[1::2]
    return found
