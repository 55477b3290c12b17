"""The next token of each row on CUDA: the likeliest, or one drawn by `tided.engine.sampling`'s law.

A row has several programs in each launch; the last one to end puts together what all found. Sums are of integers, and
of equal times the lower id wins: nothing depends on who ends when. A launch finds the likeliest tokens, and one draws:
every token has a clock that runs at the speed of its weight, and the first to ring is drawn. In between, top-k and
top-p each look for the least weight that may be drawn: sixteen candidates a launch, of which one interval is left,
until it holds one number.

No logit that is finite is near another by less than their weights are ordered by, so the bound is looked for among the
logits' own bits, in their order."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import INTERPRETED

PROGRAMS = 2 if INTERPRETED else 64  # of a row
SIZE = 512  # logits that a program looks at together
PEAK_PROGRAMS, PEAK_SIZE = 16, 2048
LAW = 5  # int64 of a row: temperature (0: the likeliest), 64 bits of noise, min_p, top_k, top_p; fp64 as their bits
DIGITS = 8  # of four bits each, of a logit's

_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))  # SplitMix64's, as signed words
_FIRST: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND: tl.constexpr = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_NEVER: tl.constexpr = tl.constexpr(2.0**-64)


@triton.jit(do_not_specialize=["width"])
def _likeliest(logits, best, at, ended, ids, peaks, width, P: tl.constexpr, N: tl.constexpr):
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
        tl.store(peaks + row, tl.max(found, 0))
        tl.store(ended + row, 0)


@triton.jit
def _order(value):
    """fp32 -> int64 in [0, 2^32), in the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000


@triton.jit
def _value(order):
    bits = (order - 0x80000000).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(value, peak, temperature):
    """fp64, relative to the likeliest's."""
    return tl.exp((value.to(tl.float64) - peak.to(tl.float64)) / temperature)


@triton.jit
def _share(total, top_p):
    """The least count of units that is `top_p` of all; one at least, so that the likeliest stays."""
    part = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
    return tl.maximum(tl.minimum(part, total), 1)


@triton.jit(do_not_specialize=["width", "shift"])
def _narrow(
    logits, law, whole, peaks, bounds, parts, ended, width, shift, unit,
    TOP_P: tl.constexpr, L: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One digit of the bound of each row that has one. parts [rows, P, 16] int64: what a program finds for each digit;
    zero before, and zero again. bounds [rows, 2, 3] int64, of top-k and of top-p: the least logit of the interval that
    is left, in its order; how much is above the interval; how much there must be."""
    row, program = tl.program_id(0), tl.program_id(1)
    temperature, top_k, top_p = tl.load(law + row * L), tl.load(whole + row * L + 3), tl.load(law + row * L + 4)
    ranked = (top_k > 0) & (top_k < width)
    if (temperature > 0) & ((top_p < 1) if TOP_P else ranked):
        peak, own = tl.load(peaks + row), bounds + (2 * row + (1 if TOP_P else 0)) * 3
        base, above = tl.where(shift == 28, 0, tl.load(own)), tl.where(shift == 28, 0, tl.load(own + 1))
        least = tl.zeros([], tl.float64)
        if TOP_P:
            bound = _weight(_value(tl.load(bounds + 2 * row * 3)), peak, temperature)
            least = tl.where(ranked, bound, 0.0)
        digit, column = tl.arange(0, 16), tl.arange(0, N)
        mine = parts + (row * P + program) * 16
        for first in range(program * N, width, P * N):
            there = first + column < width
            value = tl.load(logits + row.to(tl.int64) * width + first + column, mask=there, other=0.0)
            place = (_order(value) - base) >> shift  # a shift keeps the sign
            within = there & (place >= 0) & (place < 16)
            if TOP_P:
                if tl.sum(within.to(tl.int32), 0) > 0:
                    weight = _weight(value, peak, temperature)
                    count = tl.where(weight >= least, (weight * unit).to(tl.int64), 0)
                    tl.atomic_add(mine + place, count, mask=within, sem="relaxed")
            else:
                tl.atomic_add(mine + place, tl.full([N], 1, tl.int64), mask=within, sem="relaxed")
        tl.debug_barrier()
        if tl.atomic_add(ended + row, 1, sem="acq_rel") == P - 1:
            every = tl.arange(0, P)
            all_parts = parts + (row * P + every)[:, None] * 16 + digit[None, :]
            each = tl.sum(tl.load(all_parts, cache_modifier=".cg"), 0)
            tl.store(all_parts, tl.zeros([P, 16], tl.int64))
            sums_of_all = tl.sum(tl.where(digit[None, :] >= digit[:, None], each[None, :], 0), 1)
            wanted = tl.load(own + 2)
            if shift == 28:
                wanted = top_k
                if TOP_P:
                    wanted = _share(tl.max(sums_of_all, 0), top_p)
                tl.store(own + 2, wanted)
            found = tl.sum((above + sums_of_all >= wanted).to(tl.int64), 0) - 1
            tl.store(own, base + (found << shift))
            tl.store(own + 1, above + tl.sum(tl.where(digit == found + 1, sums_of_all, 0), 0))
            tl.store(ended + row, 0)


@triton.jit
def _mixed(word, SHIFT: tl.constexpr):
    """int64 with itself shifted as if it had no sign."""
    return word ^ ((word >> SHIFT) & ((1 << (64 - SHIFT)) - 1))


@triton.jit
def _clock(noise, token):
    """`sampling.clocks`: the exponential of each token."""
    word = _mixed((token.to(tl.int64) + 1) * _GOLDEN + noise, 30) * _FIRST
    word = _mixed(_mixed(word, 27) * _SECOND, 31)
    uniform = (((word >> 11) & ((1 << 53) - 1)).to(tl.float64) + 0.5) * (2.0**-53)
    return -tl.log(uniform)


@triton.jit(do_not_specialize=["width"])
def _race(
    logits, law, whole, peaks, bounds, times, at, ended, ids, width, L: tl.constexpr, P: tl.constexpr, N: tl.constexpr
):
    """times, at [rows, P]: the first of a program's clocks to ring, and whose it is."""
    row, program = tl.program_id(0), tl.program_id(1)
    temperature, top_k = tl.load(law + row * L), tl.load(whole + row * L + 3)
    if temperature > 0:
        peak, noise = tl.load(peaks + row), tl.load(whole + row * L + 1)
        least = tl.maximum(tl.minimum(tl.load(law + row * L + 2), 1.0), _NEVER)
        if (top_k > 0) & (top_k < width):
            least = tl.maximum(least, _weight(_value(tl.load(bounds + 2 * row * 3)), peak, temperature))
        if tl.load(law + row * L + 4) < 1:
            least = tl.maximum(least, _weight(_value(tl.load(bounds + (2 * row + 1) * 3)), peak, temperature))
        column = tl.arange(0, N)
        soonest, place = tl.full([N], float("inf"), tl.float64), tl.full([N], 0x7FFFFFFF, tl.int32)
        for first in range(program * N, width, P * N):
            token = first + column
            value = tl.load(logits + row.to(tl.int64) * width + token, mask=token < width, other=float("-inf"))
            weight = _weight(value, peak, temperature)
            rings = tl.where(weight >= least, _clock(noise, token) / weight, float("inf"))
            sooner = rings < soonest  # a column's first of equals stays
            place, soonest = tl.where(sooner, token, place), tl.where(sooner, rings, soonest)
        first_of_all = tl.min(soonest, 0)
        tl.store(times + row * P + program, first_of_all)
        tl.store(at + row * P + program, tl.min(tl.where(soonest == first_of_all, place, 0x7FFFFFFF), 0))
        tl.debug_barrier()
        if tl.atomic_add(ended + row, 1, sem="acq_rel") == P - 1:
            every = tl.arange(0, P)
            found = tl.load(times + row * P + every, cache_modifier=".cg")
            places = tl.load(at + row * P + every, cache_modifier=".cg")
            drawn = tl.min(tl.where(found == tl.min(found, 0), places, 0x7FFFFFFF), 0)
            likeliest = tl.load(ids + row)
            tl.store(ids + row, tl.where(likeliest < 0, likeliest, drawn.to(tl.int64)))
            tl.store(ended + row, 0)


def _zeros(device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
    """ended [rows], parts [rows, PROGRAMS, 16]: zeros, and zeros again after every launch. Launches that use them run
    one after another."""
    ended, parts = _zeros_of(device, triton.next_power_of_2(rows))
    return ended[:rows], parts[:rows]


@cache  # for ever: captured graphs hold the addresses
@torch.inference_mode(False)  # whoever asks first; all may write to them
def _zeros_of(device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
    ended = torch.zeros(rows, dtype=torch.int32, device=device)
    return ended, torch.zeros(rows, PROGRAMS, 16, dtype=torch.int64, device=device)


def likeliest(logits: Tensor) -> Tensor:
    """logits [R, V] fp32, contiguous -> [R] int64: the lowest id among equals, -1 where any logit is no number."""
    return likeliest_and_peaks(logits)[0]


def likeliest_and_peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `likeliest`, and the largest logits [R]."""
    rows, width = logits.shape
    best = torch.empty(rows, PEAK_PROGRAMS, device=logits.device)
    at, ids = best.new_empty(rows, PEAK_PROGRAMS, dtype=torch.int32), best.new_empty(rows, dtype=torch.int64)
    peaks = best.new_empty(rows)
    _likeliest[(rows, PEAK_PROGRAMS)](
        logits, best, at, _zeros(logits.device, rows)[0], ids, peaks, width, P=PEAK_PROGRAMS, N=PEAK_SIZE, num_warps=4
    )
    return ids, peaks


def bounds_of(logits: Tensor, law: Tensor, peaks: Tensor, top_k: bool, top_p: bool) -> Tensor:
    """As `draw` -> bounds of `_narrow`, whose first numbers are the least logits that may be drawn, in their order."""
    (rows, width), device = logits.shape, logits.device
    bounds = torch.empty(rows, 2, 3, dtype=torch.int64, device=device)
    unit = 2.0 ** (62 - width.bit_length())
    floats, (ended, parts) = law.view(torch.float64), _zeros(device, rows)
    for by_share in [False] * top_k + [True] * top_p:
        for digit in reversed(range(DIGITS)):
            _narrow[(rows, PROGRAMS)](
                logits, floats, law, peaks, bounds, parts, ended, width, 4 * digit, unit, TOP_P=by_share, L=LAW,
                P=PROGRAMS, N=SIZE, num_warps=4,
            )  # fmt: skip
    return bounds


def draw(logits: Tensor, law: Tensor, top_k: bool, top_p: bool) -> Tensor:
    """logits [R, V] fp32, law [R, LAW] int64, contiguous -> [R] int64 as `likeliest`, or drawn. `top_k`, `top_p`:
    whether any row may have such a bound."""
    (rows, width), device = logits.shape, logits.device
    ids, peaks = likeliest_and_peaks(logits)
    bounds = bounds_of(logits, law, peaks, top_k, top_p)
    times = torch.empty(rows, PROGRAMS, dtype=torch.float64, device=device)
    at = torch.empty(rows, PROGRAMS, dtype=torch.int32, device=device)
    _race[(rows, PROGRAMS)](
        logits, law.view(torch.float64), law, peaks, bounds, times, at, _zeros(device, rows)[0], ids, width, L=LAW,
        P=PROGRAMS, N=SIZE, num_warps=4,
    )  # fmt: skip
    return ids
