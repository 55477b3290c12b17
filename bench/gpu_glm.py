"""A decode step of GLM-5.3 at the real shapes, one rank of two, on this GPU: where its time goes.

Weights are made up (`tidectl synth --like glm53`): headers in a temporary directory, dense weights made as the loader
reads them, experts random words on the device. `step` is from the ids to the logits on the device, the median of steps
as they are served, captured; `host` is how long the engine's thread is busy with one; `graph` its graph alone; `eager`
the same step, each kernel launched by the host. All of this is measured before a profiler is attached. Parts are
kernels, of the same step run eagerly: at every border between two parts a kernel that does nothing is launched, and
what runs between two of these on the device is the part's, whoever launched it; a part inside another counts for itself
alone. Launches that overlap make the parts more than the graph, and gaps make them less. `floor`: the bytes of the
weights that a step must read, over what a kernel that only reads reaches in the same run. Alone, the two sums a layer
over the ranks are left out."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.exl3_slots import noise, write_heads
from bench.gpu_timing import timed
from bench.synthetic import OneOfTwo
from kernels.exl3_record import Exl3Record
from kernels.record import PAGE_BYTES
from tided.engine.build import OpenedModel, open_model
from tided.engine.offline import first_pairs, settings_of
from tided.engine.slots import arena_of
from tided.engine.synthetic import plan, synthesise
from tided.experts.bank import ExpertBank
from tided.experts.tables import DemandTap, RoutingTables
from tided.models.glm53 import decode
from tided.models.glm53.captured import Prepared
from tided.models.glm53.model import Glm53
from tided.models.glm53.released import widths_of
from tided.settings import Cache, Experts, Parallel, Settings

STEP_PARTS = {  # methods of a step
    "attention": "attention",
    "index": "choose",
    "router": "route",
    "shared, dense": "dense",
    "norms": "normed",
    "head": "head",
}
PARTS: dict[str, tuple[Any, str]] = {
    "experts": (decode, "grouped_experts"),
    "demand": (DemandTap, "add_up"),
    "embedding": (Glm53, "embedded"),
}
BORDER = "spin_kernel"  # of torch.cuda._sleep
CHUNK, MARGIN = 2048, 512  # tokens: of a prompt, and of answers


@dataclass(frozen=True)
class Made:
    opened: OpenedModel
    model: Glm53
    bank: ExpertBank


def settings_for(path: Path, resident: int, context: int, rows: int, device: str, draft: str = "off") -> Settings:
    settings, tokens = settings_of(path), context + MARGIN
    return replace(
        settings,
        model=replace(settings.model, prefill_chunk_tokens=min(CHUNK, context)),
        experts=Experts(resident=resident, spare_slots=1),
        cache=Cache(context_tokens=tokens, pool_tokens=rows * tokens, dtype="fp8"),
        engine=replace(settings.engine, device=device, lanes=rows, draft=draft),
        parallel=Parallel(ranks=2),
    )


def made(
    folder: Path,
    layers: int,
    experts: int | None,
    resident: int,
    context: int,
    rows: int,
    device: str,
    draft: str = "off",
) -> Made:
    """A rank of two of the first `layers`, with contexts for so many rows; its drafter, where `draft` wants one."""
    synthesise(folder, plan("glm53", layers, experts, None, 0, True), lambda done, total: None)
    settings = settings_for(folder, resident, context, rows, device, draft)
    opened, on = open_model(settings), torch.device(device)
    shape, record, kinds = opened.shape, opened.record, opened.kinds
    assert isinstance(record, Exl3Record)
    assert kinds is not None
    pairs = first_pairs(opened)
    arena, tables = arena_of(opened, pairs, on), RoutingTables(shape.moe_layers, shape.experts_per_layer, on)
    slots = {}
    for pair in pairs:
        kind = int(kinds.of[pair])
        begin = slots[pair] = arena.take(kind)
        arena.hold({pair: begin})
        noise(arena.data[begin : begin + kinds.nbytes[kind] // PAGE_BYTES])
    first = shape_first(opened)
    write_heads(arena.data, record, ((slot, widths_of(first + pair[0], pair[1])) for pair, slot in slots.items()))
    tables.change(slots)
    tap = DemandTap(rows, shape.moe_layers, shape.experts_per_layer, on)
    bank = ExpertBank(record, arena.data, tables, tap)
    model = opened.family.load(opened.checkpoint, settings, OneOfTwo(), bank, on)
    assert isinstance(model, Glm53)
    return Made(opened, model, bank)


def shape_first(opened: OpenedModel) -> int:
    """The first layer of the file that has routed experts."""
    first: int = opened.checkpoint.config["first_k_dense_replace"]
    return first


@torch.inference_mode()
def prepared(model: Glm53, rows: int, context: int) -> tuple[list[Any], Tensor]:
    """Lanes with a prompt each, of random ids, and the ids of a step."""
    draw = torch.Generator().manual_seed(3)
    device = model.norm.device
    lanes = [model.open_lane(number) for number in range(rows)]
    for lane in lanes:
        ids = torch.randint(0, model.shape.vocab_size, (context,), generator=draw).to(device)
        for part in ids.split(min(CHUNK, context)):
            model.prefill(lane, part, "none")
    return lanes, torch.randint(0, model.shape.vocab_size, (rows,), generator=draw)


@dataclass
class Borders:
    """Whose turn it is from each border on, and when the host came there."""

    on_gpu: bool
    turns: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    inside: list[str] = field(default_factory=lambda: ["other"])

    def cross(self) -> None:
        if self.on_gpu:
            torch.cuda._sleep(0)
        self.turns.append(self.inside[-1])
        self.times_s.append(time.perf_counter())

    def around(self, part: str, work: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.inside.append(part)
            self.cross()
            try:
                return work(*given, **named)
            finally:
                self.inside.pop()
                self.cross()

        return call


def owners(step: Any) -> dict[str, tuple[Any, str]]:
    """Where the parts of this step are."""
    return {part: (type(step), name) for part, name in STEP_PARTS.items()} | PARTS


@contextmanager
def marked(step: Any, on_gpu: bool) -> Iterator[Borders]:
    """While it lasts, parts cross borders."""
    borders, places = Borders(on_gpu), owners(step)
    kept = {part: getattr(*where) for part, where in places.items()}
    try:
        for part, (owner, name) in places.items():
            setattr(owner, name, borders.around(part, kept[part]))
        yield borders
    finally:
        for part, (owner, name) in places.items():
            setattr(owner, name, kept[part])


def parts_us(model: Glm53, made: Prepared, rounds: int) -> dict[str, float]:
    """Microseconds a step, by part; "other": what is launched in none."""
    on_gpu, tap = model.norm.device.type == "cuda", model.bank.tap
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with marked(made.step, on_gpu) as borders, torch.inference_mode(), profile(activities=kinds) as seen:
        borders.cross()
        for _ in range(rounds):
            made.step.run()
            tap.record_step(made.wish)
            tap.add_up()
        borders.cross()
        if on_gpu:
            torch.cuda.synchronize()
    spent = dict.fromkeys((*owners(made.step), "other"), 0.0)
    for part, us in _on_device(seen, borders) if on_gpu else _on_host(borders):
        spent[part] += us / rounds
    return spent


def _on_host(borders: Borders) -> Iterator[tuple[str, float]]:
    for part, began_s, ended_s in zip(borders.turns, borders.times_s, borders.times_s[1:], strict=False):
        yield part, 1e6 * (ended_s - began_s)


def _on_device(seen: Any, borders: Borders) -> Iterator[tuple[str, float]]:
    """Kernels in the order in which they began. Raises ValueError where a border was not seen."""
    kernels = [event for event in seen.events() if event.device_type.name == "CUDA"]
    turns = iter(borders.turns)
    part = "other"
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        if BORDER in event.name:
            part = next(turns)
        else:
            yield part, event.time_range.elapsed_us()
    if next(turns, None) is not None:
        raise ValueError("the profiler lost kernels")


def step_ms(model: Glm53, lanes: list[Any], ids: Tensor, rounds: int) -> tuple[float, float]:
    """Medians: until the logits are there, and until the host is done launching."""
    whole, host, on_gpu = list[float](), list[float](), model.norm.device.type == "cuda"
    with torch.inference_mode():
        for _ in range(rounds):
            model.bank.tap.begin_step()
            began_s = time.perf_counter()
            model.decode(lanes, ids)
            host.append(1e3 * (time.perf_counter() - began_s))
            if on_gpu:
                torch.cuda.synchronize()
            whole.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(whole), statistics.median(host)


def read_bytes(one: Made, rows: int) -> dict[str, float]:
    """What a step must read at least: the records of distinct experts, drawn evenly, and every dense weight but the
    embedding."""
    kinds, shape = one.opened.kinds, one.opened.shape
    assert kinds is not None
    mean = float(torch.tensor(kinds.nbytes, dtype=torch.float64)[torch.from_numpy(kinds.of)].mean())
    held = one.bank.tables.routable.sum(1).double()  # a layer's
    distinct = float((held * (1 - (1 - shape.top_k / held) ** rows)).sum())
    dense = one.opened.family.dense_bytes(one.opened.checkpoint, one.opened.settings) - one.model.embed.nbytes
    return {"experts": distinct * mean, "all else": float(dense)}


def graph_ms(made: Prepared, rounds: int) -> float:
    """Of its graph alone, the median; 0 where there is none."""
    return 0.0 if made.captured is None else timed(made.captured.graph.replay, rounds, 1) / 1e3


def eager_ms(model: Glm53, made: Prepared, rounds: int) -> float:
    """The median of the same step where each kernel is launched by the host."""
    on_gpu, times = model.norm.device.type == "cuda", list[float]()
    with torch.inference_mode():
        for _ in range(rounds):
            began_s = time.perf_counter()
            made.step.run()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(times)


def nodes(made: Prepared) -> int:
    """Of its graph, by the profiler; 0 where there is none."""
    if made.captured is None:
        return 0
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        made.captured.graph.replay()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in seen.events())


@dataclass(frozen=True)
class Times:
    """Milliseconds of a step of so many rows: whole, of the host in it, of its graph alone, of the same eagerly."""

    rows: int
    whole: float
    host: float
    graph: float
    eager: float


def times(one: Made, rows: int, context: int, rounds: int) -> Times:
    """The step stays prepared, with what it read last."""
    lanes, ids = prepared(one.model, rows, context)
    step_ms(one.model, lanes, ids, 2)  # kernels are compiled, and the step is captured
    whole, host = step_ms(one.model, lanes, ids, rounds)
    made = one.model.steps.prepared[rows]
    found = Times(rows, whole, host, graph_ms(made, rounds), eager_ms(one.model, made, max(2, rounds // 4)))
    for lane in lanes:
        one.model.close_lane(lane)
    return found


def table(one: Made, took: Times, context: int, rounds: int, read_gbs: float) -> None:
    """Behind all that is timed: once a profiler was attached, launches take longer."""
    made = one.model.steps.prepared[took.rows]
    count, parts, read = nodes(made), parts_us(one.model, made, max(2, rounds // 4)), read_bytes(one, took.rows)
    total, launched = sum(read.values()), sum(parts.values())
    floor = total / read_gbs / 1e6
    print(f"\n{took.rows} rows, {len(one.model.blocks)} layers, {context} tokens of context")
    print(f"  step {took.whole:.2f} ms, host {took.host:.2f} ms, graph {took.graph:.2f} ms of {count} nodes", end="")
    print(f"; eager {took.eager:.2f} ms; kernels {launched / 1e3:.2f} ms")
    print(
        f"  floor {floor:.2f} ms ({total / 1e9:.2f} GB at {read_gbs:,.0f} GB/s); step / floor {took.whole / floor:.2f}"
    )
    for part, us in sorted(parts.items(), key=lambda item: -item[1]):
        rate = f"{read[part] / us / 1e3:8,.0f} GB/s" if part in read and us else ""
        print(f"    {part:16}{us / 1e3:8.3f} ms {us / launched:6.1%} {rate}")


def show(read_gbs: float, options: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="tidelm-glm-") as name:
        began_s = time.perf_counter()
        rows = max(options.rows)
        one = made(Path(name), options.glm_layers, None, options.glm_resident, options.context, rows, "cuda")
        torch.cuda.synchronize()
        print(
            f"\n{torch.cuda.memory_allocated() / 1e9:.1f} GB of weights, made in {time.perf_counter() - began_s:.0f} s"
        )
        took = [times(one, count, options.context, options.rounds) for count in options.rows]
        for each in took:
            table(one, each, options.context, options.rounds, read_gbs)
