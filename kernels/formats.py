"""Stored weight formats -> fp32, exactly: e4m3 with UE8M0 block scales, packed e2m1 with UE8M0 group scales."""

import torch
from torch import Tensor

GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# A byte holds two weights, the low nibble first. As complex numbers a pair is one element, which is looked up several
# times faster than a row of two.
E2M1_PAIRS: Tensor = torch.tensor([complex(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)])


def e8m0(scale: Tensor) -> Tensor:
    """UE8M0 bytes, as uint8 or float8_e8m0fnu -> fp32: 2^(byte - 127), 255 is NaN."""
    return scale.view(torch.float8_e8m0fnu).to(torch.float32)


def fp8_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [N, K] e4m3, scale [ceil(N/32), ceil(K/32)] UE8M0 -> fp32 [N, K]."""
    rows, columns = weight.shape
    spread = e8m0(scale).repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]
    return weight.to(torch.float32, memory_format=torch.contiguous_format).mul_(spread)


def fp8_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [..., K] e4m3, scale [..., K/32] UE8M0 (a scale per 32 of each row) -> fp32 [..., K]."""
    groups = weight.to(torch.float32).view(*weight.shape[:-1], -1, GROUP)
    return (groups * e8m0(scale).unsqueeze(-1)).flatten(-2)


def fp4_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [N, K/2] uint8 or int8, scale [N, K/32] UE8M0 -> fp32 [N, K]."""
    pairs = E2M1_PAIRS.to(codes.device).index_select(0, codes.reshape(-1).view(torch.uint8).to(torch.int32))
    groups = torch.view_as_real(pairs).view(codes.shape[0], -1, GROUP)
    return groups.mul_(e8m0(scale).unsqueeze(-1)).flatten(-2)
