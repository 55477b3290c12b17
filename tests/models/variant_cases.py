"""What a warmed-up rank still compiles on a GPU while prompts of all lengths, steps and proposals come: nothing.

python tests/models/variant_cases.py"""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from triton.runtime.jit import JITFunction

from tests.models import decode_cases, glm53_step_cases
from tests.models.rig import GLM, GOLDEN, settings
from tided.engine.drafting import Chooser
from tided.engine.sampling import sample
from tided.engine.types import Sampling
from tided.engine.warming import warm_up
from tided.settings import Engine

CUDA = torch.device("cuda")
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 96, 100, 128, 129, 130)
KERNELS = sorted(path.stem for path in (Path(__file__).parents[2] / "kernels").glob("*_triton.py"))


def compiled() -> dict[str, int]:
    """How many forms of each kernel there are."""
    found = {}
    for file in KERNELS:
        for name, one in vars(importlib.import_module(f"kernels.{file}")).items():
            if isinstance(one, JITFunction):
                found[f"{file}.{name}"] = sum(len(caches[0]) for caches in one.device_caches.values())
    return found


def serve(model: Any, tap: Any) -> None:
    """As requests come: demand is added up, tokens are drawn, drafts proposed."""
    for number, length in enumerate(LENGTHS):
        lane = model.open_lane(number % 2)
        model.prefill(lane, torch.arange(3, 3 + length), "last")
        tap.add_up()
        for count in (1, 3):
            logits = model.decode([lane], torch.arange(5, 5 + count), [count])
            if count > 1:
                model.keep(lane, 2)
            tap.add_up()
            sample(logits[:1], [(Sampling(temperature=0.6, top_p=0.9, top_k=20, seed=number), lane.position)])
        model.propose([lane], torch.tensor([7], device=CUDA), Chooser([Sampling(seed=1)], [lane.position + 1]))
        model.close_lane(lane)


def case(name: str, path: Path, model: Any) -> bool:
    tap = next(block.moe.bank.tap for block in model.blocks) if hasattr(model.blocks[0], "moe") else model.bank.tap
    base = settings(path, pool_tokens=4096, context_tokens=512)
    chunk = replace(base.model, prefill_chunk_tokens=64)
    asked = replace(base, model=chunk, engine=Engine(device="cuda", draft="3", lanes=2))
    warm_up(model, tap, asked, lambda *_: None)
    before = compiled()
    serve(model, tap)
    fresh = {kernel: count - before[kernel] for kernel, count in compiled().items() if count > before[kernel]}
    print(f"{name}: {sum(before.values())} forms of kernels; compiled by requests: {fresh}")
    return not fresh


if __name__ == "__main__":
    found = [
        case("DeepSeek-V4.1", GOLDEN, decode_cases.loaded(CUDA, True)),
        case("GLM-5.3", GLM, glm53_step_cases.loaded(CUDA, True)),
    ]
    print("ok" if all(found) else "some were compiled late")
    sys.exit(not all(found))
