"""Latent attention over a set of rows per query: one 512-vector is key and value at once, shared by all heads."""

import torch
from torch import Tensor

from kernels.numerics import Rounding


def latent_attention(q: Tensor, rows: Tensor, valid: Tensor | None, sink: Tensor, scale: float, p: Rounding) -> Tensor:
    """q [T, H, d]; rows [T, N, d] (window, then selected compressed rows); valid [T, N] bool or None for all;
    sink [H]: a logit with no value, in the denominator only -> [T, H, d].

    The softmax is shifted by the largest row score; `p` rounds the probabilities before the values, not the sum."""
    score = torch.bmm(q, rows.transpose(1, 2)).mul_(scale)
    if valid is not None:
        score.masked_fill_(~valid.unsqueeze(1), -torch.inf)
    top = score.amax(-1, keepdim=True)
    probability = torch.exp(score - top)
    total = probability.sum(-1, keepdim=True) + torch.exp(sink.view(1, -1, 1) - top)
    return torch.bmm(p(probability), rows) / total
