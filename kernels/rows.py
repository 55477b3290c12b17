"""Arithmetic whose result for a row does not depend on the rows beside it.

CPU libraries choose tiles, vector tails and reduction trees by shape, so the same row can come out with other bits
when it has company. Up to `ROWS` rows (a decode step) therefore go one by one through matrix products, and through
what treats all rows as one long vector; a prompt chunk, whose rows belong to one request, is computed as a whole.

Norms, rotations, roundings, gates and batches of small products take each row by itself anyway, at widths that are a
multiple of 32. `tests/kernels/test_rows.py` compares the bits of every operation of a decode step.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ROWS = 16
_local = threading.local()


@contextmanager
def together() -> Iterator[None]:
    """Within it this thread computes rows as a whole, whatever that does to their bits: for guesses, of which no answer
    keeps anything."""
    _local.together = True
    try:
        yield
    finally:
        _local.together = False


def singly(count: int) -> bool:
    """Whether so many rows go one by one."""
    return 1 < count <= ROWS and not getattr(_local, "together", False)


def by_row(operation: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """operation(*rows) with `rows` [T, ...], evaluated a row at a time when 1 < T <= ROWS."""
    count = rows[0].shape[0]
    if not singly(count):
        return operation(*rows)
    return torch.cat([operation(*(tensor[i : i + 1] for tensor in rows)) for i in range(count)])


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] fp32 times weight [N, K], fp32 or what fp32 holds -> [T, N] fp32, row by row up to ROWS rows."""
    count, weight = x.shape[0], weight.to(x.dtype)
    if count == 1:
        return torch.mv(weight, x[0]).unsqueeze(0)
    if singly(count):
        return torch.stack([torch.mv(weight, row) for row in x.unbind(0)])
    return x @ weight.t()
