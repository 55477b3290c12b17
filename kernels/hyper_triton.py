"""Hyper-connections of a decode step on CUDA, two launches a sub-layer (see `kernels.hyper` for what they mean).

spread   the output of a sub-layer is written to the streams (`expand`), and each program takes its part of the products
         that the next mix is made of: every stream is read once
finish   the parts become pre, post and comb (Sinkhorn in registers), and the streams, read with the `pre` of the
         sub-layer before, become its normed input, as it is and rounded as activation

Sums do not depend on the number of rows: a tile always has room for all of them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_triton import chain, chained
from kernels.rounding_triton import fp8_groups, rms, to_bf16

MAX_ROWS = 16
CHUNK = 32  # of the hidden size, a program's


@triton.jit(do_not_specialize=["rows"])
def _hyper_spread(
    streams, output, post, comb, out, fn, partial, rows, hidden,
    S: tl.constexpr, GATES: tl.constexpr, GP: tl.constexpr, RP: tl.constexpr, CH: tl.constexpr,
    EXPAND: tl.constexpr, MIX: tl.constexpr, RANKS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """streams, out [rows, S, hidden] bf16; output [RANKS, rows, hidden] fp32; partial [rows, chunks, GP]: GATES
    products and the sum of squares."""
    chained(CHAINED)
    d = tl.program_id(0) * CH + tl.arange(0, CH)
    r, g = tl.arange(0, RP), tl.arange(0, GP)
    inside = (r < rows)[:, None] & (d < hidden)[None, :]
    acc, squares = tl.zeros([RP, GP], tl.float32), tl.zeros([RP], tl.float32)
    if EXPAND:
        at = output + r[:, None] * hidden + d[None, :]
        y = tl.load(at, mask=inside, other=0.0)
        for rank in tl.static_range(1, RANKS):
            y += tl.load(at + rank * rows * hidden, mask=inside, other=0.0)
        y = to_bf16(y)
    for j in tl.static_range(S):
        if EXPAND:
            new = tl.load(post + r * S + j, mask=r < rows, other=0.0)[:, None] * y
            for i in tl.static_range(S):
                old = tl.load(streams + (r[:, None] * S + i) * hidden + d[None, :], mask=inside, other=0.0)
                share = tl.load(comb + (r * S + i) * S + j, mask=r < rows, other=0.0)
                new += share[:, None] * old.to(tl.float32)
            new = to_bf16(new)
            tl.store(out + (r[:, None] * S + j) * hidden + d[None, :], new.to(tl.bfloat16), mask=inside)
        else:
            at = streams + (r[:, None] * S + j) * hidden + d[None, :]
            new = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if MIX:
            squares += tl.sum(new * new, 1)
            weight = tl.load(
                fn + g[None, :] * (S * hidden) + j * hidden + d[:, None],
                mask=(g < GATES)[None, :] & (d < hidden)[:, None], other=0.0,
            )  # fmt: skip
            acc = tl.dot(new, weight, acc, input_precision="ieee")
    if MIX:
        acc = tl.where((g == GATES)[None, :], squares[:, None], acc)
        at = partial + (r[:, None] * tl.num_programs(0) + tl.program_id(0)) * GP + g[None, :]
        tl.store(at, acc, mask=(r < rows)[:, None])


@triton.jit
def _hyper_finish(
    partial, scale, base, pre, post, comb, streams, pre_in, norm, plain, rounded, hidden, chunks, iterations,
    eps, norm_eps,
    S: tl.constexpr, GATES: tl.constexpr, GP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
    MIX: tl.constexpr, NORM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A row has two programs: one makes its mix, the other its input, which needs the mix before alone."""
    chained(CHAINED)
    row = tl.program_id(0)
    if MIX and tl.program_id(1) == 1:
        c, g = tl.arange(0, CP), tl.arange(0, GP)
        at = partial + (row * chunks + c)[:, None] * GP + g[None, :]
        raw = tl.sum(tl.load(at, mask=(c < chunks)[:, None], other=0.0), 0)
        squares = tl.sum(tl.where(g == GATES, raw, 0.0), 0)
        raw = raw * tl.rsqrt(squares / (S * hidden) + 1e-20)
        known = g < GATES
        raw = raw * tl.load(scale + g, mask=known, other=0.0) + tl.load(base + g, mask=known, other=0.0)
        gate = 1.0 / (1.0 + tl.exp(-raw))
        tl.store(pre + row * S + g, gate + eps, mask=g < S)
        tl.store(post + row * S + g - S, 2.0 * gate, mask=(g >= S) & (g < 2 * S))
        i, j = tl.arange(0, S), tl.arange(0, S)
        here = 2 * S + i[:, None] * S + j[None, :]
        mixed = tl.sum(tl.where(here[:, :, None] == g[None, None, :], raw[None, None, :], 0.0), 2)
        mixed = tl.exp(mixed - tl.max(mixed, 1)[:, None])
        mixed = mixed / tl.sum(mixed, 1)[:, None] + eps
        mixed = mixed / (tl.sum(mixed, 0) + eps)[None, :]
        for _ in range(iterations - 1):
            mixed = mixed / (tl.sum(mixed, 1) + eps)[:, None]
            mixed = mixed / (tl.sum(mixed, 0) + eps)[None, :]
        tl.store(comb + row * S * S + i[:, None] * S + j[None, :], mixed)
    else:
        d = tl.arange(0, DP)
        inside = d < hidden
        x = tl.zeros([DP], tl.float32)
        for i in tl.static_range(S):
            share = tl.load(pre_in + row * S + i)
            x += share * tl.load(streams + (row * S + i) * hidden + d, mask=inside, other=0.0).to(tl.float32)
        x = to_bf16(x)
        if NORM:
            x = to_bf16(rms(x, tl.load(norm + d, mask=inside, other=0.0), hidden, norm_eps))
        active = fp8_groups(x.reshape(DP // 32, 32)).reshape(DP)
        tl.store(rounded + row * hidden + d, active.to(tl.bfloat16), mask=inside)
        tl.store(plain + row * hidden + d, x.to(tl.bfloat16), mask=inside)


@dataclass(frozen=True)
class Mixer:
    """What a sub-layer mixes by: fn [GATES, S * D], scale and base [GATES], norm [D], all fp32."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    iterations: int
    eps: float
    norm: Tensor
    norm_eps: float


@dataclass(frozen=True)
class Mixed:
    """pre, post [R, S], comb [R, S, S] fp32; x [R, D] bf16 the sub-layer's normed input, rounded [R, D] bf16 the same
    as activation."""

    pre: Tensor
    post: Tensor
    comb: Tensor
    x: Tensor
    rounded: Tensor


def spread(streams: Tensor, output: Tensor | None, by: Mixed | None, fn: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """streams [R, S, D] bf16; output [ranks, R, D] fp32, parts of what the sub-layer gave that was mixed `by`, added in
    the order of the ranks (None: the streams stay); fn of the mix that comes next (None: none) -> the streams, new
    where there is an output, and the parts of the mix."""
    rows, width, hidden = streams.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows, a decode step has {MAX_ROWS} at most")
    chunks, gates = -(-hidden // CHUNK), width * (2 + width)
    padded = triton.next_power_of_2(gates + 1)
    out = streams if output is None else torch.empty_like(streams)
    partial = None if fn is None else torch.empty(rows, chunks, padded, device=streams.device)
    post, comb = (by.post, by.comb) if by is not None else (streams, streams)
    _hyper_spread[(chunks,)](
        streams, streams if output is None else output, post, comb, out, streams if fn is None else fn,
        streams if partial is None else partial, rows, hidden, S=width, GATES=gates, GP=padded, RP=MAX_ROWS, CH=CHUNK,
        EXPAND=output is not None, MIX=fn is not None, RANKS=1 if output is None else len(output), num_warps=4,
        **chain(streams.device),
    )  # fmt: skip
    return out, partial


def finish(partial: Tensor, streams: Tensor, pre: Tensor, mixer: Mixer) -> Mixed:
    """partial as `spread` gives it, of these streams [R, S, D]; pre [R, S] of the sub-layer before."""
    rows, width, hidden = streams.shape
    new = [torch.empty(rows, *shape, device=streams.device) for shape in ((width,), (width,), (width, width))]
    x, rounded = (torch.empty(rows, hidden, dtype=torch.bfloat16, device=streams.device) for _ in range(2))
    gates, padded, chunks = width * (2 + width), partial.shape[2], partial.shape[1]
    _hyper_finish[(rows, 2)](
        partial, mixer.scale, mixer.base, *new, streams, pre, mixer.norm, x, rounded, hidden, chunks, mixer.iterations,
        mixer.eps, mixer.norm_eps, S=width, GATES=gates, GP=padded, CP=triton.next_power_of_2(chunks),
        DP=max(32, triton.next_power_of_2(hidden)), MIX=True, NORM=True, num_warps=8, **chain(streams.device),
    )  # fmt: skip
    return Mixed(new[0], new[1], new[2], x, rounded)


def collapse(streams: Tensor, pre: Tensor, norm: Tensor | None, norm_eps: float) -> tuple[Tensor, Tensor]:
    """streams [R, S, D] bf16, pre [R, S] -> [R, D] bf16: `hyper.collapse`, rounded; normed where there is a norm; and
    the same rounded as activation."""
    rows, width, hidden = streams.shape
    x, rounded = (torch.empty(rows, hidden, dtype=torch.bfloat16, device=streams.device) for _ in range(2))
    _hyper_finish[(rows, 1)](
        streams, streams, streams, streams, streams, streams, streams, pre, streams if norm is None else norm, x,
        rounded, hidden, 1, 1, 0.0, norm_eps, S=width, GATES=1, GP=2, CP=1,
        DP=max(32, triton.next_power_of_2(hidden)), MIX=False, NORM=norm is not None, num_warps=8,
        **chain(streams.device),
    )  # fmt: skip
    return x, rounded
