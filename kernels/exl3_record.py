"""The byte image of one rank's share of one EXL3 expert: as `kernels.record`, but every matrix has a width and a
codebook of its own, so that records differ in size and each tells its own.

With D hidden and n = intermediate / ranks, both whole blocks of the Hadamard transform, a record is

    [0, 128)     header: 1, then half bits a weight of gate, up, down, then codebooks of gate, up, down, then zeros
    vectors      fp16: gate suh [D], up suh [D], gate svh [n], up svh [n], down suh [n], down svh [D]
    trellises    gate [D/16, n/16, 16 * bits], up the same, down [n/16, D/16, 16 * bits], int16, as in checkpoints

and then zeros up to a multiple of 4 KiB. The intermediate dimension is cut over the ranks: columns of gate and up with
their svh, rows of down with its suh. What is cut is never quantised again: whole blocks are independent.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from kernels.record import PAGE_BYTES

Codebook = Literal["3inst", "mcg", "mul1"]
BLOCK = 128  # of the Hadamard transform; what a rank cuts must be whole blocks
TILE = 16
HEADER_BYTES = 128
VERSION = 1
CODEBOOKS: tuple[Codebook, ...] = ("3inst", "mcg", "mul1")  # by their numbers in a header


def widths(codebook: Codebook) -> tuple[int, ...]:
    """That exist, in halves of a bit."""
    return (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16) if codebook == "mul1" else (2, 4, 6, 8, 10, 12, 14, 16)


class Stored(NamedTuple):
    """How an expert's gate, up and down are stored: half bits a weight, and codebooks."""

    half_bits: tuple[int, int, int]
    codebooks: tuple[Codebook, Codebook, Codebook]


@dataclass(frozen=True)
class Exl3Record:
    """Sizes in weights: `hidden` D, `intermediate` of the whole expert, cut over `ranks`. `kinds`: codebooks and half
    bits of all matrices that there are, sorted; empty: not known. `experts`: of a layer; 0: not known."""

    hidden: int
    intermediate: int
    ranks: int
    kinds: tuple[tuple[Codebook, int], ...] = field(default=(), compare=False)
    experts: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.hidden % BLOCK or self.intermediate % (BLOCK * self.ranks):
            raise ValueError(
                f"an EXL3 expert of {self.hidden} x {self.intermediate} cannot be cut over {self.ranks} ranks: "
                f"a rank's share must be whole blocks of {BLOCK} weights"
            )

    @property
    def share(self) -> int:
        """The rank's part of the intermediate dimension."""
        return self.intermediate // self.ranks

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Of the vectors, in values."""
        d, n = self.hidden, self.share
        return d, d, n, n, n, d

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Of the vectors in a record, in bytes; behind them that of the first trellis."""
        return tuple(accumulate((2 * length for length in self.lengths), initial=HEADER_BYTES))

    def trellis_bytes(self, half_bits: int) -> int:
        """Of any of the three matrices."""
        return self.hidden * self.share * half_bits // 16

    def nbytes(self, stored: Stored) -> int:
        return self.offsets[-1] + sum(map(self.trellis_bytes, stored.half_bits))

    def slot_bytes(self, stored: Stored) -> int:
        return -(-self.nbytes(stored) // PAGE_BYTES) * PAGE_BYTES

    def tiles(self, matrix: int) -> tuple[int, int]:
        """Of gate (0), up (1) or down (2): tiles along the inputs, and along the outputs."""
        d, n = self.hidden // TILE, self.share // TILE
        return (n, d) if matrix == 2 else (d, n)


def header_of(stored: Stored) -> bytes:
    numbers = (CODEBOOKS.index(codebook) for codebook in stored.codebooks)
    return bytes((VERSION, *stored.half_bits, *numbers)).ljust(HEADER_BYTES, b"\0")


def stored_of(header: bytes) -> Stored:
    """Of a header's first bytes. Raises ValueError."""
    version, half_bits, numbers = header[0], header[1:4], header[4:7]
    if version != VERSION or max(numbers) >= len(CODEBOOKS):
        raise ValueError(f"no EXL3 expert: its header begins with {header[:8].hex(' ')}")
    gate, up, down = (CODEBOOKS[number] for number in numbers)
    if any(bits not in widths(book) for bits, book in zip(half_bits, (gate, up, down), strict=True)):
        raise ValueError(
            f"no EXL3 expert: {' '.join(f'{bits / 2:g}' for bits in half_bits)} bits of {gate} {up} {down}"
        )
    return Stored((half_bits[0], half_bits[1], half_bits[2]), (gate, up, down))
