"""Engram: n-gram hashes of compressed token ids, and the gate that adds a looked-up value to the streams."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.rows import by_row

Ints = NDArray[np.int64]
_NORM_EPS = 1e-20


def hash_rows(history: Ints, multipliers: Ints, primes: Ints, offsets: Ints) -> Ints:
    """history [T, N]: compressed id of the token and of the N - 1 before it; multipliers [N];
    primes, offsets [N - 1, heads] -> table rows [T, (N - 1) * heads], n-gram sizes 2 .. N in order."""
    mixed = np.bitwise_xor.accumulate(history * multipliers, axis=1)[:, 1:, None]
    return (mixed % primes + offsets).reshape(len(history), -1)


def gate(streams: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
    """streams [T, S, D], keys [T, S, D], weight [S, D] = query weight * key weight -> gates [T, S]: the similarity of
    both after RMSNorm, its square root with the sign kept, through a sigmoid."""

    def rows(h: Tensor, k: Tensor) -> Tensor:
        norms = torch.rsqrt(h.square().mean(-1) + _NORM_EPS) * torch.rsqrt(k.square().mean(-1) + _NORM_EPS)
        dot = (h * weight * k).sum(-1) * norms * (h.shape[-1] ** -0.5)
        return torch.sigmoid(torch.sign(dot) * dot.abs().clamp_min(1e-6).sqrt())

    return by_row(rows, streams, keys)


def mix(streams: Tensor, keys: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """As `gate`, with value [T, D] -> streams + gate * value, not yet rounded."""
    return streams + gate(streams, keys, weight).unsqueeze(-1) * value.unsqueeze(1)
