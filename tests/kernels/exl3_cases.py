"""Triton's form of EXL3 experts against the reference. `test_exl3_triton.py` runs it, interpreted and on a GPU.

python tests/kernels/exl3_cases.py cpu|cuda [part]"""

import math
import sys

import torch
from torch import Tensor

from kernels import exl3_triton
from kernels.exl3_record import Exl3Record, Stored, header_of
from kernels.experts import reference_outputs, sum_of_picks
from kernels.numerics import WEIGHTS_ONLY
from tests.kernels.experts_cases import poisoned

MUL1, MCG, FIRST = (("mul1",) * 3, ("mcg",) * 3, ("3inst",) * 3)
MIX = [Stored((4, 4, 4), MCG), Stored((4, 4, 6), MCG), Stored((6, 6, 8), MCG), Stored((8, 8, 8), MCG)]
# Every width of every codebook, in gate, up or down.
WIDTHS = [
    Stored((2, 3, 4), MUL1), Stored((5, 6, 7), MUL1), Stored((8, 10, 12), MUL1), Stored((14, 16, 2), MUL1),
    Stored((2, 4, 6), FIRST), Stored((8, 10, 12), FIRST), Stored((14, 16, 2), FIRST),
    Stored((2, 4, 6), MCG), Stored((8, 10, 12), MCG), Stored((14, 16, 6), MCG),
]  # fmt: skip
Case = tuple[int, int, int, int, int, list[Stored]]  # hidden, intermediate, ranks, rows, picks a row, experts
SMALL: list[Case] = [(128, 128, 1, 4, 5, WIDTHS), (256, 256, 2, 3, 2, MIX), (256, 128, 1, 1, 2, MIX[:2])]
CHUNKS: list[Case] = [(128, 128, 1, 20, 2, MIX), (128, 128, 1, 70, 1, MIX[:1])]  # the last: more rows than a tile has
LARGE: list[Case] = [(6144, 2048, 2, rows, 8, MIX * 4) for rows in (1, 4, 16)] + [(6144, 2048, 2, 3, 4, WIDTHS)]
LARGE_CHUNKS: list[Case] = [(6144, 2048, 2, 200, 8, MIX * 3)]
# On a GPU in processes of their own: bodies of every width take the compiler one to two minutes each time.
PARTS = {"widths": SMALL[:1], "large widths": LARGE[3:], "others": SMALL[1:] + CHUNKS + LARGE[:3] + LARGE_CHUNKS}


def problem(case: Case, seed: int, device: str) -> tuple[Tensor, Tensor, Exl3Record, Tensor, Tensor]:
    """Random trellises: any words are legal. Experts lie one behind the other, each as large as it is."""
    hidden, inner, ranks, rows, top_k, experts = case
    kinds = {kind for one in experts for kind in zip(one.codebooks, one.half_bits, strict=True)}
    record, draw = (
        Exl3Record(hidden, inner, ranks, tuple(sorted(kinds)), len(experts)),
        torch.Generator().manual_seed(seed),
    )
    pages = [record.slot_bytes(one) // 4096 for one in experts]
    slots = torch.randint(0, 256, (sum(pages), 4096), dtype=torch.uint8, generator=draw)
    begins = [sum(pages[:number]) for number in range(len(pages))]
    for begin, one in zip(begins, experts, strict=True):
        data = slots.view(-1)[begin * 4096 :]
        data[:128] = torch.frombuffer(bytearray(header_of(one)), dtype=torch.uint8)
        for vector, (at, length) in enumerate(zip(record.offsets, record.lengths, strict=False)):
            scales = torch.randn(length, generator=draw) * (hidden**-0.5 if vector in (0, 1, 4) else 1)
            data[at : at + 2 * length] = scales.half().view(torch.uint8)
    x = WEIGHTS_ONLY.store(torch.randn(rows, hidden, generator=draw))
    chosen = [torch.randperm(len(experts), generator=draw)[:top_k] for _ in range(rows)]
    picks = torch.tensor(begins)[torch.stack(chosen)].to(torch.int32)
    given = x, slots, picks, torch.rand(rows, top_k, generator=draw)
    x, slots, picks, weights = (tensor.to(device) for tensor in given)
    return x, slots, record, picks, weights


def fast(x: Tensor, slots: Tensor, record: Exl3Record, picks: Tensor, weights: Tensor) -> Tensor:
    with poisoned():
        return exl3_triton.grouped_experts(x, slots, record, picks, weights, math.inf, asm=x.is_cuda)


def error(case: Case, device: str) -> float:
    """Relative to the reference, in the Euclidean norm. Some picks of the last row have no slot."""
    x, slots, record, picks, weights = problem(case, sum(case[:5]), device)
    picks[-1, 1:] = -1
    outputs = torch.zeros(*picks.shape, record.hidden, device=device)
    reference_outputs(outputs, x, slots, record, picks.long(), weights, math.inf, WEIGHTS_ONLY)
    wanted = sum_of_picks(outputs)
    return float((fast(x, slots, record, picks, weights) - wanted).norm() / wanted.norm())


def check_parts(case: Case, device: str) -> None:
    """Experts computed in two calls, as they arrive, and added by the reference have the bits of one call for all."""
    x, slots, record, picks, weights = problem(case, 3, device)
    outputs = torch.full((*picks.shape, record.hidden), torch.nan, device=device)
    for here in (picks % 2 == 0, picks % 2 == 1):
        part = torch.where(here, picks, -1)
        exl3_triton.pick_outputs(outputs, x, slots, record, part, weights, math.inf, asm=x.is_cuda)
    whole = fast(x, slots, record, picks, weights)
    assert torch.equal(sum_of_picks(outputs), whole), "what was computed first or later leaves a trace"


def check_rows(case: Case, device: str) -> None:
    """A row of a decode step has the bits that it has alone; a pick without a slot counts for nothing."""
    x, slots, record, picks, weights = problem(case, 1, device)
    together = fast(x, slots, record, picks, weights)
    for row in range(len(x)):
        alone = fast(x[row : row + 1], slots, record, picks[row : row + 1], weights[row : row + 1])
        assert torch.equal(alone[0], together[row]), "a row depends on its company"
    without, zero = picks.clone(), weights.clone()
    without[:, 1], zero[:, 1] = -1, 0.0
    assert torch.equal(fast(x, slots, record, without, weights), fast(x, slots, record, picks, zero)), (
        "a pick without a slot counts"
    )


def check_unknown_kinds(case: Case, device: str) -> None:
    """Without a word on what there is, bodies of all kinds are compiled."""
    x, slots, record, picks, weights = problem(case, 2, device)
    other = Exl3Record(record.hidden, record.intermediate, record.ranks)
    assert torch.equal(fast(x, slots, other, picks, weights), fast(x, slots, record, picks, weights))


def check_shapes(case: Case) -> None:
    """In the interpreter: which lanes have which columns, and what is loaded ahead, has no say in any bit."""
    given = problem(case, 4, "cpu")
    wanted, usual = fast(*given), exl3_triton.PLAIN
    try:
        exl3_triton.PLAIN = {"DOWN": 1, "ACROSS": 4, "WARPS": 2, "AHEAD": False}
        assert torch.equal(fast(*given), wanted), "a tile column or row is taken for another"
    finally:
        exl3_triton.PLAIN = usual


def check_items(device: str) -> None:
    """A chunk of 8,192 rows in an arena of millions of pages: every pick once, in an item of its own expert, and no
    more items than a layer's experts can need."""
    draw = torch.Generator().manual_seed(5)
    begins = torch.randperm(20_000_000, generator=draw)[:256]
    picks = begins[torch.randint(0, 256, (8192 * 8,), generator=draw)].to(torch.int32)
    picks[::100] = -1
    table, items, m = exl3_triton._chunk_table(picks.to(device), 256)
    assert items == len(picks) // m + 256, "a bound that a grid does not take"
    slots, rows = table[:items].cpu(), table[items:].view(items, m).cpu()
    assert sorted(rows[rows >= 0].tolist()) == torch.nonzero(picks >= 0).flatten().tolist()
    for slot, row in zip(slots.tolist(), rows, strict=True):
        assert bool((picks[row[row >= 0].long()] == slot).all())
    few = exl3_triton._chunk_table(picks[:40].to(device), 0)
    assert few[1] == 40, "each may be of an expert of its own"


def check_errors(cases: list[Case], device: str) -> None:
    for case in cases:
        found = error(case, device)
        print(f"{case[:5]}: {found:.2e}", flush=True)
        assert found < 1e-3, "beyond what a few flips of a rounding do"


def check_traces(device: str) -> None:
    small = device == "cpu"
    check_items(device)
    check_rows(SMALL[1] if small else LARGE[2], device)
    for case in (SMALL[1], CHUNKS[0]) if small else (LARGE[1], LARGE_CHUNKS[0]):
        check_parts(case, device)
    if small:
        check_unknown_kinds(SMALL[2], device)
        check_shapes((128, 128, 1, 1, 1, WIDTHS[1:2]))
    given = problem(CHUNKS[0] if small else LARGE_CHUNKS[0], 2, device)
    assert torch.equal(fast(*given), fast(*given)), "a chunk's bits vary"


def main(device: str, *parts: str) -> None:
    for part in parts or PARTS:
        check_errors([case for case in PARTS[part] if device != "cpu" or case in SMALL + CHUNKS], device)
        if part == "others":
            check_traces(device)
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
