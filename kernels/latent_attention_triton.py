"""Attention of decode rows over rows of a latent cache, on CUDA, as the pool holds them: bf16, or FP8 packed
(`kernels.latent_rows`), which are multiplied as codes, exactly, and scaled behind.

Three launches. `_scores` reads the chosen rows once for all heads, and leaves the largest of each block; `_values`
reads them once more, a part of the tokens and of the width a program, with the largest score of all known:
probabilities are rounded against it as `kernels.attention` rounds them. `_joined` adds the parts in their order. Tokens
that are not there add nothing, so a row has the same bits however many places it is given."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_triton import chain, chained
from kernels.latent_decode_triton import dot
from kernels.latent_rows import GROUP
from kernels.packed_triton import _e4m3
from kernels.rounding_triton import to_bf16

BLOCK = 64  # tokens of a program of `_scores`
PART = 4  # blocks of a program of `_values`
CODES = tl.constexpr(GROUP)


@triton.jit
def _held(pool, place, live, column, inside, row_size, PACKED: tl.constexpr):
    """[tokens, columns] of latents: values, or codes as they are."""
    at = pool + place[:, None] * row_size + column[None, :]
    if PACKED:
        return _e4m3(tl.load(at, mask=live[:, None] & inside[None, :], other=0))
    else:
        return tl.load(at, mask=live[:, None] & inside[None, :], other=0.0)


@triton.jit
def _scale(pool, place, live, group, latent, row_size):
    """[tokens]: of a group of codes. Rows begin at multiples of four bytes."""
    at = (place * row_size + latent) // 4 + group
    return tl.load(pool.to(tl.pointer_type(tl.float32)) + at, mask=live, other=0.0)


@triton.jit
def _scores(
    query, pool, places, scores, tops, heads, latent, row_size, chosen, blocks, scale,
    HP: tl.constexpr, GROUPS: tl.constexpr, ROPE: tl.constexpr, RP: tl.constexpr, SIZE: tl.constexpr,
    PACKED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """scores [R, heads, blocks * SIZE], -inf where no token is; tops [R, heads, blocks]."""
    chained(CHAINED)
    row, block = tl.program_id(0), tl.program_id(1)
    h, i = tl.arange(0, HP), block * SIZE + tl.arange(0, SIZE)
    known = h < heads
    place = tl.load(places + row.to(tl.int64) * chosen + i, mask=i < chosen, other=-1).to(tl.int64)
    live = place >= 0
    value = tl.full([HP, SIZE], float("-inf"), tl.float32)
    if tl.max(place, 0) >= 0:
        place = tl.maximum(place, 0)
        q_at = query + ((row * heads + h) * (latent + ROPE))[:, None]
        acc = tl.zeros([HP, SIZE], tl.float32)
        for group in tl.static_range(GROUPS):
            column = group * CODES + tl.arange(0, CODES)
            inside = column < latent
            q = tl.load(q_at + column[None, :], mask=known[:, None] & inside[None, :], other=0.0)
            k = _held(pool, place, live, column, inside, row_size, PACKED)
            if PACKED:
                part = dot(q, tl.trans(k), tl.zeros([HP, SIZE], tl.float32))
                acc += part * _scale(pool, place, live, group, latent, row_size)[None, :]
            else:
                acc = dot(q, tl.trans(k), acc)
        r = tl.arange(0, RP)
        turns = r < ROPE
        q = tl.load(q_at + latent + r[None, :], mask=known[:, None] & turns[None, :], other=0.0)
        if PACKED:
            at = (place * row_size + latent + 4 * GROUPS) // 2
            k = tl.load(
                pool.to(tl.pointer_type(tl.bfloat16)) + at[:, None] + r[None, :],
                mask=live[:, None] & turns[None, :], other=0.0,
            )  # fmt: skip
        else:
            at = place * row_size + latent
            k = tl.load(pool + at[:, None] + r[None, :], mask=live[:, None] & turns[None, :], other=0.0)
        acc = dot(q, tl.trans(k), acc)
        value = tl.where(live[None, :], acc * scale, float("-inf"))
    to = scores + ((row * heads + h).to(tl.int64) * blocks * SIZE)[:, None] + i[None, :]
    tl.store(to, value, mask=known[:, None])
    tl.store(tops + (row * heads + h) * blocks + block, tl.max(value, 1), mask=known)


@triton.jit
def _top(tops, row, h, heads, blocks, BP: tl.constexpr):
    """[heads] of a row."""
    b = tl.arange(0, BP)
    known = (h < heads)[:, None] & (b < blocks)[None, :]
    return tl.max(
        tl.load(tops + ((row * heads + h) * blocks)[:, None] + b[None, :], mask=known, other=float("-inf")), 1
    )


@triton.jit
def _values(
    scores, tops, pool, places, parts, masses, heads, latent, row_size, chosen, blocks,
    HP: tl.constexpr, BP: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr, PACKED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """parts [R, all parts, heads, latent], masses [R, all parts, heads]: CODES columns of a part."""
    chained(CHAINED)
    row, part, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    h, column = tl.arange(0, HP), group * CODES + tl.arange(0, CODES)
    known, inside = h < heads, column < latent
    top = _top(tops, row, h, heads, blocks, BP)
    top = tl.where(top > float("-inf"), top, 0.0)
    acc, mass = tl.zeros([HP, CODES], tl.float32), tl.zeros([HP], tl.float32)
    for block in range(part * PART, tl.minimum(part * PART + PART, blocks)):
        i = block * SIZE + tl.arange(0, SIZE)
        place = tl.load(places + row.to(tl.int64) * chosen + i, mask=i < chosen, other=-1).to(tl.int64)
        if tl.max(place, 0) >= 0:
            live = place >= 0
            place = tl.maximum(place, 0)
            at = scores + ((row * heads + h).to(tl.int64) * blocks * SIZE)[:, None] + i[None, :]
            score = tl.load(at, mask=known[:, None], other=float("-inf"))
            p = tl.exp(score - top[:, None])
            mass += tl.sum(p, 1)
            p = to_bf16(p)
            v = _held(pool, place, live, column, inside, row_size, PACKED)
            if PACKED:
                p *= _scale(pool, place, live, group, latent, row_size)[None, :]
                upper = to_bf16(p)
                acc = dot(upper, v, acc)
                acc = dot(to_bf16(p - upper), v, acc)
            else:
                acc = dot(p, v, acc)
    at = (row * tl.num_programs(1) + part) * heads + h
    tl.store(parts + at.to(tl.int64)[:, None] * latent + column[None, :], acc, mask=known[:, None] & inside[None, :])
    if group == 0:
        tl.store(masses + at, mass, mask=known)


@triton.jit(do_not_specialize=["count"])
def _joined(
    parts, masses, tops, out, heads, latent, count, blocks,
    CP: tl.constexpr, BP: tl.constexpr, WHOLE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """out [R, heads, latent] bf16; or, not WHOLE, [R, heads, latent + 2] fp32 (`kernels.partial_attention`)."""
    chained(CHAINED)
    row, head = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, CP)
    inside = c < latent
    total, mass = tl.zeros([CP], tl.float32), tl.zeros([CP], tl.float32)
    for part in range(0, count):
        at = (row * count + part) * heads + head
        total += tl.load(parts + at.to(tl.int64) * latent + c, mask=inside, other=0.0)
        mass += tl.load(masses + at)
    if WHOLE:
        value = to_bf16(tl.div_rn(total, mass))
        tl.store(out + (row * heads + head).to(tl.int64) * latent + c, value.to(tl.bfloat16), mask=inside)
    else:
        b = tl.arange(0, BP)
        top = tl.load(tops + (row * heads + head) * blocks + b, mask=b < blocks, other=float("-inf"))
        to = out + (row * heads + head).to(tl.int64) * (latent + 2)
        tl.store(to + c, total, mask=inside)
        tl.store(to + latent, tl.max(top, 0))
        tl.store(to + latent + 1, tl.max(mass, 0))


def attend(query: Tensor, pool: Tensor, places: Tensor, latent: int, scale: float, whole: bool) -> Tensor:
    """query [R, H, c + r] bf16; pool [.., row] bf16 or uint8; places [R, K] int32, -1: none; `latent` c -> [R, H, c]
    bf16; or, not `whole`, parts to be joined with other ranks', [R, H, c + 2] fp32."""
    rows, heads, width = query.shape
    rope, chosen, device = width - latent, places.shape[1], query.device
    blocks = triton.cdiv(chosen, BLOCK)
    count = triton.cdiv(blocks, PART)
    scores = torch.empty(rows, heads, blocks * BLOCK, device=device)
    tops = torch.empty(rows, heads, blocks, device=device)
    parts = torch.empty(rows, count, heads, latent, device=device)
    masses = torch.empty(rows, count, heads, device=device)
    shape = {"HP": max(16, triton.next_power_of_2(heads)), "SIZE": BLOCK, "PACKED": pool.dtype is torch.uint8}
    bp, groups = triton.next_power_of_2(blocks), triton.cdiv(latent, GROUP)
    _scores[(rows, blocks)](
        query, pool, places, scores, tops, heads, latent, pool.shape[1], chosen, blocks, scale,
        GROUPS=groups, ROPE=rope, RP=max(16, triton.next_power_of_2(rope)), num_warps=4, **shape, **chain(device),
    )  # fmt: skip
    _values[(rows, count, groups)](
        scores, tops, pool, places, parts, masses, heads, latent, pool.shape[1], chosen, blocks,
        BP=bp, PART=PART, num_warps=4, **shape, **chain(device),
    )  # fmt: skip
    if whole:
        out = torch.empty(rows, heads, latent, dtype=torch.bfloat16, device=device)
    else:
        out = torch.empty(rows, heads, latent + 2, device=device)
    _joined[(rows, heads)](
        parts, masses, tops, out, heads, latent, count, blocks, CP=triton.next_power_of_2(latent), BP=bp, WHOLE=whole,
        num_warps=4, **chain(device),
    )  # fmt: skip
    return out
