"""What multi-head latent attention and the layers around it do between the products of a decode step, on CUDA: norms,
rotations, the two products by head, the row and the index key that a token leaves, index scores, SwiGLU.

Inputs are products in fp32, rounded to bf16 where they are read; outputs are bf16, as all that is multiplied next.
Every program has a row, or multiplies all rows in one order, so a row has the same bits whatever stands beside it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_triton import chain, chained
from kernels.latent_rows import GROUP
from kernels.rounding_triton import INTERPRETED, _to_e4m3, rms, to_bf16, turned
from kernels.rows import ROWS

KEYS = 64  # of a block of index scores
PROGRAMS = 64  # of a row's index scores
OUTPUTS, INNER = 64, 64  # of a product by head
CODES = tl.constexpr(GROUP)


@triton.jit
def dot(a, b, acc):
    """Of operands that bf16 holds."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)


@triton.jit
def _norm(
    x, y, weight, total, out, width, eps,
    P: tl.constexpr, ADDS: tl.constexpr, ROUNDS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chained(CHAINED)
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    live = c < width
    value = tl.load(y + row * width + c, mask=live, other=0.0).to(tl.float32)
    if ROUNDS:
        value = to_bf16(value)
    if ADDS:
        value = to_bf16(tl.load(x + row * width + c, mask=live, other=0.0).to(tl.float32) + value)
        tl.store(total + row * width + c, value.to(tl.bfloat16), mask=live)
    value = to_bf16(rms(value, tl.load(weight + c, mask=live, other=0.0), width, eps))
    tl.store(out + row * width + c, value.to(tl.bfloat16), mask=live)


def normed(y: Tensor, weight: Tensor, eps: float, rounds: bool = True) -> Tensor:
    """y [R, n] contiguous, fp32 or bf16 -> the norm of y, rounded first or not, [R, n] bf16."""
    return _normed(y, y, weight, eps, False, rounds)[1]


def added(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [R, n] fp32 or bf16 and y fp32, what a sub-layer gives -> their sum [R, n] bf16 and its norm, bf16."""
    return _normed(x, y, weight, eps, True, True)


def _normed(x: Tensor, y: Tensor, weight: Tensor, eps: float, adds: bool, rounds: bool) -> tuple[Tensor, Tensor]:
    rows, width = y.shape
    total, out = (torch.empty(rows, width, dtype=torch.bfloat16, device=y.device) for _ in range(2))
    _norm[(rows,)](
        x.contiguous(), y.contiguous(), weight, total, out, width, eps, P=max(32, triton.next_power_of_2(width)),
        ADDS=adds, ROUNDS=rounds, num_warps=8 if width > 1024 else 4, **chain(y.device),
    )  # fmt: skip
    return total, out


@triton.jit(do_not_specialize=["rows"])
def _absorbed(
    query, up, cos, sin, out, rows, heads, nope, latent, up_rows,
    M: tl.constexpr, OUT: tl.constexpr, BK: tl.constexpr, ROPE: tl.constexpr, RP: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chained(CHAINED)
    head, tile = tl.program_id(0), tl.program_id(1)
    m = tl.arange(0, M)
    live = (m < rows)[:, None]
    at = query + ((m * heads + head) * (nope + ROPE))[:, None]
    to = out + ((m * heads + head) * (latent + ROPE))[:, None]
    if tile < tl.cdiv(latent, OUT):
        column = tile * OUT + tl.arange(0, OUT)
        inside = (column < latent)[None, :]
        acc = tl.zeros([M, OUT], tl.float32)
        for first in range(0, nope, BK):
            k = first + tl.arange(0, BK)
            x = to_bf16(tl.load(at + k[None, :], mask=live & (k < nope)[None, :], other=0.0))
            row = (head * up_rows + k).to(tl.int64)
            w = tl.load(up + row[:, None] * latent + column[None, :], mask=(k < nope)[:, None] & inside, other=0.0)
            acc = dot(x, w, acc)
        tl.store(to + column[None, :], to_bf16(acc).to(tl.bfloat16), mask=live & inside)
    else:
        pair = tl.arange(0, RP)
        there = live & (pair < ROPE // 2)[None, :]
        even = to_bf16(tl.load(at + nope + 2 * pair[None, :], mask=there, other=0.0))
        odd = to_bf16(tl.load(at + nope + 2 * pair[None, :] + 1, mask=there, other=0.0))
        c = tl.load(cos + m[:, None] * (ROPE // 2) + pair[None, :], mask=there, other=1.0)
        s = tl.load(sin + m[:, None] * (ROPE // 2) + pair[None, :], mask=there, other=0.0)
        tl.store(to + latent + 2 * pair[None, :], to_bf16(even * c - odd * s).to(tl.bfloat16), mask=there)
        tl.store(to + latent + 2 * pair[None, :] + 1, to_bf16(even * s + odd * c).to(tl.bfloat16), mask=there)


def absorbed(query: Tensor, up: Tensor, cos: Tensor, sin: Tensor, nope: int) -> Tensor:
    """query [R, H * (nope + r)] fp32; up [H, nope + v, c] bf16; cos, sin [R, r / 2] -> [R, H, c + r] bf16: every head's
    query in the space of the rows, R up to ROWS."""
    rows, (heads, up_rows, latent), rope = len(query), up.shape, 2 * cos.shape[1]
    out = torch.empty(rows, heads, latent + rope, dtype=torch.bfloat16, device=query.device)
    _absorbed[(heads, triton.cdiv(latent, OUTPUTS) + 1)](
        query, up, cos, sin, out, rows, heads, nope, latent, up_rows,
        M=ROWS, OUT=OUTPUTS, BK=INNER, ROPE=rope, RP=triton.next_power_of_2(rope // 2), num_warps=4,
        **chain(query.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _brought_out(
    x, up, out, rows, heads, nope, latent, values, up_rows,
    M: tl.constexpr, OUT: tl.constexpr, BK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chained(CHAINED)
    head = tl.program_id(0)
    m, column = tl.arange(0, M), tl.program_id(1) * OUT + tl.arange(0, OUT)
    live, inside = (m < rows)[:, None], column < values
    at = x + ((m * heads + head) * latent)[:, None]
    row = (head * up_rows + nope + column).to(tl.int64)
    acc = tl.zeros([M, OUT], tl.float32)
    for first in range(0, latent, BK):
        k = first + tl.arange(0, BK)
        here = (k < latent)[None, :]
        gathered = tl.load(at + k[None, :], mask=live & here, other=0.0)
        w = tl.load(up + row[:, None] * latent + k[None, :], mask=inside[:, None] & here, other=0.0)
        acc = dot(gathered, tl.trans(w), acc)
    to = out + ((m * heads + head) * values)[:, None] + column[None, :]
    tl.store(to, to_bf16(acc).to(tl.bfloat16), mask=live & inside[None, :])


def brought_out(gathered: Tensor, up: Tensor, nope: int) -> Tensor:
    """gathered [R, H, c] bf16; up [H, nope + v, c] bf16 -> [R, H * v] bf16: what the heads give."""
    rows, heads, latent = gathered.shape
    values = up.shape[1] - nope
    out = torch.empty(rows, heads * values, dtype=torch.bfloat16, device=gathered.device)
    _brought_out[(heads, triton.cdiv(values, OUTPUTS))](
        gathered, up, out, rows, heads, nope, latent, values, up.shape[1], M=ROWS, OUT=OUTPUTS, BK=2 * INNER,
        num_warps=4, **chain(gathered.device),
    )  # fmt: skip
    return out


@triton.jit
def _e4m3_code(value):
    """fp32, |value| <= 448 -> its e4m3 code, int32."""
    value = _to_e4m3(value)
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits >> 20) & 0x7FF) - 960  # exponents begin at 2^-6, which has the number 1
    small = (tl.abs(value) * 512.0).to(tl.int32)
    return tl.where(tl.abs(value) < 0.015625, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _keep_row(
    joint, norm, cos, sin, places, pool, latent, row_size, eps,
    CP: tl.constexpr, ROPE: tl.constexpr, RP: tl.constexpr, PACKED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chained(CHAINED)
    row = tl.program_id(0)
    place = tl.load(places + row).to(tl.int64)
    if place >= 0:
        c, r = tl.arange(0, CP), tl.arange(0, RP)
        live, turns = c < latent, r < ROPE
        at = joint + row * (latent + ROPE)
        y = to_bf16(tl.load(at + c, mask=live, other=0.0))
        y = to_bf16(rms(y, tl.load(norm + c, mask=live, other=0.0), latent, eps))
        key = to_bf16(tl.load(at + latent + r, mask=turns, other=0.0))
        key = to_bf16(turned(key, cos, sin, row, ROPE, ROPE, RP)).to(tl.bfloat16)
        to = pool + place * row_size
        if PACKED:
            groups = y.reshape(CP // CODES, CODES)
            scale = tl.div_rn(tl.max(tl.abs(groups), 1), tl.full([CP // CODES], 448.0, tl.float32))
            scale = tl.where(scale > 0.0, scale, 1.0)
            code = tl.div_rn(groups, tl.broadcast_to(scale[:, None], groups.shape))
            code = _e4m3_code(tl.minimum(tl.maximum(code, -448.0), 448.0)).reshape(CP)
            tl.store(to + c, code.to(tl.uint8), mask=live)
            g = tl.arange(0, CP // CODES)
            count = tl.cdiv(latent, CODES)
            tl.store((to + latent).to(tl.pointer_type(tl.float32)) + g, scale, mask=g < count)
            tl.store((to + latent + 4 * count).to(tl.pointer_type(tl.bfloat16)) + r, key, mask=turns)
        else:
            tl.store(to + c, y.to(tl.bfloat16), mask=live)
            tl.store(to + latent + r, key, mask=turns)


def keep_rows(
    joint: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, places: Tensor, pool: Tensor
) -> None:  # fmt: skip
    """joint [R, c + r] fp32; norm [c]; places [R] int64, -1 for a token that another rank keeps; pool [.., c + r] bf16,
    or [.., bytes of a row] uint8 (`kernels.latent_rows`): writes the rows of the tokens."""
    latent, rope = len(norm), 2 * cos.shape[1]
    _keep_row[(len(joint),)](
        joint, norm, cos, sin, places, pool, latent, pool.shape[1], eps, CP=max(GROUP, triton.next_power_of_2(latent)),
        ROPE=rope, RP=triton.next_power_of_2(rope), PACKED=pool.dtype is torch.uint8, num_warps=4,
        **chain(joint.device),
    )  # fmt: skip


@triton.jit
def _keep_key(
    x, weight, bias, cos, sin, places, pool, width, eps,
    P: tl.constexpr, ROPE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chained(CHAINED)
    row = tl.program_id(0)
    place = tl.load(places + row).to(tl.int64)
    if place >= 0:
        c = tl.arange(0, P)
        live = c < width
        y = to_bf16(tl.load(x + row * width + c, mask=live, other=0.0))
        y = tl.where(live, y - tl.sum(y, 0) / width, 0.0)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / width + eps) * tl.load(weight + c, mask=live, other=0.0)
        y = to_bf16(y + tl.load(bias + c, mask=live, other=0.0))
        y = to_bf16(turned(y, cos, sin, row, ROPE, ROPE, P))
        tl.store(pool + place * width + c, y.to(tl.bfloat16), mask=live)


def keep_keys(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, cos: Tensor, sin: Tensor, places: Tensor, pool: Tensor
) -> None:  # fmt: skip
    """x [R, d] fp32, a product -> its layer norm, the first r rotated, into the rows `places` of pool [.., d] bf16."""
    width = x.shape[1]
    _keep_key[(len(x),)](
        x, weight, bias, cos, sin, places, pool, width, eps, P=max(32, triton.next_power_of_2(width)),
        ROPE=2 * cos.shape[1], num_warps=1, **chain(x.device),
    )  # fmt: skip


@triton.jit
def _index_query(x, cos, sin, out, heads, width, P: tl.constexpr, ROPE: tl.constexpr, CHAINED: tl.constexpr):
    chained(CHAINED)
    row, head = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, P)
    live, at = c < width, (row * heads + head) * width + c
    y = to_bf16(tl.load(x + at, mask=live, other=0.0))
    tl.store(out + at, to_bf16(turned(y, cos, sin, row, ROPE, ROPE, P)).to(tl.bfloat16), mask=live)


def index_query(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """x [R, heads * d] fp32, a product -> [R, heads, d] bf16, the first r of each head rotated."""
    rows, width = len(x), x.shape[1] // heads
    out = torch.empty(rows, heads, width, dtype=torch.bfloat16, device=x.device)
    _index_query[(rows, heads)](
        x, cos, sin, out, heads, width, P=max(32, triton.next_power_of_2(width)), ROPE=2 * cos.shape[1], num_warps=1,
        **chain(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _index_scores(
    query, weight, tables, visible, keys, out, heads, width, table_size, page_size, most, least, factor,
    HP: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, FILLS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chained(CHAINED)
    row = tl.program_id(0)
    count = tl.load(visible + row)
    if count > least:
        h, c = tl.arange(0, HP), tl.arange(0, DP)
        known = (h < heads)[:, None] & (c < width)[None, :]
        q = tl.load(query + (row * heads + h)[:, None] * width + c[None, :], mask=known, other=0.0)
        w = tl.load(weight + row * heads + h, mask=h < heads, other=0.0) * factor
        to = out + row.to(tl.int64) * most
        for block in range(tl.program_id(1), tl.cdiv(count, BLOCK), tl.num_programs(1)):
            s = block * BLOCK + tl.arange(0, BLOCK)
            seen = s < count
            page = tl.load(tables + row * table_size + s // page_size, mask=seen, other=0)
            at = (page * page_size + s % page_size)[:, None] * width + c[None, :]
            key = tl.load(keys + at, mask=seen[:, None] & (c < width)[None, :], other=0.0)
            dots = dot(q, tl.trans(key), tl.zeros([HP, BLOCK], tl.float32))
            tl.store(to + s, tl.sum(w[:, None] * tl.maximum(dots, 0.0), 0), mask=seen)
        if FILLS:
            for block in range(tl.program_id(1), tl.cdiv(most - count, BLOCK), tl.num_programs(1)):
                s = count + block * BLOCK + tl.arange(0, BLOCK)
                tl.store(to + s, tl.full([BLOCK], float("-inf"), tl.float32), mask=s < most)


def index_scores(
    query: Tensor, weight: Tensor, tables: Tensor, visible: Tensor, keys: Tensor, out: Tensor, page_size: int,
    least: int, fills: bool,
) -> None:  # fmt: skip
    """query [R, heads, d] bf16; weight [R, heads] fp32, not scaled yet; tables [R, pages] int64; visible [R] int32: how
    many rows of its context each row sees; keys [.., d] bf16 -> out [R, most] fp32, of rows that see more than
    `least`; `fills`: -inf behind what is seen."""
    rows, heads, width = query.shape
    _index_scores[(rows, PROGRAMS)](
        query, weight, tables, visible, keys, out, heads, width, tables.shape[1], page_size, out.shape[1], least,
        width**-0.5 * heads**-0.5, HP=max(16, triton.next_power_of_2(heads)), DP=max(16, triton.next_power_of_2(width)),
        BLOCK=KEYS, FILLS=fills, num_warps=4, **chain(query.device),
    )  # fmt: skip


@triton.jit
def _swiglu(x, out, width, limit, SIZE: tl.constexpr, CHAINED: tl.constexpr):
    chained(CHAINED)
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    live = c < width
    gate = tl.minimum(to_bf16(tl.load(x + row * 2 * width + c, mask=live, other=0.0)), limit)
    up = to_bf16(tl.load(x + (row * 2 + 1) * width + c, mask=live, other=0.0))
    value = gate / (1.0 + tl.exp(-gate)) * tl.maximum(tl.minimum(up, limit), -limit)
    tl.store(out + row * width + c, to_bf16(value).to(tl.bfloat16), mask=live)


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """gate_up [R, 2n] fp32, a product -> [R, n] bf16 (`kernels.swiglu`)."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=gate_up.device)
    _swiglu[(rows, triton.cdiv(width, 512))](gate_up, out, width, limit, SIZE=512, num_warps=4, **chain(gate_up.device))
    return out
