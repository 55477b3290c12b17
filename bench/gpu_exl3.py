"""EXL3 experts of GLM-5.3's shapes: our grouped kernel and exllamav3's own, in one run, on the same bytes, both as
replays of captured graphs. Every launch of a graph picks other experts, so that nothing is found in the L2 cache.

Weights a second count each distinct expert of a launch once, whatever the rows that share it."""

import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.exl3_slots import filled
from bench.exllamav3_kernel import Experts, build
from bench.gpu_timing import microseconds, spread
from kernels.exl3_record import Exl3Record, Stored
from kernels.exl3_triton import grouped_experts
from tided.models.glm53.released import EXPERTS, TOP_K, WIDTHS

HIDDEN, INNER = 6144, 2048
ROWS, RANKS, SETS = (1, 4, 8), (1, 2), 20
MCG = ("mcg", "mcg", "mcg")
SAME = 2e-2  # relative: ours rounds gate, up and hidden rows to bf16, theirs to fp16
MIXES: dict[str, tuple[tuple[int, int, int], ...]] = {  # half bits of gate, up and down
    "2 bits": ((4, 4, 4),), "3 bits": ((6, 6, 6),), "4 bits": ((8, 8, 8),), "mixed, 2.75": WIDTHS,
}  # fmt: skip


def stored_of(mix: str, experts: int = EXPERTS) -> list[Stored]:
    """Of a layer's experts, kind by kind."""
    return sorted(Stored(MIXES[mix][number % len(MIXES[mix])], MCG) for number in range(experts))  # type: ignore[arg-type]


def record_of(stored: list[Stored], ranks: int, hidden: int = HIDDEN, inner: int = INNER) -> Exl3Record:
    kinds = {kind for one in stored for kind in zip(one.codebooks, one.half_bits, strict=True)}
    return Exl3Record(hidden, inner, ranks, tuple(sorted(kinds)), len(stored))


def picked(rows: int, experts: int, device: torch.device) -> list[Tensor]:
    """SETS of [rows, TOP_K] int64: distinct experts for a row, drawn evenly."""
    draw = torch.Generator().manual_seed(rows)
    chosen = [torch.stack([torch.randperm(experts, generator=draw)[:TOP_K] for _ in range(rows)]) for _ in range(SETS)]
    return [one.to(device) for one in chosen]


def turns(
    sets: list[Tensor], begins: Tensor, x: Tensor, slots: Tensor, record: Exl3Record, weights: Tensor
) -> Callable[[], Tensor]:
    """Ours: a set after the other."""
    pages = itertools.cycle([begins[one].to(torch.int32) for one in sets])
    return lambda: grouped_experts(x, slots, record, next(pages), weights, math.inf, asm=x.is_cuda)


def their_turns(theirs: Experts, sets: list[Tensor], x: Tensor, weights: Tensor) -> Callable[[], Tensor]:
    turn = itertools.cycle(sets)
    return lambda: theirs(x, next(turn), weights)


def compare(native: object, mix: str, ranks: int, rounds: int, repeats: int) -> None:
    device, stored = torch.device("cuda"), stored_of(mix)
    record = record_of(stored, ranks)
    slots, begins = filled(record, stored, device)
    theirs = Experts(native, record, slots, begins, stored, TOP_K)
    first = torch.tensor(begins, device=device)
    for rows in ROWS:
        sets = picked(rows, EXPERTS, device)
        x = torch.randn(rows, HIDDEN, device=device).to(torch.bfloat16).float()
        weights = torch.rand(rows, TOP_K, device=device).half().float()
        ours = turns(sets, first, x, slots, record, weights)
        wanted, found = ours(), theirs(x.half(), sets[0], weights.half())
        apart = float((found - wanted).norm() / wanted.norm())
        if not apart < SAME:
            raise SystemExit(f"{mix}, {rows} rows: the two kernels are {apart:.1e} apart")
        other = their_turns(theirs, sets, x.half(), weights.half())
        took = [[microseconds(work, rounds) for _ in range(repeats)] for work in (ours, other)]
        distinct = statistics.mean(len(one.unique()) for one in sets)
        decoded = distinct * 3 * HIDDEN * record.share
        us, their_us = (statistics.median(each) for each in took)
        cells = f"{spread(took[0])} | {decoded / us / 1e6:.2f} | {spread(took[1])} | {decoded / their_us / 1e6:.2f}"
        print(f"| {mix} | {ranks} | {rows}, {distinct:.1f} | {cells} | {their_us / us:.2f} | {apart:.1e} |", flush=True)


def show(wheel: Path, folder: Path, rounds: int, repeats: int) -> None:
    native = build(wheel, folder)
    print("\n| bits | over ranks | rows, distinct experts | ours, us | 1e12 weights/s | exllamav3, us | 1e12 weights/s "
          "| ours is so many times as fast | apart |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for ranks in RANKS:
        for mix in MIXES:
            compare(native, mix, ranks, rounds, repeats)
            torch.cuda.empty_cache()
