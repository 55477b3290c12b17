"""The kernels of a decode step at the shapes of one rank's half of DeepSeek-V4.1-Flash, each timed alone: the experts,
by rows and distinct experts, of a prompt chunk too; the dense products; and what a GB10 should make of the experts.

Every launch of a graph reads other weights, so that nothing is found in the L2 cache."""

import itertools
import statistics

import torch
from torch import Tensor

from bench import instructions
from bench.gpu_timing import eager, microseconds, peak, spread
from kernels import experts_chunk_triton, experts_triton
from kernels.linear import Fp8Matrix, Matrix
from kernels.linear_triton import Ending, linear, parts
from kernels.record import ExpertRecord

RECORD = ExpertRecord(5120, 2304, 2)
EXPERTS, TOP_K, SETS, LIMIT = 384, 6, 20, 10.0
SLOTS = 1200
CASES = ((1, 6), (4, 16), (6, 22), (8, 28), (16, 80))  # rows, distinct experts
CHUNKS = (64, 512, 2048, 8192)  # rows
GB10_BYTES_A_S, GB10_OPERATIONS_A_S = 232e9, 48 * 128 * 2.4e9
TILES = ((128, 3), (128, 4), (128, 6), (256, 3))  # of K, and stages
# outputs, columns, what follows, groups of inputs, and whether FP8
DENSE: dict[str, tuple[int, int, Ending, int, bool]] = {
    "wq_a, wkv": (1792, 5120, Ending.PARTS, 1, True),
    "wq_b": (16384, 1280, Ending.STORED, 1, True),
    "wo_a": (4096, 4096, Ending.ACTIVATION, 4, True),
    "wo_b": (5120, 4096, Ending.SUM, 1, True),
    "shared w1, w3": (2304, 5120, Ending.SWIGLU, 1, True),
    "shared w2": (5120, 1152, Ending.ADDED, 1, True),
    "gate": (384, 5120, Ending.PARTS, 1, False),
    "head": (64640, 5120, Ending.SUM, 1, False),
}


def picked(rows: int, distinct: int, seed: int, slots: int = SLOTS) -> Tensor:
    """[rows, k] slots of so many experts, every one of them wanted, none twice in a row."""
    draw = torch.Generator().manual_seed(seed)
    pool = torch.randperm(slots, generator=draw)[:distinct]
    flat = [[expert for expert in range(distinct) if expert // TOP_K == row] for row in range(rows)]
    for own in flat:
        own += [e for e in torch.randperm(distinct, generator=draw).tolist() if e not in own][: TOP_K - len(own)]
    return pool[torch.tensor(flat)].to(torch.int32).cuda()


def filled(count: int = SLOTS) -> Tensor:
    """[count, slot_bytes]: random codes, scales near one."""
    slots = torch.randint(0, 256, (count, RECORD.slot_bytes), dtype=torch.uint8, device="cuda")
    for part in RECORD.parts[3:]:
        slots[:, part.offset : part.offset + part.nbytes].random_(116, 124)
    return slots


def activations(rows: int) -> Tensor:
    return torch.randn(rows, RECORD.hidden, device="cuda").to(torch.float8_e4m3fn).float()


def torch_grouped(rows: int, distinct: int, rounds: int) -> float:
    """Both products of the experts as bf16 matrices, by torch."""
    picks, total = rows * TOP_K, 0.0
    ends = torch.tensor([picks * (e + 1) // distinct for e in range(distinct)], dtype=torch.int32, device="cuda")
    for n, k in ((2 * RECORD.share, RECORD.hidden), (RECORD.hidden, RECORD.share)):
        weights = torch.randn(distinct, n, k, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        x = torch.randn(picks, k, device="cuda", dtype=torch.bfloat16)
        total += microseconds(lambda x=x, w=weights: torch._grouped_mm(x, w, ends), rounds, 5)
    return total


def decode(slots: Tensor, best: float, rounds: int, repeats: int) -> None:
    print("| rows, experts | us | GB/s | share | torch, bf16, us |\n|---|---|---|---|---|")
    for rows, distinct in CASES:
        sets = itertools.cycle([picked(rows, distinct, seed) for seed in range(SETS)])
        x, weights = activations(rows), torch.rand(rows, TOP_K, device="cuda")
        work = lambda s=sets, x=x, w=weights: experts_triton.grouped_experts(x, slots, RECORD, next(s), w, LIMIT)  # noqa: E731
        took = [microseconds(work, rounds) for _ in range(repeats)]
        rate = distinct * RECORD.nbytes / statistics.median(took) / 1e3
        other = torch_grouped(rows, distinct, rounds)
        print(f"| {rows}, {distinct} | {spread(took)} | {rate:,.0f} | {rate / best:.0%} | {other:.1f} |", flush=True)


def chunks(slots: Tensor, best: float, rounds: int, repeats: int) -> None:
    top = peak(rounds)
    print(f"\nbf16 product of torch: {top:.0f} TFLOP/s\n")
    print("| rows of a chunk | ms | rows a s, a layer | TFLOP/s | of peak | share of reading each expert once |")
    print("|---|---|---|---|---|---|")
    for rows in CHUNKS:
        x, weights = activations(rows), torch.rand(rows, TOP_K, device="cuda")
        picks = torch.rand(rows, EXPERTS, device="cuda").topk(TOP_K).indices.to(torch.int32)
        work = lambda x=x, p=picks, w=weights: experts_chunk_triton.grouped_experts(x, slots, RECORD, p, w, LIMIT)  # noqa: E731
        took = [eager(work, rounds) / 1e3 for _ in range(repeats)]
        ms = statistics.median(took)
        rate = 6e-9 * rows * TOP_K * RECORD.hidden * RECORD.share / ms
        read = len(picks.unique()) * RECORD.nbytes / ms / 1e6
        cells = [f"{1e3 * rows / ms:,.0f}", f"{rate:.0f}", f"{rate / top:.0%}", f"{read / best:.0%}"]
        print(f"| {rows} | {spread(took, 2)} | {' | '.join(cells)} |", flush=True)


def operations() -> None:
    """From the machine code, and what follows for a GB10."""
    print("\n| compiled for | operations a weight: gate and up | down | both |\n|---|---|---|---|")
    for capability in (90, 120):
        found = instructions.decode(capability)
        cells = f"{found['gate_up']:.2f} | {found['down']:.2f} | {instructions.mean(found):.2f}"
        print(f"| sm_{capability} | {cells} |")
    each = instructions.mean(found)
    print(
        "\nGB10, a layer: max(E x record bytes / 232 GB/s, E x weights x operations a weight / 14.7e12 a s)"
        " + 4 launches x 1 to 2 us"
    )
    for rows, distinct in CASES:
        by_bytes = 1e6 * distinct * RECORD.nbytes / GB10_BYTES_A_S
        by_operations = 1e6 * distinct * 3 * RECORD.hidden * RECORD.share * each / GB10_OPERATIONS_A_S
        print(f"  {rows} rows, E = {distinct}: max({by_bytes:.0f}, {by_operations:.0f}) us + 4 to 8 us")


def matrices(outs: int, width: int, fp8: bool) -> list[Matrix]:
    """So many that a turn through them leaves nothing in the L2 cache."""
    count = max(1, (1 << 28) // (outs * width))
    if not fp8:
        return [torch.randn(outs, width, device="cuda").to(torch.bfloat16) for _ in range(count)]
    codes = [torch.randn(outs, width, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8) for _ in range(count)]
    return [
        Fp8Matrix(one, torch.full((outs // 32, width // 32), 121, dtype=torch.uint8, device="cuda")) for one in codes
    ]


def dense(best: float, rounds: int, repeats: int, tiles: bool) -> None:
    print("\n| dense product | shape | parts | us, 1 row | us, 6 rows | GB/s | share |\n|---|---|---|---|---|---|---|")
    total = 0.0
    if tiles:
        print(f"(indented: 6 rows, in so many parts, tiles of {TILES})")
    for name, (outs, width, ending, groups, fp8) in DENSE.items():
        held = matrices(outs, width, fp8)
        launches = max(8, min(40, len(held)))
        took = {
            rows: [dense_us(held, rows, ending, groups, rounds, launches) for _ in range(repeats)] for rows in (1, 6)
        }
        one, us = held[0], sorted(took[6])[repeats // 2]
        size = one.codes.nbytes + one.scale.nbytes if isinstance(one, Fp8Matrix) else one.nbytes
        total += us if name != "head" else us / 40
        split = parts(outs // (2 if ending == Ending.SWIGLU else 1), width)
        cells = f"{outs} x {width} | {split} | {spread(took[1])} | {spread(took[6])} | {size / us / 1e3:,.0f}"
        print(f"| {name} | {cells} | {size / us / 1e3 / best:.0%} |", flush=True)
        if tiles and name != "head":
            for split in (1, 2, 3, 4, 6, 8, 10, 13, 20):
                if split > width // 128:
                    break
                found = [
                    dense_us(held, 6, ending, groups, rounds, launches, split=split, block=block, stages=stages)
                    for block, stages in TILES
                ]
                print(f"    {name} in {split}: " + ", ".join(f"{us:.1f}" for us in found), flush=True)
    print(f"a layer, and a fortieth of the head: {total:.1f} us")


def dense_us(
    held: list[Matrix], rows: int, ending: Ending, groups: int, rounds: int, launches: int, **tile: int
) -> float:
    one = held[0]
    outs, width = one.shape
    x = torch.randn(rows, groups * width, device="cuda").to(torch.bfloat16)
    out = torch.zeros(rows, outs, device="cuda") if ending == Ending.ADDED else None
    turn = itertools.cycle(held)

    def work() -> Tensor:
        return linear(x, next(turn), ending, out=out, groups=groups, limit=LIMIT, **tile)

    return microseconds(work, rounds, launches)


def show(best: float, rounds: int, repeats: int, tiles: bool) -> None:
    slots = filled()
    decode(slots, best, rounds, repeats)
    chunks(slots, best, rounds, repeats)
    del slots
    torch.cuda.empty_cache()
    dense(best, rounds, repeats, tiles)
    operations()
