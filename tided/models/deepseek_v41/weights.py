"""Reads one rank's share of the dense weights, as the fp32 tensors that the CPU kernels multiply with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats import fp8_blocks
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
        """A BF16 or F32 tensor as fp32; `rows` of its first dimension."""
        return self._owned(self.checkpoint.read(self.prefix + name)[rows].to(torch.float32))

    def fp8(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """`name`.weight times its block scales, exactly, as fp32."""
        weight = self.checkpoint.read(f"{self.prefix}{name}.weight")
        scale = self.checkpoint.read(f"{self.prefix}{name}.scale")
        return self._owned(fp8_blocks(weight, scale)[rows, columns])

    def _owned(self, tensor: Tensor) -> Tensor:
        """Contiguous and apart from the mapped file, whose pages may then be dropped."""
        return tensor.to(self.device).clone(memory_format=torch.contiguous_format)
