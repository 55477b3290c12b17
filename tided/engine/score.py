"""Log probabilities of given tokens: what a model says of a text that it did not choose."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tided.engine.sampling import no_numbers
from tided.engine.types import TokenLogprob
from tided.models.parallel import is_finite

SCORED_ROWS = 128
"""Rows of a chunk that are logits at the same time: a row of the whole vocabulary is memory."""

Head = Callable[[Tensor], Tensor]  # rows [T, hidden] -> fp32 logits [T, vocab], a collective of all ranks


def scores(head: Head, rows: Tensor, following: Sequence[int], most: int) -> list[TokenLogprob]:
    """rows [T, hidden] of a chunk -> of the tokens that follow; nothing follows the last row of a prompt. Every rank
    calls `head` as often, whatever it has to tell."""
    told: list[TokenLogprob] = []
    for first in range(0, len(following), SCORED_ROWS):
        part = following[first : first + SCORED_ROWS]
        told += logprobs(head(rows[first : first + len(part)]), part, most)
    return told


def logprobs(logits: Tensor, token_ids: Sequence[int], most: int) -> list[TokenLogprob]:
    """logits [T, vocab] fp32 as the model made them, token_ids [T] -> of each, and of the `most` likeliest beside it.
    Of equals the lowest ids come first. Raises PairError for logits that are no numbers."""
    if not is_finite(logits):
        raise no_numbers()
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    total = _log_total(logits)
    own = logits.gather(1, ids)
    ranks = 1 + (logits > own).sum(1)
    values = own.to(torch.float64) - total
    best = likeliest(logits, min(most, logits.shape[1])) if most else ids[:, :0]
    theirs = logits.gather(1, best).to(torch.float64) - total
    told = zip(token_ids, values[:, 0].tolist(), ranks.tolist(), best.tolist(), theirs.tolist(), strict=True)
    return [TokenLogprob(one, value, list(zip(*top, strict=True)), rank) for one, value, rank, *top in told]


def likeliest(logits: Tensor, count: int) -> Tensor:
    """logits [T, vocab] -> [T, count] int64, the likeliest first, of equals the lowest id (a device's own top-k leaves
    that choice to it)."""
    least = logits.topk(count, dim=1).values[:, -1:]
    above, equal = logits > least, logits == least
    room = count - above.sum(1, keepdim=True)  # for those that equal the least: the first of them
    chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= room))
    ids = chosen.nonzero()[:, 1].view(len(logits), count)
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _log_total(logits: Tensor) -> Tensor:
    """logits [T, vocab] fp32 -> [T, 1] float64, the logarithm of the sum of their exponentials. A few rows at a time:
    twice their memory."""
    parts = [part.to(torch.float64).logsumexp(1, keepdim=True) for part in torch.split(logits, 16)]
    return torch.cat(parts)
