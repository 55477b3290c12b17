"""Rotary positions on adjacent pairs (2i, 2i+1) of the last dimensions, as complex numbers in fp32."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Yarn:
    """Frequency scaling for long contexts; no amplitude correction."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_tokens: int


def frequencies(rope_dim: int, theta: float, yarn: Yarn | None) -> Tensor:
    """[rope_dim / 2] fp32 radians per position."""
    base = 1.0 / (theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))
    if yarn is None:
        return base

    def turns_to_dim(turns: float) -> float:
        return rope_dim * math.log(yarn.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turns_to_dim(yarn.beta_fast)), 0)
    high = min(math.ceil(turns_to_dim(yarn.beta_slow)), rope_dim - 1)
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return base * (1 - ramp) + base / yarn.factor * ramp


def rotation(positions: Tensor, freqs: Tensor) -> Tensor:
    """positions [T] int64, freqs [r / 2] -> complex64 [T, r / 2]."""
    angles = torch.outer(positions.to(torch.float32), freqs)
    return torch.complex(angles.cos(), angles.sin())


def rotate_(x: Tensor, turn: Tensor) -> Tensor:
    """Rotates the last 2 * turn.shape[-1] dimensions of contiguous x [T, ..., n] in place by turn [T, r / 2].

    The conjugate of `turn` rotates back."""
    pairs = torch.view_as_complex(x[..., -2 * turn.shape[-1] :].view(*x.shape[:-1], -1, 2))
    pairs.mul_(turn.view(turn.shape[0], *([1] * (x.dim() - 2)), turn.shape[1]))
    return x
