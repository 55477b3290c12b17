"""Quantise, then dequantise: the rounding that activations and caches go through.

All arithmetic here is exact except the one rounding to the narrow format, so results do not depend on vector width.
"""

import torch
from torch import Tensor

_E4M3_MAX_INVERSE = 1.0 / 448.0
_E2M1_MAX = 6.0


def _groups(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, size)


def ceil_power_of_two(x: Tensor) -> Tensor:
    """Smallest power of two >= x, for positive normal fp32: any mantissa bit carries into the exponent."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def fp8_ue8m0(x: Tensor) -> Tensor:
    """x [..., n] fp32, n a multiple of 32 -> e4m3 with one UE8M0 scale per 32. The scale makes |x / s| <= 448."""
    groups = _groups(x, 32)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(1e-4)
    scale = ceil_power_of_two(amax * _E4M3_MAX_INVERSE)
    return ((groups / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale).flatten(-2)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with sign, ties to the even code; |x| <= 6."""
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = (binade * 0.5).clamp_min_(0.5)
    return torch.round(x / step) * step


def fp4_ue8m0(x: Tensor) -> Tensor:
    """x [..., n] fp32, n a multiple of 32 -> e2m1 with one UE8M0 scale per 32 (index queries and keys)."""
    groups = _groups(x, 32)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(_E2M1_MAX * 2.0**-126)
    scale = ceil_power_of_two(amax / _E2M1_MAX)
    return (round_e2m1((groups / scale).clamp_(-_E2M1_MAX, _E2M1_MAX)) * scale).flatten(-2)


def fp4_e4m3(x: Tensor) -> Tensor:
    """x [..., n] fp32, n a multiple of 16 -> e2m1 with one E4M3 scale per 16 (compressed rows)."""
    groups = _groups(x, 16)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(_E2M1_MAX * 2.0**-9)
    scale = (amax / _E2M1_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    return (round_e2m1((groups / scale).clamp_(-_E2M1_MAX, _E2M1_MAX)) * scale).flatten(-2)


def bf16(x: Tensor) -> Tensor:
    """Rounded to bf16, held as fp32: CPU matrix products in bf16 are many times slower."""
    return x.bfloat16().float()


def fp16(x: Tensor) -> Tensor:
    return x.to(torch.float16).to(torch.float32)
