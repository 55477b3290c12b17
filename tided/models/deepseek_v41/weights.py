"""Reads one rank's share of the dense weights, as the fp32 tensors that the CPU kernels multiply with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats import GROUP, fp8_blocks
from packers.shards import Checkpoint
from tided.models.parallel import Group, share

ALL = slice(None)


@dataclass(frozen=True)
class Weights:
    """Tensors below a name prefix. `cut` gives this rank's part of a dimension."""

    checkpoint: Checkpoint
    group: Group
    device: torch.device
    prefix: str = ""

    def under(self, prefix: str) -> "Weights":
        return Weights(self.checkpoint, self.group, self.device, f"{self.prefix}{prefix}.")

    def cut(self, length: int) -> slice:
        return share(length, self.group)

    def plain(self, name: str, rows: slice = ALL) -> Tensor:
        """A BF16 or F32 tensor as fp32; `rows` of its first dimension. A copy: a view would hold the mapped file."""
        return self.checkpoint.read(self.prefix + name)[rows].to(self.device, torch.float32, copy=True)

    def stored(self, name: str) -> Tensor:
        """A tensor in the type of the file; a copy."""
        return self.checkpoint.read(self.prefix + name).clone().to(self.device)

    def fp8(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """`name`.weight times its block scales, exactly, as fp32. Cut first: only the rank's share is computed, and
        only its pages are read. Raises ValueError for a cut through a block."""
        weight = self.checkpoint.read(f"{self.prefix}{name}.weight")[rows, columns]
        scale = self.checkpoint.read(f"{self.prefix}{name}.scale")[_blocks(rows), _blocks(columns)]
        return fp8_blocks(weight, scale).to(self.device)


def _blocks(part: slice) -> slice:
    if part == ALL:
        return ALL
    if part.start % GROUP or part.stop % GROUP:
        raise ValueError(f"{part.start} to {part.stop} cuts through a block of {GROUP}")
    return slice(part.start // GROUP, part.stop // GROUP)
