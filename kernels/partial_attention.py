"""Latent attention over rows that several ranks hold a part of each: what a rank's rows give, and how parts are joined.

Of each query and head a rank gives the largest score, the sum of exponentials below it and the weighted sum of its
rows, not yet divided. Joined they are the softmax over all rows; a rank without any row adds nothing.
"""

import torch
from torch import Tensor

from kernels.numerics import Rounding


def partial_attention(
    q: Tensor, rows: Tensor, valid: Tensor | None, scale: float, latent_dim: int, p: Rounding
) -> Tensor:
    """q [T, H, d]; rows [T, N, d], N may be 0; valid [T, N] bool, or None: all -> [T, H, latent_dim + 2]: the weighted
    sum of the rows' first latent_dim values, the largest score (-inf: no row), the sum of exponentials. `p` rounds the
    probabilities before the values, not the sum."""
    if not rows.shape[1]:
        part = q.new_zeros(*q.shape[:2], latent_dim + 2)
        part[..., latent_dim] = -torch.inf
        return part
    score = torch.bmm(q, rows.transpose(1, 2)).mul_(scale)
    if valid is not None:
        score.masked_fill_(~valid.unsqueeze(1), -torch.inf)
    top = score.amax(-1, keepdim=True)
    probability = torch.exp(score - top.masked_fill(top == -torch.inf, 0.0))
    summed = torch.bmm(p(probability), rows[..., :latent_dim])
    return torch.cat([summed, top, probability.sum(-1, keepdim=True)], -1)


def joined(parts: Tensor) -> Tensor:
    """parts [T, ranks, H, c + 2] as `partial_attention` gives them, at least one of them of a row -> [T, H, c], added
    in the order of the ranks."""
    top = parts[..., -2]
    weight = torch.exp(top - top.amax(1, keepdim=True)).unsqueeze(-1)
    total, summed = weight[:, 0] * parts[:, 0, :, -1:], weight[:, 0] * parts[:, 0, :, :-2]
    for rank in range(1, parts.shape[1]):
        total = total + weight[:, rank] * parts[:, rank, :, -1:]
        summed = summed + weight[:, rank] * parts[:, rank, :, :-2]
    return summed / total


def gathered_parts(parts: Tensor) -> Tensor:
    """parts [T, n, H, c + 2] of one rank, one of them of a row -> what all their rows at once would have given,
    [T, H, c + 2]."""
    top = parts[..., -2]
    most = top.amax(1)
    weight = torch.exp(top - most.unsqueeze(1)).unsqueeze(-1)
    total = (weight * parts).sum(1)
    return torch.cat([total[..., :-2], most.unsqueeze(-1), total[..., -1:]], -1)
