"""Linear layers of a decode step on CUDA: weights are read as they are stored, once for up to 16 rows.

A program holds 32 outputs, one scale block, of all rows. Codes become bf16 exactly (an e4m3 byte's seven low bits in a
bf16's place are the value x 2^-120), activations are bf16 that hold what the model rounded them to, so products are
exact and sums are fp32. K is walked in one order whatever the rows, so a row does not depend on its company.

What follows a product in the model is done before it leaves: see `Ending`."""

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear import Fp8Matrix
from kernels.rounding_triton import INTERPRETED, fp8_groups, to_bf16

MAX_ROWS = 16
OUTPUTS = 32
BLOCK, STAGES = 128, 4  # of K: numbers of a row at a time, and tiles that are on their way
FEW_PROGRAMS = 192  # a product of fewer programs is split along K where its reader adds the parts


class Ending(IntEnum):
    RAW = 0  # fp32, [parts, R, N]
    STORED = 1  # bf16
    ACTIVATION = 2  # bf16, then e4m3 with a scale per 32
    SWIGLU = 3  # of two matrices, one over the other: clamped SwiGLU between the roundings to bf16, then as ACTIVATION
    ADDED = 4  # fp32, to what is there


@triton.jit
def _weights(w, scale, row, k, width, scale_width, FP8: tl.constexpr, WHOLE: tl.constexpr):
    """[OUTPUTS, BK] of `w` [N, width]: bf16 (fp32 in the interpreter), of FP8 x 2^-64."""
    inside = (k < width)[None, :]
    if WHOLE:
        code = tl.load(w + row[:, None].to(tl.int64) * width + k[None, :])
    else:
        code = tl.load(w + row[:, None].to(tl.int64) * width + k[None, :], mask=inside, other=0)
    if FP8:
        at = scale + (tl.min(row, 0) // 32) * scale_width + k // 32
        power = tl.load(at, mask=k < width, other=127)
        if INTERPRETED:
            wide = code.to(tl.int32)
            value = (((wide & 0x7F) << 20) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
            return value * ((power.to(tl.int32) + 56) << 23).to(tl.float32, bitcast=True)[None, :]
        else:
            wide = code.to(tl.int16)
            value = (((wide & 0x7F) << 4) | ((wide & 0x80) << 8)).to(tl.bfloat16, bitcast=True)
            return value * ((power.to(tl.int16) + 56) << 7).to(tl.bfloat16, bitcast=True)[None, :]
    elif INTERPRETED:
        return code.to(tl.float32)
    else:
        return code


@triton.jit
def _times(weights, x, acc):
    if INTERPRETED:
        return tl.dot(weights, x.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(weights, x, acc)


@triton.jit
def _linear(
    x, w, scale, out, rows, width, scale_width, outs, group_outs, x_stride, second, second_scale, limit,
    M: tl.constexpr, BK: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, FP8: tl.constexpr,
    WHOLE: tl.constexpr, ENDING: tl.constexpr,
):  # fmt: skip
    """x [rows, groups, width] bf16, w [outs, width]; outputs of group g take x[:, g]."""
    first, part = tl.program_id(0) * OUT, tl.program_id(1)
    column = first + tl.arange(0, OUT)
    row = tl.minimum(column, outs - 1)
    m = tl.arange(0, M)
    live = m < rows
    x_at = x + m * x_stride + (first // group_outs) * width
    acc, other = tl.zeros([OUT, M], tl.float32), tl.zeros([OUT, M], tl.float32)
    blocks = tl.cdiv(tl.cdiv(width, BK), SPLIT)
    for block in range(part * blocks, tl.minimum((part + 1) * blocks, tl.cdiv(width, BK))):
        k = block * BK + tl.arange(0, BK)
        acts = tl.load(x_at[None, :] + k[:, None], mask=live[None, :] & (k < width)[:, None], other=0.0)
        acc = _times(_weights(w, scale, row, k, width, scale_width, FP8, WHOLE), acts, acc)
        if ENDING == 3:
            other = _times(
                _weights(w + second, scale + second_scale, row, k, width, scale_width, FP8, WHOLE), acts, other
            )
    if FP8:
        acc, other = acc * 18446744073709551616.0, other * 18446744073709551616.0
    at = out + (part * rows + m)[None, :] * outs + column[:, None]
    there = live[None, :] & (column < outs)[:, None]
    if ENDING == 0:
        tl.store(at, acc, mask=there)
    elif ENDING == 4:
        tl.store(at, tl.load(at, mask=there, other=0.0) + acc, mask=there)
    else:
        value = to_bf16(acc)
        if ENDING == 3:
            gate, up = tl.minimum(value, limit), tl.maximum(tl.minimum(to_bf16(other), limit), -limit)
            value = to_bf16(gate / (1.0 + tl.exp(-gate)) * up)
        if ENDING >= 2:
            value = tl.trans(fp8_groups(tl.trans(value)))
        tl.store(at, value.to(tl.bfloat16), mask=there)


def parts(outs: int, width: int) -> int:
    """In how many parts a product of this shape is computed, where its reader adds them. By the shape alone: every
    rank and every row count must agree."""
    programs, most = -(-outs // OUTPUTS), -(-width // BLOCK)
    return max(1, min(8, FEW_PROGRAMS // programs, most // 4))


def linear(
    x: Tensor,
    weight: Fp8Matrix | Tensor,
    ending: Ending,
    out: Tensor | None = None,
    groups: int = 1,
    limit: float = 0.0,
    split: int = 1,
    block: int = BLOCK,
    stages: int = STAGES,
) -> Tensor:
    """x [R, K] bf16 (groups: [R, groups * K]), R <= MAX_ROWS; weight [N, K] FP8 or bf16 -> [R, N] as `ending` says;
    RAW: [split, R, N] fp32, parts of a sum. SWIGLU: N of the weight is twice that of the result, gates first. ADDED
    needs `out`."""
    rows, (outs, width) = len(x), weight.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows, a decode step has {MAX_ROWS} at most")
    is_fp8 = isinstance(weight, Fp8Matrix)
    codes, scale = (weight.codes, weight.scale) if isinstance(weight, Fp8Matrix) else (weight, weight)
    if ending == Ending.SWIGLU:
        outs //= 2
    if out is None:
        shape = (split, rows, outs) if ending == Ending.RAW else (rows, outs)
        dtype = torch.float32 if ending in (Ending.RAW, Ending.ADDED) else torch.bfloat16
        out = torch.empty(shape, dtype=dtype, device=x.device)
    scale_width = scale.shape[1]
    _linear[(-(-outs // OUTPUTS), split)](
        x, codes, scale, out, rows, width, scale_width, outs, outs // groups, x.stride(0),
        outs * width, outs // 32 * scale_width, limit,
        M=8 if rows <= 8 else 16, BK=block, OUT=OUTPUTS, SPLIT=split, FP8=is_fp8, WHOLE=width % block == 0,
        ENDING=int(ending), num_warps=2, num_stages=stages,
    )  # fmt: skip
    return out
