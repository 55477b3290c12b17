"""Engram of a decode step on CUDA (see `kernels.engram`): rows as the table holds them become an activation, and the
gated value is added to the streams."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_triton import chain, chained
from kernels.rounding_triton import fp8_groups, to_bf16


@triton.jit
def _engram_rows(raw, out, columns, DIM: tl.constexpr, CHAINED: tl.constexpr):
    """A column's row: DIM bytes e4m3, then DIM / 32 scales -> bf16 of e4m3 with scales of its own."""
    chained(CHAINED)
    row, column = tl.program_id(0), tl.program_id(1)
    raw += (row * columns + column) * (DIM + DIM // 32)
    group, inside = tl.arange(0, DIM // 32), tl.arange(0, 32)
    at = group[:, None] * 32 + inside[None, :]
    code = tl.load(raw + at).to(tl.int32)
    exponent, mantissa = (code >> 3) & 15, code & 7
    # 2^(exponent - 7) * 1.mantissa, and below 2^-6 steps of 2^-9
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    value = tl.where(code >= 128, -value, value)
    scale = (tl.load(raw + DIM + group).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    value = fp8_groups(value * scale[:, None])
    tl.store(out + (row * columns + column) * DIM + at, value.to(tl.bfloat16))


@triton.jit
def _engram_mix(streams, projected, weight, hidden, S: tl.constexpr, DP: tl.constexpr, CHAINED: tl.constexpr):
    chained(CHAINED)
    row, stream = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, DP)
    inside = d < hidden
    at = streams + (row * S + stream) * hidden + d
    h = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    line = projected + row * (S + 1) * hidden + d
    k = tl.load(line + stream * hidden, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(line + S * hidden, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + stream * hidden + d, mask=inside, other=0.0)
    norms = tl.rsqrt(tl.sum(h * h, 0) / hidden + 1e-20) * tl.rsqrt(tl.sum(k * k, 0) / hidden + 1e-20)
    dot = tl.sum(h * w * k, 0) * norms / tl.sqrt(hidden.to(tl.float32))
    root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    gate = 1.0 / (1.0 + tl.exp(tl.where(dot > 0.0, -root, tl.where(dot < 0.0, root, 0.0))))
    tl.store(at, to_bf16(h + gate * v).to(tl.bfloat16), mask=inside)


def activation(raw: Tensor) -> Tensor:
    """raw [R, columns, dim + dim / 32] uint8 -> [R, columns * dim] bf16, rounded as activation."""
    rows, columns, row_bytes = raw.shape
    dim = row_bytes * 32 // 33
    out = torch.empty(rows, columns * dim, dtype=torch.bfloat16, device=raw.device)
    _engram_rows[(rows, columns)](raw, out, columns, DIM=dim, num_warps=1, **chain(raw.device))
    return out


def mix_(streams: Tensor, projected: Tensor, weight: Tensor) -> None:
    """streams [R, S, D] bf16, changed in place; projected [R, (S + 1) * D] bf16: keys, then the value; weight
    [S, D]."""
    rows, width, hidden = streams.shape
    _engram_mix[(rows, width)](
        streams, projected, weight, hidden, S=width, DP=triton.next_power_of_2(hidden), num_warps=8,
        **chain(streams.device),
    )  # fmt: skip
