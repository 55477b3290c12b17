"""Weights that were decoded before, by the content of what they were decoded from: on a CPU a trellis takes many times
longer to decode than to multiply by.

The key is a hash of the bytes, so a slot that something else was read into is another key, and nobody has to say so."""

import threading
from collections import OrderedDict
from collections.abc import Callable

import xxhash
from torch import Tensor

MOST_BYTES = 192 << 20  # of a process


class Kept:
    """The newest used, up to `most_bytes`; a tensor larger than an eighth of that is not kept. For any thread. What it
    gives must not be written to."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[bytes, object], Tensor] = OrderedDict()
        self._bytes = 0

    def of(self, source: Tensor, kind: object, decode: Callable[[], Tensor]) -> Tensor:
        """decode(), or what it gave for the same bytes of `source` (contiguous, on the CPU) and the same `kind`."""
        key = (xxhash.xxh3_128_digest(source.numpy().data), kind)
        with self._lock:
            if (found := self._found.get(key)) is not None:
                self._found.move_to_end(key)
                return found
        made = decode()
        if made.nbytes <= self._most_bytes // 8:
            self._keep(key, made)
        return made

    def _keep(self, key: tuple[bytes, object], made: Tensor) -> None:
        with self._lock:
            if key not in self._found:
                self._found[key] = made
                self._bytes += made.nbytes
            while self._bytes > self._most_bytes:
                self._bytes -= self._found.popitem(last=False)[1].nbytes
