"""How Engram layers address their tables: primes, offsets and multipliers, all derived from the configuration."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kernels.engram import hash_rows
from tided.errors import DataError
from tided.models.deepseek_v41.config import TextConfig

_SEED = 10007
_INT64_MAX = (1 << 63) - 1
# Deterministic Miller-Rabin below 3.3e24.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Hashing:
    """Of one layer: multipliers [N]; primes and offsets [N - 1, heads]; `rows`: size of the table."""

    multipliers: Ints
    primes: Ints
    offsets: Ints

    @property
    def rows(self) -> int:
        return int(self.primes.sum())

    def rows_of(self, history: Ints) -> Ints:
        """history [T, N] compressed ids, the token itself first -> table rows [T, columns]."""
        return hash_rows(history, self.multipliers, self.primes, self.offsets)


def layer_hashing(t: TextConfig) -> dict[int, Hashing]:
    """Engram layer -> its hashing. Raises DataError when a table's size does not follow from the configuration."""
    sizes, heads = t.engram_max_ngram_size - 1, t.engram_n_heads
    found: dict[int, Hashing] = {}
    # A prime serves once: the columns of all layers take consecutive ones, in the order layer, n-gram size, head.
    unused = _primes_from(t.engram_vocab_size)
    for layer, rows in zip(t.engram_layer_ids, t.engram_num_embeddings, strict=True):
        primes = np.fromiter(islice(unused, sizes * heads), dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(primes)[:-1]])
        shape = (sizes, heads)
        multipliers = _multipliers(layer, t.engram_max_ngram_size, t.engram_compressed_vocab_size)
        found[layer] = Hashing(multipliers, primes.reshape(shape), offsets.reshape(shape))
        if found[layer].rows != rows:
            raise DataError(
                f"engram_num_embeddings gives layer {layer} {rows} rows, its hash addresses {found[layer].rows}",
                where="config.json",
            )
    return found


def table_rows(vocabulary: int, columns: int, layers: int) -> tuple[int, ...]:
    """`engram_num_embeddings` of so many layers whose hash heads begin at `vocabulary`."""
    unused = _primes_from(vocabulary)
    return tuple(sum(islice(unused, columns)) for _ in range(layers))


def _multipliers(layer: int, count: int, compressed_vocab: int) -> Ints:
    """Odd, and small enough that an id times a multiplier stays below 2^63."""
    bound = _INT64_MAX // compressed_vocab // 2
    return np.random.default_rng(_SEED * layer).integers(0, bound, count, dtype=np.int64) * 2 + 1


def _primes_from(value: int) -> Iterator[int]:
    while True:
        if _is_prime(value):
            yield value
        value += 1


def _is_prime(value: int) -> bool:
    if value < 2 or any(value % p == 0 for p in _WITNESSES):
        return value in _WITNESSES
    twos = ((value - 1) & (1 - value)).bit_length() - 1
    odd = (value - 1) >> twos
    return not any(_is_witness(a, value, odd, twos) for a in _WITNESSES)


def _is_witness(a: int, value: int, odd: int, twos: int) -> bool:
    """Whether `a` proves that `value` is composite."""
    x = pow(a, odd, value)
    if x in (1, value - 1):
        return False
    for _ in range(twos - 1):
        x = x * x % value
        if x == value - 1:
            return False
    return True
