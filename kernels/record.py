"""The byte image of one rank's share of one expert: what a slot of the arena holds and the kernel reads.

Its parts stand in this order, without gaps; then zeros up to a multiple of 4 KiB. With D hidden, n = intermediate /
ranks, an MXFP4 expert is

    w1 codes [n, D/2]   w3 codes [n, D/2]   w2 codes [D, n/2]        e2m1, two a byte, low nibble = even input
    w1 scale [n, D/32]  w3 scale [n, D/32]  w2 scale [D, n/32]       UE8M0, value 2^(byte - 127)

and one in bf16 is w1 [n, D], w3 [n, D], w2 [D, n], two bytes a weight.

The intermediate dimension is cut over the ranks: rows of w1 and w3, columns of w2.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

PAGE_BYTES = 4096
GROUP = 32  # weights that share one scale
Codec = Literal["mxfp4", "bf16"]


@dataclass(frozen=True)
class Part:
    """`rows` x `row_bytes` bytes at `offset` of a record."""

    offset: int
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class ExpertRecord:
    """Sizes in weights: `hidden` D, `intermediate` of the whole expert, cut over `ranks`."""

    hidden: int
    intermediate: int
    ranks: int
    codec: Codec = "mxfp4"

    def __post_init__(self) -> None:
        unit = GROUP if self.codec == "mxfp4" else 1
        if self.hidden % unit or self.intermediate % (unit * self.ranks):
            raise ValueError(
                f"an expert of {self.hidden} x {self.intermediate} cannot be cut over {self.ranks} ranks: "
                f"a rank's share must be a multiple of {unit} weights"
            )

    @property
    def share(self) -> int:
        """The rank's part of the intermediate dimension."""
        return self.intermediate // self.ranks

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, bytes a row) of each part: w1, w3, w2, and then their scales where the codec has some."""
        d, n = self.hidden, self.share
        if self.codec == "bf16":
            return (n, 2 * d), (n, 2 * d), (d, 2 * n)
        return (n, d // 2), (n, d // 2), (d, n // 2), (n, d // GROUP), (n, d // GROUP), (d, n // GROUP)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        parts, offset = [], 0
        for rows, row_bytes in self.shapes:
            parts.append(Part(offset, rows, row_bytes))
            offset += rows * row_bytes
        return tuple(parts)

    @property
    def nbytes(self) -> int:
        last = self.parts[-1]
        return last.offset + last.nbytes

    @property
    def slot_bytes(self) -> int:
        return -(-self.nbytes // PAGE_BYTES) * PAGE_BYTES
