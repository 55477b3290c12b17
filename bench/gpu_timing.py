"""How the benches of a GPU measure: replays of captured graphs and eager calls between events, and the two ceilings, of
reading and of multiplying, that every share is told against."""

import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl

IN_GRAPH = 20  # launches
READ_WORDS, SQUARE = 1 << 29, 8192


@triton.jit
def _read(source, out, words, SIZE: tl.constexpr):  # noqa: ANN001, ANN202
    total = tl.zeros([SIZE], tl.int32)
    for at in range(tl.program_id(0) * SIZE, words, tl.num_programs(0) * SIZE):
        total ^= tl.load(source + at + tl.arange(0, SIZE))
    tl.store(out + tl.program_id(0) * SIZE + tl.arange(0, SIZE), total)


def timed(replay: Callable[[], object], rounds: int, launches: int) -> float:
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
    return timed(graph_of(work, launches).replay, rounds, launches)


def graph_of(work: Callable[[], object], launches: int) -> torch.cuda.CUDAGraph:
    """Of so many launches; it has run once."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            work()
    graph.replay()
    return graph


def eager(work: Callable[[], object], rounds: int) -> float:
    """Microseconds of one call."""
    work()
    work()
    torch.cuda.synchronize()
    return timed(work, rounds, 1)


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


def spread(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):,.{digits}f} ({max(values) - min(values):.{digits}f})"
