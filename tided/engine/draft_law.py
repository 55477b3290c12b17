"""How drafts are drawn inside a CUDA graph: `sampling.drawn_there` for all lanes at once, its numbers in the device's
memory. On CUDA it is the sampler's own kernels; elsewhere the same law by operations, with the same noise."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tided.engine.sampling import (
    _NEVER,
    MIN_P,
    NOISE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    _share,
    _units,
    drawn_by_kernels,
    drawn_there,
    noise,
    rung,
    signed,
)
from tided.engine.types import Sampling
from tided.models.proposals import Law


def law_of(lanes: Sequence[tuple[Sampling, int]], places: int) -> Law:
    """lanes: each one's sampling and the position of its first draft. The cheapest law that all of them are under."""
    told = torch.zeros(places, len(lanes), 5, dtype=torch.int64)
    if all(sampling.temperature <= 0 for sampling, _ in lanes):
        return Law("likeliest", told, likeliest)
    floats = told.view(torch.float64)
    for lane, (sampling, first) in enumerate(lanes):
        told[:, lane, NOISE] = torch.tensor([signed(noise(sampling.seed, first + place)) for place in range(places)])
        told[:, lane, TOP_K] = sampling.top_k
        for field, value in ((TEMPERATURE, sampling.temperature), (MIN_P, sampling.min_p), (TOP_P, sampling.top_p)):
            floats[:, lane, field] = value
    ranks = any(sampling.top_k or sampling.top_p < 1 for sampling, _ in lanes)
    return Law("ranked", told, ranked) if ranks else Law("raced", told, raced)


def likeliest(logits: Tensor, told: Tensor) -> Tensor:
    """logits [R, V] -> [R] int64, -1 where they are no numbers."""
    return drawn_there(logits, ())


def raced(logits: Tensor, told: Tensor) -> Tensor:
    """logits [R, V], told [R, 5] -> [R] int64: without top-k and top-p."""
    return _drawn(logits, told, sorts=False)


def ranked(logits: Tensor, told: Tensor) -> Tensor:
    """The same with them."""
    return _drawn(logits, told, sorts=True)


def _drawn(logits: Tensor, told: Tensor, sorts: bool) -> Tensor:
    if logits.is_cuda:
        return drawn_by_kernels(logits, told, sorts, sorts)
    best, temperature = drawn_there(logits, ()), _float(told, TEMPERATURE)
    warm = temperature > 0
    weights = logits.to(torch.float64, copy=True).sub_(logits.amax(1, keepdim=True))
    weights = weights.div_(torch.where(warm, temperature, 1.0)).exp_()
    least = _float(told, MIN_P).clamp(_NEVER, 1.0)
    if sorts:
        least = torch.maximum(least, _least_ranked(weights, told))
    ids = torch.arange(weights.shape[1], device=weights.device)
    times = torch.where(weights >= least, rung(told[:, NOISE : NOISE + 1], ids) / weights, torch.inf)
    first = torch.where(times == times.amin(1, keepdim=True), ids, weights.shape[1]).amin(1)
    return torch.where(warm[:, 0] & (best >= 0), first, best)


def _least_ranked(weights: Tensor, told: Tensor) -> Tensor:
    """weights [R, V] -> [R, 1]: the least that top-k leaves, and of what it leaves top-p."""
    vocab, order = weights.shape[1], weights.sort(1, descending=True).values
    top_k, top_p = told[:, TOP_K : TOP_K + 1], _float(told, TOP_P)
    least = torch.where((top_k > 0) & (top_k < vocab), order.gather(1, (top_k - 1).clamp(0, vocab - 1)), 0.0)
    reached = _units(torch.where(order >= least, order, 0.0), vocab).cumsum(1)
    last = torch.searchsorted(reached, _share(reached[:, -1:].contiguous(), top_p))
    return torch.where(top_p < 1, torch.maximum(least, order.gather(1, last.clamp_max(vocab - 1))), least)


def _float(told: Tensor, field: int) -> Tensor:
    """[R, 1]"""
    return told[:, field : field + 1].view(torch.float64)
