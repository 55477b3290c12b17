"""Linear layers of a prompt chunk on CUDA: hundreds of rows and more, where `linear_triton` has 16.

An FP8 matrix is made bf16 by one launch, exactly, and multiplied by torch's product, which keeps the matrix units
busier than a kernel of ours would; the bf16 copy lives as long as the product. Activations are exact in bf16 as well,
so products are exact and sums are fp32, of which what follows in the model is made by one more launch (`ended`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear import Fp8Matrix, Matrix
from kernels.linear_triton import Ending
from kernels.rounding_triton import fp8_groups, to_bf16

COLUMNS = 256  # of a program that makes weights
ENDED = 1024  # of one that ends rows


@triton.jit
def _dense(codes, scale, out, outs, width, scale_width, SIZE: tl.constexpr):
    """32 rows, one scale block, of SIZE columns: e4m3 x 2^(scale - 127) as bf16."""
    row, column = tl.program_id(0) * 32 + tl.arange(0, 32), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = (row < outs)[:, None] & (column < width)[None, :]
    at = row[:, None].to(tl.int64) * width + column[None, :]
    wide = tl.load(codes + at, mask=there, other=0).to(tl.int32)
    power = tl.load(scale + tl.program_id(0) * scale_width + column // 32, mask=column < width, other=127)
    # The code's seven low bits in a fp32's place are the value x 2^-120: half of that comes with the scale.
    value = (((wide & 0x7F) << 20) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True) * 18446744073709551616.0
    value = value * ((power.to(tl.int32) + 56) << 23).to(tl.float32, bitcast=True)[None, :]
    tl.store(out + at, value.to(tl.bfloat16), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _ended(
    x, out, rows, outs, each, second, limit, SIZE: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """SIZE columns of a row, as `Ending.ACTIVATION` or `Ending.SWIGLU` says. x [groups, rows, each] fp32."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    there = column < outs
    at = x + ((column // each) * rows + row) * each + column % each
    value = to_bf16(tl.load(at, mask=there, other=0.0))
    if SWIGLU:
        gate = tl.minimum(value, limit)
        up = tl.maximum(tl.minimum(to_bf16(tl.load(at + second, mask=there, other=0.0)), limit), -limit)
        value = to_bf16(gate / (1.0 + tl.exp(-gate)) * up)
    value = fp8_groups(value.reshape(SIZE // 32, 32)).reshape(SIZE)
    tl.store(out + row * outs + column, value.to(tl.bfloat16), mask=there)


def dense(weight: Matrix) -> Tensor:
    """weight [N, K] -> bf16, exactly."""
    if isinstance(weight, Tensor):
        return weight
    (outs, width), scale = weight.shape, weight.scale
    out = torch.empty(outs, width, dtype=torch.bfloat16, device=weight.codes.device)
    _dense[(-(-outs // 32), -(-width // COLUMNS))](
        weight.codes, scale, out, outs, width, scale.shape[1], SIZE=COLUMNS, num_warps=4
    )
    return out


def product(x: Tensor, weight: Matrix) -> Tensor:
    """x [T, K] bf16; weight [N, K] FP8 or bf16 -> [T, N] fp32."""
    whole = dense(weight)
    if x.is_cuda:
        return torch.mm(x, whole.t(), out_dtype=torch.float32)
    return x.float() @ whole.float().t()


def grouped(x: Tensor, weight: Fp8Matrix, groups: int) -> Tensor:
    """x [T, groups * K] bf16, weight [groups * N, K] -> [groups, T, N] fp32: every group of inputs has its own."""
    by_group, whole = x.view(len(x), groups, -1).transpose(0, 1), dense(weight)
    whole = whole.view(groups, -1, whole.shape[1]).transpose(1, 2)
    if x.is_cuda:
        return torch.bmm(by_group, whole, out_dtype=torch.float32)
    return torch.bmm(by_group.float(), whole.float())


def ended(x: Tensor, ending: Ending, limit: float = 0.0) -> Tensor:
    """x [groups, T, N] fp32, sums of products -> [T, groups * N] bf16, rounded as activation; SWIGLU: one group, of
    which half as many columns come out."""
    groups, rows, each = x.shape
    outs = groups * each if ending == Ending.ACTIVATION else each // 2
    out = torch.empty(rows, outs, dtype=torch.bfloat16, device=x.device)
    _ended[(rows, -(-outs // ENDED))](
        x, out, rows, outs, each, outs, limit, SIZE=ENDED, SWIGLU=ending == Ending.SWIGLU, num_warps=4
    )
    return out
