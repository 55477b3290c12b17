"""Latent attention of a prompt chunk on CUDA (see `kernels.attention`): a program has one row with all its heads, and
goes twice over what the row sees: its window, which lies in line with its neighbours', then the compressed rows it
selected. First for the largest logit, then for the values: so probabilities are rounded against the largest of all, as
the reference and the decode step round them, and a prompt's rows have the roundings of an answer's. No row depends on
another."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rounding_triton import INTERPRETED, to_bf16

HEADS = 8  # of a program that turns


@triton.jit
def _turned_query(x, cos, sin, out, heads, width, HB: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr):
    """x [T, heads, width] fp32 -> bf16, the last ROPE columns rotated."""
    row, h, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * HB + tl.arange(0, HB), tl.arange(0, DP)
    at = (row * heads + h)[:, None] * width + d[None, :]
    there = (h < heads)[:, None] & (d < width)[None, :]
    value = to_bf16(tl.load(x + at, mask=there, other=0.0))
    pair = tl.arange(0, DP // 2) - (width - ROPE) // 2
    turns = (pair >= 0) & (pair < ROPE // 2)
    c = tl.load(cos + row * (ROPE // 2) + pair, mask=turns, other=1.0)[None, :]
    s = tl.load(sin + row * (ROPE // 2) + pair, mask=turns, other=0.0)[None, :]
    even, odd = tl.split(value.reshape(HB, DP // 2, 2))
    value = to_bf16(tl.join(even * c - odd * s, even * s + odd * c).reshape(HB, DP))
    tl.store(out + at, value.to(tl.bfloat16), mask=there)


@triton.jit
def _turn_back(x, cos, sin, heads, width, HP: tl.constexpr, RP: tl.constexpr, ROPE: tl.constexpr):
    """The last ROPE columns of x [T, heads, width] bf16, in place."""
    row, h, pair = tl.program_id(0).to(tl.int64), tl.arange(0, HP), tl.arange(0, RP)
    turns = pair < ROPE // 2
    c = tl.load(cos + row * (ROPE // 2) + pair, mask=turns, other=1.0)[None, :]
    s = tl.load(sin + row * (ROPE // 2) + pair, mask=turns, other=0.0)[None, :]
    at = x + (row * heads + h)[:, None] * width + width - ROPE + 2 * pair[None, :]
    there = (h < heads)[:, None] & turns[None, :]
    even = tl.load(at, mask=there, other=0.0).to(tl.float32)
    odd = tl.load(at + 1, mask=there, other=0.0).to(tl.float32)
    tl.store(at, to_bf16(even * c + odd * s).to(tl.bfloat16), mask=there)
    tl.store(at + 1, to_bf16(odd * c - even * s).to(tl.bfloat16), mask=there)


@triton.jit
def _scored(q, rows):
    if INTERPRETED:
        return tl.dot(q.to(tl.float32), tl.trans(rows.to(tl.float32)), input_precision="ieee")
    else:
        return tl.dot(q, tl.trans(rows))


@triton.jit
def _valued(p, rows, acc):
    if INTERPRETED:
        return tl.dot(to_bf16(p), rows.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(p.to(tl.bfloat16), rows, acc)


@triton.jit
def _near(near, row, block, i, d, first, floor, width):
    """Rows of a block of the window [BLOCK, DP] bf16, and which of them exist."""
    exists = first + block + i >= floor
    at = near + (row + block + i).to(tl.int64)[:, None] * width + d[None, :]
    return tl.load(at, mask=exists[:, None] & (d < width)[None, :], other=0.0), exists


@triton.jit
def _chosen(pool, places, row, block, i, d, many, selected, width):
    """Rows of a block of what was selected [BLOCK, DP] bf16, and which of them exist."""
    place = tl.load(places + row.to(tl.int64) * selected + block + i, mask=block + i < many, other=-1)
    exists = place >= 0
    at = pool + place.to(tl.int64)[:, None] * width + d[None, :]
    return tl.load(at, mask=exists[:, None] & (d < width)[None, :], other=0.0), exists


@triton.jit
def _largest(q, rows, exists, top, scale):
    return tl.maximum(top, tl.max(tl.where(exists[None, :], _scored(q, rows) * scale, float("-inf")), 1))


@triton.jit
def _added(q, rows, exists, top, acc, mass, scale):
    p = tl.exp(tl.where(exists[None, :], _scored(q, rows) * scale, float("-inf")) - top[:, None])
    return _valued(p, rows, acc), mass + tl.sum(p, 1)


@triton.jit(do_not_specialize=["start", "floor"])
def _attention_chunk(
    query, near, pool, places, sink, out, heads, width, window, selected, start, floor, ratio, scale,
    HP: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SELECTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    h, d, i = tl.arange(0, HP), tl.arange(0, DP), tl.arange(0, BLOCK)
    at = (row.to(tl.int64) * heads + h)[:, None] * width + d[None, :]
    there = (h < heads)[:, None] & (d < width)[None, :]
    q = tl.load(query + at, mask=there, other=0.0)
    first = start + row - window + 1  # the oldest position of the window
    many = tl.minimum((start + row + 1) // ratio, selected)
    top = tl.full([HP], float("-inf"), tl.float32)
    for block in tl.range(0, window, BLOCK, num_stages=STAGES):
        rows, exists = _near(near, row, block, i, d, first, floor, width)
        top = _largest(q, rows, exists, top, scale)
    if SELECTS:
        for block in tl.range(0, many, BLOCK, num_stages=STAGES):
            rows, exists = _chosen(pool, places, row, block, i, d, many, selected, width)
            top = _largest(q, rows, exists, top, scale)
    mass = tl.exp(tl.load(sink + h, mask=h < heads, other=0.0) - top)
    acc = tl.zeros([HP, DP], tl.float32)
    for block in tl.range(0, window, BLOCK, num_stages=STAGES):
        rows, exists = _near(near, row, block, i, d, first, floor, width)
        acc, mass = _added(q, rows, exists, top, acc, mass, scale)
    if SELECTS:
        for block in tl.range(0, many, BLOCK, num_stages=STAGES):
            rows, exists = _chosen(pool, places, row, block, i, d, many, selected, width)
            acc, mass = _added(q, rows, exists, top, acc, mass, scale)
    value = to_bf16(acc / mass[:, None])
    tl.store(out + at, value.to(tl.bfloat16), mask=there)


def tiles(heads: int, window: int, device: torch.device) -> tuple[int, int, int]:
    """Rows at a time, of which a window is a multiple, how many such blocks are on their way, and warps: within 99 KB
    of shared memory, or the 164 KB that sm_90 has room for."""
    if heads > 32:
        return 16, 2, 8
    large = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return (64, 1, 8) if large and window % 64 == 0 else (16, 3, 4)


def attend(
    query: Tensor, cos: Tensor, sin: Tensor, near: Tensor, start: int, floor: int, pool: Tensor | None,
    places: Tensor | None, ratio: int, sink: Tensor, scale: float, tile: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """query [T, H, d] fp32, products, of positions `start` and on; cos, sin [T, rope / 2]; near [window - 1 + T, d]
    bf16, the rows of all their windows by position, of which those below `floor` do not exist; pool [.., d] bf16 and
    places [T, K] int32 of the selected rows, of which a row has (position + 1) // ratio at most, -1: none (both None: a
    layer without); sink [H]; tile: see `tiles` -> [T, H, d] bf16, turned back."""
    rows, heads, width = query.shape
    window = len(near) - rows + 1
    block, stages, warps = tile or tiles(heads, window, query.device)
    if window % block:
        raise ValueError(f"a window of {window} rows is no multiple of {block}")
    turned = torch.empty(rows, heads, width, dtype=torch.bfloat16, device=query.device)
    out, rope, padded = torch.empty_like(turned), 2 * cos.shape[1], max(16, triton.next_power_of_2(width))
    _turned_query[(rows, -(-heads // HEADS))](
        query, cos, sin, turned, heads, width, HB=HEADS, DP=padded, ROPE=rope, num_warps=4
    )
    selects = pool is not None and places is not None
    _attention_chunk[(rows,)](
        turned, near, near if pool is None else pool, near if places is None else places, sink, out, heads, width,
        window, 0 if places is None else places.shape[1], start, floor, max(1, ratio), scale,
        HP=max(16, triton.next_power_of_2(heads)), DP=padded, BLOCK=block, STAGES=stages, SELECTS=selects,
        num_warps=warps,
    )  # fmt: skip
    _turn_back[(rows,)](
        out, cos, sin, heads, width, HP=triton.next_power_of_2(heads), RP=triton.next_power_of_2(rope // 2), ROPE=rope,
        num_warps=4,
    )  # fmt: skip
    return out
