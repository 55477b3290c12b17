"""Small numeric helpers: norms, rotations and the 8- and 4-bit roundings of the real formats."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from minis.config import Config

FP4_MAX = 6.0
FP8_MAX = 448.0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D]; statistics in fp32, result in x's dtype."""
    v = x.float()
    return (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope_frequencies(cfg: Config, compressed: bool) -> Tensor:
    """[rope_dim / 2] fp32; layers with a compressed branch use the long theta with the YaRN ramp."""
    half = cfg.rope_dim // 2
    theta = cfg.compress_theta if compressed else cfg.theta
    freq = theta ** (-torch.arange(half, dtype=torch.float64) * 2 / cfg.rope_dim)
    if compressed:

        def turn(rotations: float) -> float:
            return cfg.rope_dim * math.log(cfg.yarn_original / (2 * math.pi * rotations)) / (2 * math.log(theta))

        low = max(math.floor(turn(cfg.yarn_beta_fast)), 0)
        high = min(math.ceil(turn(cfg.yarn_beta_slow)), cfg.rope_dim - 1)
        high_f = high + 0.001 if low == high else float(high)
        ramp = ((torch.arange(half, dtype=torch.float64) - low) / (high_f - low)).clamp(0, 1)
        freq = freq * (1 - ramp) + freq / cfg.yarn_factor * ramp
    return freq.float()


@functools.lru_cache(maxsize=16)
def rope_on(cfg: Config, compressed: bool, device: torch.device) -> Tensor:
    """Frequencies on a device, made once: a captured step must not copy from the host."""
    return rope_frequencies(cfg, compressed).to(device)


def rope_table(freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """freq [R/2], positions [...] -> cos, sin [..., R/2] fp32."""
    angle = positions.float().unsqueeze(-1) * freq
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates adjacent pairs of the last 2 * cos.shape[-1] dims. x [..., d]; cos, sin broadcast against [..., R/2]."""
    width = 2 * cos.shape[-1]
    keep, turn = x[..., :-width], x[..., -width:].float()
    a, b = turn.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((keep, turned.to(x.dtype)), -1)


def ceil_pow2(x: Tensor) -> Tensor:
    """Smallest power of two >= x, taken from the exponent bits so that it is exact. x > 0, fp32."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 value, ties to the even code; |x| is clamped to 6."""
    a = x.abs().clamp(max=FP4_MAX)
    fine, mid, coarse = (a * 2).round() / 2, a.round(), (a / 2).round() * 2
    return torch.where(a < 2, fine, torch.where(a < 4, mid, coarse)) * x.sign()


def qdq8(x: Tensor, group: int = 32) -> Tensor:
    """E4M3 rounding with one power-of-two scale per group of the last dim. x [..., d] -> [..., d]."""
    v = x.float().unflatten(-1, (-1, group))
    scale = ceil_pow2(v.abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1.0 / FP8_MAX))
    q = (v / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    return (q * scale).flatten(-2).to(x.dtype)


def qdq4_ue8m0(x: Tensor, group: int = 32) -> Tensor:
    """E2M1 rounding with power-of-two scales (index queries and keys). x [..., d] -> [..., d]."""
    v = x.float().unflatten(-1, (-1, group))
    scale = ceil_pow2(v.abs().amax(-1, keepdim=True).clamp(min=FP4_MAX * 2.0**-126) / FP4_MAX)
    return (round_e2m1(v / scale) * scale).flatten(-2).to(x.dtype)


def qdq4_e4m3(x: Tensor, group: int = 16) -> Tensor:
    """E2M1 rounding with E4M3 scales per 16 (compressed rows). x [..., d] -> [..., d]."""
    v = x.float().unflatten(-1, (-1, group))
    scale = (v.abs().amax(-1, keepdim=True).clamp(min=FP4_MAX * 2.0**-9) / FP4_MAX).to(torch.float8_e4m3fn).float()
    return (round_e2m1(v / scale) * scale).flatten(-2).to(x.dtype)


def mxfp4_scale(v: Tensor) -> Tensor:
    """v [..., 32] fp32 -> [..., 1]: of the two powers of two around amax / 6 the one with the smaller squared error."""
    amax = v.abs().amax(-1, keepdim=True).clamp(min=FP4_MAX * 2.0**-100)
    high = ceil_pow2(amax / FP4_MAX)
    low = high * 0.5
    err_high = (round_e2m1(v / high) * high - v).square().sum(-1, keepdim=True)
    err_low = (round_e2m1(v / low) * low - v).square().sum(-1, keepdim=True)
    return torch.where(err_low < err_high, low, high)


def qdq_mxfp4(w: Tensor) -> Tensor:
    """MXFP4 rounding of expert weights along the input dim. w [..., d] fp32 -> same."""
    v = w.unflatten(-1, (-1, 32))
    scale = mxfp4_scale(v)
    return (round_e2m1(v / scale) * scale).flatten(-2)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Value of `rounded`, gradient of `x`."""
    return x + (rounded - x).detach()


def sqrt_softplus(z: Tensor) -> Tensor:
    return torch.sqrt(torch.nn.functional.softplus(z))
