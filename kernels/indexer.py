"""Which compressed rows a query attends to: scores, the best k, and the candidate pool of later layers.

Selections are sets, held ascending. A tie at the border goes to the lower index, so the choice depends neither on how
the prompt was cut nor on the rank."""

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 22  # bounds the [queries, heads, entries] product


def index_scores(query: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """query [T, h, d], weight [T, h], keys [n, d], fp32 -> sum over heads of weight * relu(query key), [T, n]."""
    block = max(1, _BLOCK_ELEMENTS // (query.shape[1] * keys.shape[0]))
    parts = [(query[i : i + block], weight[i : i + block]) for i in range(0, query.shape[0], block)]
    return torch.cat([torch.bmm(w.unsqueeze(1), torch.relu(q @ keys.t())).squeeze(1) for q, w in parts])


def best(score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """score [T, n] with count <= n -> indices [T, count] ascending, and whether each is visible (score > -inf)."""
    border = score.topk(count, -1).values[:, -1:]
    above = score > border
    tied = score == border
    room = count - above.sum(-1, keepdim=True)
    taken = above | (tied & (tied.cumsum(-1) <= room))
    indices = taken.nonzero()[:, 1].view(score.shape[0], count)
    return indices, score.gather(1, indices) > -torch.inf


def candidate_mask(score: Tensor, visible: Tensor, blocks: int, block_size: int) -> Tensor:
    """score [T, n] (-inf where not visible), visible [T] int64 -> mask [T, n] of the entries in the best blocks.

    A block counts by its best visible entry; the block of the newest visible entry is always in."""
    count = score.shape[1]
    padded = torch.nn.functional.pad(score, (0, -count % block_size), value=-torch.inf)
    block_score = padded.view(len(padded), -1, block_size).amax(-1)
    if block_score.shape[1] <= blocks:
        return score > -torch.inf
    newest = ((visible - 1).clamp_min(0) // block_size).unsqueeze(1)
    block_score.scatter_(1, newest, torch.inf)
    indices, counted = best(block_score, blocks)
    kept = torch.zeros_like(block_score, dtype=torch.bool).scatter_(1, indices, counted)
    return kept.repeat_interleave(block_size, 1)[:, :count] & (score > -torch.inf)
