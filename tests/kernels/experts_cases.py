"""Triton's form of the experts against the reference: run by `test_experts_triton.py` in the interpreter, and on a GPU.

python tests/kernels/experts_cases.py cpu|cuda"""

import sys

import torch
from torch import Tensor

from kernels import experts, experts_triton
from kernels.numerics import NATIVE
from kernels.record import ExpertRecord

LIMIT = 10.0
# hidden, intermediate, ranks, rows, picks a row, slots
SMALL = [(256, 128, 2, 1, 2, 4), (256, 128, 2, 5, 4, 6), (160, 96, 1, 2, 2, 3), (128, 64, 1, 9, 3, 5)]
LARGE = [(5120, 2304, 2, 1, 6, 12), (5120, 2304, 2, 6, 6, 24), (5120, 2304, 2, 16, 6, 40)]


def problem(shape: tuple[int, ...], whole: bool, seed: int) -> tuple[Tensor, Tensor, ExpertRecord, Tensor, Tensor]:
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


def fast(device: str, x: Tensor, slots: Tensor, record: ExpertRecord, picks: Tensor, weights: Tensor) -> Tensor:
    moved = [tensor.to(device) for tensor in (x, slots, picks, weights)]
    return experts_triton.grouped_experts(moved[0], moved[1], record, *moved[2:], LIMIT, asm=device == "cuda").cpu()


def error(device: str, shape: tuple[int, ...], whole: bool) -> float:
    """Relative to the reference, in the Euclidean norm."""
    given = problem(shape, whole, seed=sum(shape))
    x, slots, record, picks, weights = given
    wanted = experts.grouped_experts(x, slots, record, picks.long(), weights, LIMIT, NATIVE)
    return float((fast(device, *given) - wanted).norm() / wanted.norm())


def main(device: str) -> None:
    for shape in SMALL if device == "cpu" else SMALL + LARGE:
        exact, rounded = error(device, shape, True), error(device, shape, False)
        print(f"{shape}: {exact:.2e} on whole numbers, {rounded:.2e}")
        assert exact < 1e-5, "sums of whole numbers are exact: another exponential alone may differ"
        assert rounded < 0.02, "beyond what a few flips of the 8-bit rounding do"
    x, slots, record, picks, weights = problem(SMALL[1], False, 1)
    together = fast(device, x, slots, record, picks, weights)
    for row in range(len(x)):
        alone = fast(device, x[row : row + 1], slots, record, picks[row : row + 1], weights[row : row + 1])
        assert torch.equal(alone[0], together[row]), "a row depends on its company"
    without = picks.clone()
    without[:, 1] = -1
    zero = weights.clone()
    zero[:, 1] = 0.0
    assert torch.equal(fast(device, x, slots, record, without, weights), fast(device, x, slots, record, picks, zero)), (
        "a pick without a slot counts"
    )
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
