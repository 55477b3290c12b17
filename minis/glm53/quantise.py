"""Quantises the routed experts of trained weights to EXL3 of 2 to 4 bits a matrix, with exllamav3's own quantizer.

    python -m minis.glm53.quantise --data scratch/mini/glm --masters run/masters.safetensors \\
        --wheel exllamav3-*.whl --build /tmp/exl3 --out minis/glm --bytes 19000000

Gate and up projections of a layer share the statistics of the layer's input, a down projection has its expert's own,
as in exllamav3's conversion. Widths follow use: experts that much text goes through get more bits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from minis.data import DOMAINS, SHARES, Rows
from minis.glm53 import exllamav3, model, mtp
from minis.glm53.config import load
from minis.glm53.model import PROJECTIONS, Params, block_of
from tided.models.glm53.config import Config

# Bits of gate, up, down: from one step to the next one expert grows.
LADDER = ((2, 2, 2), (2, 2, 3), (3, 3, 3), (3, 3, 4), (4, 4, 4))
WEIGHT = (1.0, 1.0, 1.5)  # of their errors: what the last projection loses, nothing behind it dampens
ROWS = 12  # of a domain, for the statistics
PAD = 2


@dataclass
class Statistics:
    """Of a layer: `joint` [D, D], sum over tokens of the input's outer product; `inner` [E, I, I] the same of each
    expert's inner values over its own tokens; `use` [E]: routing weight by share of the domains."""

    joint: Tensor
    inner: Tensor
    use: Tensor
    tokens: Tensor  # [E]
    total: int = 0


@torch.no_grad()
def collect(p: Params, cfg: Config, rows: Rows, device: torch.device) -> dict[int, Statistics]:
    """Runs training rows through trunk and drafting layer."""
    d, i, e = cfg.hidden_size, cfg.moe_intermediate_size, cfg.n_routed_experts
    found = {
        layer: Statistics(*(torch.zeros(s, device=device) for s in ((d, d), (e, i, i), (e,), (e,))))
        for layer in model.expert_layers(cfg)
    }
    packed = model.pack_all(p, cfg, torch.float32)
    frequency = model.frequencies(cfg, device)
    for domain in DOMAINS:
        tokens = rows.tokens[domain][:ROWS].long()
        valid = (tokens != PAD).flatten()
        seen: dict[str, Tensor] = {}
        mode = model.Mode(tap=seen.__setitem__, sparse=device.type == "cpu")
        lay = model.make_layout(tokens, cfg, frequency)
        out = model.trunk(p, cfg, lay, packed, mode)
        mtp.unrolled(p, cfg, lay, packed, mode, out.state, tokens.roll(-1, 1), 1)
        for layer, s in found.items():
            _add(s, p, layer, seen[f"experts_in.{layer}"][valid], seen[f"picked.{layer}"][valid], SHARES[domain])
    return found


def _add(s: Statistics, p: Params, layer: int, x: Tensor, picked: Tensor, share: float) -> None:
    weight = picked / (picked.sum(-1, keepdim=True) + 1e-20)
    s.joint += x.T @ x
    s.total += len(x)
    s.use += weight.mean(0) * share
    gate, up = (p[f"{block_of(layer)}.mlp.experts.{w}.weight"] for w in PROJECTIONS[:2])
    for e in range(picked.shape[1]):
        own = x[picked[:, e] > 0]
        inner = F.silu(own @ gate[e].T) * (own @ up[e].T)
        s.inner[e] += inner.T @ inner
        s.tokens[e] += len(own)


def widths(
    statistics: dict[int, Statistics], matrix_weights: int, budget_bytes: int
) -> dict[int, list[tuple[int, ...]]]:
    """Per layer and expert bits of its matrices. Steps up the ladder go where use times the fall of a code's error, a
    quarter for each bit, is largest for its bytes, until the budget is spent."""
    step = {layer: [0] * len(s.use) for layer, s in statistics.items()}
    spent = sum(len(s.use) for s in statistics.values()) * sum(LADDER[0]) * matrix_weights // 8

    def error(rung: int) -> float:
        return sum(weight * 4.0**-bits for weight, bits in zip(WEIGHT, LADDER[rung], strict=True))

    queue = []
    for layer, s in statistics.items():
        for e, use in enumerate(s.use.tolist()):
            for rung in range(len(LADDER) - 1):
                grown = (sum(LADDER[rung + 1]) - sum(LADDER[rung])) * matrix_weights // 8
                queue.append((-use * (error(rung) - error(rung + 1)) / grown, rung, layer, e, grown))
    for _, rung, layer, e, grown in sorted(queue):
        if step[layer][e] == rung and spent + grown <= budget_bytes:
            step[layer][e], spent = rung + 1, spent + grown
    return {layer: [LADDER[rung] for rung in rungs] for layer, rungs in step.items()}


def _statistic(h: Tensor, tokens: int, name: str) -> dict[str, Any]:
    """A captured Hessian as the quantizer keeps it."""
    none = torch.zeros(2, dtype=torch.long, device=h.device)
    data = {"H": h.clone(), "packed": False, "n": len(h), "first_key": name, "count": tokens, "finalized": False}
    return data | {"num_total": tokens * len(h), "inf_nan": none, "device": h.device}


def quantise_layer(
    tool: ModuleType, p: Params, layer: int, s: Statistics, bits: list[tuple[int, ...]]
) -> tuple[dict[str, Tensor], list[float]]:
    """-> the layer's tensors by their names in a checkpoint, and the quantizer's own error of every matrix."""
    at = f"{block_of(layer)}.mlp.experts"
    joint = _statistic(s.joint, s.total, at)
    inner = [_statistic(h, int(n), f"{at}.{e}") for e, (h, n) in enumerate(zip(s.inner, s.tokens, strict=True))]
    out: dict[str, Tensor] = {}
    errors: list[float] = []
    for places in ((0, 1), (2,)):  # those that share statistics, and those that do not
        for width in sorted({bits[e][place] for e in range(len(bits)) for place in places}):
            chosen = [(e, place) for place in places for e in range(len(bits)) if bits[e][place] == width]
            weights = [p[f"{at}.{PROJECTIONS[place]}.weight"][e].T.contiguous() for e, place in chosen]
            datas = [inner[e] if place == 2 else joint for e, place in chosen]
            arguments = [_arguments(layer, e, place, width, weights[0].device) for e, place in chosen]
            results = tool.quantize_exl3_batch(weights, datas, arguments)
            for (e, place), (error, tensors) in zip(chosen, results, strict=True):
                out |= {f"{at}.{e}.{PROJECTIONS[place]}.{leaf}": t.cpu() for leaf, t in tensors.items()}
                errors.append(float(error))
    return out, errors


def _arguments(layer: int, e: int, place: int, width: int, device: torch.device) -> dict[str, Any]:
    """What exllamav3's conversion passes by default, with the codebook `mcg`."""
    seed = (layer * 4096 + e) * 4 + place
    arguments = {"seed": seed, "K": width, "devices": [device.index or 0], "device_ratios": None}
    return arguments | {"apply_out_scales": None, "debug_dir": "/tmp", "mcg": True}


def summary(chosen: Iterable[list[tuple[int, ...]]], errors: dict[int, list[float]]) -> dict[str, Any]:
    every = [bits for layer in chosen for bits in layer]
    counts = {"".join(map(str, rung)): every.count(rung) for rung in LADDER}
    mean = sum(map(sum, every)) / (3 * len(every))
    return {
        "experts by bits of gate, up, down": counts,
        "mean bits": round(mean, 4),
        "mean relative error by layer": {layer: round(sum(e) / len(e), 5) for layer, e in errors.items()},
    }


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--masters", type=Path, required=True)
    args.add_argument("--wheel", type=Path, required=True)
    args.add_argument("--build", type=Path, required=True, help="folder for exllamav3's code and what is built of it")
    args.add_argument("--out", type=Path, required=True, help="folder for experts.safetensors and quantisation.json")
    args.add_argument("--bytes", type=int, default=18_000_000, help="of all trellises")
    a = args.parse_args()
    began = time.monotonic()
    device = torch.device("cuda", 0)
    cfg = load(a.data / "config.json")
    p = {n: w.to(device) for n, w in load_file(a.masters).items()}
    tool = exllamav3.quantizer(*(lambda root: (root, exllamav3.build(root)))(exllamav3.unpacked(a.wheel, a.build)))
    print(f"quantizer ready {time.monotonic() - began:.0f} s", flush=True)
    statistics = collect(p, cfg, Rows(a.data, device, 1024, 1), device)
    bits = widths(statistics, cfg.hidden_size * cfg.moe_intermediate_size, a.bytes)
    a.out.mkdir(parents=True, exist_ok=True)
    out: dict[str, Tensor] = {}
    errors: dict[int, list[float]] = {}
    for layer, s in statistics.items():
        tensors, errors[layer] = quantise_layer(tool, p, layer, s, bits[layer])
        out |= tensors
        print(f"layer {layer} {time.monotonic() - began:.0f} s", flush=True)
    save_file(out, a.out / "experts.safetensors")
    told = summary(bits.values(), errors)
    (a.out / "quantisation.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
