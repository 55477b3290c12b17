"""MXFP4 experts of a decode step on CUDA: the fast form of `kernels.experts.grouped_experts` for up to 16 rows.

Each distinct expert is read once, straight from its slot in the arena, by the tensor copy engine where there is one
(Triton makes plain loads of it elsewhere), and multiplied in one of two forms (`experts_product_triton`); `Tiles` says
in which. Activations are 8-bit floats times powers of two: a row of them, times one power of two, fits fp16 without
loss (`_prepare`, `_gate_up`), and an 8-bit float again but for what is below 2^-13 of the row's largest, at worst.

A weight's scale is a byte from 1 to 254 whose products stay within fp32: 0 counts as a scale of zero, 255 as infinity,
where the reference has 2^-127 and no number.

Four launches: `_prepare` finds the distinct experts and puts the rows into the order of the codes, `_gate_up` ends in
the rounded hidden row of every pick, `_down` gives one row a pick, `_sum` adds the picks of a token in the order of k.
A token's result is bit-equal whatever tokens are beside it: a column of the matrix unit does not see the others, and K
is walked in one order. Where the device can, the next launch is placed while the one before runs (`chain_triton`).

Kernels run in Triton's interpreter too (`ASM` off): same arithmetic, decoded without inline assembly.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.chain_triton import chain, chained
from kernels.experts_product_triton import position, scaled_product, wanted
from kernels.record import ExpertRecord, Part

MAX_ROWS = 16
MAX_LIMIT = 64.0  # of the SwiGLU's clamp; while limit^2 x weight < 256, 8-bit hidden rows lose nothing as fp16


@triton.jit
def _exponent(value):
    """Of a positive fp32: 2^n <= value < 2^(n+1)."""
    return ((value.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def _power(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _prepare(
    x, picks, table, ordered, factors, count, width, padded,
    SIZE: tl.constexpr, PICKS: tl.constexpr, M: tl.constexpr, EIGHT: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A program a row: x [T, width] -> ordered [T, padded] fp16, times 2^15 / (power of two of its largest), or e4m3,
    times 2^7 / that (2^8 might go beyond 448); the inverse goes to factors [T], with the power that codes lack: 2^14 or
    2^6. One program more: table, int32: slot of each distinct expert in the order of first
    pick [PICKS], -1 behind them; the picks that want each [PICKS, M], -1 behind them."""
    chained(CHAINED)
    row = tl.program_id(0)
    if row < tl.num_programs(0) - 1:
        column = tl.arange(0, SIZE)
        value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        exponent = tl.maximum(_exponent(tl.max(tl.abs(value), 0)), -100)
        at = ordered + row * padded + position(column, EIGHT)
        code = value * _power((7 if EIGHT else 15) - exponent)
        if EIGHT:
            code = _eighth(code)
        tl.store(at, code.to(ordered.dtype.element_ty), mask=column < padded)
        tl.store(factors + row, _power(exponent - 1))
    else:
        every = tl.arange(0, PICKS)
        slots = tl.load(picks + every, mask=every < count, other=-1)
        same = slots[:, None] == slots[None, :]  # [of, among]
        before = tl.sum((same & (every[None, :] < every[:, None])).to(tl.int32), 1)
        first = (before == 0) & (slots >= 0)
        order = tl.cumsum(first.to(tl.int32), 0) - 1
        leader = tl.min(tl.where(same, every[None, :], PICKS), 1)
        expert = tl.sum(tl.where(every[None, :] == leader[:, None], order[None, :], 0), 1)
        tl.store(table + every, tl.full([PICKS], -1, tl.int32))
        wanted = tl.arange(0, M)
        tl.store(table + PICKS + every[:, None] * M + wanted[None, :], tl.full([PICKS, M], -1, tl.int32))
        tl.debug_barrier()
        tl.store(table + expert, slots, mask=first)
        tl.store(table + PICKS + expert * M + before, every, mask=slots >= 0)


@triton.jit
def _kept(value, LOW: tl.constexpr):
    """fp32 rounded to nearest even at bit LOW. By integers: the interpreter's conversions cut off instead."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + ((1 << (LOW - 1)) - 1) + ((bits >> LOW) & 1)) & (-1 << LOW)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _rounded(value):
    """To bf16, held as fp32."""
    return _kept(value, 16)


@triton.jit
def _eighth(code):
    """fp32 rounded to e4m3, where that is not its largest."""
    small = (code + 24576.0) - 24576.0  # below 2^-6 steps are 2^-9: what fp32 keeps beside 1.5 x 2^14
    return tl.where(tl.abs(code) < 0.015625, small, _kept(code, 20))


@triton.jit
def _fp8(value, AXIS: tl.constexpr):
    """value, scale groups along AXIS -> rounded to e4m3 with one power of two a group (`quantise.fp8_ue8m0`)."""
    amax = tl.maximum(tl.max(tl.abs(value), AXIS, keep_dims=True), 1e-4) * 0.002232142857142857
    bits = (amax.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    scale = bits.to(tl.float32, bitcast=True)
    return _eighth(value / scale) * scale


@triton.jit
def _ceiling_exponent(weight, limit):
    """n: no hidden value goes beyond |weight| * limit^2 < 2^(n + 1), to which 8-bit rounding may raise it. Its smallest
    step is 2^-31 (a group's scale is 2^-22 or more), and 2^(n - 38) is the smallest that fp16 then holds."""
    return tl.maximum(_exponent(tl.abs(weight) * limit * limit), -100)


@triton.jit
def _gate_up(
    w13, scales, slot_bytes, table, weights, x, factors, hidden, top_k, limit, blocks, row_scales,
    s1_bytes, s3_bytes, x_width, hidden_width,
    PICKS: tl.constexpr, M: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    HALVES: tl.constexpr, STAGES: tl.constexpr, EIGHT: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """HALF / 32 scale groups of the hidden row of every pick of one expert: fp8(w * silu(min(g, L)) * clamp(u)) as
    fp16, times 2^14 over the power of two that the clamp keeps it below."""
    chained(CHAINED)
    tile = tl.program_id(0)
    slot = tl.load(table + tl.program_id(1))
    if slot < 0:
        return
    COLUMNS: tl.constexpr = 16 if EIGHT else M
    found, valid = wanted(table, 0, COLUMNS, PICKS, M)
    row = tl.arange(0, 2 * HALF)  # so many of w1, and the same of w3
    at = scales + slot.to(tl.int64) * slot_bytes + tl.where(row < HALF, s1_bytes, s3_bytes)
    both = scaled_product(
        w13, slot, tile * HALF, at + (tile * HALF + row % HALF) * row_scales, x, x_width, top_k, table,
        blocks, row_scales, 2 * HALF, COLUMNS, PICKS, M, BLOCK, True, WHOLE, HALVES, STAGES, EIGHT, ASM,
    )  # fmt: skip
    gate, up = tl.split(both.reshape(2, HALF, COLUMNS).permute(1, 2, 0))
    factor = tl.load(factors + found // top_k)
    gate, up = _rounded(gate * factor[None, :]), _rounded(up * factor[None, :])
    gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
    weight = tl.load(weights + found)
    value = _rounded(gate / (1.0 + tl.exp(-gate)) * up * weight[None, :])
    eight = _fp8(value.reshape(HALF // 32, 32, COLUMNS), 1).reshape(HALF, COLUMNS)
    out = eight * _power(14 - _ceiling_exponent(weight, limit))[None, :]
    at = tile * HALF + position(tl.arange(0, HALF), False)
    tl.store(hidden + found[None, :] * hidden_width + at[:, None], out.to(tl.float16), mask=valid[None, :])


@triton.jit
def _down(
    w2, scales, slot_bytes, table, weights, hidden, out, limit, blocks, row_scales, outer, s2_bytes, hidden_width,
    PICKS: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    HALVES: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of every pick of one expert, [picks, outer] fp32."""
    chained(CHAINED)
    tile = tl.program_id(0)
    slot = tl.load(table + tl.program_id(1))
    if slot < 0:
        return
    found, valid = wanted(table, 0, M, PICKS, M)
    row = tile * ROWS + tl.arange(0, ROWS)
    at = scales + slot.to(tl.int64) * slot_bytes + s2_bytes + row * row_scales
    acc = scaled_product(
        w2, slot, tile * ROWS, at, hidden, hidden_width, 1, table, blocks, row_scales,
        ROWS, M, PICKS, M, BLOCK, False, WHOLE, HALVES, STAGES, False, ASM,
    )  # fmt: skip
    factor = _power(_ceiling_exponent(tl.load(weights + found), limit))
    tl.store(out + found[None, :] * outer + row[:, None], acc * factor[None, :], mask=valid[None, :])


@triton.jit
def _sum(parts, picks, out, outer, TOP_K: tl.constexpr, SIZE: tl.constexpr, CHAINED: tl.constexpr):
    """parts [T, k, outer] -> out [T, outer], in the order of k; picks without a slot count for nothing."""
    chained(CHAINED)
    row = tl.program_id(0)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for k in tl.static_range(TOP_K):
        here = tl.load(picks + row * TOP_K + k) >= 0
        total += tl.load(parts + (row * TOP_K + k) * outer + column, mask=here & (column < outer), other=0.0)
    tl.store(out + row * outer + column, total, mask=column < outer)


@dataclass(frozen=True)
class Tiles:
    """How the products are cut. Of all this only `eight` changes a bit. What a device takes by itself is within 39 KB
    of shared memory, with four stages, and on sm_90 192 registers a thread (`docs/results.md`). On sm_80 some registers
    of `_down`, and beyond 8 rows of `_gate_up`, spill to memory. ValueError for `eight` with other than four warps,
    which would come to another matrix unit."""

    eight: bool = False  # gate and up in the form of 8 bits
    half: int = 32  # rows of w1, and as many of w3, in a tile of gate and up, where the width allows
    block: int = 256  # weights of a row at a time, a multiple of 128
    stages: int | None = 3  # None: as deep as leaves all blocks a place (`_stages`)
    warps: int = 4
    registers: int | None = None  # a thread of gate and up; None: as many as the compiler likes
    down_rows: int = 64  # of w2, where the width allows
    down_block: int = 128
    down_stages: int = 3
    down_warps: int = 2

    def __post_init__(self) -> None:
        if self.eight and self.warps != 4:
            raise ValueError(f"8-bit products by {self.warps} warps: `wgmma` is of four")


# By the most rows. `eight` is one for all of a device: a row's bits hang on it.
SM_90 = ((8, Tiles(stages=None)), (MAX_ROWS, Tiles(warps=2)))
OTHERS = ((8, Tiles()), (MAX_ROWS, Tiles(warps=2)))


def tiles_of(rows: int, device: torch.device) -> Tiles:
    """What a decode step of so many rows takes: the one place where a device chooses."""
    of_device = SM_90 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 else OTHERS
    return next(tiles for most, tiles in of_device if rows <= most)


def _halves(columns: int, warps: int) -> bool:
    """At 16 columns and whole fours of warps Triton takes `wgmma` where there is one. It sums 16 bits otherwise: a
    row's bits would depend on its company. And it wants the activations laid out anew."""
    return columns == 16 and warps % 4 == 0


def _stages(tiles: Tiles, picks: int, across: int, device: torch.device) -> int:
    """Of the pipeline of `_gate_up`, `across` tiles wide; no bit depends on it. With three, six blocks of threads find
    room in a multiprocessor of sm_90; with four only five, each with more on its way, which is better
    (`docs/results.md`) unless three take all blocks at once and four do not. About six of ten picks want an expert that
    no other pick wants."""
    if tiles.stages is not None:
        return tiles.stages
    of_each = 0.6 * picks * across / torch.cuda.get_device_properties(device).multi_processor_count
    return 3 if 5 < of_each <= 6 else 4


def _tiles(slots: Tensor, record: ExpertRecord, part: Part, rows: int, block: int) -> TensorDescriptor:
    """A part of every slot, to be read in tiles of `rows` x `block` weights."""
    shape, strides = [len(slots), part.rows, part.row_bytes], [record.slot_bytes, part.row_bytes, 1]
    return TensorDescriptor(slots[:, part.offset :], shape, strides, [1, rows, block // 2])


def _paired(slots: Tensor, record: ExpertRecord, part: Part, rows: int, block: int) -> TensorDescriptor:
    """A part of every slot and the one of its shape behind it, in tiles of `rows` x `block` weights of each."""
    shape, strides = [len(slots), 2, part.rows, part.row_bytes], [record.slot_bytes, part.nbytes, part.row_bytes, 1]
    return TensorDescriptor(slots[:, part.offset :], shape, strides, [1, 2, rows, block // 2])


def _up_to(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple


def grouped_experts(
    x: Tensor,
    slots: Tensor,
    record: ExpertRecord,
    picks: Tensor,
    weights: Tensor,
    limit: float,
    asm: bool = True,
    tiles: Tiles | None = None,
) -> Tensor:
    """x [T, D], rounded as activation, T <= MAX_ROWS; slots [S, slot_bytes] uint8; picks [T, k] int32 slots, -1: none,
    no slot twice in a row; weights [T, k] fp32 -> [T, D] fp32: this rank's part, as the reference rounds it. tiles:
    None, those of the device."""
    (tokens, top_k), d = picks.shape, record.hidden
    picks = picks.to(torch.int32).contiguous()
    outputs = torch.empty(tokens, top_k, d, dtype=torch.float32, device=x.device)
    pick_outputs(outputs, x, slots, record, picks, weights, limit, asm, tiles)
    return sum_of_picks(outputs, picks)


def sum_of_picks(outputs: Tensor, picks: Tensor) -> Tensor:
    """outputs [T, k, D] fp32, contiguous; picks [T, k] int32, -1: none -> [T, D], added in the order of k."""
    tokens, top_k, d = outputs.shape
    out = torch.empty(tokens, d, dtype=torch.float32, device=outputs.device)
    _sum[(tokens, -(-d // 1024))](outputs, picks, out, d, top_k, SIZE=1024, **chain(outputs.device))
    return out


def pick_outputs(
    outputs: Tensor,
    x: Tensor,
    slots: Tensor,
    record: ExpertRecord,
    picks: Tensor,
    weights: Tensor,
    limit: float,
    asm: bool = True,
    tiles: Tiles | None = None,
) -> None:
    """As `grouped_experts`, but every pick's own output goes to its place of outputs [T, k, D] fp32, contiguous; the
    places of picks without a slot stay as they are."""
    tokens, top_k = picks.shape
    if tokens > MAX_ROWS:
        raise ValueError(f"{tokens} rows, a decode step has {MAX_ROWS} at most")
    if not 0 < limit <= MAX_LIMIT:
        raise ValueError(f"a clamp at {limit}: hidden rows are kept as fp16, which needs one of {MAX_LIMIT} at most")
    tiles = tiles or tiles_of(tokens, x.device)
    d, n, count = record.hidden, record.share, tokens * top_k
    w1, _, w2, s1, s3, s2 = record.parts
    picks, weights = picks.to(torch.int32).contiguous(), weights.contiguous()
    x_width, hidden_width = _up_to(d, tiles.block), _up_to(n, tiles.down_block)
    m, every = 8 if tokens <= 8 else 16, max(64, triton.next_power_of_2(count))
    table = torch.empty(every * (1 + m), dtype=torch.int32, device=x.device)
    ordered = torch.empty(tokens, x_width, dtype=torch.float8_e4m3fn if tiles.eight else torch.float16, device=x.device)
    factors = torch.empty(tokens, dtype=torch.float32, device=x.device)
    hidden = torch.empty(count, hidden_width, dtype=torch.float16, device=x.device)
    if hidden_width != n:
        hidden.zero_()
    shape, launch = {"PICKS": every, "M": m}, chain(x.device)
    _prepare[(tokens + 1,)](
        x.contiguous(), picks, table, ordered, factors, count, d, x_width, SIZE=triton.next_power_of_2(x_width),
        EIGHT=tiles.eight, num_warps=8, **shape, **launch,
    )  # fmt: skip
    block, half = tiles.block, tiles.half if n % tiles.half == 0 else 32  # a width is a multiple of 32
    _gate_up[(n // half, count)](
        _paired(slots, record, w1, half, block), slots, record.slot_bytes, table, weights, ordered, factors, hidden,
        top_k, limit, x_width // block, d // 32, s1.offset, s3.offset, x_width, hidden_width, HALF=half, BLOCK=block,
        WHOLE=d % block == 0, HALVES=not tiles.eight and _halves(m, tiles.warps), EIGHT=tiles.eight,
        STAGES=_stages(tiles, count, n // half, x.device), num_warps=tiles.warps, maxnreg=tiles.registers, ASM=asm,
        **shape, **launch,
    )  # fmt: skip
    block, rows = tiles.down_block, tiles.down_rows if d % tiles.down_rows == 0 else 32
    _down[(d // rows, count)](
        _tiles(slots, record, w2, rows, block), slots, record.slot_bytes, table, weights, hidden, outputs, limit,
        hidden_width // block, n // 32, d, s2.offset, hidden_width, ROWS=rows, BLOCK=block, WHOLE=n % block == 0,
        HALVES=_halves(m, tiles.down_warps), STAGES=tiles.down_stages, num_warps=tiles.down_warps, ASM=asm, **shape,
        **launch,
    )  # fmt: skip
