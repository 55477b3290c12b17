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

from minis import drafter, layout, measure, model
from minis.checkpoint import load_dequantised
from minis.config import Config, load
from minis.data import DOMAINS, Rows
from minis.engram import Hasher
from minis.layout import Mode, Params
from minis.numerics import qdq_mxfp4

FULL_WEIGHT = 255


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


def subject(b: Bench, p: Params, packed: model.Packed, mode: Mode) -> measure.Subject:
    def run(domain: str, half: int, resident: Tensor | None) -> tuple[list[Tensor], float]:
        out, loss = b.run(p, packed, domain, half, replace(mode, resident=resident))
        return out.picked, loss

    def valid(domain: str, half: int) -> Tensor:
        return (b.part(domain, half)[0] != 2).flatten().unsqueeze(-1)

    return measure.Subject(b.cfg.layers, b.cfg.experts, b.device, run, valid)


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
    whole = subject(b, stored, packed, mode)
    stats = measure.routing(whole)
    seed = measure.demand_seed("deepseek_v41", cfg.top_k, stats)
    (a.out / "demand-seed.json").write_text(json.dumps(seed, separators=(",", ":")) + "\n", "utf-8")
    result |= measure.routing_report(whole, stats, (0.65, 0.5))
    print(json.dumps({k: v for k, v in result.items() if k != "loss"}), f"{time.monotonic() - began:.0f} s", flush=True)
    hard = replace(mode, select=True)
    result["exact turns"] = exact_turns(b, stored, packed, hard)
    print(json.dumps(result["exact turns"]), flush=True)
    result["acceptance"] = acceptance(b, stored, packed, mode)
    print(json.dumps(result["acceptance"]), f"{time.monotonic() - began:.0f} s", flush=True)
    (a.out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
