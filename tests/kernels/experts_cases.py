"""Triton's forms of the experts against the reference. `test_experts_triton.py` runs it, interpreted and on a GPU.

python tests/kernels/experts_cases.py cpu|cuda"""

import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch
from torch import Tensor

from kernels import experts, experts_chunk_triton, experts_triton
from kernels.experts_chunk_triton import Tiling, tiling_of
from kernels.experts_triton import Tiles
from kernels.numerics import NATIVE
from kernels.record import ExpertRecord

LIMIT = 10.0
SIXTEEN = (Tiles(warps=2), Tiles(), Tiles(stages=4, down_rows=128, down_stages=4, down_warps=4))
EIGHT = (Tiles(eight=True), Tiles(eight=True, half=64, stages=2))  # of `wgmma` of sm_90
Shape = tuple[int, int, int, int, int, int]  # hidden, intermediate, ranks, rows, picks a row, slots
SMALL: list[Shape] = [(256, 128, 2, 5, 4, 6), (160, 96, 1, 2, 2, 3), (128, 64, 1, 9, 3, 5)]
LARGE: list[Shape] = [(5120, 2304, 2, 1, 6, 12), (5120, 2304, 2, 6, 6, 24), (5120, 2304, 2, 16, 6, 40)]
RAGGED: list[Shape] = [(160, 96, 1, 3, 2, 3), (288, 160, 1, 3, 2, 3)]  # a block and more, and tiles of fewer rows
CHUNKS: list[Shape] = [
    (160, 96, 1, 18, 2, 4),
    (128, 64, 1, 40, 1, 1),
]  # the last: more rows of one slot than a tile has
LARGE_CHUNKS: list[Shape] = [(256, 128, 2, 300, 4, 9), (5120, 2304, 2, 200, 6, 16), (5120, 2304, 2, 1100, 6, 8)]


def drawn(seed: int, rows: range) -> Shape:
    """Any widths that a record may have."""
    draw = random.Random(seed)
    ranks, slots = draw.choice([1, 2]), draw.randint(2, 6)
    hidden, inner = 32 * draw.randint(1, 7), 32 * ranks * draw.randint(1, 4)
    return hidden, inner, ranks, draw.choice(rows), draw.randint(1, min(slots, 4)), slots


def problem(shape: Shape, whole: bool, seed: int) -> tuple[Tensor, Tensor, ExpertRecord, Tensor, Tensor]:
    """`whole`: small whole numbers and scales of one, so that every sum is exact in any order."""
    hidden, inner, ranks, rows, top_k, count = shape
    record, draw = ExpertRecord(hidden, inner, ranks), torch.Generator().manual_seed(seed)
    slots = torch.randint(0, 256, (count, record.slot_bytes), dtype=torch.uint8, generator=draw)
    for part in record.parts[3:]:
        low, high = (127, 128) if whole else (116, 126)
        scales = torch.randint(low, high, (count, part.nbytes), dtype=torch.uint8, generator=draw)
        slots[:, part.offset : part.offset + part.nbytes] = scales
    if whole:
        x = torch.randint(-1, 2, (rows, hidden), generator=draw).float()
        x *= torch.rand(rows, hidden, generator=draw) < 8 / hidden  # few, so that gate and up stay below the clamp
    else:
        x = NATIVE.activation(NATIVE.store(torch.randn(rows, hidden, generator=draw)))
    picks = torch.stack([torch.randperm(count, generator=draw)[:top_k] for _ in range(rows)]).to(torch.int32)
    return x, slots, record, picks, torch.rand(rows, top_k, generator=draw)


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated without being filled holds no number, or numbers that lead nowhere."""
    empty = torch.empty

    def filled(*size, **how) -> Tensor:
        made = empty(*size, **how)
        return made.fill_(torch.nan if made.is_floating_point() else 1 << 20)

    torch.empty = filled
    try:
        yield
    finally:
        torch.empty = empty


def fast(
    device: str,
    x: Tensor,
    slots: Tensor,
    record: ExpertRecord,
    picks: Tensor,
    weights: Tensor,
    **how: Tiling | Tiles | None,
) -> Tensor:
    form = experts_triton if len(picks) <= experts_triton.MAX_ROWS else experts_chunk_triton
    moved = [tensor.to(device) for tensor in (x, slots, picks, weights)]
    with poisoned():
        return form.grouped_experts(moved[0], moved[1], record, *moved[2:], LIMIT, asm=device == "cuda", **how).cpu()


@cache
def reference(shape: Shape, whole: bool) -> Tensor:
    x, slots, record, picks, weights = asked(shape, whole)
    outputs = torch.zeros(*picks.shape, record.hidden)
    experts.pick_outputs(outputs, x, slots, record, picks.long(), weights, LIMIT, NATIVE)
    return experts.sum_of_picks(outputs)


def asked(shape: Shape, whole: bool) -> tuple[Tensor, Tensor, ExpertRecord, Tensor, Tensor]:
    """Some picks of the last row have no slot."""
    given = problem(shape, whole, seed=sum(shape))
    given[3][-1, 1:] = -1
    return given


def error(device: str, shape: Shape, whole: bool, **how: Tiling | Tiles | None) -> float:
    """Relative to the reference, in the Euclidean norm."""
    wanted = reference(shape, whole)
    return float((fast(device, *asked(shape, whole), **how) - wanted).norm() / wanted.norm())


def check_parts(device: str, shape: Shape) -> None:
    """Experts computed in two calls, as they arrive, and added by the reference have the bits of one call for all."""
    x, slots, record, picks, weights = [
        one.to(device) if isinstance(one, Tensor) else one for one in problem(shape, False, 3)
    ]
    form = experts_triton if len(picks) <= experts_triton.MAX_ROWS else experts_chunk_triton
    outputs = torch.full((*picks.shape, record.hidden), torch.nan, device=device)
    for here in (picks % 2 == 0, picks % 2 == 1):
        part = torch.where(here, picks, -1)
        form.pick_outputs(outputs, x, slots, record, part, weights, LIMIT, asm=device == "cuda")
    whole = form.grouped_experts(x, slots, record, picks, weights, LIMIT, asm=device == "cuda")
    assert torch.equal(experts.sum_of_picks(outputs), whole), "what was computed first or later leaves a trace"


def check_order(picks: Tensor, size: int) -> None:
    """Picks by slot and in their own order within it; a tile begins after each `size` picks of a slot."""
    ordered, order, tiles = experts_chunk_triton._sorted(picks, size, 10_000)
    slots = picks.flatten().tolist()
    wanted = sorted(range(len(slots)), key=lambda pick: (slots[pick], pick))
    assert order.tolist() == wanted
    assert ordered.tolist() == [slots[pick] for pick in wanted]
    runs = itertools.groupby(enumerate(wanted), lambda at: slots[at[1]])
    begins = [at for slot, run in runs if slot >= 0 for at in [place for place, _ in run][::size]]
    assert tiles.tolist() == begins + [-1] * (len(tiles) - len(begins))


def check_tiles(device: str, shape: Shape) -> None:
    """A chunk launches no more tiles than a layer's experts may fill, however many slots there are."""
    x, slots, record, picks, weights = [
        one.to(device) if isinstance(one, Tensor) else one for one in problem(shape, False, 4)
    ]
    picks, experts_ = picks.clamp_max(2), 3
    few, all_ = (experts_chunk_triton._sorted(picks, 4, most)[2] for most in (experts_, 10_000))
    assert len(few) == picks.numel() // 4 + experts_ < len(all_) == picks.numel() // 4 + picks.numel()
    assert few[few >= 0].tolist() == all_[all_ >= 0].tolist()
    check_order(torch.where(picks == 1, -1, picks), 4)
    given = (x, slots, record, picks, weights, LIMIT, device == "cuda")
    bounded, open_ = (experts_chunk_triton.grouped_experts(*given, distinct=most) for most in (experts_, None))
    assert torch.equal(bounded, open_), "tiles that nobody needs leave a trace"


def check_bound(device: str) -> None:
    """More slots than were told of write nothing behind the tiles that there is a place for."""
    picks, most = torch.arange(60, dtype=torch.int32, device=device), 10
    order, tiles = (torch.full((100,), 7, dtype=torch.int32, device=device) for _ in range(2))
    experts_chunk_triton._find_tiles[(1,)](picks, picks.long(), order, tiles, 60, most, TOKENS=64, SIZE=256)
    assert tiles.tolist() == [*range(most)] + [7] * (100 - most)


def check_scales(device: str, shape: Shape, **how: Tiling | Tiles | None) -> None:
    """At both ends of the scales that a chunk's form holds."""
    x, slots, record, picks, weights = problem(shape, False, 6)
    for ends in ((192, 192, 192), (192, 192, 59)):  # hidden rows of smaller gates are zeros
        for part, scale in zip(record.parts[3:], ends, strict=True):
            slots[:, part.offset : part.offset + part.nbytes] = scale
        outputs = torch.zeros(*picks.shape, record.hidden)
        experts.pick_outputs(outputs, x, slots, record, picks.long(), weights, LIMIT, NATIVE)
        wanted = experts.sum_of_picks(outputs).double()
        off = (fast(device, x, slots, record, picks, weights, **how).double() - wanted).norm() / wanted.norm()
        print(f"{shape}, scales {ends}: {off:.2e}")
        assert off < 2e-3, "an end of the scales is lost"


def check_forms(device: str, shape: Shape, eight: bool) -> None:
    """How 16 bits are cut into tiles leaves no trace, nor how 8 are; and both forms are the reference. Beyond whole
    numbers the unit of 8 bits, as is told of it, cuts off 1e-5 of a sum, and a hidden value that so falls to the other
    side of a rounding moves by a step of it."""
    given = problem(shape, False, 5)
    for forms in (SIXTEEN, EIGHT) if eight else (SIXTEEN,):
        first, *others = [fast(device, *given, tiles=tiles) for tiles in forms]
        assert all(torch.equal(first, other) for other in others), "tiles leave a trace"
        exact, rounded = (error(device, shape, whole, tiles=forms[-1]) for whole in (True, False))
        print(f"{shape}, {forms[-1]}: {exact:.2e} on whole numbers, {rounded:.2e}")
        assert exact < 1e-5, "sums of whole numbers are exact"
        assert rounded < (5e-3 if forms is EIGHT else 2e-3)


def check_rows(device: str, shape: Shape, **how: Tiles) -> None:
    """A row of a decode step has the bits that it has alone; a pick without a slot counts for nothing."""
    x, slots, record, picks, weights = problem(shape, False, 1)
    together = fast(device, x, slots, record, picks, weights, **how)
    for row in range(len(x)):
        alone = fast(device, x[row : row + 1], slots, record, picks[row : row + 1], weights[row : row + 1], **how)
        assert torch.equal(alone[0], together[row]), "a row depends on its company"
    without, zero = picks.clone(), weights.clone()
    without[:, 1], zero[:, 1] = -1, 0.0
    missing = fast(device, x, slots, record, without, weights, **how)
    assert torch.equal(missing, fast(device, x, slots, record, picks, zero, **how)), "a pick without a slot counts"


def main(device: str) -> None:
    seeds = range(2) if device == "cpu" else range(20)
    shapes = SMALL + CHUNKS + [drawn(seed, range(1, 17)) for seed in seeds] + [drawn(7, range(17, 40))]
    for shape in shapes if device == "cpu" else shapes + LARGE + LARGE_CHUNKS:
        exact, rounded = error(device, shape, True), error(device, shape, False)
        print(f"{shape}: {exact:.2e} on whole numbers, {rounded:.2e}")
        assert exact < 1e-5, "sums of whole numbers are exact: another exponential alone may differ"
        assert rounded < 2e-3, "beyond what a few flips of the 8-bit rounding do"
    chunk = CHUNKS[0] if device == "cpu" else LARGE_CHUNKS[1]
    assert error(device, chunk, True, tiling=tiling_of(chunk[3], wide=False)) < 1e-5, "tiles of other devices"
    with patch.object(experts_chunk_triton, "_capability", lambda device: 8):  # hidden rows by loads
        assert error(device, chunk, True) < 1e-5, "before sm_90"
    check_rows(device, SMALL[0] if device == "cpu" else LARGE[2])
    eight = device == "cpu" or torch.cuda.get_device_capability()[0] == 9
    for shape in [(128, 64, 1, 9, 2, 3), *RAGGED] if device == "cpu" else RAGGED + LARGE[1:]:
        check_forms(device, shape, eight)
    if eight:
        check_rows(device, RAGGED[1] if device == "cpu" else LARGE[2], tiles=EIGHT[1])
    check_scales(device, CHUNKS[0])
    for shape in (SMALL[1], CHUNKS[0]) if device == "cpu" else (LARGE[1], LARGE_CHUNKS[1]):
        check_parts(device, shape)
    many = torch.randint(-1, 300, (900, 6), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    check_order(many.to(device), 8)
    check_order(torch.zeros(3000, 1, dtype=torch.int32, device=device), 64)
    check_bound(device)
    check_tiles(device, CHUNKS[0] if device == "cpu" else LARGE_CHUNKS[0])
    given = problem(CHUNKS[0] if device == "cpu" else LARGE_CHUNKS[1], False, 2)
    assert torch.equal(fast(device, *given), fast(device, *given)), "a chunk's bits vary"
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
