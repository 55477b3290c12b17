"""A rank's place in the tensor-parallel group, and the collectives the models use."""

from typing import Protocol

import torch
from torch import Tensor


class Group(Protocol):
    """`rank` of `ranks`. Every rank calls the same collectives in the same order with the same shapes (C1)."""

    rank: int
    ranks: int

    def sum(self, part: Tensor) -> Tensor:
        """Sum of the ranks' `part` (fp32, any shape), added in rank order: the same bits on every rank."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """The ranks' `part` -> [ranks, ...], for a reader that adds them in rank order itself."""
        ...

    def concat(self, part: Tensor) -> Tensor:
        """The ranks' `part` [..., n] joined along the last dimension in rank order: [..., ranks * n]."""
        ...

    def check(self) -> None:
        """Raises PairError if a collective that the device has done went without a rank. Asks no device."""
        ...


class Alone:
    """The group of one rank."""

    rank = 0
    ranks = 1

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> Tensor:
        return part.unsqueeze(0)

    def concat(self, part: Tensor) -> Tensor:
        return part

    def check(self) -> None:
        pass


def share(length: int, group: Group) -> slice:
    """The rank's contiguous part of a dimension; the dimension must divide evenly."""
    if length % group.ranks:
        raise ValueError(f"{length} does not divide by {group.ranks} ranks")
    n = length // group.ranks
    return slice(group.rank * n, (group.rank + 1) * n)


def is_finite(logits: Tensor) -> bool:
    """Whether every value is a number: a rank that computes NaN must stop, not serve."""
    return bool(torch.isfinite(logits).all())
