"""The router of a decode step on CUDA, one launch behind the product with the gate (see `kernels.router`): scores, the
experts a token wants, those it gets from the routable ones, their weights and slots, and which wishes were missed.

Of equal scores the lower expert is picked first. All of a row's wish goes to places of its own, so what is recorded as
demand later never depends on another row."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_triton import chain, chained
from kernels.rounding_triton import split_sum


@dataclass(frozen=True)
class Routed:
    """As `router.Routing`, [R, k] each; slots int32, of `ids`, -1 for an expert that has none."""

    ids: Tensor
    weights: Tensor
    slots: Tensor
    wanted: Tensor
    wanted_scores: Tensor
    wanted_weights: Tensor
    missed: Tensor


@triton.jit
def _log1p(y):
    """log(1 + y) for y > 0 to the last bits, which the machine's own logarithm misses beside 1: of y itself where it is
    small, else of 1 + y as a power of two and a rest in [0.75, 1.5)."""
    bits = (1.0 + y).to(tl.int32, bitcast=True)
    power = tl.where(y < 0.5, 0, (bits - 0x3F400000) >> 23)
    rest = tl.where(y < 0.5, y, (bits - (power << 23)).to(tl.float32, bitcast=True) - 1.0)
    s = tl.div_rn(rest, 2.0 + rest)
    square = s * s
    series = 1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9 + square * (1.0 / 11))))
    return 2.0 * s + 2.0 * s * square * series + power.to(tl.float32) * 0.6931471805599453


@triton.jit
def _best(biased, score, expert, EP: tl.constexpr):
    """The likeliest, the lowest of equals: its number and its score; and what is left."""
    best = tl.min(tl.where(biased == tl.max(biased, 0), expert, EP), 0)
    return best, tl.sum(tl.where(expert == best, score, 0.0), 0), tl.where(expert == best, float("-inf"), biased)


@triton.jit(do_not_specialize=["rows"])
def _route(
    parts, bias, routable, slot_of, ids, weights, slots, wanted, wanted_scores, wanted_weights, missed,
    rows, experts, bias_stride, routable_stride, route_scale, K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr,
    SPLIT: tl.constexpr, SIGMOID: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chained(CHAINED)
    row = tl.program_id(0)
    expert, k = tl.arange(0, EP), tl.arange(0, KP)
    there = expert < experts
    bias += row * bias_stride
    routable += row * routable_stride
    z = split_sum(parts, row, expert, there, rows, experts, SPLIT, EP)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-z))
    else:
        score = tl.sqrt_rn(tl.where(z > 20.0, z, _log1p(tl.exp(tl.minimum(z, 20.0)))))
    biased = tl.where(there, score + tl.load(bias + expert, mask=there, other=0.0), float("-inf"))
    here = tl.load(routable + expert, mask=there, other=0) != 0
    left, left_here = biased, tl.where(here, biased, float("-inf"))
    wish, wish_score, id_, id_score = (
        tl.zeros([KP], tl.int32),
        tl.zeros([KP], tl.float32),
        tl.zeros([KP], tl.int32),
        tl.zeros([KP], tl.float32),
    )
    for i in tl.static_range(K):
        best, value, left = _best(left, score, expert, EP)
        wish, wish_score = tl.where(k == i, best, wish), tl.where(k == i, value, wish_score)
        best, value, left_here = _best(left_here, score, expert, EP)
        id_, id_score = tl.where(k == i, best, id_), tl.where(k == i, value, id_score)
    at, known = row * K + k, k < K
    tl.store(wanted + at, wish.to(tl.int64), mask=known)
    tl.store(wanted_scores + at, wish_score, mask=known)
    tl.store(wanted_weights + at, wish_score / (tl.sum(wish_score, 0) + 1e-20), mask=known)
    tl.store(missed + at, tl.load(routable + wish, mask=known, other=1) == 0, mask=known)
    tl.store(weights + at, id_score / (tl.sum(id_score, 0) + 1e-20) * route_scale, mask=known)
    tl.store(ids + at, id_.to(tl.int64), mask=known)
    tl.store(slots + at, tl.load(slot_of + id_, mask=known, other=-1), mask=known)


def route(
    parts: Tensor, bias: Tensor, routable: Tensor, slot_of: Tensor, top_k: int, scale: float, out: Routed,
    sigmoid: bool = False,
) -> None:  # fmt: skip
    """parts [splits, R, E] fp32 of the gate's product; bias, and routable, bool: [E], or [R, E] where rows differ;
    slot_of [E] int32 -> `out`. At least top_k experts must be routable: a resident set keeps that floor. Scores are
    sqrt(softplus), or `sigmoid`."""
    splits, rows, experts = parts.shape
    strides = (0 if one.dim() == 1 else experts for one in (bias, routable))
    _route[(rows,)](
        parts, bias, routable, slot_of, out.ids, out.weights, out.slots, out.wanted, out.wanted_scores,
        out.wanted_weights, out.missed, rows, experts, *strides, scale, K=top_k, KP=triton.next_power_of_2(top_k),
        EP=triton.next_power_of_2(experts), SPLIT=splits, SIGMOID=sigmoid, num_warps=4, **chain(parts.device),
    )  # fmt: skip


def room(*sizes: int, device: torch.device) -> Routed:
    """Memory for picks of these sizes: [rows, top_k], or [layers, rows, top_k]."""

    def of(dtype: torch.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    return Routed(
        ids=of(torch.int64),
        weights=of(torch.float32),
        slots=of(torch.int32),
        wanted=of(torch.int64),
        wanted_scores=of(torch.float32),
        wanted_weights=of(torch.float32),
        missed=of(torch.bool),
    )
