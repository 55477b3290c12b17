"""A decode step of GLM-5.3 at the real shapes, one rank of two, on this GPU: where its time goes.

Weights are made up (`tidectl synth --like glm53`): headers in a temporary directory, dense weights made as the loader
reads them, experts random words on the device. `step` is from the ids to the logits on the device, the median; `host`
is how long the engine's thread launches for. Parts are what is launched inside the methods that PARTS names, by torch's
own profiler; one inside another counts for the inner one alone. `floor`: the bytes of the weights that a step must
read, over what a kernel that only reads reaches in the same run. Alone, the two sums a layer over the ranks are left
out."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from bench.exl3_slots import noise, write_heads
from bench.synthetic import OneOfTwo
from kernels.exl3_record import Exl3Record
from kernels.record import PAGE_BYTES
from tided.engine.build import OpenedModel, open_model
from tided.engine.offline import first_pairs, settings_of
from tided.engine.slots import arena_of
from tided.engine.synthetic import plan, synthesise
from tided.experts.bank import ExpertBank
from tided.experts.tables import DemandTap, RoutingTables
from tided.models import mixture
from tided.models.glm53.attention import Attention
from tided.models.glm53.indexer import Indexer
from tided.models.glm53.mlp import Dense, Moe
from tided.models.glm53.model import Glm53
from tided.models.glm53.released import widths_of
from tided.settings import Cache, Experts, Parallel, Settings

PARTS: dict[str, tuple[Any, str]] = {
    "attention": (Attention, "forward"),
    "index": (Indexer, "select"),
    "router": (Moe, "route"),
    "experts": (mixture, "grouped_experts"),
    "shared, dense": (Dense, "of"),
    "demand": (DemandTap, "record"),
    "head": (Glm53, "logits"),
    "embedding": (Glm53, "embedded"),
}
CHUNK, MARGIN = 2048, 512  # tokens: of a prompt, and of answers


@dataclass(frozen=True)
class Made:
    opened: OpenedModel
    model: Glm53
    bank: ExpertBank


def settings_for(path: Path, resident: int, context: int, rows: int, device: str) -> Settings:
    settings, tokens = settings_of(path), context + MARGIN
    return replace(
        settings,
        model=replace(settings.model, prefill_chunk_tokens=min(CHUNK, context)),
        experts=Experts(resident=resident, spare_slots=1),
        cache=Cache(context_tokens=tokens, pool_tokens=rows * tokens, dtype="fp8"),
        engine=replace(settings.engine, device=device, lanes=rows),
        parallel=Parallel(ranks=2),
    )


def made(folder: Path, layers: int, experts: int | None, resident: int, context: int, rows: int, device: str) -> Made:
    """A rank of two of the first `layers`, with contexts for so many rows."""
    synthesise(folder, plan("glm53", layers, experts, None, 0, True), lambda done, total: None)
    settings = settings_for(folder, resident, context, rows, device)
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
        arena.hold(begin, pair)
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
    return lanes, torch.randint(0, model.shape.vocab_size, (rows,), generator=draw).to(device)


@contextmanager
def labelled() -> Iterator[None]:
    """While it lasts, the parts say who they are to the profiler."""
    kept = {part: getattr(*where) for part, where in PARTS.items()}

    def saying(part: str, work: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            with record_function(part):
                return work(*given, **named)

        return call

    try:
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, saying(part, kept[part]))
        yield
    finally:
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, kept[part])


def parts_us(model: Glm53, lanes: list[Any], ids: Tensor, rounds: int) -> dict[str, float]:
    """Microseconds a step, by part; "other": what is launched in none."""
    on_gpu = model.norm.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with labelled(), torch.inference_mode(), profile(activities=kinds) as seen:
        for _ in range(rounds):
            with record_function("step"):
                model.decode(lanes, ids)
        if on_gpu:
            torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type.name == "CPU"]
    spent = dict.fromkeys((*PARTS, "step"), 0.0)
    for event in events:
        if event.name in spent:
            took = _took(event, on_gpu)
            spent[event.name] += took
            above = event.cpu_parent
            while above is not None and above.name not in spent:
                above = above.cpu_parent
            if above is not None and above.name != "step":
                spent[above.name] -= took
    whole = spent.pop("step") / rounds
    found = {part: us / rounds for part, us in spent.items()}
    return found | {"other": whole - sum(found.values())}


def _took(event: Any, on_gpu: bool) -> float:
    return float(event.device_time_total if on_gpu else event.cpu_time_total)


def step_ms(model: Glm53, lanes: list[Any], ids: Tensor, rounds: int) -> tuple[float, float]:
    """Medians: until the logits are there, and until the host is done launching."""
    whole, host, on_gpu = list[float](), list[float](), model.norm.device.type == "cuda"
    with torch.inference_mode():
        for _ in range(rounds):
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


def table(one: Made, rows: int, context: int, rounds: int, read_gbs: float) -> None:
    lanes, ids = prepared(one.model, rows, context)
    step_ms(one.model, lanes, ids, 2)  # kernels are compiled
    whole, host = step_ms(one.model, lanes, ids, rounds)
    parts, read = parts_us(one.model, lanes, ids, max(2, rounds // 4)), read_bytes(one, rows)
    total, launched = sum(read.values()), sum(parts.values())
    floor = total / read_gbs / 1e6
    print(f"\n{rows} rows, {len(one.model.blocks)} layers, {context} tokens of context")
    print(f"  step {whole:.2f} ms, host {host:.2f} ms, kernels {launched / 1e3:.2f} ms")
    print(f"  floor {floor:.2f} ms ({total / 1e9:.2f} GB at {read_gbs:,.0f} GB/s); step / floor {whole / floor:.2f}")
    for part, us in sorted(parts.items(), key=lambda item: -item[1]):
        rate = f"{read[part] / us / 1e3:8,.0f} GB/s" if part in read and us else ""
        print(f"    {part:16}{us / 1e3:8.3f} ms {us / launched:6.1%} {rate}")
    for lane in lanes:
        one.model.close_lane(lane)


def show(read_gbs: float, options: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="tidelm-glm-") as name:
        began_s = time.perf_counter()
        rows = max(options.rows)
        one = made(Path(name), options.glm_layers, None, options.glm_resident, options.context, rows, "cuda")
        torch.cuda.synchronize()
        print(
            f"\n{torch.cuda.memory_allocated() / 1e9:.1f} GB of weights, made in {time.perf_counter() - began_s:.0f} s"
        )
        for count in options.rows:
            table(one, count, options.context, options.rounds, read_gbs)
