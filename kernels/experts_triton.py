"""MXFP4 experts of a decode step on CUDA: the fast form of `kernels.experts.grouped_experts` for up to 16 rows.

Each distinct expert is read once, straight from its slot in the arena, by the tensor copy engine where there is one
(Triton makes plain loads of it elsewhere). Codes become fp16 by shifts alone: the three bits of a magnitude, moved to
a half's two lowest exponent bits and highest mantissa bit, are the value x 2^-14, subnormals included, exactly. Scales
stay out of the product: the matrix unit sums one scale group of 32 at a time, and each sum is multiplied by its power
of two in fp32 as it is added. Activations are 8-bit floats times powers of two: a row of them, times one power of two,
fits fp16 without loss (`_prepare`, `_gate_up`).

Four launches: `_prepare` finds the distinct experts and puts the rows into the order of the codes, `_gate_up` ends in
the rounded hidden row of every pick, `_down` gives one row a pick, `_sum` adds the picks of a token in the order of k.
A token's result is bit-equal whatever tokens are beside it: a column of the matrix unit does not see the others, and K
is walked in one order. Where the device can, the next launch is placed while the one before runs (`chain_triton`).

Kernels run in Triton's interpreter too (`ASM` off): same arithmetic, decoded without inline assembly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.chain_triton import chain, chained
from kernels.record import ExpertRecord, Part

MAX_ROWS = 16
MAX_LIMIT = 64.0  # of the SwiGLU's clamp; while limit^2 x weight < 256, 8-bit hidden rows lose nothing as fp16


@triton.jit
def _position(k):
    """Where column k of an activation row lies: within a scale group, word of four, byte of four, nibble of two ->
    word, nibble, byte. A thread of the matrix unit so gets the codes of one word, in the order `_codes` makes them."""
    return (k // 8) * 8 + (k % 2) * 4 + (k // 2) % 4


@triton.jit
def _codes(byte, ASM: tl.constexpr):
    """Two e2m1 codes of a byte -> two fp16 of value x 2^-14."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, low, high;
            shl.b32 s, $4, 4; and.b32 s, s, 0x80808080; shl.b32 low, $4, 1; lop3.b32 low, low, 0x0E0E0E0E, s, 0xEA;
            and.b32 s, $4, 0x80808080; shr.b32 high, $4, 3; lop3.b32 high, high, 0x0E0E0E0E, s, 0xEA;
            prmt.b32 $0, low, 0, 0x1404; prmt.b32 $1, low, 0, 0x3424;
            prmt.b32 $2, high, 0, 0x1404; prmt.b32 $3, high, 0, 0x3424;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [byte],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        return _code(byte.to(tl.int32)), _code(byte.to(tl.int32) >> 4)


@triton.jit
def _code(code):
    return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _operand(bytes_, ROWS: tl.constexpr, ASM: tl.constexpr):
    """bytes_ [ROWS, 16], a scale group a row -> [ROWS, 32] fp16 in the order of `_position`."""
    low, high = _codes(bytes_, ASM)
    return tl.join(low, high).reshape(ROWS, 4, 4, 2).permute(0, 1, 3, 2).reshape(ROWS, 32)


@triton.jit
def _dot(weights, x, ASM: tl.constexpr):
    if ASM:
        return tl.dot(weights, x)
    else:
        return tl.dot(weights.to(tl.float32), x.to(tl.float32), input_precision="ieee")


@triton.jit
def _scale_words(at, block, row_scales, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """at [ROWS]: a row's scale bytes -> those of a block, four in each of [ROWS, BLOCK / 128] int32."""
    word = block * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
    if WHOLE:
        return tl.load(at.to(tl.pointer_type(tl.int32))[:, None] + word[None, :])
    else:
        words = tl.zeros([at.shape[0], BLOCK // 128], tl.int32)
        for byte in tl.static_range(4):
            group = (word * 4 + byte)[None, :]
            words |= tl.load(at[:, None] + group, mask=group < row_scales, other=0).to(tl.int32) << (8 * byte)
        return words


@triton.jit
def _part(tile, PART: tl.constexpr, PARTS: tl.constexpr):
    """tile [ROWS, PARTS * width] -> its part of so many, [ROWS, width]."""
    if PARTS == 1:
        return tile
    else:
        half: tl.constexpr = PARTS // 2
        first, second = tl.split(tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1))
        if PART < half:  # noqa: SIM300
            return _part(first, PART, half)
        else:
            return _part(second, PART - half, half)


@triton.jit
def _add(acc, tile, bytes_, acts, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr):
    """acc [ROWS, M] and one scale group's product."""
    part = _dot(_operand(_part(tile, GROUP, GROUPS), ROWS, ASM), acts, ASM)
    power = ((bytes_ >> (8 * (GROUP % 4))) & 0xFF) << 23
    return acc + part * power.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _product(
    codes, slot, row, scales, x, blocks, row_scales, valid,
    ROWS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """codes: a matrix of every slot, or a PAIR of them; ROWS rows are taken at `slot`, from `row` of each on, BLOCK
    weights at a time; scales [ROWS]: a row's first scale; x [M]: activation rows in the order of `_position` -> fp32
    x 2^-14, [ROWS, M]. WHOLE: a row is whole blocks."""
    acc = tl.zeros([ROWS, M], tl.float32)
    column = tl.arange(0, BLOCK)
    for block in tl.range(0, blocks, num_stages=STAGES):
        if PAIR:
            tile = codes.load([slot, 0, row, block * (BLOCK // 2)]).reshape(ROWS, BLOCK // 2)
        else:
            tile = codes.load([slot, row, block * (BLOCK // 2)]).reshape(ROWS, BLOCK // 2)
        words = _scale_words(scales, block, row_scales, BLOCK, WHOLE)
        rows = tl.load(x[:, None] + (block * BLOCK + column)[None, :], mask=valid[:, None], other=0.0)
        for group in tl.static_range(BLOCK // 32):
            if group % 4 == 0:
                bytes_ = tl.sum(_part(words, group // 4, BLOCK // 128), 1)
            acts = _part(rows, group, BLOCK // 32).trans(1, 0)
            acc = _add(acc, tile, bytes_, acts, group, BLOCK // 32, ROWS, ASM)
    return acc


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
    SIZE: tl.constexpr, PICKS: tl.constexpr, M: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A program a row: x [T, width] -> ordered [T, padded] fp16, times 2^15 / (power of two of its largest), whose
    inverse goes to factors [T]. One program more: table, int32: slot of each distinct expert in the order of first
    pick [PICKS], -1 behind them; the picks that want each [PICKS, M], -1 behind them."""
    chained(CHAINED)
    row = tl.program_id(0)
    if row < tl.num_programs(0) - 1:
        column = tl.arange(0, SIZE)
        value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        exponent = tl.maximum(_exponent(tl.max(tl.abs(value), 0)), -100)
        at = ordered + row * padded + _position(column)
        tl.store(at, (value * _power(15 - exponent)).to(tl.float16), mask=column < padded)
        tl.store(factors + row, _power(exponent - 1))  # times 2^-15 x 2^14 of the codes
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
def _fp8(value, AXIS: tl.constexpr):
    """value, scale groups along AXIS -> rounded to e4m3 with one power of two a group (`quantise.fp8_ue8m0`)."""
    amax = tl.maximum(tl.max(tl.abs(value), AXIS, keep_dims=True), 1e-4) * 0.002232142857142857
    bits = (amax.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    scale = bits.to(tl.float32, bitcast=True)
    code = value / scale
    small = (code + 24576.0) - 24576.0  # below 2^-6 steps are 2^-9: what fp32 keeps beside 1.5 x 2^14
    return tl.where(tl.abs(code) < 0.015625, small, _kept(code, 20)) * scale


@triton.jit
def _ceiling_exponent(weight, limit):
    """n: no hidden value goes beyond |weight| * limit^2 < 2^(n + 1), to which 8-bit rounding may raise it. Its smallest
    step is 2^-31 (a group's scale is 2^-22 or more), and 2^(n - 38) is the smallest that fp16 then holds."""
    return tl.maximum(_exponent(tl.abs(weight) * limit * limit), -100)


@triton.jit
def _gate_up(
    w13, scales, slot_bytes, table, weights, x, factors, hidden, top_k, limit, blocks, row_scales,
    s1_bytes, s3_bytes, x_width, hidden_width,
    PICKS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One scale group of the hidden row of every pick of one expert: fp8(w * silu(min(g, L)) * clamp(u)) as fp16, times
    2^14 over the power of two that the clamp keeps it below."""
    chained(CHAINED)
    tile = tl.program_id(0)
    slot = tl.load(table + tl.program_id(1))
    if slot < 0:
        return
    found = tl.load(table + PICKS + tl.program_id(1) * M + tl.arange(0, M))
    valid = found >= 0
    found = tl.maximum(found, 0)
    row = tl.arange(0, 64)  # 32 of w1, and the same of w3
    at = scales + slot.to(tl.int64) * slot_bytes + tl.where(row < 32, s1_bytes, s3_bytes)
    both = _product(
        w13, slot, tile * 32, at + (tile * 32 + row % 32) * row_scales, x + found // top_k * x_width, blocks,
        row_scales, valid, 64, M, BLOCK, True, WHOLE, STAGES, ASM,
    )  # fmt: skip
    gate, up = tl.split(both.reshape(2, 32, M).permute(1, 2, 0))
    factor = tl.load(factors + found // top_k)
    gate, up = _rounded(gate * factor[None, :]), _rounded(up * factor[None, :])
    gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
    weight = tl.load(weights + found)
    value = gate / (1.0 + tl.exp(-gate)) * up * weight[None, :]
    out = _fp8(_rounded(value), 0) * _power(14 - _ceiling_exponent(weight, limit))[None, :]
    at = tile * 32 + _position(tl.arange(0, 32))
    tl.store(hidden + found[None, :] * hidden_width + at[:, None], out.to(tl.float16), mask=valid[None, :])


@triton.jit
def _down(
    w2, scales, slot_bytes, table, weights, hidden, out, limit, blocks, row_scales, outer, s2_bytes, hidden_width,
    PICKS: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of every pick of one expert, [picks, outer] fp32."""
    chained(CHAINED)
    tile = tl.program_id(0)
    slot = tl.load(table + tl.program_id(1))
    if slot < 0:
        return
    found = tl.load(table + PICKS + tl.program_id(1) * M + tl.arange(0, M))
    valid = found >= 0
    found = tl.maximum(found, 0)
    row = tile * ROWS + tl.arange(0, ROWS)
    at = scales + slot.to(tl.int64) * slot_bytes + s2_bytes + row * row_scales
    acc = _product(
        w2, slot, tile * ROWS, at, hidden + found * hidden_width, blocks, row_scales, valid,
        ROWS, M, BLOCK, False, WHOLE, STAGES, ASM,
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


# Both keep a block of threads within 38 KB of shared memory and 130 registers: what any device since sm_80 has.
GATE_UP = {"BLOCK": 256}
DOWN = {"BLOCK": 128, "STAGES": 3, "num_warps": 2}
DOWN_ROWS = 64  # where the width allows


def _warps(columns: int) -> int:
    """Of `_gate_up`. Four warps and 16 columns are what `wgmma` asks for, and Triton then takes it. It sums otherwise:
    a row's bits would depend on its company. And it wants the activations laid out anew."""
    return 4 if columns < 16 else 2


def _stages(picks: int, columns: int, tiles: int, device: torch.device) -> int:
    """Of `_gate_up`'s pipeline; no bit depends on it. With three, six blocks of threads find room in a multiprocessor
    of sm_90; with four only five, each with more on its way, which is better (`docs/results.md`) unless three take all
    blocks at once and four do not. About six of ten picks want an expert that no other pick wants."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9 or columns >= 16:
        return 3
    of_each = 0.6 * picks * tiles / torch.cuda.get_device_properties(device).multi_processor_count
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
    x: Tensor, slots: Tensor, record: ExpertRecord, picks: Tensor, weights: Tensor, limit: float, asm: bool = True
) -> Tensor:
    """x [T, D], rounded as activation, T <= MAX_ROWS; slots [S, slot_bytes] uint8; picks [T, k] int32 slots, -1: none,
    no slot twice in a row; weights [T, k] fp32 -> [T, D] fp32: this rank's part, as the reference rounds it."""
    (tokens, top_k), d = picks.shape, record.hidden
    picks = picks.to(torch.int32).contiguous()
    outputs = torch.empty(tokens, top_k, d, dtype=torch.float32, device=x.device)
    pick_outputs(outputs, x, slots, record, picks, weights, limit, asm)
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
) -> None:
    """As `grouped_experts`, but every pick's own output goes to its place of outputs [T, k, D] fp32, contiguous; the
    places of picks without a slot stay as they are."""
    tokens, top_k = picks.shape
    if tokens > MAX_ROWS:
        raise ValueError(f"{tokens} rows, a decode step has {MAX_ROWS} at most")
    if not 0 < limit <= MAX_LIMIT:
        raise ValueError(f"a clamp at {limit}: hidden rows are kept as fp16, which needs one of {MAX_LIMIT} at most")
    d, n, count = record.hidden, record.share, tokens * top_k
    w1, _, w2, s1, s3, s2 = record.parts
    picks, weights = picks.to(torch.int32).contiguous(), weights.contiguous()
    x_width, hidden_width = _up_to(d, GATE_UP["BLOCK"]), _up_to(n, DOWN["BLOCK"])
    m, every = 8 if tokens <= 8 else 16, max(64, triton.next_power_of_2(count))
    table = torch.empty(every * (1 + m), dtype=torch.int32, device=x.device)
    ordered = torch.empty(tokens, x_width, dtype=torch.float16, device=x.device)
    factors = torch.empty(tokens, dtype=torch.float32, device=x.device)
    hidden = torch.empty(count, hidden_width, dtype=torch.float16, device=x.device)
    if hidden_width != n:
        hidden.zero_()
    shape, launch = {"PICKS": every, "M": m, "ASM": asm}, chain(x.device)
    _prepare[(tokens + 1,)](
        x.contiguous(), picks, table, ordered, factors, count, d, x_width, SIZE=triton.next_power_of_2(x_width),
        PICKS=every, M=m, num_warps=8, **launch,
    )  # fmt: skip
    block = GATE_UP["BLOCK"]
    _gate_up[(n // 32, count)](
        _paired(slots, record, w1, 32, block), slots, record.slot_bytes, table, weights, ordered, factors, hidden,
        top_k, limit, x_width // block, d // 32, s1.offset, s3.offset, x_width, hidden_width, WHOLE=d % block == 0,
        STAGES=_stages(count, m, n // 32, x.device), num_warps=_warps(m), **shape, **GATE_UP, **launch,
    )  # fmt: skip
    block, rows = DOWN["BLOCK"], DOWN_ROWS if d % DOWN_ROWS == 0 else 32  # a width is a multiple of 32
    _down[(d // rows, count)](
        _tiles(slots, record, w2, rows, block), slots, record.slot_bytes, table, weights, hidden, outputs, limit,
        hidden_width // block, n // 32, d, s2.offset, hidden_width, ROWS=rows, WHOLE=n % block == 0, **shape, **DOWN,
        **launch,
    )  # fmt: skip
