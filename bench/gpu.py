"""Times the expert kernels on this GPU, at the shapes of one rank's half of DeepSeek-V4.1-Flash.

    PYTHONPATH=. python bench/gpu.py [--rounds 10] [--repeats 3]

A decode step's times are of a captured graph, each launch with other experts, so that nothing is found in the L2 cache.
`share`: bytes of the distinct experts over time, as a part of what a kernel that only reads reaches in the same run.
Beside it torch's grouped product on as many experts as bf16. A chunk's times are of eager calls, from the sort of the
picks to the sum; `of peak`: its products over what torch's bf16 product of 8192 x 8192 reaches. Figures are medians, in
brackets the spread of the repeats.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench import instructions
from kernels import experts_chunk_triton, experts_triton
from kernels.record import ExpertRecord

RECORD = ExpertRecord(5120, 2304, 2)
EXPERTS, TOP_K, SETS, IN_GRAPH, LIMIT = 384, 6, 20, 20, 10.0
SLOTS = 1200
CASES = ((1, 6), (4, 16), (6, 22), (8, 28), (16, 80))  # rows, distinct experts
CHUNKS = (64, 512, 2048, 8192)  # rows
READ_WORDS, SQUARE = 1 << 29, 8192
GB10_BYTES_A_S, GB10_OPERATIONS_A_S = 232e9, 48 * 128 * 2.4e9


@triton.jit
def _read(source, out, words, SIZE: tl.constexpr):  # noqa: ANN001, ANN202
    total = tl.zeros([SIZE], tl.int32)
    for at in range(tl.program_id(0) * SIZE, words, tl.num_programs(0) * SIZE):
        total ^= tl.load(source + at + tl.arange(0, SIZE))
    tl.store(out + tl.program_id(0) * SIZE + tl.arange(0, SIZE), total)


def _timed(replay: Callable[[], object], rounds: int, launches: int) -> float:
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / launches)
    return statistics.median(times)


def microseconds(work: Callable[[], object], rounds: int, launches: int = IN_GRAPH) -> float:
    """Microseconds of one launch, the median over replays of a graph of several."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            work()
    graph.replay()
    return _timed(graph.replay, rounds, launches)


def eager(work: Callable[[], object], rounds: int) -> float:
    """Microseconds of one call."""
    work()
    work()
    torch.cuda.synchronize()
    return _timed(work, rounds, 1)


def ceiling(rounds: int) -> float:
    """GB/s of reading alone, the best of some grids."""
    source = torch.randint(0, 1 << 30, (READ_WORDS,), dtype=torch.int32, device="cuda")
    found = []
    for blocks in (4, 8, 16):
        grid = blocks * torch.cuda.get_device_properties().multi_processor_count
        out = torch.empty(grid * 4096, dtype=torch.int32, device="cuda")
        took = microseconds(lambda g=grid, o=out: _read[(g,)](source, o, READ_WORDS, 4096, num_warps=8), rounds, 3)
        found.append(4e-3 * READ_WORDS / took)
    return max(found)


def peak(rounds: int) -> float:
    """TFLOP/s of torch's bf16 product."""
    a = torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.bfloat16)
    return 2e-6 * SQUARE**3 / eager(lambda: a @ a, rounds)


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


def spread(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):,.{digits}f} ({max(values) - min(values):.{digits}f})"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    best, slots = ceiling(options.rounds), filled()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"reading alone: {best:,.0f} GB/s\n")
    decode(slots, best, options.rounds, options.repeats)
    chunks(slots, best, options.rounds, options.repeats)
    operations()


if __name__ == "__main__":
    main()
