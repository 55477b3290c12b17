"""EXL3 experts on CUDA: the fast form of `kernels.experts` for `Exl3Record`s, for decode steps and for chunks.

Experts of any widths and codebooks go in one launch: a program reads the header of its expert's record and takes the
body that was compiled for such a matrix. Every program has so many columns of one expert, for all rows that want it:
weights are decoded once, into fp16 exactly, and multiplied by the matrix unit. Rows of the activations lie in memory
in the order [r 4, r 2, r 2] of a tile's (`_place`), which is how a tile's weights come.

Launches: `_distinct` (of a decode step) finds the distinct experts; `_turn` scales and rotates each pick's row, for
gate and for up; `_product`, or in a decode step `exl3_lanes_triton.product`, multiplies, each program a part of K;
`_activate` adds these parts, rotates back, ends in the rounded hidden row and rotates it for down; then the product of
down; `_finish` adds the parts, rotates back and adds the picks of a token in the order of k. All sums have one order: a
row has the same bits in any company.

In `_walk` a tile's 256 weights come in groups of G that share two words: the word in which the group ends and the one
before, of which each register is 16 bits. In the order of the stream a tile is [c 8, r 4, c 2, r 2, r 2]
(`exl3.inner`): only columns are turned, when they are stored.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.exl3_lanes_triton import matrix, plain_number
from kernels.exl3_lanes_triton import product as lanes_product
from kernels.exl3_record import CODEBOOKS, Exl3Record, widths
from kernels.rows import ROWS

KINDS = 32  # half bits of one codebook; a matrix's kind is codebook * KINDS + half bits
ALL = sum(1 << (book * KINDS + bits) for book, name in enumerate(CODEBOOKS) for bits in widths(name))
RSQRT_BLOCK = tl.constexpr(128**-0.5)


@triton.jit
def _place(row):
    """Where row r of a tile's 16 lies among the activations: r[2:1], r[3], r[0]."""
    return (row & ~15) + ((row >> 1) & 3) * 4 + ((row >> 3) & 1) * 2 + (row & 1)


@triton.jit
def _kept(value, at):
    """value fp32 -> what `at` points to: fp16, or int32 with it in the lower half and zero in the upper."""
    value = value.to(tl.float16)
    if at.dtype.element_ty == tl.int32:
        return value.to(tl.uint16, bitcast=True).to(tl.int32)
    else:
        return value


@triton.jit
def _hadamard(x, ROWS_: tl.constexpr):
    """x [ROWS_, 128] fp32 -> each row times the Sylvester matrix over sqrt(128). A stage adds and subtracts along the
    highest bit of the index and makes it the lowest: after seven all are where they were."""
    for _ in tl.static_range(7):
        a, b = tl.split(x.reshape(ROWS_, 2, 64).permute(0, 2, 1))
        x = tl.join(a + b, a - b).reshape(ROWS_, 128)
    return x * RSQRT_BLOCK


@triton.jit
def _value(state, BOOK: tl.constexpr, ASM: tl.constexpr):
    """state: the 16 bits of a register as uint32 -> its fp16 number (`exl3.table`)."""
    if ASM:
        return _two_values(state, BOOK)
    else:
        return plain_number(state, BOOK)


@triton.jit
def _two_values(state, BOOK: tl.constexpr):
    """Two at a time: halves of two words are added at once; or the bytes of a word are summed by one instruction, into
    the number that a half with this pattern is, and scaled with one rounding."""
    if BOOK == 2:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, one, scale, offset;
            mul.lo.u32 a, $1, 0x83DCD12D; mul.lo.u32 b, $2, 0x83DCD12D;
            mov.b32 one, 0x01010101; mov.b32 scale, 0x1EEE1EEE; mov.b32 offset, 0xC931C931;
            dp4a.u32.u32 a, a, one, 0x6400; dp4a.u32.u32 b, b, one, 0x6400;
            prmt.b32 a, a, b, 0x5410; fma.rn.f16x2 $0, a, scale, offset;
            }""",
            "=r,r,r", [state], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    elif BOOK == 1:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            mul.lo.u32 a, $1, 0xCBAC1FED; mul.lo.u32 b, $2, 0xCBAC1FED;
            lop3.b32 a, a, 0x8FFF8FFF, 0x3B603B60, 0x6A; lop3.b32 b, b, 0x8FFF8FFF, 0x3B603B60, 0x6A;
            prmt.b32 c, a, b, 0x5410; prmt.b32 a, a, b, 0x7632; add.rn.f16x2 $0, c, a;
            }""",
            "=r,r,r", [state], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            mad.lo.u32 a, $1, 89226354, 64248484; mad.lo.u32 b, $2, 89226354, 64248484;
            lop3.b32 a, a, 0x8FFF8FFF, 0x3B603B60, 0x6A; lop3.b32 b, b, 0x8FFF8FFF, 0x3B603B60, 0x6A;
            prmt.b32 c, a, b, 0x5410; prmt.b32 a, a, b, 0x7632; add.rn.f16x2 $0, c, a;
            }""",
            "=r,r,r", [state], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _register(low, high, J: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, BOOK: tl.constexpr, ASM: tl.constexpr):
    """Weight J of a group of G. `low` ends with the group, `high` with its first half."""
    after: tl.constexpr = (G - 1 - J) * (HALF // 2) + (HALF % 2) * (G // 2 - (J + 1) // 2)
    middle: tl.constexpr = (G - G // 2) * (HALF // 2) + (HALF % 2) * (G // 2 - (G // 2) // 2)
    if J < G // 2:
        return _value((high >> (after - middle)) & 0xFFFF, BOOK, ASM)
    else:
        return _value((low >> after) & 0xFFFF, BOOK, ASM)


@triton.jit
def _joined(low, high, FIRST: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, BOOK: tl.constexpr, ASM: tl.constexpr):
    """Weights FIRST, FIRST + 2, .. of a group, the highest bit of their number first."""
    if G == 2:
        return _register(low, high, FIRST, G, HALF, BOOK, ASM)
    elif G == 4:
        return tl.join(
            _register(low, high, FIRST, G, HALF, BOOK, ASM), _register(low, high, FIRST + 2, G, HALF, BOOK, ASM)
        )
    else:
        return tl.join(
            tl.join(
                _register(low, high, FIRST, G, HALF, BOOK, ASM), _register(low, high, FIRST + 4, G, HALF, BOOK, ASM)
            ),
            tl.join(
                _register(low, high, FIRST + 2, G, HALF, BOOK, ASM), _register(low, high, FIRST + 6, G, HALF, BOOK, ASM)
            ),
        )


@triton.jit
def _walk(
    acc, x, words, first, tiles, row_tiles, valid,
    HALF: tl.constexpr, BOOK: tl.constexpr, M: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [M, ACROSS * 16] and the product of activation rows x [M] (pointers to their first value) with tile columns
    `words` (pointer to the first tile of the first row) over tile rows first .. first + tiles."""
    # How many weights share two words: their span and what the shift takes off must fit into 64 bits.
    G: tl.constexpr = 8 if (HALF <= 6 or HALF == 8) else (2 if HALF == 14 else 4)
    GROUPS: tl.constexpr = 256 // G
    BITS: tl.constexpr = G * HALF // 2
    WORDS: tl.constexpr = 4 * HALF
    MIDDLE: tl.constexpr = (G - G // 2) * (HALF // 2) + (HALF % 2) * (G // 2 - (G // 2) // 2)
    end = (tl.arange(0, GROUPS) + 1) * BITS - 1
    last = end >> 5
    before = tl.where(last == 0, WORDS - 1, last - 1)
    skip = (31 - (end & 31)).to(tl.uint64)[None, None, :]
    down, across = tl.arange(0, DOWN), tl.arange(0, ACROSS)
    tile = (down[:, None] * row_tiles + across[None, :]) * WORDS
    column = tl.arange(0, DOWN * 16)
    for step in tl.range(0, tiles // DOWN, num_stages=STAGES):
        at = words + (first + step * DOWN).to(tl.int64) * row_tiles * WORDS
        low = tl.load(at + tile[:, :, None] + last[None, None, :]).to(tl.uint32, bitcast=True).to(tl.uint64)
        high = tl.load(at + tile[:, :, None] + before[None, None, :]).to(tl.uint32, bitcast=True).to(tl.uint64)
        both = (high << 32) | low
        low, high = (both >> skip).to(tl.uint32), (both >> (skip + MIDDLE)).to(tl.uint32)
        even, odd = _joined(low, high, 0, G, HALF, BOOK, ASM), _joined(low, high, 1, G, HALF, BOOK, ASM)
        weight = tl.join(even, odd).reshape(DOWN, ACROSS, 8, 4, 2, 2, 2)
        weight = weight.permute(0, 3, 5, 6, 1, 2, 4).reshape(DOWN * 16, ACROSS * 16)
        rows = tl.load(x[:, None] + ((first + step * DOWN) * 16 + column)[None, :], mask=valid[:, None], other=0.0)
        if ASM:
            acc = tl.dot(rows, weight, acc)
        else:
            acc += tl.dot(rows.to(tl.float32), weight.to(tl.float32), input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["count"])
def _distinct(picks, table, count, PICKS: tl.constexpr, M: tl.constexpr):
    """table, int32: slot of each distinct expert in the order of first pick [PICKS], -1 behind them; then the picks
    that want each [PICKS, M], -1 behind them."""
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


@triton.jit(do_not_specialize=["count"])
def _turn(
    x, picks, slots, unit, turned, hidden, top_k, count, BLOCKS: tl.constexpr
):  # fmt: skip
    """BLOCKS blocks of 128 inputs of a pick's row: turned [2, picks, hidden], scaled and rotated for gate and up, in
    the order of `_place`, as `_kept`."""
    pick, side = tl.program_id(0), tl.program_id(2)
    slot = tl.load(picks + pick)
    if slot < 0:
        return
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    here = column < hidden
    scales = (slots + slot.to(tl.int64) * unit + 128).to(tl.pointer_type(tl.float16)) + side * hidden
    value = tl.load(x + (pick // top_k).to(tl.int64) * hidden + column, mask=here, other=0.0).to(tl.float32)
    value = _hadamard(value * tl.load(scales + column, mask=here, other=0.0).to(tl.float32), BLOCKS)
    at = turned + (side * count + pick).to(tl.int64) * hidden
    tl.store(at + _place(column), _kept(value, turned), mask=here)


@triton.jit(do_not_specialize=["items", "count"])
def _product(
    slots, unit, table, x, parts, hidden, share, items, count, vectors,
    DOWN_SIDE: tl.constexpr, MASK: tl.constexpr, M: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """ACROSS tile columns of one expert, a part of K, for up to M picks: parts [SPLITS, picks, outputs] fp32. Outputs
    are gate | up, or those of down (DOWN_SIDE). x: rows of every pick, [2, picks, hidden] or [picks, share]."""
    item, part = tl.program_id(1), tl.program_id(2)
    slot = tl.load(table + item)
    if slot < 0:
        return
    found = tl.load(table + items + item * M + tl.arange(0, M))
    valid = found >= 0
    found = tl.maximum(found, 0).to(tl.int64)
    record = slots + slot.to(tl.int64) * unit
    tile = tl.program_id(0) * ACROSS
    side, half, book, trellis, all_tiles, row_tiles = matrix(record, tile, hidden, share, vectors, DOWN_SIDE)
    rows = x + (side * count + found) * (all_tiles * 16)
    words = trellis.to(tl.pointer_type(tl.int32)) + (tile - side * row_tiles).to(tl.int64) * half * 4
    kind = book * 32 + half
    tiles = all_tiles // SPLITS
    acc = tl.zeros([M, ACROSS * 16], tl.float32)
    for one in tl.static_range(96):
        if (MASK >> one) & 1:  # noqa: SIM102 (the one is known when compiled, the other is not)
            if kind == one:
                acc = _walk(
                    acc, rows, words, part * tiles, tiles, row_tiles, valid,
                    one % 32, one // 32, M, DOWN, ACROSS, STAGES, ASM,
                )  # fmt: skip
    turned = tl.arange(0, ACROSS * 16)
    turned = (turned & ~15) + (turned & 1) * 8 + ((turned >> 1) & 7)  # columns come as c[2:0], c[3]
    out = parts + (part.to(tl.int64) * count + found) * (hidden if DOWN_SIDE else 2 * share)
    tl.store(out[:, None] + (tile * 16 + turned)[None, :], acc, mask=valid[:, None])


@triton.jit
def _total(parts, column, count, row, outputs, here, SPLITS: tl.constexpr):
    """[1, 128]: the parts of a row's block, added in order; zero where it is not here."""
    total = tl.load(parts + row.to(tl.int64) * outputs + column, mask=here, other=0.0)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts + (part * count + row).to(tl.int64) * outputs + column, mask=here, other=0.0)
    return total


@triton.jit
def _rounded(value):
    """fp32 to bf16, held as fp32, to nearest even. By integers: the interpreter's conversions cut off instead."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _activate(
    parts, picks, slots, unit, weights, turned, hidden, share, count, limit,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """One block of 128 of the hidden row of a pick: turned [picks, share], scaled and rotated for down, as `_kept`."""
    pick, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(picks + pick)
    if slot < 0:
        return
    vectors = (slots + slot.to(tl.int64) * unit + 128).to(tl.pointer_type(tl.float16))
    column = block * 128 + tl.arange(0, 128)[None, :]
    outputs, svh = 2 * share, vectors + 2 * hidden
    gate = _hadamard(_total(parts, column, count, pick, outputs, True, SPLITS), 1) * tl.load(svh + column).to(
        tl.float32
    )
    up = _hadamard(_total(parts, share + column, count, pick, outputs, True, SPLITS), 1)
    up = _rounded(up * tl.load(svh + share + column).to(tl.float32))
    gate = tl.minimum(_rounded(gate), limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    value = _rounded(gate / (1.0 + tl.exp(-gate)) * up * tl.load(weights + pick))
    value = _hadamard(value * tl.load(svh + 2 * share + column).to(tl.float32), 1)
    tl.store(turned + pick.to(tl.int64) * share + _place(column), _kept(value, turned))


@triton.jit(do_not_specialize=["count"])
def _finish(
    parts, picks, slots, unit, out, hidden, share, count,
    TOP_K: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One block of 128 outputs of a token: its picks added in the order of k, [tokens, hidden] fp32. Picks without a
    slot count for nothing; where TOP_K is 1 (each pick by itself) they leave their place as it is."""
    token, block = tl.program_id(0), tl.program_id(1)
    column = block * 128 + tl.arange(0, 128)[None, :]
    if TOP_K == 1:  # noqa: SIM102
        if tl.load(picks + token) < 0:
            return
    sums: tl.tuple = ()  # all are loaded before the first is rotated
    scales: tl.tuple = ()
    for k in tl.static_range(TOP_K):
        slot = tl.load(picks + token * TOP_K + k)
        at = slots + tl.maximum(slot, 0).to(tl.int64) * unit + 128 + (2 * hidden + 3 * share) * 2
        scales = scales + (tl.load(at.to(tl.pointer_type(tl.float16)) + column, mask=slot >= 0, other=0.0),)
        sums = sums + (_total(parts, column, count, token * TOP_K + k, hidden, slot >= 0, SPLITS),)
    total = tl.zeros([1, 128], tl.float32)
    for k in tl.static_range(TOP_K):
        total += _hadamard(sums[k], 1) * scales[k].to(tl.float32)
    tl.store(out + token.to(tl.int64) * hidden + column, total)


# Of a decode step: WARPS of a program have ACROSS tile columns each and take DOWN tiles of each at a time, the next
# loaded AHEAD. As many parts of K as give all processors of a device their RESIDENT warps when a row has its PICKS
# experts, each part of LEAST tiles or more.
DECODE = {"DOWN": 2, "ACROSS": 4, "WARPS": 1, "AHEAD": True}
PLAIN = {"DOWN": 2, "ACROSS": 1, "WARPS": 8, "AHEAD": True}  # in the interpreter: numpy takes many lanes at once
RESIDENT, PICKS, LEAST = 32, 8, 8
KINDS_AT_ONCE = 4  # of a launch: each has a body there, and the compiler takes longer than their number tells
# Of a chunk: DOWN x ACROSS tiles at a time. Loads that are made ahead through shared memory (STAGES above 1) cost more
# than they hide: registers and many warps do.
STAGES = 1
CHUNK = {"DOWN": 2, "ACROSS": 8, "SPLITS": 1, "STAGES": STAGES, "num_warps": 8}
CHUNK_ROWS = 64  # of one expert that a program takes; a chunk's picks are sorted by expert


def grouped_experts(
    x: Tensor, slots: Tensor, record: Exl3Record, picks: Tensor, weights: Tensor, limit: float,
    asm: bool = True,
) -> Tensor:  # fmt: skip
    """x [T, D]; slots [S, unit] uint8; picks [T, k] int32 slots, -1: none; weights [T, k] fp32 -> [T, D] fp32: this
    rank's part. Gate, up and hidden rows are rounded to bf16, as in the reference."""
    tokens, top_k = picks.shape
    out = torch.empty(tokens, record.hidden, dtype=torch.float32, device=x.device)
    _run(out, top_k, x, slots, record, picks, weights, limit, asm)
    return out


def pick_outputs(
    outputs: Tensor, x: Tensor, slots: Tensor, record: Exl3Record, picks: Tensor, weights: Tensor, limit: float,
    asm: bool = True,
) -> None:  # fmt: skip
    """As `grouped_experts`, but every pick's own output goes to its place of outputs [T, k, D] fp32, contiguous; the
    places of picks without a slot stay as they are."""
    _run(outputs, 1, x, slots, record, picks, weights, limit, asm)


def _run(
    out: Tensor, top_k: int, x: Tensor, slots: Tensor, record: Exl3Record, picks: Tensor, weights: Tensor,
    limit: float, asm: bool,
) -> None:  # fmt: skip
    d, n, count, device = record.hidden, record.share, picks.numel(), x.device
    x, weights, flat = x.contiguous(), weights.contiguous(), picks.to(torch.int32).contiguous()
    unit, each = slots.shape[1], picks.shape[1]
    decode = len(picks) <= ROWS
    if decode:
        shape = DECODE if asm else PLAIN
        gate_up, down = (_split(shape, d // 16, 2 * n // 16, device), _split(shape, n // 16, d // 16, device))
        table, items, m = _decode_table(flat, 8 if len(picks) <= 8 else ROWS)
    else:
        gate_up = down = CHUNK
        table, items, m = _chunk_table(flat, record.experts)
    kept = torch.int32 if decode else torch.float16
    turned = torch.empty(2, count, d, dtype=kept, device=device)
    parts = torch.empty(gate_up["SPLITS"], count, 2 * n, dtype=torch.float32, device=device)
    inner = torch.empty(count, n, dtype=kept, device=device)
    sums = torch.empty(down["SPLITS"], count, d, dtype=torch.float32, device=device)
    product = _decode_product if decode else _chunk_product
    _turn[(count, -(-d // 1024), 2)](x, flat, slots, unit, turned, d, each, count, BLOCKS=8)
    product(slots, record, table, items, m, turned, parts, count, False, gate_up, asm)
    _activate[(count, n // 128)](
        parts, flat, slots, unit, weights, inner, d, n, count, limit, SPLITS=gate_up["SPLITS"], num_warps=1
    )
    product(slots, record, table, items, m, inner, sums, count, True, down, asm)
    # Products are rounded before they are added, so that the picks of a call are those of several.
    _finish[(count // top_k, d // 128)](
        sums, flat, slots, unit, out, d, n, count, TOP_K=top_k, SPLITS=down["SPLITS"], num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip


def _decode_product(
    slots: Tensor, record: Exl3Record, table: Tensor, items: int, m: int, x: Tensor, parts: Tensor, count: int,
    down_side: bool, shape: dict[str, int], asm: bool,
) -> None:  # fmt: skip
    d, n = record.hidden, record.share
    across = shape["WARPS"] * shape["ACROSS"]
    for mask in _masks(_mask(record)):
        lanes_product[((d if down_side else 2 * n) // 16 // across, items, shape["SPLITS"])](
            slots, slots.shape[1], table, x, parts, d, n, items, count, record.offsets[-1],
            DOWN_SIDE=down_side, MASK=mask, BLOCKS=m // 8, ASM=asm, num_warps=shape["WARPS"], **shape,
        )  # fmt: skip


def _chunk_product(
    slots: Tensor, record: Exl3Record, table: Tensor, items: int, m: int, x: Tensor, parts: Tensor, count: int,
    down_side: bool, shape: dict[str, int], asm: bool,
) -> None:  # fmt: skip
    d, n = record.hidden, record.share
    _product[((d if down_side else 2 * n) // 16 // shape["ACROSS"], items, shape["SPLITS"])](
        slots, slots.shape[1], table, x, parts, d, n, items, count, record.offsets[-1],
        DOWN_SIDE=down_side, MASK=_mask(record), M=m, ASM=asm, **shape,
    )  # fmt: skip


def _mask(record: Exl3Record) -> int:
    """Kinds of matrices that bodies are compiled for: those that the record's experts are of, or all there are."""
    return sum(1 << (CODEBOOKS.index(book) * KINDS + bits) for book, bits in record.kinds) or ALL


@cache
def _masks(mask: int) -> list[int]:
    """`mask` by KINDS_AT_ONCE of its kinds."""
    kinds = [1 << kind for kind in range(mask.bit_length()) if mask >> kind & 1]
    return [sum(kinds[first : first + KINDS_AT_ONCE]) for first in range(0, len(kinds), KINDS_AT_ONCE)]


def _split(shape: dict[str, int], tiles: int, columns: int, device: torch.device) -> dict[str, int]:
    """`shape` and SPLITS, which the rows of a step have no say in. tiles: of K; columns: of tiles."""
    warps, splits = columns // shape["ACROSS"] * PICKS, 1
    while warps * splits < RESIDENT * _processors(device) and tiles % (2 * splits * LEAST) == 0:
        splits *= 2
    return {**shape, "SPLITS": splits}


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _decode_table(picks: Tensor, m: int) -> tuple[Tensor, int, int]:
    """(table, items, rows of an item) of `_distinct`."""
    count = picks.numel()
    size = triton.next_power_of_2(max(count, 2))
    table = torch.empty(size * (1 + m), dtype=torch.int32, device=picks.device)
    _distinct[(1,)](picks, table, count, PICKS=size, M=m)
    return table, size, m


def _chunk_table(picks: Tensor, experts: int) -> tuple[Tensor, int, int]:
    """The same of a chunk: picks sorted by expert, each item CHUNK_ROWS of one at most. The host waits for nothing, so
    there are as many items as `experts` (0: not known) can need: a last, broken one each. A grid takes 65,535."""
    ordered, order = torch.sort(picks.flatten(), stable=True)
    count, device = len(ordered), picks.device
    place = torch.arange(count, device=device)
    is_first = torch.ones(count, dtype=torch.bool, device=device)
    is_first[1:] = ordered[1:] != ordered[:-1]
    rank = place - torch.cummax(torch.where(is_first, place, 0), 0).values
    begins = (rank % CHUNK_ROWS == 0) & (ordered >= 0)
    items = count // CHUNK_ROWS + min(count, experts or count)
    number = torch.where(ordered >= 0, torch.cumsum(begins, 0) - 1, items)
    table = torch.full((items + 1,), -1, dtype=torch.int32, device=device)
    table.scatter_(0, number, ordered)
    rows = torch.full((items + 1, CHUNK_ROWS), -1, dtype=torch.int32, device=device)
    rows[number, rank % CHUNK_ROWS] = order.to(torch.int32)
    return torch.cat([table[:items], rows[:items].flatten()]), items, CHUNK_ROWS
