"""MXFP4 experts of a decode step on CUDA: the fast form of `kernels.experts.grouped_experts` for up to 16 rows.

Each distinct expert is read once, straight from its slot in the arena. A thread reads 16 bytes of a row at a time: 32
codes, exactly one scale group. Which weight of K stands where in the matrix unit's operand is free as long as weights
and activations agree; so codes never move between threads, and the activations are stored in the order in which a
thread's codes come (`_position`).

Four launches: `_ordered` puts the rows in that order, `_gate_up` ends in the rounded hidden row of every pick, `_down`
gives one row a pick, `_sum` adds the picks of a token in the order of k. A token's result is bit-equal whatever tokens
are beside it: a column of the matrix unit does not see the others, and K is walked in one order.

Kernels run in Triton's interpreter too (`ASM` off): same arithmetic, decoded without inline assembly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.record import ExpertRecord

MAX_ROWS = 16
BLOCK = 128  # weights of a row that four threads hold together: 64 bytes
GATE_UP_WARPS = 2  # 16 rows a warp: a program's tile is one scale group of the hidden row
DOWN_WARPS = 4  # where the width allows


@triton.jit
def _position(k):
    """Where column k of an activation row lies: within 128, thread k // 32, word of four, nibble of eight -> the order
    of registers. Nibbles n and n + 4 of a word share a register."""
    inside = k % 128
    thread, word, nibble = inside // 32, (inside % 32) // 8, inside % 8
    register, half = nibble % 4, nibble // 4
    return (k // 128) * 128 + word * 32 + (register // 2) * 16 + thread * 4 + (register % 2) * 2 + half


@triton.jit
def _codes(word, ASM: tl.constexpr):
    """Eight e2m1 codes of an int32 -> eight bf16 (fp32 without ASM) of value x 2^-126: sign to bit 15, the three others
    to bits 8 to 6 of a half, subnormals included, exactly. Nibbles 0 4, 1 5, 2 6, 3 7, each two in one register."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            shl.b32 a, $8, 6; shl.b32 b, $8, 12; and.b32 b, b, 0x80008000; lop3.b32 c, a, 0x01C001C0, b, 0xEA;
            mov.b32 {$0, $1}, c;
            shl.b32 a, $8, 2; shl.b32 b, $8, 8; and.b32 b, b, 0x80008000; lop3.b32 c, a, 0x01C001C0, b, 0xEA;
            mov.b32 {$2, $3}, c;
            shr.b32 a, $8, 2; shl.b32 b, $8, 4; and.b32 b, b, 0x80008000; lop3.b32 c, a, 0x01C001C0, b, 0xEA;
            mov.b32 {$4, $5}, c;
            shr.b32 a, $8, 6; and.b32 b, $8, 0x80008000; lop3.b32 c, a, 0x01C001C0, b, 0xEA;
            mov.b32 {$6, $7}, c;
            }""",
            "=h,=h,=h,=h,=h,=h,=h,=h,r",
            [word],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        return (
            _code(word, 0),
            _code(word, 16),
            _code(word, 4),
            _code(word, 20),
            _code(word, 8),
            _code(word, 24),
            _code(word, 12),
            _code(word, 28),
        )


@triton.jit
def _code(word, SHIFT: tl.constexpr):
    code = word >> SHIFT
    return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _operand(word, scale, ROWS: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """word [ROWS, 16] int32, scale [ROWS, 4] uint8 -> [ROWS, 128] weights x 2^-64, rows in the order of the matrix
    unit: warp, eighth, lane of what was loaded as eighth, warp, lane. No value leaves its thread."""
    e0, e1, e2, e3, e4, e5, e6, e7 = _codes(word, ASM)
    codes = tl.join(tl.join(tl.join(e0, e1), tl.join(e2, e3)), tl.join(tl.join(e4, e5), tl.join(e6, e7)))
    # 2^(byte - 127) x 2^126 x 2^-64: so every scale up to 2^65 fits, and the sum is multiplied by 2^64 at the end.
    if ASM:
        power = ((scale.to(tl.int16) + 62) << 7).to(tl.bfloat16, bitcast=True)
    else:  # the interpreter has no arithmetic in bf16
        power = ((scale.to(tl.int32) + 62) << 23).to(tl.float32, bitcast=True)
    weights = codes.reshape(ROWS, 4, 4, 2, 2, 2) * power[:, :, None, None, None, None]
    ordered = weights.permute(0, 2, 5, 1, 4, 3).reshape(ROWS // (8 * W), W, 8, 128)
    return ordered.permute(1, 0, 2, 3).reshape(ROWS, 128)


@triton.jit
def _loaded_row(ROWS: tl.constexpr, W: tl.constexpr):
    """[ROWS]: which row of the tile the operand's row is."""
    row = tl.arange(0, ROWS)
    return (row % (ROWS // W)) // 8 * (8 * W) + row // (ROWS // W) * 8 + row % 8


@triton.jit
def _dot(weights, x, acc, ASM: tl.constexpr):
    if ASM:
        return tl.dot(weights, x, acc)
    else:
        return tl.dot(weights, x.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _picks_of(picks, pick, count, PICKS: tl.constexpr, M: tl.constexpr):
    """Of the expert that `pick` is the first to want: its slot (-1: it is not the first, or has none), the picks that
    want it [M], and which of those there are."""
    every = tl.arange(0, PICKS)
    slots = tl.load(picks + every, mask=every < count, other=-1)
    slot = tl.load(picks + pick)
    same = slots == slot
    is_first = tl.sum((same & (every < pick)).to(tl.int32), 0) == 0
    rank = tl.cumsum(same.to(tl.int32), 0) - 1
    column = tl.arange(0, M)
    at = (same[:, None] & (rank[:, None] == column[None, :])).to(tl.int32)
    found = tl.sum(at * every[:, None], 0)
    return tl.where(is_first, slot, -1), found, column < tl.sum(same.to(tl.int32), 0)


@triton.jit
def _block(at, scale_at, block, row_words, row_scales, WHOLE: tl.constexpr):
    """Four groups of a tile's rows: [ROWS, 16] words and [ROWS, 4] scale bytes."""
    if WHOLE:
        return tl.load(at), tl.load(scale_at)
    else:
        word, group = block * 16 + tl.arange(0, 16), block * 4 + tl.arange(0, 4)
        words = tl.load(at, mask=(word < row_words)[None, :], other=0)
        return words, tl.load(scale_at, mask=(group < row_scales)[None, :], other=127)


@triton.jit
def _product(
    codes, scales, x, row_words, row_scales, x_rows, x_width, valid, one, apart, apart_bytes,
    ROWS: tl.constexpr, M: tl.constexpr, W: tl.constexpr, WHOLE: tl.constexpr, PAIR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """codes, scales: at the tile's first row, as int32 words and bytes; x: ordered activations, x_rows [M] of them ->
    [ROWS, M] fp32, rows as `_loaded_row` says; of a PAIR of matrices, the second lies `apart` words behind, its scales
    `apart_bytes`. WHOLE: a row is whole blocks of 128. A block is loaded while the one before is multiplied."""
    row = tl.arange(0, ROWS)
    at = codes + row[:, None] * row_words + tl.arange(0, 16)[None, :]
    # `one` is 1, which the compiler must not know: else a thread loads four scales at once, and they change hands.
    scale_at = scales + row[:, None] * row_scales + tl.arange(0, 4)[None, :] * one
    x_at = x + x_rows[None, :] * x_width + tl.arange(0, 128)[:, None]
    blocks = tl.cdiv(row_words, 16)
    acc, acc2 = tl.zeros([ROWS, M], tl.float32), tl.zeros([ROWS, M], tl.float32)
    words, bytes_ = _block(at, scale_at, 0, row_words, row_scales, WHOLE)
    words2, bytes2 = words, bytes_
    if PAIR:
        words2, bytes2 = _block(at + apart, scale_at + apart_bytes, 0, row_words, row_scales, WHOLE)
    for block in range(0, blocks):
        step = tl.where(block + 1 < blocks, 1, 0)  # the last block is loaded twice
        at += 16 * step
        scale_at += 4 * step
        next_words, next_bytes = _block(at, scale_at, block + step, row_words, row_scales, WHOLE)
        next_words2, next_bytes2 = next_words, next_bytes
        if PAIR:
            next_words2, next_bytes2 = _block(
                at + apart, scale_at + apart_bytes, block + step, row_words, row_scales, WHOLE
            )
        acts = tl.load(x_at, mask=valid[None, :], other=0.0)
        x_at += 128
        acc = _dot(_operand(words, bytes_, ROWS, W, ASM), acts, acc, ASM)
        if PAIR:
            acc2 = _dot(_operand(words2, bytes2, ROWS, W, ASM), acts, acc2, ASM)
        words, bytes_, words2, bytes2 = next_words, next_bytes, next_words2, next_bytes2
    return acc * 18446744073709551616.0, acc2 * 18446744073709551616.0


@triton.jit
def _ordered(x, out, width, padded, SIZE: tl.constexpr):
    """x [T, width] fp32, rounded already -> out [T, padded] bf16 in the order of a thread's codes."""
    row = tl.program_id(0)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + row * width + column, mask=column < width, other=0.0)
    tl.store(out + row * padded + _position(column), value.to(tl.bfloat16))


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
def _fp8(value):
    """value [32, M], a scale group a column -> rounded to e4m3 with one power of two a group (`quantise.fp8_ue8m0`)."""
    amax = tl.maximum(tl.max(tl.abs(value), 0), 1e-4) * 0.002232142857142857
    bits = (amax.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    scale = bits.to(tl.float32, bitcast=True)
    code = value / scale[None, :]
    small = (code + 24576.0) - 24576.0  # below 2^-6 steps are 2^-9: what fp32 keeps beside 1.5 x 2^14
    return tl.where(tl.abs(code) < 0.015625, small, _kept(code, 20)) * scale[None, :]


@triton.jit(do_not_specialize=["one"])
def _gate_up(
    slots, slot_words, picks, weights, x, hidden, count, top_k, limit, row_words, row_scales,
    w3_words, s1_bytes, s3_bytes, x_width, hidden_width, one,
    PICKS: tl.constexpr, M: tl.constexpr, W: tl.constexpr, WHOLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One scale group of the hidden row of every pick of one expert: bf16 of fp8(w * silu(min(g, L)) * clamp(u))."""
    tile = tl.program_id(0)
    slot, found, valid = _picks_of(picks, tl.program_id(1), count, PICKS, M)
    if slot < 0:
        return
    ROWS: tl.constexpr = 16 * W
    words = slots + slot.to(tl.int64) * slot_words + tile * ROWS * row_words
    scales = (slots + slot.to(tl.int64) * slot_words).to(tl.pointer_type(tl.uint8)) + tile * ROWS * row_scales
    rows = found // top_k
    gate, up = _product(
        words, scales + s1_bytes, x, row_words, row_scales, rows, x_width, valid, one, w3_words, s3_bytes - s1_bytes,
        ROWS, M, W, WHOLE, True, ASM,
    )  # fmt: skip
    gate, up = tl.minimum(_rounded(gate), limit), tl.maximum(tl.minimum(_rounded(up), limit), -limit)
    weight = tl.load(weights + found, mask=valid, other=0.0)
    value = gate / (1.0 + tl.exp(-gate)) * up * weight[None, :]
    out = _fp8(_rounded(value))
    at = _position(tile * ROWS + _loaded_row(ROWS, W))
    tl.store(hidden + found[None, :] * hidden_width + at[:, None], out.to(tl.bfloat16), mask=valid[None, :])


@triton.jit(do_not_specialize=["one"])
def _down(
    slots, slot_words, picks, hidden, out, count, row_words, row_scales, outer, w2_words, s2_bytes, hidden_width, one,
    PICKS: tl.constexpr, M: tl.constexpr, W: tl.constexpr, WHOLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """16 * W outputs of every pick of one expert, [picks, outer] fp32."""
    tile = tl.program_id(0)
    slot, found, valid = _picks_of(picks, tl.program_id(1), count, PICKS, M)
    if slot < 0:
        return
    ROWS: tl.constexpr = 16 * W
    record = slots + slot.to(tl.int64) * slot_words
    words = record + w2_words + tile * ROWS * row_words
    scales = record.to(tl.pointer_type(tl.uint8)) + s2_bytes + tile * ROWS * row_scales
    acc, _ = _product(
        words, scales, hidden, row_words, row_scales, found, hidden_width, valid, one, 0, 0,
        ROWS, M, W, WHOLE, False, ASM,
    )  # fmt: skip
    row = tile * ROWS + _loaded_row(ROWS, W)
    tl.store(out + found[None, :] * outer + row[:, None], acc, mask=valid[None, :])


@triton.jit
def _sum(parts, picks, out, outer, TOP_K: tl.constexpr, SIZE: tl.constexpr):
    """parts [T, k, outer] -> out [T, outer], in the order of k; picks without a slot count for nothing."""
    row = tl.program_id(0)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for k in range(TOP_K):
        here = tl.load(picks + row * TOP_K + k) >= 0
        total += tl.load(parts + (row * TOP_K + k) * outer + column, mask=here & (column < outer), other=0.0)
    tl.store(out + row * outer + column, total, mask=column < outer)


def grouped_experts(
    x: Tensor, slots: Tensor, record: ExpertRecord, picks: Tensor, weights: Tensor, limit: float, asm: bool = True
) -> Tensor:
    """x [T, D] fp32, rounded as activation, T <= MAX_ROWS; slots [S, slot_bytes] uint8; picks [T, k] int32 slots, -1:
    none, no slot twice in a row; weights [T, k] fp32 -> [T, D] fp32: this rank's part, as the reference rounds it."""
    tokens, top_k = picks.shape
    if tokens > MAX_ROWS:
        raise ValueError(f"{tokens} rows, a decode step has {MAX_ROWS} at most")
    d, n, count = record.hidden, record.share, tokens * top_k
    w1, w3, w2, s1, s3, s2 = record.parts
    words, slot_words = slots.view(torch.int32), record.slot_bytes // 4
    picks = picks.to(torch.int32).contiguous()
    x_width, hidden_width = (-(-width // BLOCK) * BLOCK for width in (d, n))
    ordered = torch.empty(tokens, x_width, dtype=torch.bfloat16, device=x.device)
    hidden = torch.zeros(count, hidden_width, dtype=torch.bfloat16, device=x.device)
    parts = torch.empty(count, d, dtype=torch.float32, device=x.device)
    out = torch.empty(tokens, d, dtype=torch.float32, device=x.device)
    shape = {"PICKS": triton.next_power_of_2(count), "M": 8 if tokens <= 8 else 16, "ASM": asm}
    _ordered[(tokens, x_width // BLOCK)](x.contiguous(), ordered, d, x_width, BLOCK)
    _gate_up[(n // (16 * GATE_UP_WARPS), count)](
        words, slot_words, picks, weights.contiguous(), ordered, hidden, count, top_k, limit, d // 8, d // 32,
        (w3.offset - w1.offset) // 4, s1.offset, s3.offset, x_width, hidden_width, 1, WHOLE=d % BLOCK == 0,
        W=GATE_UP_WARPS, num_warps=GATE_UP_WARPS, num_stages=1, **shape,
    )  # fmt: skip
    warps = DOWN_WARPS if d % (16 * DOWN_WARPS) == 0 else 2  # a width is a multiple of 32
    _down[(d // (16 * warps), count)](
        words, slot_words, picks, hidden, parts, count, n // 8, n // 32, d, w2.offset // 4, s2.offset, hidden_width, 1,
        WHOLE=n % BLOCK == 0, W=warps, num_warps=warps, num_stages=1, **shape,
    )  # fmt: skip
    _sum[(tokens, -(-d // 1024))](parts, picks, out, d, top_k, 1024)
    return out
