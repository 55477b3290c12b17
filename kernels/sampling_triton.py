"""The likeliest token of each row on CUDA, one launch: the lowest id among equals, -1 where any logit is no number.

A row has several programs; the last one to end compares what all found."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS, SIZE = 16, 2048  # of a row; logits that a program looks at together


@triton.jit
def _likeliest(logits, best, at, ended, ids, width, P: tl.constexpr, N: tl.constexpr):
    """best, at [rows, P]: a program's largest, NaN where something is no number, and where it first is."""
    row, program = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, N)
    top, place = tl.full([N], float("-inf"), tl.float32), tl.full([N], 0x7FFFFFFF, tl.int32)
    strange = tl.zeros([N], tl.int32)
    for first in range(program * N, width, P * N):
        there = first + column < width
        value = tl.load(logits + row.to(tl.int64) * width + first + column, mask=there, other=0.0)
        strange += (there & ~(tl.abs(value) < float("inf"))).to(tl.int32)
        higher = there & (value > top)  # a column's first of equals stays
        place = tl.where(higher, first + column, place)
        top = tl.where(higher, value, top)
    highest = tl.max(top, 0)
    tl.store(best + row * P + program, tl.where(tl.sum(strange, 0) > 0, float("nan"), highest))
    tl.store(at + row * P + program, tl.min(tl.where(top == highest, place, 0x7FFFFFFF), 0))
    tl.debug_barrier()
    if tl.atomic_add(ended + row, 1, sem="acq_rel") == P - 1:
        every = tl.arange(0, P)
        found = tl.load(best + row * P + every, cache_modifier=".cg")
        places = tl.load(at + row * P + every, cache_modifier=".cg")
        wrong = tl.sum((found != found).to(tl.int32), 0) > 0
        first = tl.min(tl.where(found == tl.max(found, 0), places, 0x7FFFFFFF), 0)
        tl.store(ids + row, tl.where(wrong, -1, first).to(tl.int64))
        tl.store(ended + row, 0)


@lru_cache
def _ended(device: torch.device, rows: int) -> Tensor:
    """Zeros, and zeros again after every launch. Launches that use them run one after another."""
    return torch.zeros(rows, dtype=torch.int32, device=device)


def likeliest(logits: Tensor) -> Tensor:
    """logits [R, V] fp32, contiguous -> [R] int64."""
    rows, width = logits.shape
    best = torch.empty(rows, PROGRAMS, device=logits.device)
    at, ids = best.new_empty(rows, PROGRAMS, dtype=torch.int32), best.new_empty(rows, dtype=torch.int64)
    _likeliest[(rows, PROGRAMS)](
        logits, best, at, _ended(logits.device, rows), ids, width, P=PROGRAMS, N=SIZE, num_warps=4
    )
    return ids
