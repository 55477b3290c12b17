"""GLM-5.3's captured decode steps of two ranks on two GPUs, against eager ones, and against steps by spans: run
by `test_glm53_steps.py`. Contexts whole on each rank, and shared by the ranks.

python tests/models/glm53_rank_cases.py cpu|cuda"""

import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from msgspec.structs import replace
from torch import Tensor

from packers.shards import Checkpoint
from tests.models.glm53_step_cases import EXL3, NEAR, TOKENS, error, trellises
from tests.models.rig import settings
from tided.engine.dataplane import TorchGroup
from tided.engine.drafting import Chooser
from tided.engine.local_ranks import free_port, run_ranks
from tided.engine.types import Sampling
from tided.models.glm53 import load
from tided.models.glm53.family import Glm53Family
from tided.models.parallel import Group
from tided.settings import Engine, Parallel

RANKS, TIMEOUT_S, STEPS = 2, 240.0, 6
SHARED = 0.4  # the median distance of steps whose choices differ
CASES: tuple[dict[str, Any], ...] = ({"split": False}, {"split": True}, {"split": True, "dtype": "fp8"})


def loaded(device: torch.device, group: Group, captures: bool, fixed: bool = True, **cache: Any) -> Any:
    base = settings(EXL3, pool_tokens=4096, context_tokens=512)
    asked = replace(base, cache=replace(base.cache, **cache), engine=Engine(device=device.type, draft="3"))
    with patch.object(load, "_is_widened", lambda _: device.type == "cpu"):
        checkpoint = Checkpoint.open(EXL3)
        model = Glm53Family().load(checkpoint, asked, group, trellises(checkpoint, device, group), device)
    model.steps.captures = captures
    model.steps.everywhere = fixed
    model.drafter.proposals.captures = captures
    model.steps.over_ranks = model.drafter.proposals.over_ranks = True
    if not fixed:
        model.steps.serve = lambda *_: False
    return model


def served(model: Any) -> Iterator[Tensor]:
    """Logits of steps of two lanes, then of a block of three rows of which two stay, then of one lane; behind the
    steps, those of what is proposed, of both and of one."""
    lanes = [model.open_lane(index) for index in range(2)]
    for lane, length in zip(lanes, (101, 40), strict=True):
        model.prefill(lane, TOKENS[:length].to(model.norm.device), "none")
    for step in range(STEPS):
        yield model.decode(lanes, TOKENS[110 + step : 112 + step]).clone()
    for asked in (lanes, lanes[:1], lanes):
        choose = Chooser([Sampling(temperature=0.0)] * len(asked), [lane.position + 1 for lane in asked])
        anchors = TOKENS[120 : 120 + len(asked)].to(model.norm.device)
        yield model.propose(asked, anchors, choose).logits.flatten(0, 1).clone()
    yield model.decode(lanes[:1], TOKENS[120:123], [3]).clone()
    model.keep(lanes[0], 2)
    for step in range(2):
        yield model.decode(lanes[:1], TOKENS[130 + step : 131 + step]).clone()


def main() -> None:
    device, port, rank = torch.device(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    base = settings(EXL3)
    asked = replace(base, engine=Engine(device=device.type), parallel=Parallel(ranks=RANKS, data_port=port))
    group = TorchGroup(asked, rank)
    for cache in CASES:
        models = [loaded(device, group, one, **cache) for one in (False, True)]
        eager, captured = (list(served(model)) for model in models)
        if device.type == "cuda":
            drafter = models[1].drafter.proposals
            assert all(made.captured for made in models[1].steps.prepared.values()), "steps were not captured"
            assert all(law.graphs for made in drafter._prepared.values() for law in made.laws.values())
        for wanted, got in zip(eager, captured, strict=True):
            assert torch.equal(wanted, got), f"{cache}: a captured step is not the eager one"
        own = torch.cat([logits.view(torch.int32).to(torch.int64).sum(1) for logits in captured])
        whole = group.concat(own.view(1, -1)).view(RANKS, -1)
        assert torch.equal(whole[0], whole[1]), f"{cache}: the ranks differ"
        reference = served(loaded(device, group, False, fixed=False, **cache))
        rows = (zip(got, wanted, strict=True) for got, wanted in zip(captured, reference, strict=True))
        far = [error(*both) for step in rows for both in step]
        print(f"  {cache}: {[round(one, 4) for one in far]}", flush=True)
        # Shared contexts are summed in another order, and a random model makes much of a rounding.
        assert statistics.median(far) < (SHARED if cache["split"] else NEAR)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print("ok", flush=True)
    group.close()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main()
    else:
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks([__file__, sys.argv[1], str(free_port())], Path(folder), RANKS, TIMEOUT_S)
            finally:
                print((Path(folder) / "rank-0.log").read_text(errors="replace"), flush=True)
