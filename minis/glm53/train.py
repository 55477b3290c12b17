"""Trains the GLM-5.3 mini.

    python -m minis.glm53.train --data scratch/mini/glm --out /tmp/mini --seconds 330

The first part of a run shares the drafting layer's loss with the trunk; the second detaches it and unrolls it on its
own output, and disturbs the experts' weights as the quantisation that follows will. Each part is a graph of its own.

`--from CHECKPOINT --done 0.6` goes on with the weights of a checkpoint, as stored, from that part of the schedule on.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from minis import layers, loop, losses
from minis.capture import Captured
from minis.data import DOMAINS, Batch, Rows, make_batch
from minis.glm53 import joined, model, mtp
from minis.glm53.checkpoint import load_parameters
from minis.glm53.config import load
from minis.glm53.init import fresh
from minis.optim import Optimiser, frozen
from minis.probe import IndexProbe
from minis.tokenizer import Encoder
from tided.chat.glm53 import USER
from tided.models.glm53.config import Config

QUERIES, CHAIN = 64, 3
SECOND_FROM = 0.6
NOISE = 0.15  # of an expert's weights: between the errors of 3 and of 2 bits
INDEX_WEIGHT, DRAFT_WEIGHT = 0.1, 0.3
INFORMATION_WEIGHT, INFORMATION_UNTIL = 0.01, 0.5  # for ever, it would bind experts to domains harder than text does
BALANCE_RATE = 1e-3


@layers.region
def token_loss(state: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """state [B, T, D] behind the final norm, target [B, T] -> cross-entropy [B, T] fp32."""
    logits = F.linear(state, head.to(state.dtype)).float()
    return logits.logsumexp(-1) - logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)


class Trainer:
    reports = ("main", "index", "draft", "information", "norm")

    def __init__(self, cfg: Config, p: dict[str, Tensor], gpu: bool) -> None:
        self.cfg, self.p, self.gpu = cfg, p, gpu
        for name, w in p.items():
            w.requires_grad_(not frozen(name))
        self.opt = Optimiser(p)
        device = p["lm_head.weight"].device
        self.frequency = model.frequencies(cfg, device)
        self.noise = torch.zeros((), device=device)
        self.balance = torch.full((), BALANCE_RATE, device=device)
        self.information = torch.full((), INFORMATION_WEIGHT, device=device)
        self.mode = model.Mode(dtype=torch.bfloat16 if gpu else torch.float32, sparse=not gpu)
        self.second = False
        self.captured: dict[bool, Captured] = {}

    def batch(self, rows: Rows, size: int) -> Batch:
        return rows.batch(size, 1, QUERIES, 1)

    def progress(self, done: float) -> None:
        self.second = done > SECOND_FROM
        self.noise.fill_(NOISE if self.second else 0.0)
        self.information.fill_(INFORMATION_WEIGHT if done < INFORMATION_UNTIL else 0.0)
        self.balance.fill_(BALANCE_RATE if done < SECOND_FROM else BALANCE_RATE / 5)

    def layout(self, tokens: Tensor) -> model.Layout:
        return model.make_layout(tokens, self.cfg, self.frequency, self.mode.dtype)

    def forward(self, b: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Losses of one batch: total, its parts, and counts per layer for balancing."""
        p, cfg = self.p, self.cfg
        lay = self.layout(b.tokens)
        packed = model.pack_all(p, cfg, self.mode.dtype, self.noise)
        probe = IndexProbe(b.index_at)
        out = model.trunk(p, cfg, lay, packed, self.mode, probe)
        ce = token_loss(out.state, p["lm_head.weight"], b.target)
        main = (ce * b.weight).sum() / b.weight.sum().clamp(min=1)
        shares, counts = zip(*(losses.row_share(k, b.valid) for k in out.picked), strict=True)
        info = losses.mutual_information(torch.stack(shares), b.domain)
        state, steps = (out.state.detach(), CHAIN) if self.second else (out.state, 1)
        drafts, behind = mtp.unrolled(p, cfg, lay, packed, self.mode, state, b.target, steps, probe)
        counts += (losses.row_share(behind, b.valid)[1],)
        draft = mtp.training_loss(drafts, out.state, p["lm_head.weight"], b.weight, lay.start)
        index = probe.loss()
        total = main + INDEX_WEIGHT * index + DRAFT_WEIGHT * draft - self.information * info
        return total, torch.stack([main, index, draft, info]).detach(), list(counts)

    def step(self, b: Batch) -> Tensor:
        total, parts, counts = self.forward(b)
        total.backward()
        norm = self.opt.step()
        with torch.no_grad():
            for layer, count in zip(model.expert_layers(self.cfg), counts, strict=True):
                bias = self.p[f"{model.block_of(layer)}.mlp.gate.e_score_correction_bias"]
                bias += self.balance * torch.sign(count.mean() - count)
        for w in self.opt.trained:
            w.grad = None
        return torch.cat((parts, norm.detach().view(1)))

    def capture(self, b: Batch) -> None:
        for self.second in (True, False):
            self.captured[self.second] = Captured(self.step, b)

    def run(self, b: Batch) -> Tensor:
        captured = self.captured.get(self.second)
        return self.step(b) if captured is None else captured(b)

    def held_out(self, rows: Rows, size: int) -> dict[str, float]:
        """Loss per domain over tokens that the model has to write; same compiled regions as training."""
        result = {}
        packed = model.pack_all(self.p, self.cfg, self.mode.dtype)
        for i, d in enumerate(DOMAINS):
            tokens, weights = rows.tokens[d][:size].long(), rows.weights[d][:size]
            if len(tokens) < size:
                tokens = tokens.repeat(size // len(tokens) + 1, 1)[:size]
                weights = weights.repeat(size // len(weights) + 1, 1)[:size]
            b = make_batch(tokens, weights, torch.full((size,), i, device=tokens.device), 1, QUERIES, 1)
            out = model.trunk(self.p, self.cfg, self.layout(tokens), packed, self.mode)
            ce = token_loss(out.state, self.p["lm_head.weight"], b.target).detach()
            full = (b.weight > 0.99).float()
            result[d] = round(float((ce * full).sum() / full.sum().clamp(min=1)), 4)
        return result

    def self_check(self, rows: Rows, size: int) -> tuple[float, float]:
        """Loss of a few rows through the compiled path and through plain exact arithmetic."""
        tokens = torch.cat([rows.tokens[d][:2] for d in ("story", "math", "tools")]).long()
        weights = torch.cat([rows.weights[d][:2] for d in ("story", "math", "tools")])
        full = (F.pad(weights[:, 1:], (0, 1)) == 255).float()
        target = F.pad(tokens[:, 1:], (0, 1))
        values = []
        for plain in (False, True):
            layers.enable_compile(self.gpu and not plain)
            many = tokens if plain else tokens.repeat(-(-size // len(tokens)), 1)[:size]
            mode = model.Mode(sparse=False) if plain else self.mode
            lay = model.make_layout(many, self.cfg, self.frequency, mode.dtype)
            with torch.set_grad_enabled(not plain):  # the compiled regions exist for training only
                packed = model.pack_all(self.p, self.cfg, mode.dtype)
                state = model.trunk(self.p, self.cfg, lay, packed, mode).state[: len(tokens)]
                ce = F.cross_entropy(
                    model.logits(self.p, state).detach().flatten(0, 1), target.flatten(), reduction="none"
                )
            values.append(float((ce.view_as(full) * full).sum() / full.sum()))
        layers.enable_compile(self.gpu)
        return values[0], values[1]


def main() -> None:
    arguments = loop.arguments(__doc__)
    arguments.add_argument("--from", dest="before", type=Path, help="a checkpoint to go on with")
    a = arguments.parse_args()
    began = time.monotonic()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 128
    layers.enable_compile(gpu)
    cfg = load(a.data / "config.json")
    rows, test = Rows(a.data, device, a.row, a.seed), Rows(a.data, device, a.row, a.seed, test=True)
    joined.join(rows, Encoder(a.data / "tokenizer.json").special[USER], a.seed)
    p = load_parameters(a.before)[1] if a.before else fresh(cfg, a.seed)
    trainer = Trainer(cfg, {n: w.float().to(device) for n, w in p.items()}, gpu)
    loop.train(trainer, rows, test, a, began)


if __name__ == "__main__":
    main()
