"""Greedy generation by recomputing the whole text for every token: slow, short, and free of caches to get wrong."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from minis import layout, model
from minis.checkpoint import load_dequantised
from minis.config import Config, load
from minis.encoding import Dialogue, render
from minis.engram import Hasher
from minis.layout import Mode
from minis.tokenizer import Encoder

EOS_ID, PAD_ID = 1, 2


class Speaker:
    """A checkpoint with its tokenizer."""

    def __init__(self, folder: Path, mode: Mode, device: str = "cpu", p: dict[str, Tensor] | None = None) -> None:
        self.cfg: Config = load(folder / "config.json")
        self.encoder = Encoder(folder / "tokenizer.json")
        self.mode, self.device = mode, device
        self.p = {n: w.to(device) for n, w in (p or load_dequantised(folder)).items()}
        self.hasher = Hasher.build(self.cfg, self.encoder.compressed(), device)
        self.packed = model.pack_all(self.p, self.cfg, mode.dtype, torch.tensor(0.0, device=device))

    @torch.no_grad()
    def next_tokens(self, rows: list[list[int]]) -> list[int]:
        """Greedy next token of every row; shorter rows are padded behind, which causality makes harmless."""
        longest = max(len(r) for r in rows)
        longest += longest % 2
        tokens = torch.tensor([r + [PAD_ID] * (longest - len(r)) for r in rows], device=self.device)
        lay = layout.make_layout(tokens, self.cfg, self.hasher)
        x = model.trunk(self.p, self.cfg, lay, self.packed, self.mode).x
        last = x[torch.arange(len(rows), device=self.device), torch.tensor([len(r) - 1 for r in rows])]
        return model.logits(self.p, last, self.cfg).argmax(-1).tolist()

    def complete(self, prompts: list[list[int]], limit: int) -> list[list[int]]:
        """Prompts -> generated ids without EOS."""
        rows = [list(p) for p in prompts]
        done = [False] * len(rows)
        for _ in range(limit):
            active = [i for i, d in enumerate(done) if not d]
            if not active:
                break
            for i, token in zip(active, self.next_tokens([rows[i] for i in active]), strict=True):
                if token == EOS_ID:
                    done[i] = True
                else:
                    rows[i].append(token)
        return [r[len(p) :] for r, p in zip(rows, prompts, strict=True)]

    def answer(self, dialogues: list[Dialogue], limit: int) -> list[str]:
        prompts = [self.encoder.ids(render(d, generate=True)) for d in dialogues]
        return [self.encoder.decode(ids) for ids in self.complete(prompts, limit)]
