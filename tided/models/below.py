"""Weights of a checkpoint below a name prefix: what families read alike."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from packers.shards import Checkpoint
from tided.models.parallel import Group, share

ALL = slice(None)


@dataclass(frozen=True)
class Below:
    """One rank's, on a device."""

    checkpoint: Checkpoint
    group: Group
    device: torch.device
    prefix: str = field(default="", kw_only=True)

    def under(self, prefix: str) -> Self:
        return replace(self, prefix=f"{self.prefix}{prefix}.")

    def cut(self, length: int) -> slice:
        """This rank's part of a dimension."""
        return share(length, self.group)

    def plain(self, name: str, rows: slice = ALL) -> Tensor:
        """A tensor that is not quantised as fp32; `rows` of its first dimension. A copy: a view would hold the file."""
        return self.checkpoint.read(self.prefix + name)[rows].to(self.device, torch.float32, copy=True)
