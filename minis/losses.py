"""Losses and routing statistics."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minis.layers import region
from minis.numerics import rms_norm


@region
def token_loss(x: Tensor, norm: Tensor, head: Tensor, target: Tensor, eps: float) -> Tensor:
    """x [B, T, D] collapsed, target [B, T] -> cross-entropy [B, T] fp32."""
    logits = F.linear(rms_norm(x, norm, eps), head.to(x.dtype)).float()
    picked = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return logits.logsumexp(-1) - picked


@region
def row_share(picked: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """picked [N, E], valid [B, T] -> mean routing weight per row [B, E], count of choices per expert [E]."""
    b, t = valid.shape
    weight = (picked / (picked.sum(-1, keepdim=True) + 1e-20)).view(b, t, -1)
    share = (weight * valid.unsqueeze(-1)).sum(1) / valid.sum(1, keepdim=True).clamp(min=1)
    count = ((picked.detach() > 0).view(b, t, -1) * valid.unsqueeze(-1)).sum((0, 1))
    return share, count


def mutual_information(shares: Tensor, domain: Tensor) -> Tensor:
    """shares [layers, B, E], domain [B, domains] (columns average rows) -> mean over layers of I(domain; expert).

    The entropy of the mean balances experts over the batch; the mean entropy makes each domain choose few.
    """
    present = (domain.sum(0) > 0).float()
    q = torch.einsum("lbe,bd->lde", shares, domain)
    entropy = -(q * (q + 1e-9).log()).sum(-1)
    weights = present / present.sum()
    mean = torch.einsum("lde,d->le", q, weights)
    return (-(mean * (mean + 1e-9).log()).sum(-1) - (entropy * weights).sum(-1)).mean()
