"""A decode step of two ranks on two GPUs of this machine, at the real shapes, its collectives inside the graphs; and
the collectives alone: by NCCL, and where the GPUs read each other's memory by one launch (`parallel.one_shot`).

Each rank is a process: `show` starts both, and prints what rank 0 found."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu_step import prepared, replayed_us, step_table
from bench.gpu_timing import microseconds, spread
from bench.synthetic import real_shapes
from tided.engine.dataplane import TorchGroup
from tided.engine.link_probe import measure
from tided.engine.local_ranks import free_port, run_ranks
from tided.models.deepseek_v41.captured import DecodeSteps
from tided.settings import Cache, Engine, Experts, Model, Parallel, Settings

RANKS, TIMEOUT_S = 2, 400.0
LOGITS = [("concat", (1, 64640)), ("concat", (6, 64640))]
ASKED = ("layers", "resident", "context", "rows", "rounds", "repeats")


def show(best: float, options: Any) -> None:
    if torch.cuda.device_count() < RANKS:
        print(f"\nranks: this machine has {torch.cuda.device_count()} GPU, {RANKS} are needed")
        return
    asked = json.dumps(
        {name: getattr(options, name) for name in ASKED}
        | {"best": best, "port": free_port(), "one_shot": torch.cuda.can_device_access_peer(0, 1)}
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_ranks([__file__, asked], Path(folder), RANKS, TIMEOUT_S)
        finally:
            print(f"\n{RANKS} ranks\n\n" + (Path(folder) / "rank-0.log").read_text(errors="replace"), flush=True)


def joined(port: int, rank: int, one_shot: bool) -> TorchGroup:
    return TorchGroup(
        Settings(
            model=Model(path="none", served_name="synthetic"),
            experts=Experts(resident=10_000),
            cache=Cache(context_tokens=8192, pool_tokens=65536),
            engine=Engine(device="cuda"),
            parallel=Parallel(ranks=RANKS, data_port=port, one_shot=one_shot),
        ),
        rank,
    )


def ways(group: TorchGroup) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    both: dict[str, Callable[[], AbstractContextManager[None]]] = {"NCCL": group.by_library}
    return both | ({"one launch": nullcontext} if group.one_shot else {})


def collectives(group: TorchGroup, repeats: int) -> None:
    print("| collective, in a graph | bytes a rank | us |\n|---|---|---|")
    works = {"gather": group.gather, "sum": group.sum, "concat": group.concat}
    for what, shape in [(what, (rows, 5120)) for what in ("gather", "sum") for rows in (1, 6, 16)] + LOGITS:
        part, work = torch.randn(shape, device="cuda"), works[what]
        took = [microseconds(lambda w=work, p=part: w(p), 10) for _ in range(repeats)]  # type: ignore[misc]
        print(f"| {what} of {list(shape)} | {part.nbytes:,} | {spread(took)} |", flush=True)


def agree(group: TorchGroup, model: Any, rows: int, context: int) -> tuple[bool, int]:
    """Whether the ranks' logits are the same bits, and the collectives of a step."""
    at = prepared(model, rows, context)
    before, captures = group.calls, model.steps.captures
    model.steps.captures, model.steps.prepared = False, {}
    logits = model.decode(at.lanes, at.ids)
    calls = group.calls - before
    model.steps.captures, model.steps.prepared = captures, {}
    own = logits.view(torch.int32).to(torch.int64).sum(1)
    whole = group.concat(own.view(1, -1)).view(RANKS, rows)
    for lane in at.lanes:
        model.close_lane(lane)
    return bool((whole[0] == whole[1]).all()) and bool(torch.isfinite(logits).all()), calls


def replays(model: Any, asked: dict[str, Any]) -> None:
    """Steps alone, before a profiler is attached to any."""
    for rows in asked["rows"]:
        at = prepared(model, rows, asked["context"])
        took = [replayed_us(at.made.captured.pieces, asked["rounds"]) / 1e3 for _ in range(asked["repeats"])]
        print(f"  {rows} rows: step {spread(took, 3)} ms", flush=True)
        for lane in at.lanes:
            model.close_lane(lane)


def main() -> None:
    asked, rank = json.loads(sys.argv[1]), int(sys.argv[3])
    torch.cuda.set_device(rank)
    group = joined(asked["port"], rank, asked["one_shot"])
    print(measure(group, torch.device("cuda")))
    for name, way in ways(group).items():
        print(f"\nby {name}\n")
        with way():
            collectives(group, asked["repeats"])
    group.check()
    room = max(asked["rows"]) * (asked["context"] + 256)
    model = real_shapes(asked["layers"], asked["resident"], room, group=group)
    models = {name: replace(model, steps=DecodeSteps()) for name in ways(group)}
    print(flush=True)
    for name, way in ways(group).items():
        with way(), torch.inference_mode():
            same, calls = agree(group, models[name], max(asked["rows"]), asked["context"])
            bits = "the same bits" if same else "NOT THE SAME"
            print(f"by {name}: {calls} collectives a step; the ranks' logits are {bits}", flush=True)
            replays(models[name], asked)
    for name, way in ways(group).items():
        print(f"\nby {name}")
        with way():
            for rows in asked["rows"]:
                step_table(models[name], rows, asked["context"], asked["rounds"], asked["repeats"], asked["best"])
    torch.cuda.synchronize()
    group.check()
    group.close()
    sys.stdout.flush()
    os._exit(0)  # as a daemon ends: NCCL does not let go while graphs hold collectives


if __name__ == "__main__":
    main()
