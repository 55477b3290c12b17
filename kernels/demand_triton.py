"""Demand of a whole step on CUDA: what every layer's rows wanted, added to the lanes' books in one launch, and copied
for whoever asks later. Which rows count may be told in the device's memory, so that the launch can be in a graph.

A program has a layer, whose places in the books nobody else touches, and takes the rows in order; the last one to end
adds up what all layers add to the lanes' totals. So no sum depends on when a program runs."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows", "lane_stride", "all_lanes", "light"])
def _demand(
    lanes, layers, wanted, scores, weights, missed, read, counts, mass, uses, totals, added, kept_wanted, kept_weights,
    told, ended, rows, lane_stride, all_lanes, all_layers, experts, light,
    K: tl.constexpr, KP: tl.constexpr, NP: tl.constexpr, READ: tl.constexpr,
    TOLD: tl.constexpr,
):  # fmt: skip
    """told [1 + rows], with TOLD: where wishes are kept, and whether each row counts."""
    place = tl.program_id(0)
    layer = tl.load(layers + place)
    k = tl.arange(0, KP)
    kind = tl.arange(0, 8)
    if TOLD:
        turn = tl.load(told) * tl.num_programs(0) * rows * K
        kept_wanted += turn
        kept_weights += turn
    for row in range(rows):
        at = (place * rows + row) * K + k
        known = k < K
        if TOLD:
            known = known & (tl.load(told + 1 + row) != 0)
        lane = tl.load(lanes + row * lane_stride)
        expert = tl.load(wanted + at, mask=known, other=0)
        weight = tl.load(weights + at, mask=known, other=0.0)
        tl.store(kept_wanted + at, expert, mask=k < K)
        tl.store(kept_weights + at, weight, mask=k < K)
        absent = (tl.load(missed + at, mask=known, other=0) != 0) & known
        late = absent & (k < 0)
        if READ:
            late = (tl.load(read + at, mask=known, other=0) != 0) & known
        small = absent & ~late & (weight < light)
        book = (lane * all_layers + layer) * experts + expert
        tl.store(counts + book, tl.load(counts + book, mask=known, other=0.0) + 1.0, mask=known)
        score = tl.load(scores + at, mask=known, other=0.0)
        tl.store(mass + book, tl.load(mass + book, mask=known, other=0.0) + score, mask=known)
        part = all_lanes * all_layers * experts
        tl.store(uses + book, tl.load(uses + book, mask=known, other=0.0) + 1.0, mask=known)
        gone = uses + part + book
        tl.store(gone, tl.load(gone, mask=absent, other=0.0) + weight, mask=absent)
        waited = uses + 2 * part + book
        tl.store(waited, tl.load(waited, mask=late, other=0.0) + weight, mask=late)
        value = tl.where(kind == 0, tl.sum(known.to(tl.float32), 0), tl.zeros([8], tl.float32))
        value = tl.where(kind == 1, tl.sum(absent.to(tl.float32), 0), value)
        value = tl.where(kind == 2, tl.sum(weight, 0), value)
        value = tl.where(kind == 3, tl.sum(tl.where(absent, weight, 0.0), 0), value)
        value = tl.where(kind == 4, tl.sum(late.to(tl.float32), 0), value)
        value = tl.where(kind == 5, tl.sum(small.to(tl.float32), 0), value)
        value = tl.where(kind == 6, tl.sum(tl.where(late, weight, 0.0), 0), value)
        value = tl.where(kind == 7, tl.sum(tl.where(small, weight, 0.0), 0), value)
        tl.store(added + (place * rows + row) * 8 + kind, value)
        tl.debug_barrier()  # the next row may be of the same lane, and want the same expert
    if tl.atomic_add(ended, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        n = tl.arange(0, NP)
        for row in range(rows):
            at = added + (n * rows + row)[:, None] * 8 + kind[None, :]
            each = tl.load(at, mask=(n < tl.num_programs(0))[:, None], other=0.0, cache_modifier=".cg")
            book = totals + tl.load(lanes + row * lane_stride) * 8 + kind
            tl.store(book, tl.load(book) + tl.sum(each, 0).to(tl.float64))
            tl.debug_barrier()
        tl.store(ended, 0)


@lru_cache
@torch.inference_mode(False)  # whoever asks first; all may write to it
def _ended(device: torch.device) -> Tensor:
    """Zero, and zero again after every launch. Launches that use it run one after another."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def add_demand(
    layers: Tensor, lanes: Tensor, wanted: Tensor, scores: Tensor, weights: Tensor, missed: Tensor, read: Tensor | None,
    counts: Tensor, mass: Tensor, uses: Tensor, totals: Tensor, light: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """layers [n] int64, each once; lanes [T] int64; wanted [n, T, k] int64, scores, weights fp32, missed, read bool
    alike; adds to counts, mass [lanes, layers, experts], uses [3, lanes, layers, experts] fp32 and totals [lanes, 8]
    fp64 (`tided.experts.tables.DemandTap`) -> wanted and weights, copied."""
    n, rows, _ = wanted.shape
    added = torch.empty(n, rows, 8, device=wanted.device)
    copies = torch.empty_like(wanted), torch.empty_like(weights)
    seen, books = (lanes, layers, wanted, scores, weights, missed), (counts, mass, uses, totals)
    _launch(seen, missed if read is None else read, books, light, copies, added, None, read is not None)
    return copies


def add_some_demand(
    seen: tuple[Tensor, ...], books: tuple[Tensor, ...], light: float, told: Tensor, kept: tuple[Tensor, Tensor],
    added: Tensor,
) -> None:  # fmt: skip
    """As `add_demand`, of the rows that are told, for a graph. `seen`: layers, lanes, wanted, scores, weights, missed;
    `books`: counts, mass, uses, totals. told [1 + T] int64: in which of the kept places wanted and weights are copied
    to, `kept` [places, n, T, k] each, which may be pinned memory of the host, those of rows that do not count as expert
    0 without weight; and of each row whether it counts. added [n, T, 8] fp32: to write over."""
    layers, lanes, *rest = seen
    _launch((lanes, layers, *rest), seen[5], books, light, kept, added, told, False)


def _launch(
    seen: tuple[Tensor, ...], read: Tensor, books: tuple[Tensor, ...], light: float, kept: tuple[Tensor, Tensor],
    added: Tensor, told: Tensor | None, reads: bool,
) -> None:  # fmt: skip
    lanes, wanted, counts = seen[0], seen[2], books[0]
    n, rows, top_k = wanted.shape
    _demand[(n,)](
        *seen, read, *books, added, *kept, lanes if told is None else told, _ended(wanted.device), rows,
        lanes.stride(0), *counts.shape, light, K=top_k, KP=triton.next_power_of_2(top_k), NP=triton.next_power_of_2(n),
        READ=reads, TOLD=told is not None, num_warps=1,
    )  # fmt: skip
