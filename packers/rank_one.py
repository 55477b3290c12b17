"""One direction that an edit took out of a matrix, recovered from the matrix before and after.

    W' = W - alpha d (d^T W)        d of length 1 over the rows, W [D, n]

so the difference has rank one: its left singular vector is d, and alpha follows from d^T (W - W') = alpha d^T W. Both
matrices were rounded to their dtype; what the difference holds beside rank one must not be more than that rounding.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
Vector = NDArray[np.float64]

STEPS = 100  # of the power iteration; each gains the square of the ratio of the two largest singular values
CONVERGED = 1e-12
ROUNDING_SHARE = 3.0  # the residue may be so many times what rounding explains
BLOCK_ROWS = 512  # made fp64 at a time


@dataclass(frozen=True)
class RankOne:
    """`direction` [D], its largest component positive. `explained`: share of the difference's energy that lies along
    it; `rounding`: share that rounding alone would leave beside it."""

    direction: Vector
    alpha: float
    explained: float
    rounding: float

    @property
    def holds(self) -> bool:
        return 1.0 - self.explained <= ROUNDING_SHARE * self.rounding + 1e-9


def rank_one(before: Matrix, after: Matrix, mantissa_bits: int) -> RankOne:
    """Of [D, n] matrices that differ; `mantissa_bits` of the dtype that `after` was rounded to (bfloat16: 7)."""
    delta = before - after
    energy = _energy(delta)
    direction = _left_singular(delta)
    along = _times(direction, delta)
    stock = _times(direction, before)
    alpha = float(along @ stock / (stock @ stock))
    return RankOne(direction, alpha, float(along @ along) / energy, _rounding_energy(after, mantissa_bits) / energy)


def _left_singular(delta: Matrix) -> Vector:
    """[D, n] -> [D]. Begins with the row weights of the column of most energy: never orthogonal to the answer."""
    direction = delta[:, int(np.argmax(np.einsum("ij,ij->j", delta, delta)))].astype(np.float64)
    direction /= np.linalg.norm(direction)
    for _ in range(STEPS):
        following = _onto(delta, _times(direction, delta))
        following /= np.linalg.norm(following)
        moved, direction = 1.0 - abs(float(following @ direction)), following
        if moved < CONVERGED:
            break
    return direction if direction[np.argmax(np.abs(direction))] > 0 else -direction


def _times(direction: Vector, matrix: Matrix) -> Vector:
    """[D], [D, n] -> [n], in fp64 by blocks of rows: a copy of the whole would be twice its size."""
    total = np.zeros(matrix.shape[1])
    for at in range(0, len(matrix), BLOCK_ROWS):
        total += direction[at : at + BLOCK_ROWS] @ matrix[at : at + BLOCK_ROWS].astype(np.float64)
    return total


def _onto(matrix: Matrix, row: Vector) -> Vector:
    """[D, n], [n] -> [D]."""
    blocks = range(0, len(matrix), BLOCK_ROWS)
    return np.concatenate([matrix[at : at + BLOCK_ROWS].astype(np.float64) @ row for at in blocks])


def _energy(matrix: Matrix) -> float:
    blocks = (matrix[at : at + BLOCK_ROWS].astype(np.float64) for at in range(0, len(matrix), BLOCK_ROWS))
    return float(sum(np.vdot(rows, rows) for rows in blocks))


def _rounding_energy(matrix: Matrix, mantissa_bits: int) -> float:
    """What rounding to the nearest leaves: a twelfth of the squared spacing of each number."""
    _, exponent = np.frexp(matrix)
    spacing = np.ldexp(np.float32(1.0), exponent - 1 - mantissa_bits)
    spacing[matrix == 0] = 0
    return _energy(spacing) / 12
