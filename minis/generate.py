"""Greedy generation by recomputing the whole text for every token: slow, short, and free of caches to get wrong."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from minis import layout, model
from minis.checkpoint import load_dequantised
from minis.config import Config, load
from minis.dialogue import Dialogue
from minis.encoding import render
from minis.engram import Hasher, compressed_of
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
        self.hasher = Hasher.build(self.cfg, compressed_of(self.encoder.full), device)
        self.packed = model.pack_all(self.p, self.cfg, mode.dtype, torch.tensor(0.0, device=device))

    @torch.no_grad()
    def states(self, rows: list[list[int]]) -> Tensor:
        """Final states [B, T, D]; shorter rows are padded behind, which causality makes harmless."""
        longest = max(len(r) for r in rows)
        longest += longest % 2
        tokens = torch.tensor([r + [PAD_ID] * (longest - len(r)) for r in rows], device=self.device)
        lay = layout.make_layout(tokens, self.cfg, self.hasher)
        return model.trunk(self.p, self.cfg, lay, self.packed, self.mode).x

    def next_tokens(self, rows: list[list[int]]) -> list[int]:
        """Greedy next token of every row."""
        last = self.states(rows)[
            torch.arange(len(rows), device=self.device),
            torch.tensor([len(r) - 1 for r in rows], device=self.device),
        ]
        return model.logits(self.p, last, self.cfg).argmax(-1).tolist()

    def answer_logits(self, prompt: list[int], answer: list[int]) -> Tensor:
        """Logits [len(answer) + 1, V] at every place of an answer, the last one for what follows it."""
        x = self.states([prompt + answer])[0, len(prompt) - 1 : len(prompt) + len(answer)]
        return model.logits(self.p, x, self.cfg)

    def agreement(self, prompt: list[int], answer: list[int]) -> int:
        """How many leading tokens of `answer` are greedy choices (one more than its length if EOS follows)."""
        best = self.answer_logits(prompt, answer).argmax(-1).tolist()
        wanted = [*answer, EOS_ID]
        return next((i for i, (a, b) in enumerate(zip(best, wanted, strict=True)) if a != b), len(wanted))

    def complete(self, prompts: list[list[int]], limit: int, guesses: list[list[int]] | None = None) -> list[list[int]]:
        """Prompts -> generated ids without EOS. A right guess saves the recomputation, a wrong one changes nothing."""
        rows = [list(p) for p in prompts]
        done = [False] * len(rows)
        for i, guess in enumerate(guesses or []):
            agreed = self.agreement(rows[i], guess[:limit])
            rows[i] += guess[: min(agreed, limit)]
            done[i] = agreed > len(guess[:limit])
        while True:
            active = [i for i, d in enumerate(done) if not d and len(rows[i]) - len(prompts[i]) < limit]
            if not active:
                break
            for i, token in zip(active, self.next_tokens([rows[i] for i in active]), strict=True):
                if token == EOS_ID:
                    done[i] = True
                else:
                    rows[i].append(token)
        return [r[len(p) :] for r, p in zip(rows, prompts, strict=True)]

    def answer(self, dialogues: list[Dialogue], limit: int, guesses: list[str] | None = None) -> list[str]:
        prompts = [self.encoder.ids(render(d, generate=True)) for d in dialogues]
        ids = [self.encoder.full.encode(g, add_special_tokens=False).ids for g in guesses] if guesses else None
        return [self.encoder.decode(a) for a in self.complete(prompts, limit, ids)]
