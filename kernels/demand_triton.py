"""Demand of a whole step on CUDA: what every layer's rows wanted, added to the lanes' books in one launch.

A program has a layer, whose places in the books nobody else touches, and takes the rows in order, so the sums do not
depend on when a program runs."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _demand(
    lanes, layers, wanted, scores, weights, missed, read, counts, mass, uses, totals, rows, all_lanes, all_layers,
    experts, light, K: tl.constexpr, KP: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    layer = tl.load(layers + place)
    k = tl.arange(0, KP)
    known = k < K
    kind = tl.arange(0, 8)
    for row in range(rows):
        at = (place * rows + row) * K + k
        lane = tl.load(lanes + row)
        expert = tl.load(wanted + at, mask=known, other=0)
        weight = tl.load(weights + at, mask=known, other=0.0)
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
        value = tl.where(kind == 0, K * 1.0, tl.zeros([8], tl.float32))
        value = tl.where(kind == 1, tl.sum(absent.to(tl.float32), 0), value)
        value = tl.where(kind == 2, tl.sum(weight, 0), value)
        value = tl.where(kind == 3, tl.sum(tl.where(absent, weight, 0.0), 0), value)
        value = tl.where(kind == 4, tl.sum(late.to(tl.float32), 0), value)
        value = tl.where(kind == 5, tl.sum(small.to(tl.float32), 0), value)
        value = tl.where(kind == 6, tl.sum(tl.where(late, weight, 0.0), 0), value)
        value = tl.where(kind == 7, tl.sum(tl.where(small, weight, 0.0), 0), value)
        tl.store(totals + (place * rows + row) * 8 + kind, value)
        tl.debug_barrier()  # the next row may be of the same lane, and want the same expert


def add_demand(
    layers: Tensor, lanes: Tensor, wanted: Tensor, scores: Tensor, weights: Tensor, missed: Tensor, read: Tensor | None,
    counts: Tensor, mass: Tensor, uses: Tensor, light: float,
) -> Tensor:  # fmt: skip
    """layers [n] int64, each once; lanes [T] int64; wanted [n, T, k] int64, scores, weights fp32, missed, read bool
    alike; adds to counts, mass [lanes, layers, experts] and uses [3, lanes, layers, experts] fp32 -> [T, 8] fp32, what
    each row adds to its lane's totals (`tided.experts.tables.DemandTap`)."""
    n, rows, top_k = wanted.shape
    totals = torch.empty(n, rows, 8, device=wanted.device)
    _demand[(n,)](
        lanes.contiguous(), layers, wanted, scores, weights, missed, missed if read is None else read, counts, mass,
        uses, totals, rows, counts.shape[0], counts.shape[1], counts.shape[2], light, K=top_k,
        KP=triton.next_power_of_2(top_k), READ=read is not None, num_warps=1,
    )  # fmt: skip
    return totals.sum(0)
