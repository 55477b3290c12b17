"""What attention makes of a layer's input in a decode step, on CUDA: the query's latent and the row of the window, one
launch behind the one product that both are columns of.

    query   bf16, norm, bf16, then as activation: all that reads it is FP8
    row     bf16, norm, bf16, rotation, bf16, then e4m3 as the window holds it"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_triton import chain, chained
from kernels.rounding_triton import POSITION, ROW_FIELDS, WINDOWS, fp8_groups, rms, split_sum, to_bf16, turned


@triton.jit(do_not_specialize=["rows"])
def _latents(
    parts, q_norm, kv_norm, cos, sin, query, window, rows, rank, width, eps,
    SPLIT: tl.constexpr, QP: tl.constexpr, DP: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    FIRST: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chained(CHAINED)
    row = tl.program_id(0)
    if tl.program_id(1) + FIRST == 0:
        c = tl.arange(0, QP)
        there = c < rank
        x = to_bf16(split_sum(parts, row, c, there, rows, rank + width, SPLIT, QP))
        x = to_bf16(rms(x, tl.load(q_norm + c, mask=there, other=0.0), rank, eps))
        x = fp8_groups(x.reshape(QP // 32, 32)).reshape(QP)
        tl.store(query + row * rank + c, x.to(tl.bfloat16), mask=there)
    else:
        d = tl.arange(0, DP)
        live = d < width
        y = to_bf16(split_sum(parts, row, rank + d, live, rows, rank + width, SPLIT, DP))
        y = to_bf16(rms(y, tl.load(kv_norm + d, mask=live, other=0.0), width, eps))
        y = to_bf16(turned(y, cos, sin, row, WIDTH, ROPE, DP))
        y = fp8_groups(y.reshape(DP // 32, 32)).reshape(DP)
        tl.store(window + row * width + d, y.to(tl.bfloat16), mask=live)


def latents(
    parts: Tensor, q_norm: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, eps: float, window: Tensor
) -> Tensor:
    """parts [splits, R, q rank + d] fp32; cos, sin [R, rope / 2]; writes window [R, d] bf16 -> query latent [R, q rank]
    bf16."""
    splits, rows, _ = parts.shape
    rank, width = q_norm.numel(), kv_norm.numel()
    query = torch.empty(rows, rank, dtype=torch.bfloat16, device=parts.device)
    _latents[(rows, 2)](
        parts, q_norm, kv_norm, cos, sin, query, window, rows, rank, width, eps, SPLIT=splits,
        QP=max(32, triton.next_power_of_2(rank)), DP=max(32, triton.next_power_of_2(width)), WIDTH=width,
        ROPE=2 * cos.shape[-1], FIRST=0, num_warps=4, **chain(parts.device),
    )  # fmt: skip
    return query


def normed(parts: Tensor, norm: Tensor, eps: float) -> Tensor:
    """parts [splits, R, n] fp32 -> [R, n] bf16: what `latents` does to the query's columns."""
    splits, rows, width = parts.shape
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=parts.device)
    _latents[(rows, 1)](
        parts, norm, norm, norm, norm, out, out, rows, width, 0, eps, SPLIT=splits,
        QP=max(32, triton.next_power_of_2(width)), DP=32, WIDTH=32, ROPE=2, FIRST=0, num_warps=8,
        **chain(parts.device),
    )  # fmt: skip
    return out


def window_row(parts: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, eps: float, window: Tensor) -> None:
    """parts [splits, R, d] fp32 -> window [R, d] bf16: what `latents` does to the row's columns."""
    splits, rows, width = parts.shape
    _latents[(rows, 1)](
        parts, norm, norm, cos, sin, window, window, rows, 0, width, eps, SPLIT=splits, QP=32,
        DP=max(32, triton.next_power_of_2(width)), WIDTH=width, ROPE=2 * cos.shape[-1], FIRST=1, num_warps=4,
        **chain(parts.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _window_keep(meta, held, rows, width, window, DP: tl.constexpr, CHAINED: tl.constexpr):
    chained(CHAINED)
    row, layer = tl.program_id(0), tl.program_id(1)
    position = tl.load(meta + row * ROW_FIELDS + POSITION)
    ring = tl.load(meta + row * ROW_FIELDS + WINDOWS).to(tl.pointer_type(tl.bfloat16))
    c = tl.arange(0, DP)
    value = tl.load(held + (layer.to(tl.int64) * rows + row) * width + c, mask=c < width)
    tl.store(ring + (layer.to(tl.int64) * window + position % window) * width + c, value, mask=c < width)


def keep_rows(meta: Tensor, held: Tensor, window: int) -> None:
    """held [layers, R, d] bf16, the new rows of all layers, into the rings of their lanes, once nothing reads what they
    replace any more. meta [R, ROW_FIELDS]."""
    layers, rows, width = held.shape
    _window_keep[(rows, layers)](
        meta, held, rows, width, window, DP=triton.next_power_of_2(width), num_warps=1, **chain(held.device)
    )
