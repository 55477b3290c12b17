"""Records what a checkpoint's router wants, as a trace for the simulator: numbers of experts and weights, no tokens.

    python bench/record_routing.py minis/deepseek --rows scratch/mini/full/rows.npz --out mini-routing.safetensors

The engine's own code computes held-out rows of the training data (`minis.prepare` writes them), every expert resident.
One row is one request; topics come in blocks, and the first of them come back.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tided.engine.build import build_rank, open_model
from tided.engine.offline import first_pairs, settings_of, teacher_forced
from tided.models.parallel import Alone
from tided.sim.trace import Span, Trace, save
from tided.tide.demand import RouterShape, per_layer
from tided.tide.seed import load_seed

BLOCKS = ("prose", "code", "math", "lang", "code", "prose")
FIRST_ROW = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stay", type=int, default=4, help="requests of a topic before the next")
    parser.add_argument("--tokens", type=int, default=192, help="of a request")
    parser.add_argument("--prompt", type=int, default=64, help="of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, spans = _requests(options.rows, options.stay, options.tokens, options.prompt)
    experts, weights, shape = _record(options.checkpoint, rows)
    base = load_seed(options.checkpoint / "demand-seed.json", "deepseek_v41", shape).prior
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save(Trace(shape, experts, weights, spans, per_layer(base)), options.out)
    print(f"{options.out}: {len(experts)} tokens, {len(spans)} requests, {options.out.stat().st_size} bytes")


def _requests(path: Path, stay: int, tokens: int, prompt: int) -> tuple[list[np.ndarray[Any, Any]], list[Span]]:
    arrays = np.load(path, allow_pickle=False)
    rows: list[np.ndarray[Any, Any]] = []
    used = dict.fromkeys(BLOCKS, FIRST_ROW)
    for topic in BLOCKS:
        held_out = arrays[f"{topic}.test_tokens"]
        rows += [held_out[(used[topic] + at) % len(held_out), :tokens] for at in range(stay)]
        used[topic] += stay
    spans = [Span(at * tokens, prompt, tokens - prompt, BLOCKS[at // stay]) for at in range(len(rows))]
    return rows, spans


def _record(checkpoint: Path, rows: list[Any]) -> tuple[Any, Any, RouterShape]:
    opened = open_model(settings_of(checkpoint))
    rank = build_rank(opened, Alone(), first_pairs(opened), lambda stage, done, total: None)
    shape = RouterShape(opened.shape.moe_layers, opened.shape.experts_per_layer, opened.shape.top_k)
    seen: list[list[tuple[Any, Any]]] = [[] for _ in range(shape.layers)]

    def record(layer: int, lanes: Any, wanted: Any, scores: Any, weights: Any, *rest: Any) -> None:
        seen[layer].append((wanted.numpy().astype(np.int16), weights.float().numpy()))

    rank.bank.tap.record = record  # type: ignore[method-assign]
    try:
        for ids in rows:
            teacher_forced(rank.model, torch.from_numpy(ids.astype(np.int64)), 0, 64)
    finally:
        rank.reads.close()
    experts, weights = (np.stack([np.concatenate([one[at] for one in layer]) for layer in seen], 1) for at in (0, 1))
    return experts, weights, shape


if __name__ == "__main__":
    main()
