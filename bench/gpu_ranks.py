"""A decode step of two ranks on two GPUs of this machine, at the real shapes, its collectives inside the graphs; and
the collectives alone.

Each rank is a process: `show` starts both, and prints what rank 0 found."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu_step import prepared, step_table
from bench.gpu_timing import microseconds, spread
from bench.synthetic import real_shapes
from tided.engine.dataplane import TorchGroup
from tided.engine.local_ranks import free_port, run_ranks
from tided.settings import Cache, Engine, Experts, Model, Parallel, Settings

RANKS, TIMEOUT_S = 2, 400.0
ASKED = ("layers", "resident", "context", "rows", "rounds", "repeats")


def show(best: float, options: Any) -> None:
    if torch.cuda.device_count() < RANKS:
        print(f"\nranks: this machine has {torch.cuda.device_count()} GPU, {RANKS} are needed")
        return
    asked = json.dumps({**{name: getattr(options, name) for name in ASKED}, "best": best, "port": free_port()})
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_ranks([__file__, asked], Path(folder), RANKS, TIMEOUT_S)
        finally:
            print(f"\n{RANKS} ranks\n\n" + (Path(folder) / "rank-0.log").read_text(errors="replace"), flush=True)


def joined(port: int, rank: int) -> TorchGroup:
    return TorchGroup(
        Settings(
            model=Model(path="none", served_name="synthetic"),
            experts=Experts(resident=10_000),
            cache=Cache(context_tokens=8192, pool_tokens=65536),
            engine=Engine(device="cuda"),
            parallel=Parallel(ranks=RANKS, data_port=port),
        ),
        rank,
    )


def collectives(group: TorchGroup, repeats: int) -> None:
    print("| collective, in a graph | bytes a rank | us |\n|---|---|---|")
    for what, shape in (("sum", (1, 5120)), ("sum", (6, 5120)), ("sum", (16, 5120)), ("concat", (6, 64640))):
        part = torch.randn(shape, device="cuda")
        work = group.sum if what == "sum" else group.concat
        took = [microseconds(lambda w=work, p=part: w(p), 10) for _ in range(repeats)]  # type: ignore[misc]
        print(f"| {what} of {list(shape)} | {part.nbytes:,} | {spread(took)} |", flush=True)


def agree(group: TorchGroup, model: Any, rows: int, context: int) -> tuple[bool, int]:
    """Whether the ranks' logits are the same bits, and the collectives of a step."""
    at = prepared(model, rows, context)
    before, captures = group.calls, model.steps.captures
    model.steps.captures, model.steps._prepared = False, {}
    logits = model.decode(at.lanes, at.ids)
    calls = group.calls - before
    model.steps.captures, model.steps._prepared = captures, {}
    own = logits.view(torch.int32).to(torch.int64).sum(1)
    whole = group.concat(own.view(1, -1)).view(RANKS, rows)
    for lane in at.lanes:
        model.close_lane(lane)
    return bool((whole[0] == whole[1]).all()) and bool(torch.isfinite(logits).all()), calls


def main() -> None:
    asked, rank = json.loads(sys.argv[1]), int(sys.argv[3])
    torch.cuda.set_device(rank)
    group = joined(asked["port"], rank)
    collectives(group, asked["repeats"])
    room = max(asked["rows"]) * (asked["context"] + 256)
    model = real_shapes(asked["layers"], asked["resident"], room, group=group)
    with torch.inference_mode():
        same, calls = agree(group, model, max(asked["rows"]), asked["context"])
        print(f"\n{calls} collectives a step; the ranks' logits are {'the same bits' if same else 'NOT THE SAME'}")
        for rows in asked["rows"]:
            step_table(model, rows, asked["context"], asked["rounds"], asked["repeats"], asked["best"])
    torch.cuda.synchronize()
    print(flush=True)
    group.close()


if __name__ == "__main__":
    main()
