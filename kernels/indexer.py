"""Which compressed rows a query attends to: scores, the best k, and the candidate pool of later layers.

Selections are sets, held ascending. A tie at the border goes to the lower index, so the choice depends neither on how
the prompt was cut nor on the rank."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def index_scores(query: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """query [T, h, d], weight [T, h], keys [n, d], fp32 -> sum over heads of weight * relu(query key), [T, n]."""
    return torch.bmm(weight.unsqueeze(1), torch.relu(query @ keys.t())).squeeze(1)


def best(score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """score [T, n] with count <= n -> indices [T, count] ascending, and whether each is visible (score > -inf)."""
    border = score.topk(count, -1).values[:, -1:]
    above = score > border
    tied = score == border
    room = count - above.sum(-1, keepdim=True)
    taken = above | (tied & (tied.cumsum(-1) <= room))
    indices = _numbers(taken, count) if score.is_cuda else taken.nonzero()[:, 1].view(score.shape[0], count)
    return indices, score.gather(1, indices) > -torch.inf


def _numbers(taken: Tensor, count: int) -> Tensor:
    """taken [T, n] bool, `count` of each row -> their numbers [T, count] ascending, without a wait for the device."""
    place = torch.where(taken, taken.cumsum(-1) - 1, count)
    numbers = torch.arange(taken.shape[1], device=taken.device).expand_as(place)
    return numbers.new_empty(len(taken), count + 1).scatter_(1, place, numbers)[:, :count]


def merged(score: Tensor, position: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """score, position [T, n] of entries in any order, -inf where there is none -> [T, count] of the best, by position:
    what `best` chooses of all entries of which these are the best of each part."""
    position, order = position.sort(1)
    score = score.gather(1, order)
    chosen, _ = best(score, count)
    return score.gather(1, chosen), position.gather(1, chosen)


def candidate_blocks(score: Tensor, visible: Tensor, blocks: int, block_size: int) -> Tensor:
    """score [T, n] (-inf where not visible), visible [T] int64 -> the best blocks, numbers [T, blocks] int32, or all
    when there are fewer. A place that no visible block fills repeats the newest one's number.

    A block counts by its best visible entry; the block of the newest visible entry is always in."""
    padded = pad(score, (0, -score.shape[1] % block_size), value=-torch.inf)
    block_score = padded.view(len(score), -1, block_size).amax(-1)
    newest = ((visible - 1).clamp_min(0) // block_size).unsqueeze(1)
    block_score.scatter_(1, newest, torch.inf)
    indices, counted = best(block_score, min(blocks, block_score.shape[1]))
    return indices.where(counted, newest).to(torch.int32)


def limit_to_blocks_(score: Tensor, kept: Tensor, block_size: int) -> None:
    """score [T, n]: -inf outside the blocks whose numbers are in kept [T, blocks] int32; in place."""
    outside = torch.ones(len(score), -(-score.shape[1] // block_size), dtype=torch.bool, device=score.device)
    outside.scatter_(1, kept.long(), False)
    score.masked_fill_(outside.repeat_interleave(block_size, 1)[:, : score.shape[1]], -torch.inf)
