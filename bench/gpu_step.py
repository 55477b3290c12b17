"""A decode step at the real shapes, one rank of two, on this GPU: where its time goes, and what the least would be.

`step`: replays of the captured graphs, back to back. `host`: what the engine's thread spends on a step beside waits:
launching the graphs, and all the rest. `floor`: the bytes of the weights that a step must read, over what a kernel that
only reads reaches in the same run. Alone, the two sums a layer over the ranks are left out. Parts are kernels by name;
launches overlap, so parts add up to more than the step."""

import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench import gpu_prefill
from bench.synthetic import real_shapes
from kernels.linear import Fp8Matrix, Matrix
from tided.engine.sampling import sample
from tided.engine.types import Sampling
from tided.models.deepseek_v41.captured import Captured
from tided.models.deepseek_v41.model import DeepseekV41

PARTS = {
    "experts": "^_gate_up|^_down|^_prepare|^_sum|expert",
    "dense": "^_linear",
    "attention": "^_attention|^_latents|^_window",
    "mHC": "^_hyper",
    "router": "^_route",
    "index": "^_index|^_compressor",
    "Engram": "^_engram",
    "collectives": "nccl|^_one_shot",
}
GB10_GBS, GB10_NODE_US = 232.0, 1.5
PREFILL_TOKENS = 8192


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


@dataclass
class Watched:
    """A graph whose launches are timed."""

    graph: Any
    seconds: float = 0.0

    def replay(self) -> None:
        began = time.perf_counter()
        self.graph.replay()
        self.seconds += time.perf_counter() - began


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


@dataclass(frozen=True)
class Spent:
    """Microseconds of a step: by part, by kernel (and how often it is launched), and nodes a step."""

    parts: dict[str, float]
    kernels: list[tuple[str, float, float]]
    nodes: float


def spent(pieces: list[tuple[Any, Any]], rounds: int = 3) -> Spent:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            for graph, _ in pieces:
                graph.replay()
        torch.cuda.synchronize()
    by_part, by_name, count = Counter[str](), Counter[str](), Counter[str]()
    for event in seen.events():
        if event.device_type.name == "CUDA":
            name = event.name.split("(")[0][:60]
            by_part[next((p for p, names in PARTS.items() if re.search(names, event.name)), "other")] += (
                event.time_range.elapsed_us()
            )
            by_name[name] += event.time_range.elapsed_us()
            count[name] += 1
    most = [(name, us / rounds, count[name] / rounds) for name, us in by_name.most_common(16)]
    return Spent({part: us / rounds for part, us in by_part.items()}, most, count.total() / rounds)


def host_ms(model: DeepseekV41, lanes: list[Any], ids: Tensor, made: Any, rounds: int) -> tuple[float, float]:
    """Of a step on the engine's thread: launching the graphs, and the rest."""
    own, launches, rest = made.captured, list[float](), list[float]()
    for _ in range(rounds):
        watched = [(Watched(graph), layer) for graph, layer in own.pieces]
        made.captured = Captured(watched, own.logits)
        began = time.perf_counter()
        model.decode(lanes, ids)
        took = time.perf_counter() - began
        torch.cuda.synchronize()
        launches.append(1e3 * sum(graph.seconds for graph, _ in watched))
        rest.append(1e3 * took - launches[-1])
    made.captured = own
    return statistics.median(launches), statistics.median(rest)


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


def loop_ms(model: DeepseekV41, lanes: list[Any], ids: Tensor, sampling: Sampling, steps: int) -> float:
    """A step from the ids before to its own, as an engine's thread goes through it: the step, its demand added up, its
    tokens drawn and read."""
    tap, times = model.blocks[0].moe.bank.tap, list[float]()
    for _ in range(steps):
        began = time.perf_counter()
        tap.begin_step()
        logits = model.decode(lanes, ids)
        tap.add_up()
        drawn = sample(logits, [(sampling, lane.position) for lane in lanes])
        times.append(1e3 * (time.perf_counter() - began))
        assert len(drawn) == len(lanes)
    return statistics.median(times)


@dataclass(frozen=True)
class Prepared:
    """A captured step of so many rows at work."""

    lanes: list[Any]
    ids: Tensor
    made: Any


@torch.inference_mode()
def prepared(model: DeepseekV41, rows: int, context: int) -> Prepared:
    lanes = contexts(model, rows, context)
    ids = torch.arange(rows) * 7919 + 5
    for _ in range(3):
        model.decode(lanes, ids)  # eager and captured, then replays
    torch.cuda.synchronize()
    return Prepared(lanes, ids, model.steps._prepared[rows])


@torch.inference_mode()
def step_table(model: DeepseekV41, rows: int, context: int, rounds: int, repeats: int, read_gbs: float) -> None:
    layers, at = len(model.blocks), prepared(model, rows, context)
    slots = at.made.step.inputs.routed.slots
    distinct = sum(len(torch.unique(slots[n][slots[n] >= 0])) for n in range(layers)) / layers
    pieces = at.made.captured.pieces
    took = [replayed_us(pieces, rounds) for _ in range(repeats)]
    us = statistics.median(took)
    launches, rest = host_ms(model, at.lanes, at.ids, at.made, 2 * rounds)
    greedy, drawn = [loop_ms(model, at.lanes, at.ids, Sampling(temperature=t, seed=1), 4 * rounds) for t in (0.0, 1.0)]
    of = spent(pieces)  # last: once a profiler was attached, launches take longer
    record = model.blocks[0].moe.bank.plain_record.nbytes
    read = {"experts": distinct * layers * record, "dense": float(dense_bytes(model))}
    total = sum(read.values())
    floor = total / read_gbs / 1e3
    print(f"\n{rows} rows, {layers} layers, {context} tokens of context, {distinct:.1f} distinct experts a layer")
    print(
        f"  step {us / 1e3:.3f} ms ({(max(took) - min(took)) / 1e3:.3f}), kernels {sum(of.parts.values()) / 1e3:.3f} ms"
    )
    print(f"  {of.nodes:.0f} graph nodes in {len(pieces)} pieces; host: launches {launches:.3f} ms, rest {rest:.3f} ms")
    print(f"  ids to ids: greedy {greedy:.3f} ms, {greedy - us / 1e3:.3f} beside the graphs; drawn {drawn:.3f} ms")
    print(f"  floor {floor / 1e3:.3f} ms ({total / 1e9:.2f} GB at {read_gbs:,.0f} GB/s); step / floor {us / floor:.2f}")
    gb10 = total / GB10_GBS / 1e6 + of.nodes * GB10_NODE_US / 1e3
    print(f"  GB10 at {GB10_GBS:.0f} GB/s and {GB10_NODE_US} us a node: {gb10:.1f} ms and its collectives")
    for part, part_us in sorted(of.parts.items(), key=lambda one: -one[1]):
        rate = f"{read[part] / part_us / 1e3:8,.0f} GB/s" if part in read else ""
        print(f"    {part:12}{part_us / 1e3:8.3f} ms {part_us / us:6.1%} {rate}")
    for name, kernel_us, count in of.kernels:
        print(f"      {name:40}{kernel_us / 1e3:8.3f} ms {count:6.0f} x {kernel_us / count:7.2f} us")
    for lane in at.lanes:
        model.close_lane(lane)


def show(read_gbs: float, of_model: list[str], options: Any) -> None:
    began = time.perf_counter()
    tokens = 2 * PREFILL_TOKENS if "prefill" in of_model else 0
    model = real_shapes(options.layers, options.resident, max(options.rows) * (options.context + 256) + tokens)
    torch.cuda.synchronize()
    print(f"\n{torch.cuda.memory_allocated() / 1e9:.1f} GB of weights, made in {time.perf_counter() - began:.0f} s")
    if "step" in of_model:
        for rows in options.rows:
            step_table(model, rows, options.context, options.rounds, options.repeats, read_gbs)
    if "residency" in of_model:
        from bench import gpu_residency  # it uses what is above

        gpu_residency.show(model, options)
    if "prefill" in of_model:
        gpu_prefill.show(model, PREFILL_TOKENS, [2048, PREFILL_TOKENS], options.rounds)
