"""Trains the DeepSeek mini.

    python -m minis.train --data scratch/mini/full --out /tmp/mini --seconds 520

On a GPU the step (forward, backward, both optimisers, balancing) is compiled in regions and captured once as a graph.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from minis import attention, drafter, layers, layout, losses, model
from minis.config import Config, load
from minis.data import DOMAINS, Batch, Rows, make_batch
from minis.engram import Hasher
from minis.init import fresh
from minis.optim import Optimiser, frozen

DRAFTS, QUERIES = 12, 64
WARMUP, FLAT, FLOOR = 80, 0.45, 0.02
QUANT_FROM = 0.62
INDEX_WEIGHT, CONFIDENCE_WEIGHT, INFORMATION_WEIGHT = 0.1, 0.1, 0.02
BALANCE_RATE = 1e-3
FIRST_MARK = 0.12


class Trainer:
    def __init__(self, cfg: Config, p: dict[str, Tensor], hasher: Hasher, gpu: bool) -> None:
        self.cfg, self.p, self.hasher, self.gpu = cfg, p, hasher, gpu
        for name, w in p.items():
            w.requires_grad_(not frozen(name))
        self.opt = Optimiser(p)
        device = p["embed.weight"].device
        self.amount = torch.zeros((), device=device)
        self.balance = torch.full((), BALANCE_RATE, device=device)
        dtype = torch.bfloat16 if gpu else torch.float32
        self.mode = layout.Mode(dtype=dtype, round_kv=True, sparse=not gpu, flex=gpu)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: Batch | None = None
        self.report: Tensor | None = None

    def layout(self, tokens: Tensor) -> layout.Layout:
        build = None
        if self.gpu:
            from minis.flex import block_mask as build
        return layout.make_layout(tokens, self.cfg, self.hasher, build)

    def forward(self, b: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Losses of one batch: total, its parts, and counts per layer for balancing."""
        p, cfg = self.p, self.cfg
        lay = self.layout(b.tokens)
        packed = model.pack_all(p, cfg, self.mode.dtype, self.amount)
        probe = attention.IndexProbe(b.index_at)
        out = model.trunk(p, cfg, lay, packed, self.mode, probe)
        ce = losses.token_loss(out.x, p["norm.weight"], p["head.weight"], b.target, cfg.norm_eps)
        main = (ce * b.weight).sum() / b.weight.sum().clamp(min=1)
        shares, counts = zip(*(losses.row_share(k, b.valid) for k in out.picked), strict=True)
        info = losses.mutual_information(torch.stack(shares), b.domain)
        ahead = b.draft_at.unsqueeze(-1) + torch.arange(1, cfg.draft_size + 1, device=b.tokens.device)
        with torch.no_grad():
            state = attention.gather_rows(out.x.detach(), ahead.flatten(1)).unflatten(1, (-1, cfg.draft_size))
            soft = model.logits(p, state, cfg)
        d_loss, c_loss = drafter.training_loss(
            p, cfg, lay, packed, self.mode, out.taps, b.tokens, b.draft_at, b.draft_weight, soft
        )
        index = probe.loss()
        total = main + INDEX_WEIGHT * index + d_loss + CONFIDENCE_WEIGHT * c_loss - INFORMATION_WEIGHT * info
        return total, torch.stack([main, index, d_loss, c_loss, info]).detach(), list(counts)

    def step(self, b: Batch) -> Tensor:
        total, parts, counts = self.forward(b)
        total.backward()
        norm = self.opt.step()
        with torch.no_grad():
            for i, count in enumerate(counts):
                bias = self.p[f"layers.{i}.ffn.gate.bias"]
                bias += self.balance * torch.sign(count.mean() - count)
        for w in self.opt.trained:
            w.grad = None
        return torch.cat((parts, norm.detach().view(1)))

    def capture(self, b: Batch) -> None:
        """Warm-up on a side stream, then one capture of the whole step; parameters move during the warm-up only."""
        self.static = b
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step(b)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.report = self.step(b)

    def run(self, b: Batch) -> Tensor:
        if self.graph is None or self.static is None or self.report is None:
            return self.step(b)
        self.static.copy_(b)
        self.graph.replay()
        return self.report

    def held_out(self, rows: Rows, size: int) -> dict[str, float]:
        """Loss per domain over tokens that the model has to write; same compiled regions as training."""
        result = {}
        for i, d in enumerate(DOMAINS):
            tokens, weights = rows.tokens[d][:size].long(), rows.weights[d][:size]
            if len(tokens) < size:
                tokens = tokens.repeat(size // len(tokens) + 1, 1)[:size]
                weights = weights.repeat(size // len(weights) + 1, 1)[:size]
            domain = torch.full((size,), i, device=tokens.device)
            b = make_batch(tokens, weights, domain, DRAFTS, QUERIES, self.cfg.draft_size)
            packed = model.pack_all(self.p, self.cfg, self.mode.dtype, self.amount)
            out = model.trunk(self.p, self.cfg, self.layout(tokens), packed, self.mode)
            ce = losses.token_loss(
                out.x, self.p["norm.weight"], self.p["head.weight"], b.target, self.cfg.norm_eps
            ).detach()
            full = (b.weight > 0.99).float()
            result[d] = round(float((ce * full).sum() / full.sum().clamp(min=1)), 4)
        return result

    def self_check(self, rows: Rows, size: int) -> tuple[float, float]:
        """Loss of a few rows through the compiled block-sparse path and through plain exact arithmetic."""
        tokens = torch.cat([rows.tokens[d][:2] for d in ("story", "math", "tools")]).long()
        weights = torch.cat([rows.weights[d][:2] for d in ("story", "math", "tools")])
        repeat = -(-size // len(tokens))
        full = (torch.nn.functional.pad(weights[:, 1:], (0, 1)) == 255).float()
        target = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        values = []
        for plain in (False, True):
            layers.enable_compile(self.gpu and not plain)
            many = tokens if plain else tokens.repeat(repeat, 1)[:size]
            mode = layout.Mode(round_kv=True, sparse=False) if plain else self.mode
            lay = layout.make_layout(many, self.cfg, self.hasher) if plain else self.layout(many)
            with torch.set_grad_enabled(not plain):  # the compiled regions exist for training only
                packed = model.pack_all(self.p, self.cfg, mode.dtype, self.amount)
                x = model.trunk(self.p, self.cfg, lay, packed, mode).x[: len(tokens)]
                logits = model.logits(self.p, x, self.cfg).detach()
            ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
            values.append(float((ce.view_as(full) * full).sum() / full.sum()))
        layers.enable_compile(self.gpu)
        return values[0], values[1]


def rate_at(progress: float, step: int) -> float:
    warm = min(1.0, (step + 1) / WARMUP)
    if progress < FLAT:
        return warm
    return warm * max(FLOOR, 1 - (1 - FLOOR) * (progress - FLAT) / (1 - FLAT))


def save(p: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({n: w.detach().cpu().contiguous() for n, w in p.items()}, path)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--data", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--seconds", type=float, default=520, help="time for steps, without compilation")
    args.add_argument("--steps", type=int, default=10**9)
    args.add_argument("--batch", type=int, default=32)
    args.add_argument("--row", type=int, default=1024)
    args.add_argument("--seed", type=int, default=7)
    args.add_argument("--no-graph", action="store_true")
    a = args.parse_args()
    began = time.monotonic()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 128
    layers.enable_compile(gpu)
    cfg = load(a.data / "config.json")
    table = np.load(a.data / "compressed.npy", allow_pickle=False)
    hasher = Hasher.build(cfg, table, device)
    rows, test = Rows(a.data, device, a.row, a.seed), Rows(a.data, device, a.row, a.seed, test=True)
    p = {n: w.to(device) for n, w in fresh(cfg, [int(m.sum()) for m in hasher.moduli], a.seed).items()}
    trainer = Trainer(cfg, p, hasher, gpu)
    trainer.opt.set_rate(1e-3)

    def batch() -> Batch:
        return rows.batch(a.batch, DRAFTS, QUERIES, cfg.draft_size)

    trainer.step(batch())
    print(f"compiled {time.monotonic() - began:.0f} s", flush=True)
    if gpu and not a.no_graph:
        try:
            trainer.capture(batch())
            print(f"captured {time.monotonic() - began:.0f} s", flush=True)
        except RuntimeError as error:  # slower, but training must not fail for the want of a graph
            print(f"no graph: {error}", flush=True)
            trainer.graph = None
            torch.cuda.synchronize()
    history: list[dict[str, object]] = []
    start, step, marks = time.monotonic(), 0, [FIRST_MARK, 0.4, 0.7, 2.0]
    while step < a.steps:
        elapsed = time.monotonic() - start
        progress = max(elapsed / a.seconds, step / a.steps)
        if progress >= 1:
            break
        trainer.opt.set_rate(rate_at(progress, step))
        trainer.amount.fill_(1.0 if progress > QUANT_FROM else 0.0)
        trainer.balance.fill_(BALANCE_RATE if progress < 0.6 else BALANCE_RATE / 5)
        report = trainer.run(batch())
        step += 1
        if step % 50 == 0 or step == a.steps:
            values = [round(v, 4) for v in report.tolist()]
            line = {"step": step, "s": round(time.monotonic() - start, 1), "tokens": step * a.batch * a.row}
            line |= dict(zip(("main", "index", "draft", "confidence", "information", "norm"), values, strict=True))
            history.append(line)
            if step % 200 == 0 or step <= 100 or step == a.steps:
                print(json.dumps(line), flush=True)
            if not np.isfinite(values).all():
                raise SystemExit("training diverged")
        if progress >= marks[0]:
            if marks.pop(0) == FIRST_MARK and gpu:
                fast, plain = trainer.self_check(test, a.batch)
                print(f"self check: {fast:.4f} compiled, {plain:.4f} plain", flush=True)
                if abs(fast - plain) > 0.05:
                    raise SystemExit("the fast path computes something else than the plain one")
            print("held-out", step, trainer.held_out(test, a.batch), flush=True)
            if len(marks) == 1:
                save(p, a.out / "part.safetensors")
    trainer.amount.fill_(1.0)
    save(p, a.out / "masters.safetensors")
    final = trainer.held_out(test, a.batch)
    print("held-out at the end", final, flush=True)
    summary = {"steps": step, "tokens": step * a.batch * a.row, "seconds": round(time.monotonic() - start, 1)}
    epochs = {d: round(rows.used[d] / len(rows.order[d]), 2) for d in DOMAINS}
    summary |= {"epochs": epochs, "held_out": final, "history": history[:: max(1, len(history) // 60)]}
    (a.out / "training.json").write_text(json.dumps(summary) + "\n", "utf-8")
    print("done", {k: v for k, v in summary.items() if k != "history"}, f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
