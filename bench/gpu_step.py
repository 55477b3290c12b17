"""A decode step at the real shapes, one rank of two, on this GPU: where its time goes, and what the least would be.

`step`: replays of the captured graphs, back to back. `ids to ids`: a step as an engine's thread goes through it, from
the tokens before to its own; what it takes more than the graphs, the device waits for the host, or draws. `host`: that
thread's time until it launches the first graph, in the launches, and until it has nothing left but to wait. No profiler
is attached before all of this is measured. `floor`: the bytes of the weights that a step must read, over what a kernel
that only reads reaches in the same run. Alone, the two sums a layer over the ranks are left out. Parts are kernels by
name; launches overlap, so parts add up to more than the step."""

import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench import gpu_prefill
from bench.synthetic import real_shapes
from kernels.linear import Fp8Matrix, Matrix
from tided.engine.sampling import drawing
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
    began_s: float = 0.0
    seconds: float = 0.0

    def replay(self) -> None:
        self.began_s = time.perf_counter()
        self.graph.replay()
        self.seconds = time.perf_counter() - self.began_s


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
    return Prepared(lanes, ids, model.steps.prepared[rows])


@dataclass(frozen=True)
class Looped:
    """Milliseconds of a step: of the whole; of the host, until the first launch, in launches, until nothing is left."""

    whole: float
    first: float
    launches: float
    launched: float


@torch.inference_mode()
def looped(model: DeepseekV41, at: Prepared, sampling: Sampling, steps: int) -> Looped:
    """Steps as the engine's thread goes through them, from tokens to tokens: always the same ones, so that all steps
    ask for the same experts as the graphs alone."""
    tap, own, lanes = model.blocks[0].moe.bank.tap, at.made.captured, at.lanes
    tokens, times = at.ids.tolist(), list[Looped]()
    watched = [(Watched(graph), layer) for graph, layer in own.pieces]
    at.made.captured = Captured(watched, own.logits)
    for _ in range(steps):
        began = time.perf_counter()
        tap.begin_step()
        logits = model.decode(lanes, torch.tensor(tokens))
        drawn = drawing(logits, [(sampling, lane.position) for lane in lanes])
        tap.add_up()
        launched = time.perf_counter()
        read = drawn()
        ended = time.perf_counter()
        assert len(read) == len(tokens)
        launches = sum(graph.seconds for graph, _ in watched)
        times.append(Looped(ended - began, watched[0][0].began_s - began, launches, launched - began))
    at.made.captured = own
    return Looped(*(1e3 * statistics.median(getattr(one, name.name) for one in times) for name in fields(Looped)))


@torch.inference_mode()
def step_table(model: DeepseekV41, rows: int, context: int, rounds: int, repeats: int, read_gbs: float) -> None:
    layers, at = len(model.blocks), prepared(model, rows, context)
    slots = at.made.step.inputs.routed.slots
    distinct = sum(len(torch.unique(slots[n][slots[n] >= 0])) for n in range(layers)) / layers
    pieces = at.made.captured.pieces
    took = [replayed_us(pieces, rounds) for _ in range(repeats)]
    us = statistics.median(took)
    laws = {"greedy": {"temperature": 0.0}, "drawn": {"temperature": 1.0}, "top-p 0.95": {"top_p": 0.95}}
    loops = {name: looped(model, at, Sampling(seed=1, **law), 4 * rounds) for name, law in laws.items()}
    host = loops["greedy"]
    of = spent(pieces)  # last: once a profiler was attached, launches take longer
    record = model.blocks[0].moe.bank.plain_record.nbytes
    read = {"experts": distinct * layers * record, "dense": float(dense_bytes(model))}
    total = sum(read.values())
    floor = total / read_gbs / 1e3
    print(f"\n{rows} rows, {layers} layers, {context} tokens of context, {distinct:.1f} distinct experts a layer")
    print(
        f"  step {us / 1e3:.3f} ms ({(max(took) - min(took)) / 1e3:.3f}), kernels {sum(of.parts.values()) / 1e3:.3f} ms"
    )
    print(
        f"  {of.nodes:.0f} graph nodes in {len(pieces)} pieces; host: {host.first:.3f} ms before the first, "
        f"{host.launches:.3f} ms in launches, all is launched after {host.launched:.3f} ms"
    )
    for name, loop in loops.items():
        print(f"  ids to ids, {name}: {loop.whole:.3f} ms, {loop.whole - us / 1e3:.3f} beside the graphs")
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
