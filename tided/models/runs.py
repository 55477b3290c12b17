"""How the rows of a decode step are taken together."""

from collections.abc import Iterator, Sequence

from kernels.rows import ROWS


def runs(counts: Sequence[int]) -> Iterator[slice]:
    """Consecutive lanes that have ROWS rows together, or a lane that alone has more."""
    first, rows = 0, 0
    for i, count in enumerate(counts):
        if i > first and rows + count > ROWS:
            yield slice(first, i)
            first, rows = i, 0
        rows += count
    yield slice(first, len(counts))
