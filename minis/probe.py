"""Training and use of an indexer: where its scores are compared with the attention, and the choice by score."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class IndexProbe:
    """Training of the indexer: query positions [B, n]; attention targets collected layer by layer."""

    at: Tensor
    targets: dict[int, list[Tensor]] = field(default_factory=dict)  # source -> [B, n, S] each
    scores: dict[int, Tensor] = field(default_factory=dict)
    visible: dict[int, Tensor] = field(default_factory=dict)

    def loss(self) -> Tensor:
        """Mean KL(attention over compressed rows || softmax of index scores) over sources and usable queries."""
        total = []
        for source, parts in self.targets.items():
            vis = self.visible[source]
            target = torch.stack(parts).mean(0)
            log_q = self.scores[source].masked_fill(~vis, -1e9).log_softmax(-1)
            kl = torch.where(vis, target * ((target + 1e-9).log() - log_q), 0.0).sum(-1)
            some = vis.any(-1).float()
            total.append((kl * some).sum() / (some.sum() + 1))
        return torch.stack(total).mean()


def gather_rows(x: Tensor, at: Tensor) -> Tensor:
    """x [B, T, ...], at [B, n] -> [B, n, ...]."""
    return x[torch.arange(x.shape[0], device=x.device).unsqueeze(1), at]


def select_rows(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """scores, visible [B, T, S] -> bool [B, T, S]: the best k visible entries of every query."""
    if scores.shape[-1] <= k:
        return visible
    top = scores.masked_fill(~visible, float("-inf")).topk(k, -1).indices
    return torch.zeros_like(visible).scatter(-1, top, True) & visible
