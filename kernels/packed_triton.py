"""Products of `kernels.packed` on CUDA: weights are read as they are stored, once for up to 16 rows of a decode step
and once for each 64 rows of a chunk.

Codes become bf16 or fp16 exactly, inputs are bf16 that hold what the model rounded them to, so products are exact and
sums are fp32; the scale of an FP8 block multiplies the block's sum. A weight in fp16 is the sum of two in bf16: its 11
bits are 8 and 3 more, and its least, 2^-24, is far from bf16's. K is walked in one order whatever the rows, so a
row does not depend on its company. A trellis takes three launches: inputs are scaled and rotated into fp16, tiles are
decoded and multiplied (`exl3_lanes_triton`, or in a chunk `exl3_walk_triton`), outputs are rotated back and scaled.
Its K is walked in one order up to 16 rows, in parts that are added behind one another, and in another, as a whole, by
chunks: a row has the same bits whatever its company in a step, and the same in any chunk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import exl3_lanes_triton as lanes
from kernels.chain_triton import chain, chained
from kernels.exl3 import Exl3Matrix
from kernels.exl3_record import CODEBOOKS
from kernels.exl3_triton import STAGES, _processors
from kernels.exl3_walk_triton import _hadamard, _kept, _place, _walk
from kernels.packed import Exl3, Fp8, Linear, Mxfp4, Plain, Stacked
from kernels.rounding_triton import INTERPRETED
from kernels.rows import ROWS

CHUNK_ROWS = 64
BLOCK = 128  # of K at a time: one scale block of FP8
OUTPUTS = 32
BF16, FP8, MXFP4, FP16 = range(4)


@triton.jit
def _narrow(value):
    """fp32 that bf16 holds, as the dtype that is multiplied."""
    if INTERPRETED:
        return value
    else:
        return value.to(tl.bfloat16)


@triton.jit
def _times(weights, x, acc):
    if INTERPRETED:
        return tl.dot(weights, x.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(weights, x, acc)


@triton.jit
def _e4m3(code):
    """code uint8 -> its value, fp32: seven bits in an fp32's place are the value x 2^-120."""
    wide = code.to(tl.int32)
    bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _e2m1(code, power):
    """code int32, 4 bits; power int32, a UE8M0 scale -> fp32."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    bits = tl.where(exponent > 0, normal, tl.where(mantissa > 0, 0x3F000000, 0))
    value = bits.to(tl.float32, bitcast=True) * (power << 23).to(tl.float32, bitcast=True)
    return tl.where(code > 7, -value, value)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, w, scale, out, rows, width, outs, skipped_rows, skipped_columns, scale_width,
    FORMAT: tl.constexpr, M: tl.constexpr, OUT: tl.constexpr, BK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """x [rows, width] bf16, w [outs, ..] -> out [rows, outs] fp32: OUT outputs of M rows."""
    chained(CHAINED)
    column = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row = tl.minimum(column, outs - 1).to(tl.int64)
    m = tl.program_id(1) * M + tl.arange(0, M)
    live = (m < rows)[None, :]
    x_at = x + tl.minimum(m, rows - 1).to(tl.int64)[None, :] * width
    acc = tl.zeros([OUT, M], tl.float32)
    for block in range(0, tl.cdiv(width + skipped_columns, BK)):
        if FORMAT == 2:
            byte = block * (BK // 2) + tl.arange(0, BK // 2)
            here = byte < width // 2
            codes = tl.load(w + row[:, None] * (width // 2) + byte[None, :], mask=here[None, :], other=0).to(tl.int32)
            power = tl.load(scale + row[:, None] * scale_width + (byte // 16)[None, :], mask=here[None, :], other=127)
            even = tl.load(x_at + 2 * byte[:, None], mask=live & here[:, None], other=0.0)
            odd = tl.load(x_at + 2 * byte[:, None] + 1, mask=live & here[:, None], other=0.0)
            acc = _times(_narrow(_e2m1(codes & 15, power.to(tl.int32))), even, acc)
            acc = _times(_narrow(_e2m1(codes >> 4, power.to(tl.int32))), odd, acc)
        else:
            k = block * BK - skipped_columns + tl.arange(0, BK)
            here = (k >= 0) & (k < width)
            inputs = tl.load(x_at + k[:, None], mask=live & here[:, None], other=0.0)
            weights = tl.load(w + row[:, None] * width + k[None, :], mask=here[None, :], other=0)
            if FORMAT == 1:
                part = _times(_narrow(_e4m3(weights)), inputs, tl.zeros([OUT, M], tl.float32))
                acc += part * tl.load(scale + (row + skipped_rows) // 128 * scale_width + block)[:, None]
            elif FORMAT == 3:
                exact = weights.to(tl.float32)
                upper = exact.to(tl.bfloat16)
                acc = _times(_narrow(upper.to(tl.float32)), inputs, acc)
                acc = _times(_narrow(exact - upper.to(tl.float32)), inputs, acc)
            elif INTERPRETED:
                acc = _times(weights.to(tl.float32), inputs, acc)
            else:
                acc = _times(weights, inputs, acc)
    tl.store(out + m.to(tl.int64)[None, :] * outs + column[:, None], acc, mask=live & (column < outs)[:, None])


@triton.jit
def _rotate(x, suh, turned, inputs, BLOCKS: tl.constexpr, CHAINED: tl.constexpr):
    """turned [rows, inputs]: BLOCKS blocks of a row, scaled and rotated, in the order of `_place`, as `_kept`."""
    chained(CHAINED)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    here = column < inputs
    value = tl.load(x + row * inputs + column, mask=here, other=0.0).to(tl.float32)
    value = _hadamard(value * tl.load(suh + column, mask=here, other=0.0).to(tl.float32), BLOCKS)
    tl.store(turned + row * inputs + _place(column), _kept(value, turned), mask=here)


@triton.jit(do_not_specialize=["rows"])
def _trellis(
    words, x, parts, rows, inputs, outs,
    HALF: tl.constexpr, BOOK: tl.constexpr, M: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """ACROSS tile columns, a part of K, of M rows: parts [SPLITS, rows, outs] fp32."""
    chained(CHAINED)
    tile, part = tl.program_id(0) * ACROSS, tl.program_id(2)
    m = tl.program_id(1) * M + tl.arange(0, M)
    valid, found = m < rows, tl.minimum(m, rows - 1).to(tl.int64)
    tiles = inputs // 16 // SPLITS
    acc = _walk(
        tl.zeros([M, ACROSS * 16], tl.float32), x + found * inputs, words + tile.to(tl.int64) * HALF * 4,
        part * tiles, tiles, outs // 16, valid, HALF, BOOK, M, DOWN, ACROSS, STAGES, ASM,
    )  # fmt: skip
    turned = tl.arange(0, ACROSS * 16)
    turned = (turned & ~15) + (turned & 1) * 8 + ((turned >> 1) & 7)  # columns come as c[2:0], c[3]
    out = parts + (part.to(tl.int64) * rows + found) * outs
    tl.store(out[:, None] + (tile * 16 + turned)[None, :], acc, mask=valid[:, None])


@triton.jit(do_not_specialize=["rows"])
def _lanes(
    words, x, parts, rows, inputs, outs,
    HALF: tl.constexpr, BOOK: tl.constexpr, BLOCKS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    WARPS: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Of a decode step (`exl3_lanes_triton.product`): WARPS * ACROSS tile columns, a part of K, of up to 8 * BLOCKS
    rows; parts as `_trellis`."""
    chained(CHAINED)
    part, lane = tl.program_id(1), tl.arange(0, 32 * WARPS)
    tile = tl.program_id(0) * (WARPS * ACROSS) + lane // 32 * ACROSS
    given: tl.tuple = ()
    sums: tl.tuple = ()
    for block in tl.static_range(BLOCKS):
        m = tl.minimum(block * 8 + lane % 32 // 4, rows - 1).to(tl.int64)
        given = given + ((x + m * inputs + lane % 4 * 4).to(tl.pointer_type(tl.int64)),)
    for _ in tl.static_range(4 * BLOCKS * ACROSS):
        sums = sums + (tl.zeros([32 * WARPS], tl.float32),)
    tiles = inputs // 16 // SPLITS
    sums = lanes._walk(
        sums, given, words + tile * (4 * HALF), part * tiles, tiles, outs // 16, lane, HALF, BOOK, BLOCKS, DOWN,
        ACROSS, AHEAD, ASM,
    )  # fmt: skip
    for block in tl.static_range(BLOCKS):
        for odd in tl.static_range(2):
            m = block * 8 + lane % 4 * 2 + odd
            out = parts + (part * rows + m).to(tl.int64) * outs + tile * 16 + lane % 32 // 4
            for across in tl.static_range(ACROSS):
                for far in tl.static_range(2):
                    one_sum = sums[4 * (across * BLOCKS + block) + 2 * far + odd]
                    tl.store(out + across * 16 + far * 8, one_sum, mask=m < rows)


@triton.jit(do_not_specialize=["rows"])
def _rotate_back(parts, svh, out, rows, outs, SPLITS: tl.constexpr, CHAINED: tl.constexpr):
    """One block of 128 outputs of a row."""
    chained(CHAINED)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * 128 + tl.arange(0, 128)[None, :]
    total = tl.load(parts + row * outs + column)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts + (part * rows + row) * outs + column)
    tl.store(out + row * outs + column, _hadamard(total, 1) * tl.load(svh + column).to(tl.float32))


def product(x: Tensor, weight: Linear) -> Tensor:
    """x [T, K] fp32 that bf16 holds -> [T, N] fp32, with the native rounding of a trellis's input."""
    x = x.to(torch.bfloat16).contiguous()
    if isinstance(weight, Stacked):
        return torch.cat([_one(x, part) for part in weight.parts], 1)
    return _one(x, weight)


def _one(x: Tensor, weight: Linear) -> Tensor:
    if isinstance(weight, Exl3):
        return _of_trellis(x, weight.matrix)[:, : weight.outputs].contiguous()
    rows, (outs, width) = len(x), weight.shape
    out = torch.empty(rows, outs, dtype=torch.float32, device=x.device)
    m = ROWS if rows <= ROWS else CHUNK_ROWS
    held, scale, kind, skipped = _operands(weight)
    _product[(-(-outs // OUTPUTS), -(-rows // m))](
        x, held, scale, out, rows, width, outs, *skipped, scale.shape[-1],
        FORMAT=kind, M=m, OUT=OUTPUTS, BK=BLOCK, **chain(x.device),
    )  # fmt: skip
    return out


def _operands(weight: Linear) -> tuple[Tensor, Tensor, int, tuple[int, int]]:
    if isinstance(weight, Fp8):
        return weight.codes, weight.scale.contiguous(), FP8, weight.skipped
    if isinstance(weight, Mxfp4):
        return weight.codes, weight.scale, MXFP4, (0, 0)
    assert isinstance(weight, Plain), "trellises and stacks are taken apart before"
    return weight.weight, weight.weight, FP16 if weight.weight.dtype is torch.float16 else BF16, (0, 0)


# Of a trellis in a decode step: as an expert's, but that a product is one of one, and its parts are added one by one.
DECODE = {"DOWN": 2, "ACROSS": 4, "WARPS": 2, "AHEAD": True}
PLAIN = {"DOWN": 2, "ACROSS": 2, "WARPS": 4, "AHEAD": False}  # of the interpreter: numpy takes many lanes at once
RESIDENT, MOST_PARTS, LEAST = 16, 16, 8  # warps of a processor; parts of K, of at least so many rows of tiles


def _of_trellis(x: Tensor, matrix: Exl3Matrix) -> Tensor:
    rows, (inputs, outs) = len(x), matrix.shape
    few, device = rows <= ROWS, x.device
    splits = _parts(inputs // 16, outs // 16, device) if few else 1
    turned = torch.empty(rows, inputs, dtype=torch.int32 if few else torch.float16, device=device)
    parts = torch.empty(splits, rows, outs, dtype=torch.float32, device=device)
    out = torch.empty(rows, outs, dtype=torch.float32, device=device)
    _rotate[(rows, -(-inputs // 1024))](x, matrix.suh, turned, inputs, BLOCKS=8, **chain(device))
    given = matrix.trellis.view(torch.int32), turned, parts, rows, inputs, outs
    kind = {"HALF": matrix.half_bits, "BOOK": CODEBOOKS.index(matrix.codebook), "SPLITS": splits}
    if few:
        shape = PLAIN if INTERPRETED.value else DECODE
        _lanes[(outs // 16 // (shape["WARPS"] * shape["ACROSS"]), splits)](
            *given, **kind, **shape, BLOCKS=1 if rows <= 8 else 2, ASM=not INTERPRETED.value,
            num_warps=shape["WARPS"], **chain(device),
        )  # fmt: skip
    else:
        _trellis[(outs // 16 // 8, -(-rows // CHUNK_ROWS), 1)](
            *given, **kind, M=CHUNK_ROWS, DOWN=2, ACROSS=8, STAGES=STAGES, ASM=not INTERPRETED.value, **chain(device)
        )
    _rotate_back[(rows, outs // 128)](
        parts, matrix.svh, out, rows, outs, SPLITS=splits, num_warps=1, **chain(device)
    )  # fmt: skip
    return out


def _parts(tiles: int, columns: int, device: torch.device) -> int:
    """Into how many K is cut, of so many tiles; the rows of a step have no say in it."""
    warps, parts = columns // DECODE["ACROSS"], 1
    while warps * parts < RESIDENT * _processors(device) and parts < MOST_PARTS and tiles % (2 * parts * LEAST) == 0:
        parts *= 2
    return parts
