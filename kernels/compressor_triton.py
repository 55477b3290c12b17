"""Compressed rows and their index keys in a decode step, on CUDA (see `kernels.compressor`).

pool     a token's projections are kept beside its lane's recent ones, by position; its group is pooled and normed
append   behind the product that makes its key: both are rotated, rounded to their formats and written to the pages

A row that leaves its group open writes no page; the next token finds its projections. Rows of one lane in one pass take
each other's from the product itself, so none waits for another."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_triton import chain, chained
from kernels.device import RECENT_TOKENS
from kernels.rounding_triton import (
    FIRST_POSITION,
    FIRST_ROW,
    PAGES,
    POSITION,
    RECENT,
    ROW_FIELDS,
    fp4_e4m3_groups,
    fp4_ue8m0_groups,
    rms,
    split_sum,
    to_bf16,
    turned,
)


@triton.jit(do_not_specialize=["rows"])
def _compressor_pool(
    parts, meta, norm, latent, rows, width, eps, source, recent_tokens,
    RATIO: tl.constexpr, SPLIT: tl.constexpr, DP: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chained(CHAINED)
    row = tl.program_id(0)
    c = tl.arange(0, DP)
    there = c < width
    columns = width * (2 if RATIO > 1 else 1)
    position = tl.load(meta + row * ROW_FIELDS + POSITION)
    x = split_sum(parts, row, c, there, rows, columns, SPLIT, DP)
    if RATIO > 1:
        since = tl.load(meta + row * ROW_FIELDS + FIRST_POSITION)
        first = tl.load(meta + row * ROW_FIELDS + FIRST_ROW)
        recent = tl.load(meta + row * ROW_FIELDS + RECENT).to(tl.pointer_type(tl.float32))
        recent += source * recent_tokens * 2 * width
        gate = split_sum(parts, row, width + c, there, rows, columns, SPLIT, DP)
        at = recent + (position % recent_tokens) * 2 * width + c
        tl.store(at, x, mask=there)
        tl.store(at + width, gate, mask=there)
        top = gate
        for back in tl.static_range(1, RATIO):
            before = tl.maximum(position - back, 0)
            mine = there & (before >= since)
            other = first + before - since
            kept = recent + (before % recent_tokens) * 2 * width + width + c
            g = tl.where(
                before >= since, split_sum(parts, other, width + c, mine, rows, columns, SPLIT, DP),
                tl.load(kept, mask=there & (before < since), other=0.0),
            )  # fmt: skip
            top = tl.maximum(top, g)
        share = tl.exp(gate - top)
        total, x = share, x * share
        for back in tl.static_range(1, RATIO):
            before = tl.maximum(position - back, 0)
            mine, old = there & (before >= since), there & (before < since)
            other = first + before - since
            kept = recent + (before % recent_tokens) * 2 * width + c
            g = tl.where(
                before >= since, split_sum(parts, other, width + c, mine, rows, columns, SPLIT, DP),
                tl.load(kept + width, mask=old, other=0.0),
            )  # fmt: skip
            k = tl.where(
                before >= since, split_sum(parts, other, c, mine, rows, columns, SPLIT, DP),
                tl.load(kept, mask=old, other=0.0),
            )  # fmt: skip
            share = tl.exp(g - top)
            total += share
            x += k * share
        x = x / total
    x = to_bf16(rms(to_bf16(x), tl.load(norm + c, mask=there, other=0.0), width, eps))
    tl.store(latent + row * width + c, x.to(tl.bfloat16), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _compressor_append(
    parts, meta, latent, k_norm, cos, sin, page_rows, page_keys, rows, eps, page_size,
    RATIO: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr, DP: tl.constexpr, KEY: tl.constexpr,
    KP: tl.constexpr, ROPE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chained(CHAINED)
    row = tl.program_id(0)
    position = tl.load(meta + row * ROW_FIELDS + POSITION)
    if (position + 1) % RATIO == 0:
        number = position // RATIO
        pages = tl.load(meta + row * ROW_FIELDS + PAGES).to(tl.pointer_type(tl.int64))
        place = tl.load(pages + number // page_size) * page_size + number % page_size
        if tl.program_id(1) == 0:
            c = tl.arange(0, KP)
            there = c < KEY
            x = to_bf16(split_sum(parts, row, c, there, rows, KEY, SPLIT, KP))
            x = to_bf16(rms(x, tl.load(k_norm + c, mask=there, other=0.0), KEY, eps))
            x = to_bf16(turned(x, cos, sin, row, KEY, ROPE, KP))
            x = fp4_ue8m0_groups(x.reshape(KP // 32, 32)).reshape(KP)
            tl.store(page_keys + place * KEY + c, x.to(tl.bfloat16), mask=there)
        else:
            d = tl.arange(0, DP)
            live = d < WIDTH
            y = tl.load(latent + row * WIDTH + d, mask=live, other=0.0).to(tl.float32)
            y = to_bf16(turned(y, cos, sin, row, WIDTH, ROPE, DP))
            y = fp4_e4m3_groups(y.reshape(DP // 16, 16)).reshape(DP)
            tl.store(page_rows + place * WIDTH + d, y.to(tl.bfloat16), mask=live)


def pool(parts: Tensor, meta: Tensor, norm: Tensor, eps: float, source: int, ratio: int) -> Tensor:
    """parts [splits, R, d or 2 d] fp32 (rows, then gates); meta [R, ROW_FIELDS]; `source`: the place of the layer in
    what a lane keeps -> latent [R, d] bf16, of what a row's group would be if it ended here."""
    splits, rows, _ = parts.shape
    width = norm.numel()
    latent = torch.empty(rows, width, dtype=torch.bfloat16, device=parts.device)
    _compressor_pool[(rows,)](
        parts, meta, norm, latent, rows, width, eps, source, RECENT_TOKENS, RATIO=ratio, SPLIT=splits,
        DP=triton.next_power_of_2(width), num_warps=4, **chain(parts.device),
    )  # fmt: skip
    return latent


def append(
    parts: Tensor, meta: Tensor, latent: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, eps: float,
    page_rows: Tensor, page_keys: Tensor, page_size: int, ratio: int,
) -> None:  # fmt: skip
    """parts [splits, R, key] fp32 of the key's product; cos, sin [R, rope / 2] at the first position of a row's group;
    page_rows [.., d] and page_keys [.., key] bf16, `page_size` rows a page."""
    splits, rows, key = parts.shape
    width = latent.shape[1]
    _compressor_append[(rows, 2)](
        parts, meta, latent, k_norm, cos, sin, page_rows, page_keys, rows, eps, page_size, RATIO=ratio, SPLIT=splits,
        WIDTH=width, DP=max(16, triton.next_power_of_2(width)), KEY=key, KP=max(32, triton.next_power_of_2(key)),
        ROPE=2 * cos.shape[1], num_warps=4, **chain(parts.device),
    )  # fmt: skip
