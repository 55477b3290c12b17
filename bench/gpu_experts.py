"""MXFP4 experts of DeepSeek-V4.1-Flash, one rank's half: our kernel and other people's (`mxfp4_peers.py`), in one run,
on the same codes, rows and picks, as replays of captured graphs that take turns. Every launch of a graph picks other
experts of the layer's 384, so that nothing is found in the L2 cache.

A peer's time is of both products, the gated activation between them and the weighted sum over the picks; sorting the
picks by expert and rounding the rows are done beforehand, not timed. Ours is of the whole: the distinct experts are
found in it, and with `--forms` other tiles of it take turns too. A chunk of a prompt is timed by other tiles too, each
held to the same. A peer is held to the products in fp32 without rounding, and so is each form of ours; one that is
further off than its number formats explain computes something else and is not timed. A fault of the device ends the
run: nothing would run after it."""

import functools
import itertools
import statistics
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu_kernels import CASES, EXPERTS, LIMIT, RECORD, SETS, TOP_K, activations, filled, picked
from bench.gpu_timing import IN_GRAPH, graph_of, spread, timed
from bench.mxfp4_peers import Layer, Peer, found, layer_of
from kernels import experts_chunk_triton, experts_triton
from kernels.experts import decode
from kernels.experts_chunk_triton import Tiling
from kernels.experts_triton import Tiles

CHUNK, CHUNKS = 2048, (512, 2048, 8192)  # rows; those that peers are timed at, and all
FORMS = {
    "16 bits, 4 warps": Tiles(),
    "16 bits, 4 warps, 4 stages": Tiles(stages=4),
    "8 bits, 64 rows": Tiles(eight=True),
    "8 bits, 64 rows, 4 stages": Tiles(eight=True, stages=4),
    "8 bits, 128 rows": Tiles(eight=True, half=64),
    "8 bits, 128 rows, 128 registers": Tiles(eight=True, half=64, registers=128),
    "8 bits, 128 rows, 128 registers, 4 stages": Tiles(eight=True, half=64, registers=128, stages=4),
    "8 bits, 128 rows x 128, 4 stages": Tiles(eight=True, half=64, block=128, stages=4),
    "16 bits, 4 warps; down 64 rows, 4 warps": Tiles(down_warps=4),
    "16 bits, 4 warps; down 128 rows, 4 warps": Tiles(down_rows=128, down_warps=4),
    "16 bits, 4 warps; down 4 stages": Tiles(down_stages=4),
    "8 bits, 128 rows; down 128 rows, 4 warps": Tiles(eight=True, half=64, down_rows=128, down_warps=4),
}
WORK = ("decode", "chunk")
SAME = 6e-2  # relative: 8-bit hidden rows come to 3e-2, rows rounded to 8 bits a second time to as much again

Work = Callable[[], Tensor]


def tiles(tokens: int, **constants: int) -> Tiling:
    fixed = {"BLOCK": 128, "STAGES": 3, "num_warps": 4, **constants}
    return Tiling(tokens, {"ROWS": 64, **fixed}, {"ROWS": 128, **fixed})


# Of a chunk's kernels. What rows choose, by their count, is among them. Others lost on an H200: 8 warps (1.2 to 1.6
# times the time of 4), 4 stages (1.1 to 1.5).
TILINGS = {
    "64 rows, three blocks of threads": tiles(64, maxnreg=168),
    "64 rows, tiles of 64 weights": tiles(64, BLOCK=64, maxnreg=168),
    "32 rows, three blocks of threads": tiles(32, maxnreg=168),
    "32 rows, four blocks of threads": tiles(32, maxnreg=128),
    "128 rows, tiles of 64 weights": tiles(128, BLOCK=64),
}


def exact(x: Tensor, slots: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
    """x [T, D] fp32 -> [T, D] fp32, nothing rounded."""
    out = torch.zeros_like(x)
    for slot in picks.unique().tolist():
        w13, w2 = decode(slots[slot], RECORD)
        rows, k = (picks == slot).nonzero(as_tuple=True)
        gate, up = (x[rows] @ w13.t()).chunk(2, 1)
        hidden = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
        out.index_add_(0, rows, weights[rows, k, None] * (hidden @ w2.t()))
    return out


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def why(error: BaseException) -> str:
    """The error's last line, and where it came from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    last = (str(error).strip() or "no message").splitlines()[-1]
    return f"{type(error).__name__}: {last[:300]} ({Path(frame.filename).name}, line {frame.lineno})"


def in_turns(works: dict[str, Work], rounds: int, repeats: int, launches: int = IN_GRAPH) -> dict[str, list[float]]:
    """Microseconds of a launch of each, `repeats` medians; works whose graph cannot be captured are left out, aloud."""
    graphs = {}
    for name, work in works.items():
        try:
            graphs[name] = graph_of(work, launches)
        except Exception as error:
            print(f"{name}: not captured: {why(error)}", flush=True)
            torch.cuda.synchronize()
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        of_round = [{name: timed(graph.replay, 1, launches) for name, graph in graphs.items()} for _ in range(rounds)]
        for name in graphs:
            taken[name].append(statistics.median(each[name] for each in of_round))
    return taken


def turns(peer: Peer, x: Tensor, sets: list[Tensor], weights: Tensor) -> Work:
    ready = itertools.cycle([peer.ready(x, picks, weights) for picks in sets])
    return lambda: peer(next(ready))


def made(variants: list[tuple[str, Callable[[Layer], Peer]]], layer: Layer) -> dict[str, Peer]:
    peers = {}
    for name, make in variants:
        try:
            peers[name] = make(layer)
            print(f"{name}: {peers[name].what}", flush=True)
        except Exception as error:
            print(f"{name}: does not run here: {why(error)}", flush=True)
    return peers


def sound(name: str, rows: int, work: Work, wanted: Tensor) -> Tensor | None:
    """What it computes, if that is the same; what it is off is printed. Raises where the device itself has failed."""
    try:
        made = work()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{name}: {rows} rows: does not run here: {why(error)}", flush=True)
        torch.cuda.synchronize()  # a fault stays, and every later work would be said not to run
        return None
    off = apart(made, wanted)
    print(f"{name}: {rows} rows: {off:.1e} of the norm", flush=True)
    if off < SAME:
        return made
    print(f"{name}: computes something else, left out", flush=True)
    return None


def times_ours(took: dict[str, list[float]], each: list[float]) -> str:
    return f"{statistics.median(each) / statistics.median(took['ours']):.2f}" if "ours" in took else "ours did not run"


def right(peers: dict[str, Peer], x: Tensor, picks: Tensor, weights: Tensor, wanted: Tensor) -> dict[str, Peer]:
    """Those that compute the same; what they are off is printed."""
    kept = {}
    for name, peer in peers.items():

        def work(peer: Peer = peer) -> Tensor:
            return peer(peer.ready(x.bfloat16(), picks, weights))

        if sound(name, len(x), work, wanted) is not None:
            kept[name] = peer
    return kept


def ours(
    x: Tensor, slots: Tensor, sets: list[Tensor], weights: Tensor, forms: dict[str, Tiles], wanted: Tensor
) -> dict[str, Work]:
    """Our kernel as the device chooses, and in other forms: those that compute the same, and which have its bits."""
    works: dict[str, Work] = {}
    first = None
    for name, tiles in {"ours": None, **forms}.items():
        call = functools.partial(experts_triton.grouped_experts, x, slots, RECORD, tiles=tiles)
        made = sound(name, len(x), functools.partial(call, sets[0], weights, LIMIT), wanted)
        if made is None:
            continue
        if name == "ours":
            first = made
        elif first is not None:
            print(f"{name}: {'the same' if torch.equal(made, first) else 'other'} bits", flush=True)
        turn = itertools.cycle(sets)
        works[name] = lambda call=call, turn=turn: call(next(turn), weights, LIMIT)
    return works


def decode_rows(
    slots: Tensor,
    peers: dict[str, Peer],
    forms: dict[str, Tiles],
    best: float,
    rounds: int,
    repeats: int,
    timing: bool,
) -> None:
    lines = []
    for rows, distinct in CASES:
        sets = [picked(rows, distinct, seed, EXPERTS) for seed in range(SETS)]
        x, weights = activations(rows), torch.rand(rows, TOP_K, device="cuda")
        wanted = exact(x, slots, sets[0], weights)
        works = ours(x, slots, sets, weights, forms, wanted)
        kept = right(peers, x, sets[0], weights, wanted)
        if not timing:
            continue
        works |= {name: turns(peer, x.bfloat16(), sets, weights) for name, peer in kept.items()}
        took = in_turns(works, rounds, repeats)
        for name, each in took.items():
            rate = distinct * RECORD.nbytes / statistics.median(each) / 1e3
            ratio = times_ours(took, each)
            lines.append(
                f"| {rows}, {distinct} | {name} | {spread(each)} | {rate:,.0f} | {rate / best:.0%} | {ratio} |"
            )
    if timing:
        print("\n| rows, experts | kernel | us | GB/s | share | times ours |\n|---|---|---|---|---|---|")
        print("\n".join(lines), flush=True)


def chunk(slots: Tensor, rows: int, peers: dict[str, Peer], rounds: int, repeats: int, timing: bool) -> None:
    """Rows of a prompt, picks spread evenly: as it is chosen, by tiles, and what is around the products alone."""
    x, weights = activations(rows), torch.rand(rows, TOP_K, device="cuda")
    picks = torch.rand(rows, EXPERTS, device="cuda").topk(TOP_K).indices.to(torch.int32)
    wanted, outputs = exact(x, slots, picks, weights), torch.empty(rows, TOP_K, RECORD.hidden, device="cuda")
    given = (x, slots, RECORD, picks, weights, LIMIT)
    works: dict[str, Work] = {}
    for name, tiling in {"ours": None, **TILINGS}.items():
        work = functools.partial(experts_chunk_triton.grouped_experts, *given, tiling=tiling)
        if sound(name, rows, work, wanted) is not None:
            works[name] = work
    works["sorting alone"] = lambda: experts_chunk_triton._sorted(picks, 64, EXPERTS)[2]
    works["sum alone"] = lambda: experts_triton.sum_of_picks(outputs, picks)
    kept = right(peers, x, picks, weights, wanted)
    if not timing:
        return
    works |= {name: turns(peer, x.bfloat16(), [picks], weights) for name, peer in kept.items()}
    took = in_turns(works, rounds, repeats, 1)
    print("\n| rows of a chunk | kernel | ms | times ours |\n|---|---|---|---|")
    for name, each in took.items():
        ms = spread([us / 1e3 for us in each], 2)
        print(f"| {rows} | {name} | {ms} | {times_ours(took, each)} |", flush=True)


def show(
    places: list[Path],
    folder: Path,
    forms: dict[str, Tiles],
    work: Sequence[str],
    best: float,
    rounds: int,
    repeats: int,
    timing: bool = True,
) -> None:
    slots = filled(EXPERTS)
    layer = layer_of(slots, RECORD, TOP_K, LIMIT)
    peers = made(list(found(places, folder)), layer)
    del layer
    if "decode" in work:
        decode_rows(slots, peers, forms, best, rounds, repeats, timing)
    for rows in CHUNKS if "chunk" in work else ():
        chunk(slots, rows, peers if rows == CHUNK else {}, rounds, repeats, timing)
