"""A proposal at the real shapes, one rank of two, on this GPU: DeepSeek-V4.1's block and GLM-5.3's chain.

`wall` is what the engine's thread waits for one: from the anchors to ids on the host, by a `Chooser` that is greedy,
draws (`drawn`), or draws from ranked tokens (`ranked`, top-p). `graph`: the device's time of the greedy graphs alone.
`host`: how long the thread is busy before it waits. `eager`: the same code without graphs. Sums over the ranks are left
out."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from bench import gpu_glm
from bench.synthetic import CUDA, OneOfTwo, RandomWeights, replace_text, text_config
from kernels.numerics import NATIVE
from kernels.record import ExpertRecord
from tests.models.random_checkpoint import released_config
from tided.cache.context import Context, ContextShape
from tided.cache.pool import Pool
from tided.engine.drafting import Chooser
from tided.engine.types import Sampling
from tided.experts.bank import ExpertBank
from tided.experts.tables import DemandTap, RoutingTables
from tided.models.base import Draft
from tided.models.deepseek_v41 import load
from tided.models.deepseek_v41.config import Config, TextConfig
from tided.models.deepseek_v41.drafter import Drafter, load_drafter
from tided.models.deepseek_v41.names import expected_tensors
from tided.models.deepseek_v41.step import Rotations

LAWS = {"greedy": Sampling(temperature=0.0), "drawn": Sampling(seed=5), "ranked": Sampling(seed=5, top_p=0.95)}
EXPERTS = 64  # of a layer of GLM-5.3's: a token picks 8, and only those are read
Propose = Callable[[list[Any], Sampling], Draft]


def experts(t: TextConfig) -> ExpertBank:
    """The drafter's own, of random codes."""
    layers, count = t.num_nextn_predict_layers, t.dspark_n_routed_experts
    record = ExpertRecord(t.hidden_size, t.moe_intermediate_size, 2)
    slots = torch.empty(layers * count, record.slot_bytes, dtype=torch.uint8, device=CUDA)
    slots.view(torch.int64).random_()
    for part in record.parts[3:]:
        slots[:, part.offset : part.offset + part.nbytes].random_(115, 118)  # near 1 / sqrt(5120)
    tables, tap = RoutingTables(layers, count, CUDA), DemandTap(1, layers, count, CUDA)
    tap.enabled = False
    tables.change({divmod(number, count): number for number in range(layers * count)})
    return ExpertBank(record, slots, tables, tap)


def block_drafter() -> tuple[Drafter, ContextShape]:
    """DeepSeek-V4.1's, without a trunk."""
    t, group = text_config(40), OneOfTwo()
    config = msgspec.convert(released_config(), Config)
    weights: Any = RandomWeights(expected_tensors(replace_text(config, t)), group)
    table = torch.randn(t.vocab_size, t.hidden_size // 2, device=CUDA, dtype=torch.bfloat16)

    def embed(ids: torch.Tensor) -> torch.Tensor:
        return group.concat(table[ids].to(torch.float32)).unsqueeze(1).repeat(1, t.hc_mult, 1)

    pool = Pool(load._layout(t, NATIVE), 256, CUDA)
    head = weights.matrix("head.weight", rows=weights.cut(t.vocab_size))
    trunk: Any = SimpleNamespace(
        pool=pool, rotations=Rotations(t, CUDA), numerics=NATIVE, group=group, embedded=embed, head=head
    )
    made = load_drafter(trunk, weights, t, experts(t))
    shape = load._context_shape(t, 2, NATIVE)
    rings = shape.layers + t.num_nextn_predict_layers
    return made, ContextShape(rings, shape.window, shape.head_dim, shape.tail_tokens, shape.pad_id, shape.dtype)


def block_lanes(shape: ContextShape, count: int, tokens: int) -> list[Context]:
    lanes = [Context(index, shape, CUDA) for index in range(count)]
    for lane in lanes:
        lane.position = tokens
        lane.windows.normal_()
    return lanes


def proposing(drafter: Any, **more: Any) -> Propose:
    def propose(lanes: list[Any], sampling: Sampling) -> Draft:
        choose = Chooser([sampling] * len(lanes), [lane.position + 1 for lane in lanes])
        anchors = torch.tensor([5 + lane.index for lane in lanes]).to(CUDA)
        draft: Draft = drafter.propose(lanes, anchors, choose, **more)
        return draft

    return propose


def wall_ms(propose: Propose, lanes: list[Any], sampling: Sampling, rounds: int) -> tuple[float, float]:
    """From anchors to ids; and until the host waits."""
    walls, busy = list[float](), list[float]()
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        draft = propose(lanes, sampling)
        busy.append(1e3 * (time.perf_counter() - began))
        draft.ids.tolist()
        draft.confidence.tolist()
        walls.append(1e3 * (time.perf_counter() - began))
    return statistics.median(walls[3:]), statistics.median(busy[3:])


def graph_ms(drafter: Any, lanes: int, places: int, rounds: int) -> float:
    made, times = drafter.proposals._prepared[lanes], list[float]()
    graphs = made.laws["likeliest"].graphs[: places if made.proposal.one_by_one else 1]
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for graph in graphs:
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def table(name: str, places: int, drafter: Any, propose: Propose, lanes: list[Any], rounds: int) -> None:
    for count in range(1, len(lanes) + 1):
        some, proposals, told = lanes[:count], drafter.proposals, list[str]()
        for law, sampling in LAWS.items():
            proposals.captures = False
            eager = wall_ms(propose, some, sampling, max(3, rounds // 4))[0]
            proposals.captures = True
            wall, busy = wall_ms(propose, some, sampling, rounds)
            told.append(f"{law} {wall:.3f} ms (host {busy:.3f}, eager {eager:.3f})")
        graph = graph_ms(drafter, count, places, rounds)
        print(f"{name} of {places}, {count} lanes: graph {graph:.3f} ms; wall {'; '.join(told)}", flush=True)


def show_block(rounds: int, lanes: int = 2, context: int = 8000) -> None:
    drafter, shape = block_drafter()
    table(
        "DeepSeek-V4.1's block", drafter.size, drafter, proposing(drafter), block_lanes(shape, lanes, context), rounds
    )


def show_chain(rounds: int, lanes: int = 2, context: int = 8000, layers: int = 4) -> None:
    with tempfile.TemporaryDirectory() as name:
        one = gpu_glm.made(Path(name), layers, EXPERTS, EXPERTS, context, lanes, "cuda", draft="7")
        drafter, held = one.model.drafter, gpu_glm.prepared(one.model, lanes, context)[0]
        assert drafter is not None
        for places in (1, 3, 7):
            propose = proposing(drafter, places=places, by_kernels=True)
            table("GLM-5.3's chain", places, drafter, propose, held, rounds)


def show(options: Any) -> None:
    print()
    show_block(4 * options.rounds, context=options.context)
    torch.cuda.empty_cache()
    show_chain(4 * options.rounds, context=options.context)
