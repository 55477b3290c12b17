"""The router: fp32 scores, the experts a token wants, and the experts it gets from the routable set."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kernels.rows import by_row, matmul

_SUM_EPS = 1e-20


@dataclass(frozen=True)
class Routing:
    """For T tokens and top-k experts. `wanted` ignores residency and is what demand is made of.

    ids [T, k] int64 chosen among the routable; weights [T, k] fp32, normalised, times the route scale;
    wanted [T, k] int64; wanted_scores [T, k] unbiased; wanted_weights [T, k] normalised to sum 1; missed [T, k] bool;
    score [T, E] unbiased, what all of it was made from.
    """

    ids: Tensor
    weights: Tensor
    wanted: Tensor
    wanted_scores: Tensor
    wanted_weights: Tensor
    missed: Tensor
    score: Tensor


def scores(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, D], gate [E, D], fp32 -> sqrt(softplus(gate x)) [T, E]."""
    return by_row(lambda rows: torch.sqrt(softplus(matmul(rows, gate))), x)


def route(score: Tensor, bias: Tensor, routable: Tensor, top_k: int, scale: float) -> Routing:
    """score [T, E], bias [E] or [T, E], routable [E] bool. An absent expert is substituted by the best routable one:
    the choice is by score + bias, the weights are the unbiased scores of the chosen, renormalised.

    Raises ValueError when fewer than top_k experts are routable."""
    biased = score + bias
    wanted = biased.topk(top_k, -1).indices
    wanted_scores = score.gather(1, wanted)
    wanted_weights = by_row(_normalised, wanted_scores)
    here = routable[wanted]
    if bool(here.all()):
        return Routing(wanted, wanted_weights * scale, wanted, wanted_scores, wanted_weights, ~here, score)
    if int(routable.sum()) < top_k:
        raise ValueError(f"{int(routable.sum())} routable experts, the router needs {top_k}")
    ids, weights = _chosen(score, biased, routable, top_k, scale)
    return Routing(ids, weights, wanted, wanted_scores, wanted_weights, ~here, score)


def reroute(routing: Routing, bias: Tensor, allowed: Tensor, scale: float) -> Routing:
    """The same wish, chosen anew where allowed [T, E] says by row which experts may be used: at least the routable. A
    row that may use all it wants gets the bits of a layer whose experts are all routable."""
    top_k = routing.wanted.shape[1]
    ids, weights = _chosen(routing.score, routing.score + bias, allowed, top_k, scale)
    return replace(routing, ids=ids, weights=weights)


def _chosen(score: Tensor, biased: Tensor, allowed: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """allowed [E] or [T, E] -> ids, weights [T, k]."""
    ids = biased.masked_fill(~allowed, -torch.inf).topk(top_k, -1).indices
    return ids, by_row(_normalised, score.gather(1, ids)) * scale


def _normalised(chosen: Tensor) -> Tensor:
    return chosen / (chosen.sum(-1, keepdim=True) + _SUM_EPS)
