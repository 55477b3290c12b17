"""Linear layers of a decode step on CUDA: weights are read as they are stored, once for up to 16 rows.

A program holds 32 outputs, one scale block, of all rows, and a part of K. Codes become bf16 by shifts alone (an e4m3
byte's seven low bits in a bf16's place are the value x 2^-120, subnormals included); their scale, the same for all of a
program's outputs, goes to the activations instead, which are bf16 that hold what the model rounded them to. So products
are exact, and sums are fp32. K is walked in one order whatever the rows, and its parts are added in their order by
whichever program ends last, so a row does not depend on its company and no result on the time of day.

What follows a product in the model is done before it leaves: see `Ending`."""

from enum import IntEnum
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_triton import chain, place_next, wait_for_last
from kernels.linear import Fp8Matrix
from kernels.rounding_triton import INTERPRETED, fp8_groups, to_bf16

MAX_ROWS = 16
OUTPUTS = 32
BLOCK, STAGES = 128, 6  # of K: numbers of a row at a time, and tiles that are on their way
PROGRAMS = 768  # a product of fewer is split along K, so that nearly all of it can be on its way at once
LEAST_BLOCKS, MOST_PARTS = 3, 16  # of K, a program's; of a sum


class Ending(IntEnum):
    PARTS = 0  # fp32, [parts, R, N]: whoever reads them adds them
    SUM = 1  # fp32, [R, N]
    STORED = 2  # bf16
    ACTIVATION = 3  # bf16, then e4m3 with a scale per 32
    SWIGLU = 4  # of two matrices, one over the other: clamped SwiGLU between the roundings to bf16, then as ACTIVATION
    ADDED = 5  # fp32, to what is there


@triton.jit
def _bf16_of(code, ASM: tl.constexpr):
    """e4m3 codes -> bf16 (fp32 in the interpreter) of value x 2^-120."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, s, t;
            prmt.b32 low, $2, 0, 0x1404; prmt.b32 high, $2, 0, 0x3424;
            and.b32 s, low, 0x80008000; shr.b32 low, low, 4; lop3.b32 $0, low, 0x07F007F0, s, 0xEA;
            and.b32 t, high, 0x80008000; shr.b32 high, high, 4; lop3.b32 $1, high, 0x07F007F0, t, 0xEA;
            }""",
            "=&r,=&r,r",
            [code],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = code.to(tl.int32)
        return (((wide & 0x7F) << 20) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _powers(scale, k, width):
    """Scale bytes of columns k of one scale row."""
    return tl.load(scale + k // 32, mask=k < width, other=127)


@triton.jit
def _scaled(acts, power):
    """acts [BK, M] times their weights' scales [BK], and 2^56: what the codes and this leave of 1 is 2^-64."""
    if INTERPRETED:
        return acts.to(tl.float32) * ((power.to(tl.int32) + 56) << 23).to(tl.float32, bitcast=True)[:, None]
    else:
        return acts * ((power.to(tl.int16) + 56) << 7).to(tl.bfloat16, bitcast=True)[:, None]


@triton.jit
def _times(weights, x, acc):
    if INTERPRETED:
        return tl.dot(weights.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(weights, x, acc)


@triton.jit
def _finish(acc, other, out, rows, outs, m, column, limit, there, ENDING: tl.constexpr):
    """acc, other [OUT, M] fp32, whole sums, to their place."""
    at = out + m[None, :] * outs + column[:, None]
    if ENDING == 1:
        tl.store(at, acc, mask=there)
    elif ENDING == 5:
        tl.store(at, tl.load(at, mask=there, other=0.0) + acc, mask=there)
    else:
        value = to_bf16(acc)
        if ENDING == 4:
            gate, up = tl.minimum(value, limit), tl.maximum(tl.minimum(to_bf16(other), limit), -limit)
            value = to_bf16(gate / (1.0 + tl.exp(-gate)) * up)
        if ENDING >= 3:
            value = tl.trans(fp8_groups(tl.trans(value)))
        tl.store(at, value.to(tl.bfloat16), mask=there)


@triton.jit
def _tile(w, row, k, width, WHOLE: tl.constexpr):
    """Weights [OUT, BK] of these rows and columns. WHOLE: no block of K reaches beyond the width."""
    if WHOLE:
        return tl.load(w + row * width + k[None, :])
    else:
        return tl.load(w + row * width + k[None, :], mask=(k < width)[None, :], other=0)


@triton.jit
def _walk(
    x_at, w, scale, row, live, begin, end, width, second, second_scale,
    M: tl.constexpr, BK: tl.constexpr, OUT: tl.constexpr, FP8: tl.constexpr, WHOLE: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Blocks [begin, end) of K of a program's outputs, and where there is a PAIR of the second matrix' ->
    two [OUT, M] fp32."""
    acc, other = tl.zeros([OUT, M], tl.float32), tl.zeros([OUT, M], tl.float32)
    if FP8:
        k = begin * BK + tl.arange(0, BK)
        power = _powers(scale, k, width)
        if PAIR:
            power2 = _powers(scale + second_scale, k, width)
    for block in range(begin, end):
        k = block * BK + tl.arange(0, BK)
        acts = tl.load(x_at[None, :] + k[:, None], mask=live[None, :] & (k < width)[:, None], other=0.0)
        tile = _tile(w, row, k, width, WHOLE)
        if PAIR:
            tile2 = _tile(w + second, row, k, width, WHOLE)
        if FP8:
            acc = _times(_bf16_of(tile, not INTERPRETED), _scaled(acts, power), acc)
            power = _powers(scale, k + BK, width)  # of the next block, while this one is multiplied
            if PAIR:
                other = _times(_bf16_of(tile2, not INTERPRETED), _scaled(acts, power2), other)
                power2 = _powers(scale + second_scale, k + BK, width)
        else:
            acc = _times(tile, acts, acc)
            if PAIR:
                other = _times(tile2, acts, other)
    if FP8:
        return acc * 18446744073709551616.0, other * 18446744073709551616.0
    else:
        return acc, other


@triton.jit
def _add_parts(
    acc, other, parts, arrived, out, rows, outs, m, column, limit, there,
    M: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, ENDING: tl.constexpr,
):  # fmt: skip
    """Leaves this program's part, and adds all of them if it is the last, in their order."""
    part = tl.program_id(1)
    pair: tl.constexpr = 2 if ENDING == 4 else 1
    at = parts + m[None, :] * outs + column[:, None]
    one = rows * outs
    tl.store(at + part * pair * one, acc, mask=there)
    if ENDING == 4:
        tl.store(at + (part * pair + 1) * one, other, mask=there)
    tl.debug_barrier()  # all of this program's, before it is counted
    if tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == SPLIT - 1:
        acc, other = tl.zeros([OUT, M], tl.float32), tl.zeros([OUT, M], tl.float32)
        for p in tl.static_range(SPLIT):
            acc += tl.load(at + p * pair * one, mask=there, other=0.0, cache_modifier=".cg")
            if ENDING == 4:
                other += tl.load(at + (p * pair + 1) * one, mask=there, other=0.0, cache_modifier=".cg")
        tl.store(arrived + tl.program_id(0), 0)
        _finish(acc, other, out, rows, outs, m, column, limit, there, ENDING)


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, w, scale, out, parts, arrived, rows, width, scale_width, outs, group_outs, x_stride, second, second_scale, limit,
    M: tl.constexpr, BK: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, FP8: tl.constexpr,
    WHOLE: tl.constexpr, ENDING: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """x [rows, groups, width] bf16, w [outs, width]; outputs of group g take x[:, g]. parts [SPLIT, 1 or 2, rows, outs]
    and arrived [a tile] int32, zeros, where there are several parts to be added here."""
    first, part = tl.program_id(0) * OUT, tl.program_id(1)
    blocks = tl.cdiv(tl.cdiv(width, BK), SPLIT)
    begin, end = part * blocks, tl.minimum((part + 1) * blocks, tl.cdiv(width, BK))
    wait_for_last(CHAINED)
    column = first + tl.arange(0, OUT)
    row = tl.minimum(column, outs - 1)[:, None].to(tl.int64)
    m = tl.arange(0, M)
    live = m < rows
    acc, other = _walk(
        x + m * x_stride + (first // group_outs) * width, w, scale + (first // 32) * scale_width, row, live,
        begin, end, width, second, second_scale, M, BK, OUT, FP8, WHOLE, ENDING == 4,
    )  # fmt: skip
    place_next(CHAINED)
    there = live[None, :] & (column < outs)[:, None]
    if ENDING == 0:
        tl.store(out + (part * rows + m)[None, :] * outs + column[:, None], acc, mask=there)
    elif SPLIT == 1:
        _finish(acc, other, out, rows, outs, m, column, limit, there, ENDING)
    else:
        _add_parts(acc, other, parts, arrived, out, rows, outs, m, column, limit, there, M, OUT, SPLIT, ENDING)


@lru_cache
@torch.inference_mode(False)  # whoever asks first; all may write to them
def _arrived(device: torch.device) -> Tensor:
    """Zeros, and zeros again after every launch. Launches that use them run one after another."""
    return torch.zeros(1 << 14, dtype=torch.int32, device=device)


def parts(outs: int, width: int) -> int:
    """In how many parts a product of this shape is computed. By the shape alone: every rank and every row count must
    agree."""
    programs, blocks = -(-outs // OUTPUTS), -(-width // BLOCK)
    wanted = max(1, min(MOST_PARTS, -(-PROGRAMS // programs), blocks // LEAST_BLOCKS))
    share = -(-blocks // wanted)
    return -(-blocks // share)  # as few as the same share of each gives


def linear(
    x: Tensor,
    weight: Fp8Matrix | Tensor,
    ending: Ending,
    out: Tensor | None = None,
    groups: int = 1,
    limit: float = 0.0,
    split: int | None = None,
    block: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """x [R, K] bf16 (groups: [R, groups * K]), R <= MAX_ROWS; weight [N, K] FP8 or bf16 -> [R, N] as `ending` says;
    PARTS: [parts, R, N] fp32. SWIGLU: N of the weight is twice that of the result, gates first. ADDED needs `out`.
    `split`, `block` and `stages`: instead of what suits the shape."""
    rows, (outs, width) = len(x), weight.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows, a decode step has {MAX_ROWS} at most")
    is_fp8 = isinstance(weight, Fp8Matrix)
    codes, scale = (weight.codes, weight.scale) if isinstance(weight, Fp8Matrix) else (weight, weight)
    if ending == Ending.SWIGLU:
        outs //= 2
    split = parts(outs, width) if split is None else split
    block, stages = block or BLOCK, stages or STAGES
    if out is None:
        shape = (split, rows, outs) if ending == Ending.PARTS else (rows, outs)
        dtype = torch.float32 if ending in (Ending.PARTS, Ending.SUM, Ending.ADDED) else torch.bfloat16
        out = torch.empty(shape, dtype=dtype, device=x.device)
    here = split > 1 and ending != Ending.PARTS
    scratch = torch.empty(split * (1 + (ending == Ending.SWIGLU)) * rows * outs, device=x.device) if here else out
    scale_width = scale.shape[1]
    _linear[(-(-outs // OUTPUTS), split)](
        x, codes, scale, out, scratch, _arrived(x.device), rows, width, scale_width, outs, outs // groups, x.stride(0),
        outs * width, outs // 32 * scale_width, limit,
        M=8 if rows <= 8 else 16, BK=block, OUT=OUTPUTS, SPLIT=split, FP8=is_fp8, WHOLE=width % block == 0,
        ENDING=int(ending), num_warps=2, num_stages=stages, **chain(x.device),
    )  # fmt: skip
    return out
