"""Which tokens decode rows attend to, on CUDA, of contexts of any length: the best of a row's index scores, by several
programs a row (see `kernels.indexer.best`).

The border is found digit by digit of the scores' bits, 8 at a time from the top: programs count the digits of their
part, of entries that agree with the border so far, and add their counts, which are integers. Then each program counts
what it will take, and the next launch knows where each one's places begin. Of equal scores the older tokens are taken.
Rows that see no more than are chosen take all of them, without asking."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_triton import chain, chained
from kernels.indexer_triton import _ranked

PROGRAMS = 32  # of a row
SCANNED = 1024  # scores at a time
TURNS = 4
BINS = tl.constexpr(256)


@triton.jit
def _so_far(counts, wanted, TURN: tl.constexpr):
    """counts [TURNS, BINS] of a row -> the border's first TURN digits, and how many of `wanted` are still to be found
    among the entries that have them."""
    digit = tl.arange(0, BINS)
    border = tl.zeros([1], tl.int64)
    left = tl.zeros([1], tl.int32) + wanted
    for turn in tl.static_range(TURN):
        found = tl.load(counts + turn * BINS + digit)
        above = tl.sum(found, 0) - tl.cumsum(found, 0)
        hit = (above < left) & (above + found >= left)
        border = border * 256 + tl.sum(tl.where(hit, digit, 0), 0)
        left -= tl.sum(tl.where(hit, above, 0), 0)
    return tl.max(border, 0), tl.max(left, 0)


@triton.jit
def _digits(
    score, visible, counts, most, wanted, TURN: tl.constexpr, ALL: tl.constexpr, SIZE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """counts [R, ALL, BINS]: digit TURN of the entries whose digits before it are the border's."""
    chained(CHAINED)
    row = tl.program_id(0)
    length = tl.load(visible + row)
    counts += row * ALL * BINS
    if length > wanted:
        border, _ = _so_far(counts, wanted, TURN)
        score += row.to(tl.int64) * most
        for block in range(tl.program_id(1), tl.cdiv(length, SIZE), tl.num_programs(1)):
            s = block * SIZE + tl.arange(0, SIZE)
            rank = _ranked(tl.load(score + s, mask=s < length, other=float("-inf")))
            here = (s < length) & ((rank >> (32 - 8 * TURN)) == border)
            digit = tl.where(here, (rank >> (24 - 8 * TURN)) & 255, 0).to(tl.int32)
            found = tl.histogram(digit, BINS)
            number = tl.arange(0, BINS)
            found = found - tl.where(number == 0, SIZE - tl.sum(here.to(tl.int32), 0), 0)
            tl.atomic_add(counts + TURN * BINS + number, found, mask=found > 0, sem="relaxed")


@triton.jit
def _own(length, SIZE: tl.constexpr):
    """A program's part of a row, whole blocks: from, to."""
    span = tl.cdiv(tl.cdiv(length, SIZE), tl.num_programs(1)) * SIZE
    return tl.program_id(1) * span, tl.minimum(tl.program_id(1) * span + span, length)


@triton.jit
def _counted(score, visible, counts, parts, most, wanted, ALL: tl.constexpr, SIZE: tl.constexpr, CHAINED: tl.constexpr):
    """parts [R, programs, 2]: entries of a program's part above the border, and on it."""
    chained(CHAINED)
    row = tl.program_id(0)
    length = tl.load(visible + row)
    if length > wanted:
        border, _ = _so_far(counts + row * ALL * BINS, wanted, ALL)
        first, last = _own(length, SIZE)
        above, tied = tl.zeros([SIZE], tl.int32), tl.zeros([SIZE], tl.int32)
        for begin in range(first, last, SIZE):
            s = begin + tl.arange(0, SIZE)
            rank = _ranked(tl.load(score + row.to(tl.int64) * most + s, mask=s < last, other=float("-inf")))
            above += ((s < last) & (rank > border)).to(tl.int32)
            tied += ((s < last) & (rank == border)).to(tl.int32)
        at = parts + (row * tl.num_programs(1) + tl.program_id(1)) * 2
        tl.store(at, tl.sum(above, 0))
        tl.store(at + 1, tl.sum(tied, 0))


@triton.jit
def _placed(
    score, visible, counts, parts, tables, places, most, wanted, table_size, page_size,
    ALL: tl.constexpr, SIZE: tl.constexpr, CP: tl.constexpr, NP: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """places [R, wanted] int32 in the pool, ascending by token; -1 behind those of a short context."""
    chained(CHAINED)
    row, program = tl.program_id(0), tl.program_id(1)
    length = tl.load(visible + row)
    pages, to = tables + row * table_size, places + row.to(tl.int64) * wanted
    if length > wanted:
        border, room = _so_far(counts + row * ALL * BINS, wanted, ALL)
        n = tl.arange(0, NP)
        before = n < program
        at = parts + (row * tl.num_programs(1) + n) * 2
        tied_before = tl.sum(tl.load(at + 1, mask=before, other=0), 0)
        taken_before = tl.sum(tl.load(at, mask=before, other=0), 0) + tl.minimum(tied_before, room)
        first, last = _own(length, SIZE)
        for begin in range(first, last, SIZE):
            s = begin + tl.arange(0, SIZE)
            rank = _ranked(tl.load(score + row.to(tl.int64) * most + s, mask=s < last, other=float("-inf")))
            tied = (s < last) & (rank == border)
            order = tied_before + tl.cumsum(tied.to(tl.int32), 0)
            taken = ((s < last) & (rank > border)) | (tied & (order <= room))
            number = taken_before + tl.cumsum(taken.to(tl.int32), 0) - 1
            place = tl.load(pages + s // page_size, mask=taken, other=0) * page_size + s % page_size
            tl.store(to + number, place.to(tl.int32), mask=taken)
            taken_before += tl.sum(taken.to(tl.int32), 0)
            tied_before += tl.sum(tied.to(tl.int32), 0)
    elif program == 0:
        s = tl.arange(0, CP)
        seen = s < length
        place = tl.load(pages + s // page_size, mask=seen, other=0) * page_size + s % page_size
        tl.store(to + s, tl.where(seen, place, -1).to(tl.int32), mask=s < wanted)


def select(score: Tensor, visible: Tensor, tables: Tensor, count: int, page_size: int) -> Tensor:
    """score [R, most] fp32, numbers, of rows that see more than `count` entries; visible [R] int32: how many each sees;
    tables [R, pages] int64 -> places [R, count] int32, -1: none."""
    rows, most = len(visible), score.shape[1]
    counts = torch.zeros(rows, TURNS, BINS.value, dtype=torch.int32, device=score.device)
    parts = torch.empty(rows, PROGRAMS, 2, dtype=torch.int32, device=score.device)
    places = torch.empty(rows, count, dtype=torch.int32, device=score.device)
    grid, shape = (rows, PROGRAMS), {"ALL": TURNS, "SIZE": SCANNED, "num_warps": 4, **chain(score.device)}
    for turn in range(TURNS):
        _digits[grid](score, visible, counts, most, count, TURN=turn, **shape)
    _counted[grid](score, visible, counts, parts, most, count, **shape)
    _placed[grid](
        score, visible, counts, parts, tables, places, most, count, tables.shape[1], page_size,
        CP=triton.next_power_of_2(count), NP=PROGRAMS, **shape,
    )  # fmt: skip
    return places
