"""Measures a checkpoint on held-out rows: loss, rounding, routing, residency, drafts; writes the demand seed.

python -m minis.evaluate --model minis/deepseek --data scratch/mini/full --out /tmp/mini --masters masters.safetensors
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from minis import drafter, layout, model
from minis.checkpoint import load_dequantised
from minis.config import Config, load
from minis.data import DOMAINS, Rows
from minis.engram import Hasher
from minis.layout import Mode, Params
from minis.numerics import qdq_mxfp4

FULL_WEIGHT = 255
MINIMUM_PER_LAYER = 4


class Bench:
    """Held-out rows and everything needed to run them."""

    def __init__(self, cfg: Config, data: Path, device: str, rows: int, length: int) -> None:
        self.cfg, self.device = cfg, torch.device(device)
        self.rows = Rows(data, self.device, length, 0, test=True)
        self.count = rows
        self.hasher = Hasher.build(cfg, np.load(data / "compressed.npy", allow_pickle=False), device)
        self.layouts: dict[tuple[str, int], layout.Layout] = {}

    def part(self, domain: str, half: int) -> tuple[Tensor, Tensor]:
        """Every second row of a domain: tokens and weights [B, T]."""
        t, w = self.rows.tokens[domain][half::2][: self.count], self.rows.weights[domain][half::2][: self.count]
        return t.long(), w

    @torch.no_grad()
    def run(self, p: Params, packed: model.Packed, domain: str, half: int, mode: Mode) -> tuple[model.Trunk, float]:
        """Trunk output and loss over the tokens that the model has to write."""
        tokens, weights = self.part(domain, half)
        if (domain, half) not in self.layouts:
            self.layouts[domain, half] = layout.make_layout(tokens, self.cfg, self.hasher)
        out = model.trunk(p, self.cfg, self.layouts[domain, half], packed, mode)
        full = torch.nn.functional.pad(weights[:, 1:], (0, 1)) == FULL_WEIGHT
        target = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        logits = model.logits(p, out.x[full], self.cfg)
        return out, float(torch.nn.functional.cross_entropy(logits, target[full]))


def packed_of(p: Params, cfg: Config, dtype: torch.dtype) -> model.Packed:
    return model.pack_all(p, cfg, dtype, torch.zeros((), device=p["embed.weight"].device))


def rounding_table(b: Bench, exact: Params | None, stored: Params, base: Mode) -> dict[str, dict[str, float]]:
    """Loss per domain while roundings are added one by one."""
    cfg = b.cfg
    steps: list[tuple[str, Params, Mode]] = []
    if exact is not None:
        fp4 = {n: qdq_mxfp4(w) if ".ffn.experts." in n else w for n, w in exact.items()}
        steps += [("no rounding", exact, base), ("+ MXFP4 experts", fp4, base)]
        steps += [("+ KV FP8 / FP4", fp4, replace(base, round_kv=True))]
    steps += [("+ dense FP8 (the stored checkpoint)", stored, replace(base, round_kv=True))]
    steps += [("+ FP8 activations", stored, replace(base, round_kv=True, round_input=True))]
    steps += [("+ hard index top-k and pool", stored, replace(base, round_kv=True, round_input=True, select=True))]
    table = {}
    for name, p, mode in steps:
        packed = packed_of(p, cfg, mode.dtype)
        table[name] = {
            d: round((b.run(p, packed, d, 0, mode)[1] + b.run(p, packed, d, 1, mode)[1]) / 2, 4) for d in DOMAINS
        }
    return table


def routing(b: Bench, p: Params, packed: model.Packed, mode: Mode) -> dict[str, dict[int, dict[str, Tensor]]]:
    """Per domain and half: tokens, counts, score mass and normalised weight [layers, E]."""
    stats: dict[str, dict[int, dict[str, Tensor]]] = {}
    for d in DOMAINS:
        for half in (0, 1):
            out, _ = b.run(p, packed, d, half, mode)
            valid = (b.part(d, half)[0] != 2).flatten().unsqueeze(-1)
            picked = [k * valid for k in out.picked]
            weight = [(k / (k.sum(-1, keepdim=True) + 1e-20)).sum(0) for k in picked]
            stats.setdefault(d, {})[half] = {
                "tokens": valid.sum(),
                "counts": torch.stack([(k > 0).sum(0) for k in picked]),
                "mass": torch.stack([k.sum(0) for k in picked]),
                "weight": torch.stack(weight) / valid.sum(),
            }
    return stats


def best_set(weight: Tensor, share: float) -> Tensor:
    """weight [layers, E] -> bool: the best pairs over all layers, at least four a layer."""
    keep = torch.zeros_like(weight, dtype=torch.bool)
    keep.scatter_(1, weight.topk(MINIMUM_PER_LAYER, 1).indices, True)
    rest = weight.masked_fill(keep, float("inf")).flatten()
    count = round(share * weight.numel())
    return torch.zeros_like(rest, dtype=torch.bool).scatter(0, rest.topk(count).indices, True).view_as(weight)


def coverage(sets: dict[str, Tensor], stats: dict[str, dict[int, dict[str, Tensor]]]) -> dict[str, dict[str, float]]:
    """Share of routing weight of the second half that sets chosen on the first half hold."""
    result = {}
    for name, keep in sets.items():
        result[name] = {
            d: round(float((stats[d][1]["weight"] * keep).sum() / stats[d][1]["weight"].sum()), 3) for d in DOMAINS
        }
    return result


def residency(
    b: Bench, p: Params, packed: model.Packed, mode: Mode, sets: dict[str, Tensor]
) -> dict[str, dict[str, float]]:
    """Rise of loss on the second half when only a set may be chosen."""
    layers, experts = b.cfg.layers, b.cfg.experts
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(layers, experts, generator=generator).to(b.device)
    share = float(next(iter(sets.values())).float().mean())
    table: dict[str, dict[str, float]] = {"own": {}, "one set for all": {}, "random": {}, "other domains": {}}
    for d in DOMAINS:
        free = b.run(p, packed, d, 1, mode)[1]

        def rise(keep: Tensor, d: str = d, free: float = free) -> float:
            return round(b.run(p, packed, d, 1, replace(mode, resident=keep))[1] - free, 4)

        table["own"][d] = rise(sets[d])
        table["one set for all"][d] = rise(sets["all"])
        table["random"][d] = rise(best_set(noise, share))
        table["other domains"][d] = round(float(np.mean([rise(sets[o]) for o in DOMAINS if o != d])), 4)
    for row in table.values():
        row["mean"] = round(float(np.mean(list(row.values()))), 4)
    return table


@torch.no_grad()
def acceptance(b: Bench, p: Params, packed: model.Packed, mode: Mode, per_row: int = 24) -> dict[str, list[float]]:
    """Probability that drafts 1..j agree with the trunk's own greedy choice, and the mean number accepted."""
    k = b.cfg.draft_size
    generator = torch.Generator(device=b.device).manual_seed(2)
    result = {}
    for d in DOMAINS:
        tokens, weights = b.part(d, 0)
        out, _ = b.run(p, packed, d, 0, mode)
        reach = tokens.shape[1] - k - 2
        written = (weights[:, 2 : reach + 2] == FULL_WEIGHT).float()
        at = torch.multinomial(written + 1e-6, per_row, generator=generator)
        ahead = at.unsqueeze(-1) + torch.arange(1, k + 1, device=at.device)
        rows = torch.arange(len(tokens), device=at.device).view(-1, 1, 1)
        opened = (tokens == 0).cumsum(1)
        usable = (opened[rows, ahead] == opened[rows, at.unsqueeze(-1)]).all(-1) & written.bool().gather(1, at)
        truth = model.logits(p, out.x[rows, ahead], b.cfg).argmax(-1)
        anchor = tokens.gather(1, at + 1)
        sketch = drafter.draft(p, b.cfg, b.layouts[d, 0], packed, mode, out.taps, at, anchor)
        ids, _, _ = drafter.greedy(p, sketch, anchor)
        good = (ids == truth).cumprod(-1)[usable].float()
        result[d] = [round(float(v), 3) for v in good.mean(0)] + [round(float(good.sum(-1).mean()), 2)]
    return result


@torch.no_grad()
def exact_turns(b: Bench, p: Params, packed: model.Packed, mode: Mode) -> dict[str, dict[str, float]]:
    """Share of answers whose every token is the greedy choice, given the true text before it."""
    result = {}
    for d in DOMAINS[2:]:
        right = total = 0
        for half in (0, 1):
            tokens, weights = b.part(d, half)
            out, _ = b.run(p, packed, d, half, mode)
            full = torch.nn.functional.pad(weights[:, 1:], (0, 1)) == FULL_WEIGHT
            target = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
            wrong = full & (model.logits(p, out.x, b.cfg).argmax(-1) != target)
            opens = full & ~torch.nn.functional.pad(full[:, :-1], (1, 0))
            turn = opens.flatten().cumsum(0) * full.flatten()
            count = int(opens.sum())
            bad = torch.zeros(count + 1, device=b.device).index_add(0, turn, wrong.flatten().float())[1:]
            right, total = right + int((bad == 0).sum()), total + count
        result[d] = {"turns": total, "exact": round(right / max(total, 1), 3)}
    return result


def demand_seed(stats: dict[str, dict[int, dict[str, Tensor]]], cfg: Config) -> dict[str, Any]:
    """Aggregate routing demand of the held-out rows, per domain: whoever plans for all gives each domain one vote."""
    domains: dict[str, Any] = {}
    for d, halves in stats.items():
        counts, mass = (halves[0][k] + halves[1][k] for k in ("counts", "mass"))
        domains[d] = {
            "tokens": int(halves[0]["tokens"] + halves[1]["tokens"]),
            "counts": counts.tolist(),
            "mass": [[round(v, 1) for v in r] for r in mass.tolist()],
        }
    return {
        "model_type": "deepseek_v41",
        "layers": cfg.layers,
        "experts": cfg.experts,
        "top_k": cfg.top_k,
        "domains": domains,
    }


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--model", type=Path, required=True)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--masters", type=Path, help="fp32 parameters, for the rounding table")
    args.add_argument("--rows", type=int, default=16, help="rows per domain and half")
    args.add_argument("--length", type=int, default=1024)
    a = args.parse_args()
    began = time.monotonic()
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    cfg = load(a.model / "config.json")
    b = Bench(cfg, a.data, device, a.rows, a.length)
    base = Mode(dtype=torch.bfloat16 if gpu else torch.float32, sparse=not gpu)
    stored = {n: w.to(device) for n, w in load_dequantised(a.model).items()}
    exact = {n: w.to(device) for n, w in load_file(a.masters).items()} if a.masters else None
    result: dict[str, Any] = {"rows": a.rows, "loss": rounding_table(b, exact, stored, base)}
    print(json.dumps(result["loss"], indent=1), f"{time.monotonic() - began:.0f} s", flush=True)
    mode = replace(base, round_kv=True, round_input=True)
    packed = packed_of(stored, cfg, mode.dtype)
    stats = routing(b, stored, packed, mode)
    (a.out / "demand-seed.json").write_text(json.dumps(demand_seed(stats, cfg), separators=(",", ":")) + "\n", "utf-8")
    for share in (0.65, 0.5):
        sets = {d: best_set(stats[d][0]["weight"], share) for d in DOMAINS}
        sets["all"] = best_set(torch.stack([stats[d][0]["weight"] for d in DOMAINS]).mean(0), share)
        result[f"coverage {share}"] = coverage(sets, stats)
        result[f"residency {share}"] = residency(b, stored, packed, mode, sets)
        print(
            json.dumps({k: v for k, v in result.items() if str(share) in k}),
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
    load_all = torch.stack([stats[d][0]["weight"] for d in DOMAINS]).mean(0)
    result["busiest expert"] = round(float(load_all.max() * cfg.experts), 2)
    hard = replace(mode, select=True)
    result["exact turns"] = exact_turns(b, stored, packed, hard)
    print(json.dumps(result["exact turns"]), flush=True)
    result["acceptance"] = acceptance(b, stored, packed, mode)
    print(json.dumps(result["acceptance"]), f"{time.monotonic() - began:.0f} s", flush=True)
    (a.out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
