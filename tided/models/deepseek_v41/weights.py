"""Reads one rank's share of the dense weights: as the fp32 tensors that the CPU kernels multiply with, or `packed`, as
they are stored, for devices whose kernels read them so."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats import GROUP, fp8_blocks
from kernels.linear import Fp8Matrix, Matrix
from tided.models.below import ALL, Below


@dataclass(frozen=True)
class Weights(Below):
    """Tensors of BF16, F32 and FP8."""

    packed: bool = False

    def stored(self, name: str) -> Tensor:
        """A tensor in the type of the file; a copy."""
        return self.checkpoint.read(self.prefix + name).clone().to(self.device)

    def matrix(self, name: str, rows: slice = ALL) -> Tensor:
        """A BF16 matrix: bf16 where `packed`, else as `plain`."""
        if not self.packed:
            return self.plain(name, rows)
        return self.checkpoint.read(self.prefix + name)[rows].to(self.device, torch.bfloat16, copy=True)

    def fp8(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Matrix:
        """`name`.weight with its block scales; times them, exactly, as fp32 unless `packed`. Cut first: only the rank's
        share is computed, and only its pages are read. Raises ValueError for a cut through a block."""
        weight = self.checkpoint.read(f"{self.prefix}{name}.weight")[rows, columns]
        scale = self.checkpoint.read(f"{self.prefix}{name}.scale")[_blocks(rows), _blocks(columns)]
        if self.packed:
            return Fp8Matrix(self._bytes(weight), self._bytes(scale))
        return fp8_blocks(weight, scale).to(self.device)

    def _bytes(self, part: Tensor) -> Tensor:
        return part.contiguous().view(torch.uint8).to(self.device, copy=True)


def _blocks(part: slice) -> slice:
    if part == ALL:
        return ALL
    if part.start % GROUP or part.stop % GROUP:
        raise ValueError(f"{part.start} to {part.stop} cuts through a block of {GROUP}")
    return slice(part.start // GROUP, part.stop // GROUP)
