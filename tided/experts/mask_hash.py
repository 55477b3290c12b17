"""64 bits that name a routable set, whatever its order: the xor of a well-mixed key for each pair."""

from collections.abc import Iterable
from itertools import chain

import numpy as np
import numpy.typing as npt

from tided.experts.arena import Pair

Indices = npt.NDArray[np.int64]
_U64 = (1 << 64) - 1


def mask_hash(pairs: Iterable[Pair], experts: int) -> int:
    z = (indices(pairs, experts).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # `key_of` all
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(np.bitwise_xor.reduce(z ^ (z >> np.uint64(31)), initial=0))


def key_of(pair: Pair, experts: int) -> int:
    """splitmix64 of the pair's number: neighbours get unrelated keys, so two masks do not cancel by chance."""
    z = ((pair[0] * experts + pair[1] + 1) * 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def indices(pairs: Iterable[Pair], experts: int) -> Indices:
    """[n] int64: layer * experts + expert"""
    flat = np.fromiter(chain.from_iterable(pairs), dtype=np.int64)
    found: Indices = flat[0::2] * experts + flat[1::2]
    return found
