"""A decode step at the real shapes, one rank of two, on this GPU: where its time goes, and what the least would be.

    python bench/gpu_step.py [--layers 40] [--resident 10000] [--rows 1 6] [--context 8000] [--prefill 0] [--tiles]

`step`: replays of the captured graphs, back to back. `host`: what the engine's thread spends on a step beside waiting.
`step`: replays of the captured graphs, back to back. `host`: what the engine's thread spends on a step beside waits.
the same run. The two sums a layer over the ranks are left out: there is one device. Parts are kernels by name."""

import argparse
import itertools
import re
import statistics
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.gpu import ceiling, microseconds
from bench.synthetic import real_shapes
from kernels.linear import Fp8Matrix, Matrix
from kernels.linear_triton import Ending, linear, parts
from tided.models.deepseek_v41.model import DeepseekV41

PARTS = {
    "experts": "^_gate_up|^_down|^_prepare|^_sum|expert",
    "dense": "^_linear",
    "attention": "^_attention|^_latents|^_window",
    "mHC": "^_hyper",
    "router": "^_route",
    "index": "^_index|^_compressor",
    "Engram": "^_engram",
}
GB10_GBS, GB10_NODE_US = 232.0, 1.5


def contexts(model: DeepseekV41, rows: int, tokens: int) -> list[Any]:
    """Lanes that hold so many tokens, of random numbers."""
    found = []
    for index in range(rows):
        lane = model.open_lane(index)
        model.pool.grow([lane], tokens + 64)
        lane.position = tokens
        lane.windows.normal_()
        found.append(lane)
    return found


def replayed_us(pieces: list[tuple[Any, Any]], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for graph, _ in pieces:
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def by_part(pieces: list[tuple[Any, Any]], rounds: int = 3) -> tuple[dict[str, float], float]:
    """Microseconds of a step by part, and nodes a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            for graph, _ in pieces:
                graph.replay()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    nodes = 0
    for event in seen.events():
        if event.device_type.name != "CUDA":
            continue
        nodes += 1
        part = next((part for part, names in PARTS.items() if re.search(names, event.name)), "other")
        spent[part] += event.time_range.elapsed_us()
    return {part: us / rounds for part, us in spent.items()}, nodes / rounds


def dense_bytes(model: DeepseekV41) -> int:
    def of(matrix: Matrix) -> int:
        if isinstance(matrix, Fp8Matrix):
            return matrix.codes.nbytes + matrix.scale.nbytes
        return matrix.nbytes

    total = of(model.head)
    for block in model.blocks:
        held = [*vars(block.attention).values(), *vars(block.moe).values(), block.hc_attn.fn, block.hc_ffn.fn]
        for part in (block.attention.compressor, block.attention.indexer):
            held += [] if part is None else list(vars(part).values())
        total += sum(of(one) for one in held if isinstance(one, Tensor | Fp8Matrix))
    return total + sum(of(engram.wkv) for engram in model.engrams.layers.values())


def step_table(model: DeepseekV41, counts: list[int], context: int, rounds: int, read_gbs: float) -> None:
    layers = len(model.blocks)
    for rows in counts:
        lanes = contexts(model, rows, context)
        ids = torch.arange(rows) * 7919 + 5
        for _ in range(2):
            model.decode(lanes, ids)  # eager and captured, then a replay
        torch.cuda.synchronize()
        host = []
        for _ in range(10):
            began = time.perf_counter()
            model.decode(lanes, ids)
            host.append(1e3 * (time.perf_counter() - began))
            torch.cuda.synchronize()
        made = model.steps._prepared[rows]
        distinct = sum(len(torch.unique(made.step.inputs.routed.slots[n])) for n in range(layers)) / layers
        pieces = made.captured.pieces
        took = replayed_us(pieces, rounds)
        spent, nodes = by_part(pieces)
        record = model.blocks[0].moe.bank.record.nbytes
        read = {"experts": distinct * layers * record, "dense": float(dense_bytes(model))}
        floor = sum(read.values()) / read_gbs / 1e3
        busy = sum(spent.values())
        print(f"\n{rows} rows, {layers} layers, {context} tokens of context, {distinct:.1f} distinct experts a layer")
        print(f"  step {took / 1e3:.3f} ms, kernels {busy / 1e3:.3f} ms, gaps {(took - busy) / 1e3:.3f} ms")
        print(f"  {nodes:.0f} graph nodes in {len(pieces)} pieces; host {statistics.median(host):.3f} ms")
        print(f"  floor {floor / 1e3:.3f} ms ({sum(read.values()) / 1e9:.2f} GB); step / floor {took / floor:.2f}")
        gb10 = sum(read.values()) / GB10_GBS / 1e6 + nodes * GB10_NODE_US / 1e3
        print(f"  GB10 at {GB10_GBS:.0f} GB/s and {GB10_NODE_US} us a node: {gb10:.1f} ms and its collectives")
        for part, us in sorted(spent.items(), key=lambda one: -one[1]):
            rate = f"{read[part] / us / 1e3:8,.0f} GB/s" if part in read else ""
            print(f"    {part:10}{us / 1e3:8.3f} ms {us / took:6.1%} {rate}")
        for lane in lanes:
            model.close_lane(lane)


def linear_table(model: DeepseekV41, rows: int, rounds: int, read_gbs: float) -> None:
    """Each kind of matrix, one layer's after another's, so that none is in the cache."""
    attention, moe = [b.attention for b in model.blocks], [b.moe for b in model.blocks]
    kinds: dict[str, tuple[list[Matrix], Ending, int]] = {
        "wq_a, wkv": ([a.inputs for a in attention], Ending.RAW, 1),
        "wq_b": ([a.wq_b for a in attention], Ending.STORED, 1),
        "wo_a": ([a.wo_a for a in attention], Ending.ACTIVATION, 4),
        "wo_b": ([a.wo_b for a in attention], Ending.RAW, 1),
        "shared w1, w3": ([m.shared_w13 for m in moe], Ending.SWIGLU, 1),
        "shared w2": ([m.shared_w2 for m in moe], Ending.RAW, 1),
        "gate": ([m.gate for m in moe], Ending.RAW, 1),
        "head": ([model.head], Ending.RAW, 1),
    }
    print(f"\n| matrix, {rows} rows | shape | us | GB/s | of reading alone |\n|---|---|---|---|---|")
    for name, (matrices, ending, groups) in kinds.items():
        outs, width = matrices[0].shape
        x = torch.randn(rows, groups * width, device="cuda").to(torch.bfloat16)
        split = parts(outs, width) if name in ("wq_a, wkv", "gate") else 1
        turn = itertools.cycle(matrices)

        def work(x: Tensor = x, turn: Any = turn, ending: Ending = ending, g: int = groups, s: int = split) -> None:
            linear(x, next(turn), ending, groups=g, limit=10.0, split=s)

        took = microseconds(work, rounds, len(matrices))
        one = matrices[0]
        size = one.codes.nbytes + one.scale.nbytes if isinstance(one, Fp8Matrix) else one.nbytes
        rate = size / took / 1e3
        print(f"| {name} | {outs} x {width} | {took:.1f} | {rate:,.0f} | {rate / read_gbs:.0%} |")


def tile_table(model: DeepseekV41, rows: int, rounds: int) -> None:
    """Microseconds of a product by how much of K a tile has, and how many are on their way."""
    attention, moe = [b.attention for b in model.blocks], [b.moe for b in model.blocks]
    kinds: dict[str, tuple[list[Matrix], Ending, int]] = {
        "wq_a, wkv": ([a.inputs for a in attention], Ending.RAW, 3),
        "wq_b": ([a.wq_b for a in attention], Ending.STORED, 1),
        "wo_b": ([a.wo_b for a in attention], Ending.RAW, 1),
        "shared w1, w3": ([m.shared_w13 for m in moe], Ending.SWIGLU, 1),
        "shared w2": ([m.shared_w2 for m in moe], Ending.RAW, 1),
        "gate": ([m.gate for m in moe], Ending.RAW, 8),
    }
    tiles = [(128, 3), (128, 6), (256, 2), (256, 4), (512, 2), (512, 3)]
    print(f"\n| us, {rows} rows |" + "|".join(f" {block} x {stages} " for block, stages in tiles) + "|")
    print("|---" * (len(tiles) + 1) + "|")
    for name, (matrices, ending, split) in kinds.items():
        x = torch.randn(rows, matrices[0].shape[1], device="cuda").to(torch.bfloat16)
        found = []
        for block, stages in tiles:
            turn = itertools.cycle(matrices)

            def work(x: Tensor = x, turn: Any = turn, tile: tuple[int, int] = (block, stages)) -> None:
                linear(x, next(turn), ending, limit=10.0, split=split, block=tile[0], stages=tile[1])  # noqa: B023

            try:
                found.append(f"{microseconds(work, rounds, len(matrices)):.1f}")
            except Exception as error:  # more shared memory than there is
                found.append(type(error).__name__)
        print(f"| {name} | " + " | ".join(found) + " |")


def prefill(model: DeepseekV41, tokens: int, chunk: int) -> None:
    for name, count in (("warm", chunk // 4), ("measured", tokens)):
        lane = model.open_lane(0)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for ids in (torch.arange(count) * 7919 % 129_000).split(chunk):
            model.prefill(lane, ids, "none")
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        print(f"prefill, {name}: {count} tokens in chunks of {chunk}: {took:.2f} s, {count / took:,.0f} tok/s")
        model.close_lane(lane)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--layers", 40), ("--resident", 10_000), ("--context", 8000), ("--prefill", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--tiles", action="store_true", help="other tiles of the dense products too")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    began = time.perf_counter()
    read_gbs = ceiling(options.rounds)
    room = max(options.rows) * (options.context + 256) + options.prefill
    model = real_shapes(options.layers, options.resident, room)
    torch.cuda.synchronize()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; reading alone {read_gbs:,.0f} GB/s")
    print(f"{torch.cuda.memory_allocated() / 1e9:.1f} GB of weights, made in {time.perf_counter() - began:.0f} s")
    with torch.inference_mode():
        step_table(model, options.rows, options.context, options.rounds, read_gbs)
        linear_table(model, max(options.rows), options.rounds, read_gbs)
        if options.tiles:
            tile_table(model, max(options.rows), options.rounds)
        if options.prefill:
            prefill(model, options.prefill, 2048)


if __name__ == "__main__":
    main()
