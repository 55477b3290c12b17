"""Log probabilities of given tokens: what a model says of a text that it did not choose."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tided.engine.lane import Lane, Scoring
from tided.engine.logits import shaped
from tided.engine.sampling import no_numbers, sample
from tided.engine.types import Request, TokenLogprob
from tided.models.base import Model, Pictured
from tided.models.parallel import is_finite

SCORED_ROWS = 128
"""Rows of a chunk that are logits at the same time: a row of the whole vocabulary is memory."""

Head = Callable[[Tensor], Tensor]  # rows [T, hidden] -> fp32 logits [T, vocab], a collective of all ranks


def pieces(head: Head, rows: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """rows [T, hidden] of a chunk -> (first row, logits [n, vocab]) of the first `count` of them, a few at a time. A
    collective: every rank takes them all."""
    for first in range(0, count, SCORED_ROWS):
        yield first, head(rows[first : min(first + SCORED_ROWS, count)])


def redrawn(logits: Tensor, first: int, asked: Request, answer: Sequence[int]) -> list[int]:
    """logits [n, vocab] of what stands from position `first` on -> what `asked` would have drawn there behind that much
    of its answer; of its own prompt nothing. With the draws' noise: the same logits give the same token."""
    prompt = len(asked.prompt_ids)
    places = range(max(first, prompt), first + len(logits))
    rows = [shaped(logits[at - first], asked, answer[: at - prompt], at - prompt, None) for at in places]
    return sample(torch.stack(rows), [(asked.sampling, at) for at in places]) if rows else []


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


def scoring(model: Model, lane: Lane, start: int, count: int, pictured: Pictured | None) -> Scoring:
    """A chunk of a scored prompt. Layer by layer, then the scores of the tokens that follow, some rows at a time; none
    follows a prompt's last."""
    request, asked, end = lane.request, lane.asked, start + count
    ids = torch.tensor(request.prompt_ids[start:end], dtype=torch.int64)
    rows = yield from model.prefill_by_layer(lane.state, ids, pictured)
    first, told, drawn = start + 1, list[TokenLogprob](), list[int]()
    following = request.prompt_ids[first : end + 1]
    answer = request.prompt_ids[request.redrawn_from :]
    for at, logits in pieces(model.logits, rows, len(following)):
        if at:
            yield
        told += logprobs(logits, following[at : at + len(logits)], request.scored_top)
        drawn += redrawn(logits, first + at, asked, answer) if request.redrawn_from else []
    return rows, told, drawn
