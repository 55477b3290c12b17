"""Trains the DeepSeek mini.

    python -m minis.train --data scratch/mini/full --out /tmp/mini --seconds 520

On a GPU the step (forward, backward, both optimisers, balancing) is compiled in regions and captured once as a graph.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from minis import drafter, layers, layout, loop, losses, model
from minis import probe as probes
from minis.capture import Captured
from minis.config import Config, load
from minis.data import DOMAINS, Batch, Rows, make_batch
from minis.engram import Hasher
from minis.init import fresh
from minis.optim import Optimiser, frozen

DRAFTS, QUERIES = 12, 64
QUANT_FROM = 0.62
INDEX_WEIGHT, CONFIDENCE_WEIGHT, INFORMATION_WEIGHT = 0.1, 0.1, 0.02
BALANCE_RATE = 1e-3


class Trainer:
    reports = ("main", "index", "draft", "confidence", "information", "norm")

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
        self.captured: Captured | None = None

    def batch(self, rows: Rows, size: int) -> Batch:
        return rows.batch(size, DRAFTS, QUERIES, self.cfg.draft_size)

    def progress(self, done: float) -> None:
        self.amount.fill_(1.0 if done > QUANT_FROM else 0.0)
        self.balance.fill_(BALANCE_RATE if done < 0.6 else BALANCE_RATE / 5)

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
        probe = probes.IndexProbe(b.index_at)
        out = model.trunk(p, cfg, lay, packed, self.mode, probe)
        ce = losses.token_loss(out.x, p["norm.weight"], p["head.weight"], b.target, cfg.norm_eps)
        main = (ce * b.weight).sum() / b.weight.sum().clamp(min=1)
        shares, counts = zip(*(losses.row_share(k, b.valid) for k in out.picked), strict=True)
        info = losses.mutual_information(torch.stack(shares), b.domain)
        ahead = b.draft_at.unsqueeze(-1) + torch.arange(1, cfg.draft_size + 1, device=b.tokens.device)
        with torch.no_grad():
            state = probes.gather_rows(out.x.detach(), ahead.flatten(1)).unflatten(1, (-1, cfg.draft_size))
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
        self.captured = Captured(self.step, b)

    def run(self, b: Batch) -> Tensor:
        return self.step(b) if self.captured is None else self.captured(b)

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


def main() -> None:
    a = loop.arguments(__doc__).parse_args()
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
    loop.train(Trainer(cfg, p, hasher, gpu), rows, test, a, began)


if __name__ == "__main__":
    main()
