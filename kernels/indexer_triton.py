"""Which compressed rows decode rows attend to, on CUDA (see `kernels.indexer`): by the position of a row, so that a
captured step serves a context of any length.

    query       the index query's heads, rotated and rounded
    scores      of all entries that a row sees, a few programs a row, each over every so-manieth block of keys
    blocks      of the layer that publishes a candidate pool: a block's best score
    select      the best of a row, as places in the pool, ascending; or, for blocks, which are kept

The border is found digit by digit of the scores' bits, from the top: integers, and no order of threads in them. Of
equal scores at the border the lower entries are taken. What a row sees is taken without asking where all of it fits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_triton import chain, chained
from kernels.rounding_triton import (
    INTERPRETED,
    PAGES,
    POSITION,
    ROW_FIELDS,
    fp4_ue8m0_groups,
    split_sum,
    to_bf16,
    turned,
)

KEYS = 64  # of a block
SCANNED = 1024  # scores that the selection looks at together
PROGRAMS = 32  # of a row's scores
UNLIMITED = (1 << 31) - 1


@triton.jit(do_not_specialize=["rows"])
def _index_query(
    parts, cos, sin, out, rows, heads,
    SPLIT: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chained(CHAINED)
    row, head = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, DP)
    there = c < DIM
    x = to_bf16(split_sum(parts, row, head * DIM + c, there, rows, heads * DIM, SPLIT, DP))
    x = to_bf16(turned(x, cos, sin, row, DIM, ROPE, DP))
    x = fp4_ue8m0_groups(x.reshape(DP // 32, 32)).reshape(DP)
    tl.store(out + (row * heads + head) * DIM + c, x.to(tl.bfloat16), mask=there)


@triton.jit(do_not_specialize=["rows", "bound", "most_blocks"])
def _index_scores(
    query, weight_parts, meta, page_keys, kept, out, rows, heads, page_size, most, most_blocks, block_size, least,
    bound, factor, RATIO: tl.constexpr, SPLIT: tl.constexpr, HP: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chained(CHAINED)
    row = tl.program_id(0)
    visible = (tl.load(meta + row * ROW_FIELDS + POSITION) + 1) // RATIO
    if visible > least:
        pages = tl.load(meta + row * ROW_FIELDS + PAGES).to(tl.pointer_type(tl.int64))
        h, c = tl.arange(0, HP), tl.arange(0, DP)
        known = (h < heads)[:, None] & (c < DIM)[None, :]
        q = tl.load(query + (row * heads + h)[:, None] * DIM + c[None, :], mask=known, other=0.0)
        weight = to_bf16(split_sum(weight_parts, row, h, h < heads, rows, heads, SPLIT, HP)) * factor
        for block in range(tl.program_id(1), tl.cdiv(visible, BLOCK), tl.num_programs(1)):
            s = block * BLOCK + tl.arange(0, BLOCK)
            seen = s < visible
            place = tl.load(pages + s // page_size, mask=seen, other=0) * page_size + s % page_size
            key = tl.load(
                page_keys + place[:, None] * DIM + c[None, :], mask=seen[:, None] & (c < DIM)[None, :], other=0.0
            )
            zero = tl.zeros([HP, BLOCK], tl.float32)
            if INTERPRETED:
                dots = tl.dot(q.to(tl.float32), tl.trans(key.to(tl.float32)), zero, input_precision="ieee")
            else:
                dots = tl.dot(q, tl.trans(key), zero)
            score = tl.sum(weight[:, None] * tl.maximum(dots, 0.0), 0)
            limited = visible > bound
            free = tl.load(kept + row * most_blocks + s // block_size, mask=seen & limited, other=1) != 0
            score = tl.where(free, score, float("-inf"))
            tl.store(out + row.to(tl.int64) * most + s, score, mask=seen)


@triton.jit
def _index_blocks(
    score, meta, out, most, most_blocks, bound,
    RATIO: tl.constexpr, SIZE: tl.constexpr, SP: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A block's best visible score; the block of the newest entry is always kept."""
    chained(CHAINED)
    row = tl.program_id(0)
    visible = (tl.load(meta + row * ROW_FIELDS + POSITION) + 1) // RATIO
    if visible > bound:
        newest = (visible - 1) // SIZE
        i = tl.arange(0, SP)
        for block in range(tl.program_id(1), tl.cdiv(newest + 1, BLOCK), tl.num_programs(1)):
            b = block * BLOCK + tl.arange(0, BLOCK)
            s = b[:, None] * SIZE + i[None, :]
            seen = (s < visible) & (i < SIZE)[None, :]
            best = tl.max(tl.load(score + row.to(tl.int64) * most + s, mask=seen, other=float("-inf")), 1)
            best = tl.where(b == newest, float("inf"), best)
            tl.store(out + row.to(tl.int64) * most_blocks + b, best, mask=b <= newest)


@triton.jit
def _ranked(score):
    """fp32 -> int64 in [0, 2^32) of the same order, both zeros alike."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64) + 2147483648


@triton.jit
def _border(score, length, count, BLOCK: tl.constexpr):
    """score [length] -> the rank of the count-th largest, and how many of that rank are among the count largest."""
    border = length * 0
    digit = tl.arange(0, 16).to(tl.int64)
    for turn in tl.static_range(8):
        tried = border + (digit << (28 - 4 * turn))
        found = tl.zeros([16], tl.int32)
        for first in range(0, length, BLOCK):
            s = first + tl.arange(0, BLOCK)
            rank = _ranked(tl.load(score + s, mask=s < length, other=float("-inf")))
            rank = tl.where(s < length, rank, -1)
            found += tl.sum((rank[None, :] >= tried[:, None]).to(tl.int32), 1)
        border += (tl.sum((found >= count).to(tl.int64), 0) - 1) << (28 - 4 * turn)
    above = tl.zeros([BLOCK], tl.int32)
    for first in range(0, length, BLOCK):
        s = first + tl.arange(0, BLOCK)
        rank = _ranked(tl.load(score + s, mask=s < length, other=float("-inf")))
        above += ((rank > border) & (s < length)).to(tl.int32)
    return border, count - tl.sum(above, 0)


@triton.jit
def _index_select(
    score, meta, places, page_size, most, least,
    RATIO: tl.constexpr, COUNT: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """places [R, COUNT] int32: the best entries of a row in the pool, -1 behind them."""
    chained(CHAINED)
    row = tl.program_id(0)
    visible = (tl.load(meta + row * ROW_FIELDS + POSITION) + 1) // RATIO
    pages = tl.load(meta + row * ROW_FIELDS + PAGES).to(tl.pointer_type(tl.int64))
    if visible <= least:
        s = tl.arange(0, CP)
        seen = (s < visible) & (s < COUNT)
        place = tl.load(pages + s // page_size, mask=seen, other=0) * page_size + s % page_size
        tl.store(places + row * COUNT + s, tl.where(seen, place, -1).to(tl.int32), mask=s < COUNT)
    else:
        score += row.to(tl.int64) * most
        border, room = _border(score, visible, tl.minimum(visible, COUNT), BLOCK)
        taken_before, tied_before = visible * 0, visible * 0
        for first in range(0, visible, BLOCK):
            s = first + tl.arange(0, BLOCK)
            value = tl.load(score + s, mask=s < visible, other=float("-inf"))
            rank = _ranked(value)
            counts = (s < visible) & (value > float("-inf"))
            tied = counts & (rank == border)
            order = tied_before + tl.cumsum(tied.to(tl.int64), 0)
            taken = (counts & (rank > border)) | (tied & (order <= room))
            at = taken_before + tl.cumsum(taken.to(tl.int64), 0) - 1
            place = tl.load(pages + s // page_size, mask=taken, other=0) * page_size + s % page_size
            tl.store(places + row * COUNT + at, place.to(tl.int32), mask=taken)
            taken_before += tl.sum(taken.to(tl.int64), 0)
            tied_before += tl.sum(tied.to(tl.int64), 0)
        s = tl.arange(0, CP)
        tl.store(places + row * COUNT + s, tl.full([CP], -1, tl.int32), mask=(s >= taken_before) & (s < COUNT))


@triton.jit
def _index_keep(
    score, meta, kept, most_blocks, bound, blocks,
    RATIO: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """kept [R, most_blocks] uint8: whether a block is one of the best."""
    chained(CHAINED)
    row = tl.program_id(0)
    visible = (tl.load(meta + row * ROW_FIELDS + POSITION) + 1) // RATIO
    if visible > bound:
        length = (visible - 1) // SIZE + 1
        score += row.to(tl.int64) * most_blocks
        border, room = _border(score, length, tl.minimum(length, blocks), BLOCK)
        tied_before = length * 0
        for first in range(0, length, BLOCK):
            s = first + tl.arange(0, BLOCK)
            value = tl.load(score + s, mask=s < length, other=float("-inf"))
            rank = _ranked(value)
            counts = (s < length) & (value > float("-inf"))
            tied = counts & (rank == border)
            order = tied_before + tl.cumsum(tied.to(tl.int64), 0)
            taken = (counts & (rank > border)) | (tied & (order <= room))
            tl.store(kept + row.to(tl.int64) * most_blocks + s, taken.to(tl.uint8), mask=s < length)
            tied_before += tl.sum(tied.to(tl.int64), 0)


def query(parts: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """parts [splits, R, heads * dim] fp32; cos, sin [R, rope / 2] -> [R, heads, dim] bf16."""
    splits, rows, columns = parts.shape
    dim = columns // heads
    out = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=parts.device)
    _index_query[(rows, heads)](
        parts, cos, sin, out, rows, heads, SPLIT=splits, DIM=dim, DP=max(32, triton.next_power_of_2(dim)),
        ROPE=2 * cos.shape[1], num_warps=1, **chain(parts.device),
    )  # fmt: skip
    return out


def scores(
    query: Tensor, weight_parts: Tensor, meta: Tensor, page_keys: Tensor, out: Tensor, kept: Tensor | None,
    *, ratio: int, page_size: int, block_size: int, least: int, bound: int,
) -> None:  # fmt: skip
    """query [R, heads, dim] bf16; weight_parts [splits, R, heads] fp32; page_keys [.., dim] bf16 -> out [R, most] fp32
    of rows that see more than `least` entries. kept [R, most_blocks] uint8: outside its blocks of a row that sees more
    than `bound` entries scores are -inf."""
    rows, heads, dim = query.shape
    _index_scores[(rows, PROGRAMS)](
        query, weight_parts, meta, page_keys, meta.view(torch.uint8) if kept is None else kept, out, rows, heads,
        page_size, out.shape[1], 0 if kept is None else kept.shape[1], block_size, least,
        UNLIMITED if kept is None else bound, dim**-0.5 * heads**-0.5, RATIO=ratio,
        SPLIT=len(weight_parts), HP=max(16, triton.next_power_of_2(heads)), DIM=dim,
        DP=max(16, triton.next_power_of_2(dim)), BLOCK=KEYS, num_warps=4,
        **chain(query.device),
    )  # fmt: skip


def select(
    score: Tensor, meta: Tensor, places: Tensor, *, ratio: int, page_size: int, least: int
) -> None:  # fmt: skip
    """score [R, most] of rows that see more than `least` entries -> places [R, count] int32."""
    rows, count = places.shape
    _index_select[(rows,)](
        score, meta, places, page_size, score.shape[1], least, RATIO=ratio, COUNT=count,
        CP=triton.next_power_of_2(count), BLOCK=SCANNED, num_warps=8, **chain(score.device),
    )  # fmt: skip


def keep_blocks(
    score: Tensor, meta: Tensor, block_scores: Tensor, kept: Tensor, *, ratio: int, blocks: int, block_size: int
) -> None:
    """score [R, most] -> kept [R, most_blocks] uint8, of rows that see more than blocks * block_size entries;
    block_scores [R, most_blocks] fp32 is written on the way."""
    rows, most_blocks = kept.shape
    bound = blocks * block_size
    _index_blocks[(rows, PROGRAMS)](
        score, meta, block_scores, score.shape[1], most_blocks, bound, RATIO=ratio, SIZE=block_size,
        SP=triton.next_power_of_2(block_size), BLOCK=64, num_warps=4, **chain(score.device),
    )  # fmt: skip
    _index_keep[(rows,)](
        block_scores, meta, kept, most_blocks, bound, blocks, RATIO=ratio, SIZE=block_size, BLOCK=SCANNED, num_warps=8,
        **chain(score.device),
    )  # fmt: skip
