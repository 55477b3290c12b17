"""Measures the GLM-5.3 mini on held-out rows: loss by rounding, routing, residency, drafts; writes the demand seed.

python -m minis.glm53.evaluate --model minis/glm --data scratch/mini/glm --out run --masters run/masters.safetensors
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from minis import measure
from minis.data import DOMAINS, Rows
from minis.glm53 import model, mtp
from minis.glm53.checkpoint import EXPERTS, load_parameters
from minis.glm53.model import Mode, Params
from tided.models.glm53.config import Config

FULL_WEIGHT, PAD = 255, 2
CHAIN = 5


class Bench:
    """Held-out rows and everything needed to run them."""

    def __init__(self, cfg: Config, data: Path, device: torch.device, rows: int, length: int) -> None:
        self.cfg, self.device, self.count = cfg, device, rows
        self.rows = Rows(data, device, length, 0, test=True)
        self.frequency = model.frequencies(cfg, device)

    def part(self, domain: str, half: int) -> tuple[Tensor, Tensor]:
        """Every second row of a domain: tokens [B, T], and where the next token is one that the model has to write."""
        t, w = self.rows.tokens[domain][half::2][: self.count], self.rows.weights[domain][half::2][: self.count]
        return t.long(), F.pad(w[:, 1:], (0, 1)) == FULL_WEIGHT

    @torch.no_grad()
    def run(self, p: Params, packed: model.Packed, domain: str, half: int, mode: Mode) -> tuple[model.Trunk, float]:
        tokens, full = self.part(domain, half)
        lay = model.make_layout(tokens, self.cfg, self.frequency, mode.dtype)
        out = model.trunk(p, self.cfg, lay, packed, mode)
        logits = model.logits(p, out.state[full])
        return out, float(F.cross_entropy(logits, F.pad(tokens[:, 1:], (0, 1))[full]))

    def losses(self, p: Params, mode: Mode) -> dict[str, float]:
        """Over all tokens of both halves, as training reports it."""
        packed = model.pack_all(p, self.cfg, mode.dtype)
        result = {}
        for d in DOMAINS:
            counts = [int(self.part(d, half)[1].sum()) for half in (0, 1)]
            total = sum(n * self.run(p, packed, d, half, mode)[1] for half, n in enumerate(counts) if n)
            result[d] = round(total / max(sum(counts), 1), 4)
        return result


def rounding_table(b: Bench, exact: Params | None, stored: Params, base: Mode) -> dict[str, dict[str, float]]:
    """Loss per domain while roundings are added one by one."""
    table = {}
    if exact is not None:
        table["bf16"] = b.losses(exact, base)
        dense = {n: exact[n] if EXPERTS.fullmatch(n) else w for n, w in stored.items()}
        table["+ FP8 of what every token passes"] = b.losses(dense, base)
    table["+ routed experts as stored"] = b.losses(stored, base)
    table["+ hard index top-k"] = b.losses(stored, replace(base, select=True))
    return table


def subject(b: Bench, p: Params, packed: model.Packed, mode: Mode) -> measure.Subject:
    def run(domain: str, half: int, resident: Tensor | None) -> tuple[list[Tensor], float]:
        out, loss = b.run(p, packed, domain, half, replace(mode, resident=resident))
        return out.picked, loss

    def valid(domain: str, half: int) -> Tensor:
        return (b.part(domain, half)[0] != PAD).flatten().unsqueeze(-1)

    return measure.Subject(b.cfg.moe_layers, b.cfg.n_routed_experts, b.device, run, valid)


@torch.no_grad()
def acceptance(b: Bench, p: Params, packed: model.Packed, mode: Mode) -> dict[str, list[float]]:
    """Probability that drafts 1..j all equal the trunk's own greedy choice where it has to write, given the true text,
    and the mean number accepted."""
    result = {}
    for d in DOMAINS:
        tokens, full = b.part(d, 0)
        out, _ = b.run(p, packed, d, 0, mode)
        lay = model.make_layout(tokens, b.cfg, b.frequency, mode.dtype)
        steps, _ = mtp.unrolled(p, b.cfg, lay, packed, mode, out.state, tokens.roll(-1, 1), CHAIN)
        best = model.logits(p, out.state).argmax(-1)
        good, usable = torch.ones_like(full), full.clone()
        shares = []
        for j, state in enumerate(steps):  # the chain of row r drafts the token at r + 2 + j in step j at row r + j
            right = model.logits(p, state).argmax(-1) == best.roll(-1, 1)
            good = good & right.roll(-j, 1)
            usable &= full.roll(-j - 1, 1) & (lay.start.roll(-j - 1, 1) == lay.start)
            usable[:, -j - 2 :] = False
            shares.append(good)
        kept = torch.stack([s[usable].float() for s in shares], -1)
        result[d] = [round(float(v), 3) for v in kept.mean(0)] + [round(float(kept.sum(-1).mean()), 2)]
    return result


@torch.no_grad()
def exact_turns(b: Bench, p: Params, packed: model.Packed, mode: Mode) -> dict[str, dict[str, float]]:
    """Share of answers whose every token is the greedy choice, given the true text before it."""
    result = {}
    for d in DOMAINS[2:]:
        right = total = 0
        for half in (0, 1):
            tokens, full = b.part(d, half)
            out, _ = b.run(p, packed, d, half, mode)
            wrong = full & (model.logits(p, out.state).argmax(-1) != F.pad(tokens[:, 1:], (0, 1)))
            opens = full & ~F.pad(full[:, :-1], (1, 0))
            turn = opens.flatten().cumsum(0) * full.flatten()
            count = int(opens.sum())
            bad = torch.zeros(count + 1, device=b.device).index_add(0, turn, wrong.flatten().float())[1:]
            right, total = right + int((bad == 0).sum()), total + count
        result[d] = {"turns": total, "exact": round(right / max(total, 1), 3)}
    return result


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--model", type=Path, required=True)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--masters", type=Path, help="fp32 parameters, for the rounding table")
    args.add_argument("--rows", type=int, default=16, help="rows per domain and half")
    args.add_argument("--length", type=int, default=1024)
    a = args.parse_args()
    began = time.monotonic()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    cfg, stored = load_parameters(a.model)
    stored = {n: w.to(device) for n, w in stored.items()}
    exact = {n: w.to(device) for n, w in load_file(a.masters).items()} if a.masters else None
    b = Bench(cfg, a.data, device, a.rows, a.length)
    base = Mode(dtype=torch.bfloat16 if gpu else torch.float32, sparse=not gpu)
    result: dict[str, Any] = {"rows": a.rows}

    def told(part: dict[str, Any]) -> None:
        result.update(part)
        (a.out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        print(json.dumps(part), f"{time.monotonic() - began:.0f} s", flush=True)

    told({"loss": rounding_table(b, exact, stored, base)})
    packed = model.pack_all(stored, cfg, base.dtype)
    hard = replace(base, select=True)
    whole = subject(b, stored, packed, hard)
    stats = measure.routing(whole)
    seed = measure.demand_seed("glm_moe_dsa", cfg.num_experts_per_tok, stats)
    (a.out / "demand-seed.json").write_text(json.dumps(seed, separators=(",", ":")) + "\n", "utf-8")
    told({"acceptance": acceptance(b, stored, packed, base)})
    told({"exact turns": exact_turns(b, stored, packed, hard)})
    told(measure.routing_report(whole, stats, (0.67, 0.5)))


if __name__ == "__main__":
    main()
