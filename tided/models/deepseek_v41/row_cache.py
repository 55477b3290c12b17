"""Rows of a table that were read lately, in memory of a fixed size, looked up many at a time.

Set-associative: a row may lie in one of `_WAYS` places that its number gives, so that looking up and replacing are
a few array operations whatever the number of rows. A dictionary in order of use costs more than a hundred bytes a row,
of a few hundred, and an iteration of Python."""

import numpy as np
from numpy.typing import NDArray

_WAYS = 8
_EMPTY = -1
_OVERHEAD_BYTES = 16  # of a place: its row's number and the time of its last use

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


class RowCache:
    """At most `budget_bytes`, all it holds counted. In a set, the row that was not used for longest makes room."""

    def __init__(self, budget_bytes: int, row_bytes: int) -> None:
        places = budget_bytes // (row_bytes + _OVERHEAD_BYTES)
        ways = min(_WAYS, places)
        self._sets = places // ways if ways else 0
        self._data: Bytes = np.empty((self._sets, ways, row_bytes), dtype=np.uint8)
        self._row_at: Ints = np.full((self._sets, ways), _EMPTY, dtype=np.int64)
        self._used_at: Ints = np.zeros((self._sets, ways), dtype=np.int64)
        self._now = 0

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self._row_at.nbytes + self._used_at.nbytes

    def recall(self, rows: Ints, out: Bytes) -> NDArray[np.bool_]:
        """rows [n] -> whether each is here, [n]; those that are lie in out [n, row bytes] then."""
        if not self._sets:
            return np.zeros(len(rows), dtype=np.bool_)
        self._now += 1
        sets = rows % self._sets
        match = self._row_at[sets] == rows[:, None]
        found: NDArray[np.bool_] = match.any(1)
        places = sets[found], match[found].argmax(1)
        out[found] = self._data[places]
        self._used_at[places] = self._now
        return found

    def remember(self, rows: Ints, data: Bytes) -> None:
        """rows [n], distinct; data [n, row bytes]. Of more rows than a set has places, the first are kept."""
        if not self._sets:
            return
        new = ~(self._row_at[rows % self._sets] == rows[:, None]).any(1)
        rows, data = rows[new], data[new]
        order = np.argsort(rows % self._sets, kind="stable")
        sets = (rows % self._sets)[order]
        _, first, counts = np.unique(sets, return_index=True, return_counts=True)
        turn = np.arange(len(sets)) - np.repeat(first, counts)  # the how-manieth of its set
        fits = turn < self._row_at.shape[1]
        sets, turn, order = sets[fits], turn[fits], order[fits]
        ways = np.take_along_axis(np.argsort(self._used_at[sets], axis=1, kind="stable"), turn[:, None], 1)[:, 0]
        self._data[sets, ways] = data[order]
        self._row_at[sets, ways] = rows[order]
        self._used_at[sets, ways] = self._now
