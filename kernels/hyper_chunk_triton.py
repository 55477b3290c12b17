"""`hyper_triton.spread` for the rows of a prompt chunk, on CUDA: a program has some rows, and some columns of all
streams. Streams are read once and written once.

The products of the next mix run on the matrix units: streams are bf16, and a weight of 24 bits is three of bf16, so
every product is exact and sums are fp32, as in the decode step's form."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.hyper_triton import Mixed
from kernels.rounding_triton import INTERPRETED, to_bf16

ROWS, CHUNK = 16, 64  # of a program


@triton.jit
def _times(new, weight, acc):
    if INTERPRETED:
        return tl.dot(new, weight, acc, input_precision="ieee")
    else:
        x = new.to(tl.bfloat16)
        first = weight.to(tl.bfloat16)
        rest = weight - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(x, first, tl.dot(x, second, tl.dot(x, third, acc)))


@triton.jit(do_not_specialize=["rows"])
def _hyper_chunk(
    streams, output, post, comb, out, fn, partial, rows, hidden,
    S: tl.constexpr, GATES: tl.constexpr, GP: tl.constexpr, RP: tl.constexpr, CH: tl.constexpr,
    EXPAND: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """As `hyper_triton._hyper_spread`; partial [rows, chunks, GP]."""
    d, r = tl.program_id(1) * CH + tl.arange(0, CH), tl.program_id(0) * RP + tl.arange(0, RP)
    g, i = tl.arange(0, GP), tl.arange(0, S)
    row = r.to(tl.int64)
    known = r < rows
    inside = known[:, None] & (d < hidden)[None, :]
    acc, squares = tl.zeros([RP, GP], tl.float32), tl.zeros([RP], tl.float32)
    if EXPAND:
        y = to_bf16(tl.load(output + row[:, None] * hidden + d[None, :], mask=inside, other=0.0))
        old = tl.load(
            streams + (row[:, None, None] * S + i[None, :, None]) * hidden + d[None, None, :],
            mask=inside[:, None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
    for j in tl.static_range(S):
        if EXPAND:
            share = tl.load(comb + (row[:, None] * S + i[None, :]) * S + j, mask=known[:, None], other=0.0)
            new = tl.sum(share[:, :, None] * old, 1)
            new = to_bf16(new + tl.load(post + row * S + j, mask=known, other=0.0)[:, None] * y)
            tl.store(out + (row[:, None] * S + j) * hidden + d[None, :], new.to(tl.bfloat16), mask=inside)
        else:
            at = streams + (row[:, None] * S + j) * hidden + d[None, :]
            new = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if MIX:
            squares += tl.sum(new * new, 1)
            weight = tl.load(
                fn + g[None, :] * (S * hidden) + j * hidden + d[:, None],
                mask=(g < GATES)[None, :] & (d < hidden)[:, None], other=0.0,
            )  # fmt: skip
            acc = _times(new, weight, acc)
    if MIX:
        acc = tl.where((g == GATES)[None, :], squares[:, None], acc)
        at = partial + (row[:, None] * tl.num_programs(1) + tl.program_id(1)) * GP + g[None, :]
        tl.store(at, acc, mask=known[:, None])


def spread(streams: Tensor, output: Tensor | None, by: Mixed | None, fn: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """As `hyper_triton.spread`, for any number of rows; what it gives is for `hyper_triton.finish`."""
    rows, width, hidden = streams.shape
    chunks, gates = -(-hidden // CHUNK), width * (2 + width)
    padded = triton.next_power_of_2(gates + 1)
    out = streams if output is None else torch.empty_like(streams)
    partial = None if fn is None else torch.empty(rows, chunks, padded, device=streams.device)
    post, comb = (by.post, by.comb) if by is not None else (streams, streams)
    _hyper_chunk[(-(-rows // ROWS), chunks)](
        streams, streams if output is None else output, post, comb, out, streams if fn is None else fn,
        streams if partial is None else partial, rows, hidden, S=width, GATES=gates, GP=padded, RP=ROWS, CH=CHUNK,
        EXPAND=output is not None, MIX=fn is not None, num_warps=4,
    )  # fmt: skip
    return out, partial
