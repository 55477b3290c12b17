"""Packed rows in device memory and batches with fixed domain shares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DOMAINS = ("prose", "code", "story", "qa", "math", "codechat", "tools", "lang")
# Natural text is capped at about four epochs of a run of 210 M tokens; what is generated may repeat more often.
SHARES = {
    "prose": 0.06,
    "code": 0.10,
    "story": 0.13,
    "qa": 0.17,
    "math": 0.17,
    "codechat": 0.13,
    "tools": 0.17,
    "lang": 0.07,
}


@dataclass
class Batch:
    """Static buffers: a captured step reads these."""

    tokens: Tensor  # [B, T] int64
    target: Tensor  # [B, T] int64: the next token
    weight: Tensor  # [B, T] fp32, of the target
    valid: Tensor  # [B, T] fp32: not a pad
    domain: Tensor  # [B, domains] fp32 one-hot, columns averaging over the domain's rows
    index_at: Tensor  # [B, n] positions for the index loss
    draft_at: Tensor  # [B, n] last verified positions for the drafter
    draft_weight: Tensor  # [B, n, K]

    def copy_(self, other: Batch) -> None:
        for name, t in vars(other).items():
            getattr(self, name).copy_(t)


class Rows:
    def __init__(self, path: Path, device: torch.device, row: int, seed: int, test: bool = False) -> None:
        arrays = np.load(path / "rows.npz", allow_pickle=False)
        kind = "test_" if test else ""
        self.device, self.row = device, row
        self.tokens = {
            d: torch.from_numpy(arrays[f"{d}.{kind}tokens"][:, :row].astype(np.int32)).to(device) for d in DOMAINS
        }
        self.weights = {d: torch.from_numpy(arrays[f"{d}.{kind}weights"][:, :row].copy()).to(device) for d in DOMAINS}
        self.rng = np.random.default_rng(seed)
        self.order = {d: self.rng.permutation(len(self.tokens[d])) for d in DOMAINS}
        self.used = dict.fromkeys(DOMAINS, 0)

    def _take(self, domain: str, count: int) -> np.ndarray:
        order, at = self.order[domain], self.used[domain]
        picked = order[np.arange(at, at + count) % len(order)]
        if (at + count) // len(order) > at // len(order):
            self.order[domain] = self.rng.permutation(len(order))
        self.used[domain] = at + count
        return picked

    def batch(self, size: int, drafts: int, queries: int, block: int) -> Batch:
        """Rows by share: systematic sampling, so that every domain is in (nearly) every batch."""
        points = (np.arange(size) + self.rng.random()) / size
        which = np.searchsorted(np.cumsum([SHARES[d] for d in DOMAINS]) - 1e-9, points).clip(max=len(DOMAINS) - 1)
        tokens, weights = [], []
        for i, d in enumerate(DOMAINS):
            count = int((which == i).sum())
            if count:
                index = torch.from_numpy(self._take(d, count)).to(self.device)
                tokens.append(self.tokens[d][index])
                weights.append(self.weights[d][index])
        domain = torch.from_numpy(np.sort(which)).to(self.device)
        return make_batch(torch.cat(tokens).long(), torch.cat(weights), domain, drafts, queries, block)


def make_batch(tokens: Tensor, weights: Tensor, domain: Tensor, drafts: int, queries: int, block: int) -> Batch:
    """tokens [B, T] int64, weights [B, T] uint8, domain [B] -> Batch with random probe positions."""
    b, t = tokens.shape
    shift = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=2)
    weight = torch.nn.functional.pad(weights[:, 1:].float() / 255, (0, 1))
    hot = torch.nn.functional.one_hot(domain, len(DOMAINS)).float()
    # A draft from `at` predicts the tokens at + 2 .. at + 1 + K: prefer places that the model has to write.
    reach = t - block - 2
    at = torch.multinomial(weight[:, 1 : reach + 1] + 0.02, drafts)
    ahead = at.unsqueeze(-1) + torch.arange(1, block + 1, device=tokens.device)
    rows = torch.arange(b, device=tokens.device).view(-1, 1, 1)
    opened = (tokens == 0).cumsum(1)
    same = opened[rows, ahead] == opened[rows, at.unsqueeze(-1)]
    return Batch(
        tokens=tokens,
        target=shift,
        weight=weight,
        valid=(tokens != 2).float(),
        domain=hot / hot.sum(0).clamp(min=1),
        index_at=torch.randint(0, t, (b, queries), device=tokens.device),
        draft_at=at,
        draft_weight=weight[rows, ahead] * same,
    )
