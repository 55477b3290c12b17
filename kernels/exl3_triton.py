"""EXL3 experts on CUDA: the fast form of `kernels.experts` for `Exl3Record`s, for decode steps and for chunks.

Experts of any widths and codebooks go in one launch: a program reads the header of its expert's record and takes the
body that was compiled for such a matrix. Every program has so many columns of one expert, for all rows that want it:
weights are decoded once, into fp16 exactly, and multiplied by the matrix unit. Rows of the activations lie in memory
in the order [r 4, r 2, r 2] of a tile's (`exl3_walk_triton._place`), which is how a tile's weights come.

Launches: `_distinct` (of a decode step) finds the distinct experts; `_turn` scales and rotates each pick's row, for
gate and for up; `_product`, or in a decode step `exl3_lanes_triton.product`, multiplies, each program a part of K;
`_activate` adds these parts, rotates back, ends in the rounded hidden row and rotates it for down; then the product of
down; `_finish` adds the parts, rotates back and adds the picks of a token in the order of k. All sums have one order: a
row has the same bits in any company.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.exl3_lanes_triton import matrix
from kernels.exl3_lanes_triton import product as lanes_product
from kernels.exl3_record import CODEBOOKS, Exl3Record, widths
from kernels.exl3_walk_triton import _hadamard, _kept, _place, _walk
from kernels.rows import ROWS

KINDS = 32  # half bits of one codebook; a matrix's kind is codebook * KINDS + half bits
ALL = sum(1 << (book * KINDS + bits) for book, name in enumerate(CODEBOOKS) for bits in widths(name))


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
