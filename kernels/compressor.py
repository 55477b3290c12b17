"""Pooling of token rows into compressed rows."""

import torch
from torch import Tensor


def pool_groups(rows: Tensor, gates: Tensor) -> Tensor:
    """rows, gates [G, ratio, d] fp32 -> [G, d]: per channel, a softmax over the group's gates weighs its rows."""
    return (torch.softmax(gates, 1) * rows).sum(1)
