"""The ranks' parts joined in one launch, for ranks whose devices read each other's memory.

Each rank lends the others a region: flags, and two halves of slabs. A program copies its blocks of the rank's part into
its own slab and tells every peer by a flag in the peer's region; once all peers have told, it reads their blocks where
they lie. Programs of one number work together, and nobody else waits for them: so the part may have any shape that all
ranks agree on, and no launch waits for a whole grid.

- What counts is told by time: a program's `epoch` is the number of launches that it took part in, kept on the device,
  so a captured launch can be replayed. 64 bits never come round.
- One wait a launch is enough, because launches alternate between the halves: who is in launch k has seen every peer in
  k - 1, so no peer reads what it left in k - 2 any more.
- A flag is written by one peer, with release, and read where it lies, with acquire: both at the system's scope. What
  is not the kernel's own is read past the first cache.
- No wait is without a bound: after `patience` the program says which peer it missed, in the rank's own memory and in a
  word that the host sees, and goes on with what is there. From then on no launch waits longer than it takes to look at
  that. The host ends all waits by its word too.

`patience` is counted in microseconds, in the interpreter in polls."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chain_triton import chain, place_next, wait_for_last
from kernels.rounding_triton import INTERPRETED

PROGRAMS, BLOCK, BLOCKS = 128, 1024, 8  # most programs; words of a block; blocks of a slab
LARGEST_BYTES = 4 * PROGRAMS * BLOCK * BLOCKS
MOST_RANKS = 8
FLAG_BYTES = 8 * MOST_RANKS * PROGRAMS  # int64 [rank that tells, program]
REGION_BYTES = FLAG_BYTES + 2 * LARGEST_BYTES
OWN_WORDS = PROGRAMS + 1  # int64: the programs' epochs, and whether a wait was given up

ADDED, STACKED = 0, 1

_PROGRAMS: tl.constexpr = tl.constexpr(PROGRAMS)
_FLAG_BYTES: tl.constexpr = tl.constexpr(FLAG_BYTES)
_HALF_BYTES: tl.constexpr = tl.constexpr(LARGEST_BYTES)
_SLAB: tl.constexpr = tl.constexpr(BLOCK * BLOCKS)
_POLLS: tl.constexpr = tl.constexpr(256)  # between two looks at the clock
_ADDED: tl.constexpr = tl.constexpr(ADDED)


@triton.jit
def _now_ns(polls):
    return 1000 * polls.to(tl.int64) if INTERPRETED else tl.extra.cuda.globaltimer()


@triton.jit
def _await(flag, epoch, peer, given_up, word, patience):
    """Until the flag has reached the epoch. Threads may read clock and word differently, and must decide alike: what
    one of them found goes through `given_up`, whose atomics give all threads the same."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    polls = (seen * 0).to(tl.int32)
    over = seen * 0
    began_ns = _now_ns(polls)
    most_ns = 1000 * patience.to(tl.int64)
    while (seen < epoch) & (over == 0):
        polls += 1
        if polls % _POLLS == 0:
            late = ((_now_ns(polls) - began_ns) > most_ns).to(tl.int64) * (peer + 1)
            found = tl.maximum(tl.load(word, volatile=True), late)
            tl.atomic_cas(given_up, over, found, sem="relaxed", scope="gpu")  # the first to be found counts
            over = tl.atomic_add(given_up, 0, sem="relaxed", scope="gpu")
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if seen < epoch:
        tl.store(word, over)


@triton.jit(do_not_specialize=["patience"])
def _one_shot(
    part, out, regions, own, words, patience,
    RANK: tl.constexpr, RANKS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """part [words] of four bytes; regions int64 [RANKS + 1]: where each rank's region lies for this one, and the word
    that the host sees; own int64 [OWN_WORDS]. out: [words] for ADDED, [RANKS, words] for STACKED."""
    program = tl.program_id(0)
    number = tl.pointer_type(tl.int64)
    kind = tl.pointer_type(part.dtype.element_ty)
    mine = tl.load(regions + RANK)
    word = tl.load(regions + RANKS).to(number)
    wait_for_last(CHAINED)
    epoch = tl.load(own + program) + 1
    slab = _FLAG_BYTES + (epoch % 2) * _HALF_BYTES + program * (4 * _SLAB)
    lent = tl.multiple_of((mine + slab).to(kind), 16)
    each = tl.arange(0, BLOCK)
    place = 0
    for first in range(program * BLOCK, words, tl.num_programs(0) * BLOCK):
        known = first + each < words
        tl.store(lent + place + each, tl.load(part + first + each, mask=known), mask=known)
        place += BLOCK
    tl.debug_barrier()  # all threads' words, before one of them tells
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = tl.load(regions + peer).to(number)
            tl.atomic_xchg(theirs + RANK * _PROGRAMS + program, epoch, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = mine.to(number) + peer * _PROGRAMS + program
            _await(flag, epoch, peer, own + _PROGRAMS, word, patience)
    tl.debug_barrier()
    place_next(CHAINED)
    place = 0
    for first in range(program * BLOCK, words, tl.num_programs(0) * BLOCK):
        at = first + each
        known = at < words
        total = tl.load(part + at, mask=known)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                value = tl.load(part + at, mask=known)
            else:
                there = tl.multiple_of((tl.load(regions + rank) + slab).to(kind), 16)
                value = tl.load(there + place + each, mask=known, cache_modifier=".cg")
            if KIND == _ADDED:
                total = value if rank == 0 else total + value
            else:
                tl.store(out + rank * words + at, value, mask=known)
        if KIND == _ADDED:
            tl.store(out + at, total, mask=known)
        place += BLOCK
    tl.store(own + program, epoch)


def one_shot(part: Tensor, regions: Tensor, own: Tensor, rank: int, ranks: int, kind: int, patience: int) -> Tensor:
    """part: contiguous, of four-byte numbers, fp32 to be ADDED, LARGEST_BYTES at most -> their sum in the order of the
    ranks, or [ranks, ...]. All ranks call alike, one call after the other. `regions`, `own`,
    `patience`: `_one_shot`."""
    out = torch.empty_like(part) if kind == ADDED else part.new_empty(ranks, *part.shape)
    words = part.numel()
    grid = (min(PROGRAMS, triton.cdiv(words, BLOCK)),)
    _one_shot[grid](
        part, out, regions, own, words, patience, RANK=rank, RANKS=ranks, KIND=kind, BLOCK=BLOCK,
        num_warps=8, **chain(part.device),
    )  # fmt: skip
    return out
