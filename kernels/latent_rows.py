"""Rows of a latent cache in FP8: what a token leaves in a layer of multi-head latent attention, in 656 bytes where bf16
takes 1,152 (a latent of 512, a rotated key of 64).

    c            e4m3 codes of the latent
    4 ceil(c / 128)   fp32 scales, little-endian, one per 128 of the latent: value = code x scale
    2 r          the rotated key in bf16

The scale is the group's largest magnitude over 448; a group of zeros has the scale 1. Only e4m3 rounds: a value is off
by at most 1/16 of itself, or 2^-10 of its group's scale.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 128
E4M3_MAX = 448.0


def row_bytes(latent_dim: int, rope_dim: int) -> int:
    return latent_dim + 4 * -(-latent_dim // GROUP) + 2 * rope_dim


def pack(rows: Tensor, latent_dim: int) -> Tensor:
    """rows [T, c + r] fp32, c the latent -> [T, row_bytes] uint8. A row's bytes are its own alone."""
    groups = _groups(rows[:, :latent_dim])
    scale = groups.abs().amax(-1, keepdim=True) / E4M3_MAX
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(1)[:, :latent_dim]
    parts = (codes, scale.flatten(1), rows[:, latent_dim:].to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def unpack(packed: Tensor, latent_dim: int) -> Tensor:
    """packed [..., row_bytes] uint8 -> [..., c + r] fp32."""
    ends = latent_dim, latent_dim + 4 * -(-latent_dim // GROUP)
    codes = packed[..., : ends[0]].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    scale = packed[..., ends[0] : ends[1]].contiguous().view(torch.float32)
    key = packed[..., ends[1] :].contiguous().view(torch.bfloat16).to(torch.float32)
    if latent_dim % GROUP:
        latent = codes * scale.repeat_interleave(GROUP, -1)[..., :latent_dim]
    else:
        latent = (codes.view(*scale.shape, GROUP) * scale.unsqueeze(-1)).flatten(-2)
    return torch.cat([latent, key], -1)


def _groups(latent: Tensor) -> Tensor:
    """[T, c] -> [T, groups, GROUP], the last filled up with zeros."""
    padded = pad(latent, (0, -latent.shape[1] % GROUP))
    return padded.view(len(latent), padded.shape[1] // GROUP, GROUP)
