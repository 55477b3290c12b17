"""Latent attention of decode rows on CUDA (see `kernels.attention`): a row of a lane sees its window ring, the rows of
the same lane before it in the pass, and its selected compressed rows.

Two launches. `_attention_scores` reads every row once for all heads. `_attention_values` reads it once more, a part of
its width a program, with the largest score of all rows known: probabilities are rounded against it as the reference
rounds them, in one order, and nothing is combined afterwards. Rings are read where they lie, by the address in the
row's `meta`; new rows are beside them until the pass is over (`latents_triton.keep_rows`), so a row never sees a later
one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_triton import chain, chained
from kernels.rounding_triton import (
    FIRST_POSITION,
    FIRST_ROW,
    INTERPRETED,
    POSITION,
    ROW_FIELDS,
    WINDOWS,
    to_bf16,
)

BLOCK = 32  # rows of a program; a window is a multiple of it
COLUMNS = 128  # of a row at a time


@triton.jit
def _gathered(meta, row, block, held, pool, places, column, width, window, layer, selected, BLOCK: tl.constexpr):
    """Rows of a block of what `row` sees, at these columns: [BLOCK, columns] bf16, and which of them exist [BLOCK]."""
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = (column < width)[None, :]
    if block * BLOCK < window:
        position = tl.load(meta + row * ROW_FIELDS + POSITION)
        since = tl.load(meta + row * ROW_FIELDS + FIRST_POSITION)
        first = tl.load(meta + row * ROW_FIELDS + FIRST_ROW)
        ring = tl.load(meta + row * ROW_FIELDS + WINDOWS).to(tl.pointer_type(tl.bfloat16))
        at = position - (position - i + window) % window
        exists = at >= 0
        is_new = at >= since
        old = tl.load(
            ring + (layer * window + i)[:, None] * width + column[None, :],
            mask=(exists & ~is_new)[:, None] & inside, other=0.0,
        )  # fmt: skip
        new = tl.load(
            held + (first + at - since)[:, None] * width + column[None, :], mask=is_new[:, None] & inside, other=0.0
        )
        value = tl.where(is_new[:, None], new, old)
    else:
        k = i - window
        place = tl.load(places + row * selected + k, mask=k < selected, other=-1)
        exists = place >= 0
        value = tl.load(
            pool + place.to(tl.int64)[:, None] * width + column[None, :], mask=exists[:, None] & inside, other=0.0
        )
    return value, exists


@triton.jit
def _attention_scores(
    query, cos, sin, meta, held, pool, places, scores, heads, width, window, layer, selected, scale,
    HP: tl.constexpr, BLOCK: tl.constexpr, CH: tl.constexpr, ROPE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """query [R, heads, width] bf16, not rotated yet -> scores [R, heads, window + selected] fp32, -inf for no row."""
    chained(CHAINED)
    row, block = tl.program_id(0), tl.program_id(1)
    h = tl.arange(0, HP)
    acc = tl.zeros([HP, BLOCK], tl.float32)
    exists = tl.zeros([BLOCK], tl.int1)
    for first in range(0, width, CH):
        column = first + tl.arange(0, CH)
        at = query + (row * heads + h)[:, None] * width + column[None, :]
        q = tl.load(at, mask=(h < heads)[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
        pair = first // 2 + tl.arange(0, CH // 2) - (width - ROPE) // 2
        turns = (pair >= 0) & (pair < ROPE // 2)
        c = tl.load(cos + row * (ROPE // 2) + pair, mask=turns, other=1.0)[None, :]
        s = tl.load(sin + row * (ROPE // 2) + pair, mask=turns, other=0.0)[None, :]
        even, odd = tl.split(q.reshape(HP, CH // 2, 2))
        q = to_bf16(tl.join(even * c - odd * s, even * s + odd * c).reshape(HP, CH))
        k, exists = _gathered(meta, row, block, held, pool, places, column, width, window, layer, selected, BLOCK)
        if INTERPRETED:
            acc = tl.dot(q, tl.trans(k.to(tl.float32)), acc, input_precision="ieee")
        else:
            acc = tl.dot(q.to(tl.bfloat16), tl.trans(k), acc)
    i = block * BLOCK + tl.arange(0, BLOCK)
    total = window + selected
    there = (h < heads)[:, None] & (i < total)[None, :]
    value = tl.where(exists[None, :], acc * scale, float("-inf"))
    tl.store(scores + (row * heads + h)[:, None] * total + i[None, :], value, mask=there)


@triton.jit
def _attention_values(
    scores, cos, sin, meta, held, pool, places, sink, out, heads, width, window, layer, selected,
    HP: tl.constexpr, BLOCK: tl.constexpr, CH: tl.constexpr, ROPE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """-> out [R, heads, width] bf16, the last ROPE columns turned back. A program has CH columns of all heads."""
    chained(CHAINED)
    row, part = tl.program_id(0), tl.program_id(1)
    h = tl.arange(0, HP)
    column = part * CH + tl.arange(0, CH)
    total = window + selected
    blocks = tl.cdiv(total, BLOCK)
    at = scores + (row * heads + h)[:, None] * total + tl.arange(0, BLOCK)[None, :]
    top = tl.full([HP], float("-inf"), tl.float32)
    for block in range(0, blocks):
        there = (h < heads)[:, None] & (block * BLOCK + tl.arange(0, BLOCK) < total)[None, :]
        top = tl.maximum(top, tl.max(tl.load(at + block * BLOCK, mask=there, other=float("-inf")), 1))
    top = tl.where(h < heads, top, 0.0)
    acc, mass = tl.zeros([HP, CH], tl.float32), tl.zeros([HP], tl.float32)
    for block in range(0, blocks):
        there = (h < heads)[:, None] & (block * BLOCK + tl.arange(0, BLOCK) < total)[None, :]
        p = tl.exp(tl.load(at + block * BLOCK, mask=there, other=float("-inf")) - top[:, None])
        mass += tl.sum(p, 1)
        p = to_bf16(p)
        v, _ = _gathered(meta, row, block, held, pool, places, column, width, window, layer, selected, BLOCK)
        if INTERPRETED:
            acc = tl.dot(p, v.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(p.to(tl.bfloat16), v, acc)
    mass += tl.exp(tl.load(sink + h, mask=h < heads, other=0.0) - top)
    x = to_bf16(acc / mass[:, None])
    pair = part * (CH // 2) + tl.arange(0, CH // 2) - (width - ROPE) // 2
    turns = (pair >= 0) & (pair < ROPE // 2)
    c = tl.load(cos + row * (ROPE // 2) + pair, mask=turns, other=1.0)[None, :]
    s = tl.load(sin + row * (ROPE // 2) + pair, mask=turns, other=0.0)[None, :]
    even, odd = tl.split(x.reshape(HP, CH // 2, 2))
    x = to_bf16(tl.join(even * c + odd * s, odd * c - even * s).reshape(HP, CH))
    there = (h < heads)[:, None] & (column < width)[None, :]
    tl.store(out + (row * heads + h)[:, None] * width + column[None, :], x.to(tl.bfloat16), mask=there)


def attend(
    query: Tensor, cos: Tensor, sin: Tensor, meta: Tensor, held: Tensor, layer: int, window: int,
    pool: Tensor | None, places: Tensor | None, sink: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """query [R, H, d] bf16, not rotated; cos, sin [R, rope / 2]; meta [R, ROW_FIELDS]; held [R, d] bf16 the layer's new
    rows; pool [.., d] bf16 and places [R, K] int32 of the selected rows, -1: none (both None: a layer without);
    sink [H] -> [R, H, d] bf16, turned back."""
    rows, heads, width = query.shape
    if window % BLOCK:
        raise ValueError(f"a window of {window} rows is no multiple of {BLOCK}")
    selected = 0 if places is None else places.shape[1]
    scores = torch.empty(rows, heads, window + selected, device=query.device)
    out = torch.empty_like(query)
    shape = {"HP": max(16, triton.next_power_of_2(heads)), "BLOCK": BLOCK, "ROPE": 2 * cos.shape[1]}
    pool, places = held if pool is None else pool, meta if places is None else places
    _attention_scores[(rows, triton.cdiv(window + selected, BLOCK))](
        query, cos, sin, meta, held, pool, places, scores, heads, width, window, layer, selected, scale,
        CH=min(COLUMNS, triton.next_power_of_2(width)), num_warps=4, num_stages=2, **shape,
        **chain(query.device),
    )  # fmt: skip
    _attention_values[(rows, triton.cdiv(width, 64))](
        scores, cos, sin, meta, held, pool, places, sink, out, heads, width, window, layer, selected, CH=64,
        num_warps=4, num_stages=2, **shape, **chain(query.device),
    )  # fmt: skip
    return out
