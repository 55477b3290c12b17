"""Times the expert kernels on this GPU, at the shapes of one rank's half of DeepSeek-V4.1-Flash.

    python bench/gpu.py [--rounds 10]

Times are of a captured graph, each launch with other experts, so that nothing is found in the L2 cache. `share`: bytes
of the distinct experts over time, as a part of what a kernel that only reads reaches in the same run. Beside it torch's
grouped product on as many experts as bf16.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import experts_triton
from kernels.record import ExpertRecord

RECORD = ExpertRecord(5120, 2304, 2)
SLOTS, TOP_K, SETS, IN_GRAPH, LIMIT = 1200, 6, 20, 20, 10.0
CASES = ((1, 6), (4, 16), (6, 22), (8, 28))  # rows, distinct experts
READ_WORDS = 1 << 29


@triton.jit
def _read(source, out, words, SIZE: tl.constexpr):  # noqa: ANN001, ANN202
    total = tl.zeros([SIZE], tl.int32)
    for at in range(tl.program_id(0) * SIZE, words, tl.num_programs(0) * SIZE):
        total ^= tl.load(source + at + tl.arange(0, SIZE))
    tl.store(out + tl.program_id(0) * SIZE + tl.arange(0, SIZE), total)


def microseconds(work: Callable[[], object], rounds: int, launches: int = IN_GRAPH) -> float:
    """Of one launch, the median over replays of a graph of several."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            work()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / launches)
    return statistics.median(times)


def ceiling(rounds: int) -> float:
    """GB/s of reading alone, the best of some grids."""
    source = torch.zeros(READ_WORDS, dtype=torch.int32, device="cuda")
    found = []
    for blocks in (4, 8, 16):
        grid = blocks * torch.cuda.get_device_properties().multi_processor_count
        out = torch.empty(grid * 4096, dtype=torch.int32, device="cuda")
        took = microseconds(lambda g=grid, o=out: _read[(g,)](source, o, READ_WORDS, 4096, num_warps=8), rounds, 3)
        found.append(4e-3 * READ_WORDS / took)
    return max(found)


def picked(rows: int, distinct: int, seed: int) -> Tensor:
    """[rows, k] slots of so many experts, every one of them wanted, none twice in a row."""
    draw = torch.Generator().manual_seed(seed)
    pool = torch.randperm(SLOTS, generator=draw)[:distinct]
    flat = [[expert for expert in range(distinct) if expert // TOP_K == row] for row in range(rows)]
    for own in flat:
        own += [e for e in torch.randperm(distinct, generator=draw).tolist() if e not in own][: TOP_K - len(own)]
    return pool[torch.tensor(flat)].to(torch.int32).cuda()


def filled() -> Tensor:
    """[SLOTS, slot_bytes]: random codes, scales near one."""
    slots = torch.randint(0, 256, (SLOTS, RECORD.slot_bytes), dtype=torch.uint8, device="cuda")
    for part in RECORD.parts[3:]:
        slots[:, part.offset : part.offset + part.nbytes].random_(116, 124)
    return slots


def torch_grouped(rows: int, distinct: int, rounds: int) -> float:
    """Both products of the experts as bf16 matrices, by torch."""
    picks, total = rows * TOP_K, 0.0
    ends = torch.tensor([picks * (e + 1) // distinct for e in range(distinct)], dtype=torch.int32, device="cuda")
    for n, k in ((2 * RECORD.share, RECORD.hidden), (RECORD.hidden, RECORD.share)):
        weights = torch.randn(distinct, n, k, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        x = torch.randn(picks, k, device="cuda", dtype=torch.bfloat16)
        total += microseconds(lambda x=x, w=weights: torch._grouped_mm(x, w, ends), rounds)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    best, slots = ceiling(rounds), filled()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"reading alone: {best:,.0f} GB/s\n")
    print("| rows, experts | us | GB/s | share | torch, bf16, us |\n|---|---|---|---|---|")
    for rows, distinct in CASES:
        sets = itertools.cycle([picked(rows, distinct, seed) for seed in range(SETS)])
        x, weights = torch.randn(rows, RECORD.hidden, device="cuda"), torch.rand(rows, TOP_K, device="cuda")
        took = microseconds(
            lambda s=sets, x=x, w=weights: experts_triton.grouped_experts(x, slots, RECORD, next(s), w, LIMIT), rounds
        )
        rate = distinct * RECORD.nbytes / took / 1e3
        other = torch_grouped(rows, distinct, rounds)
        print(f"| {rows}, {distinct} | {took:.1f} | {rate:,.0f} | {rate / best:.0%} | {other:.1f} |")


if __name__ == "__main__":
    main()
