"""What every mixture of experts does with the router's choice: demand, residency, reads before use, and the sum."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kernels.experts import grouped_experts, pick_outputs, sum_of_picks
from kernels.numerics import Numerics
from kernels.router import Routing, reroute
from tided.experts.bank import ExpertBank
from tided.experts.fetch import UrgentReads


class Layer(Protocol):
    """`layer` counts those of the bank; `limit` clamps an expert's SwiGLU."""

    @property
    def layer(self) -> int: ...
    @property
    def route_scale(self) -> float: ...
    @property
    def limit(self) -> float: ...
    @property
    def bank(self) -> ExpertBank: ...
    @property
    def numerics(self) -> Numerics: ...


def mixture(
    of: Layer, lanes: Tensor, x: Tensor, routing: Routing, bias: Tensor, shared: Callable[[Tensor], Tensor]
) -> Tensor:
    """lanes [T]; x [T, D] as experts take it; routing among the routable, by bias [E] or [T, E] -> [T, D] fp32: this
    rank's part of the routed and the shared experts.

    Experts that rows wait for are read while the shared expert and those that are here are computed."""
    bank = of.bank
    urgent = bank.urgent if bank.urgent is not None and bank.urgent.active else None
    allowed = urgent.allowed(of.layer, lanes, routing) if urgent else None
    read = None
    if allowed is not None:
        routing = reroute(routing, bias, allowed, of.route_scale)
        read = routing.missed & allowed.gather(1, routing.wanted)
    wish = (routing.wanted, routing.wanted_scores, routing.wanted_weights)
    bank.tap.record(of.layer, lanes, *wish, routing.missed, read)
    picks = bank.tables.slot_of[of.layer][routing.ids]
    if urgent is None or allowed is None:
        routed = grouped_experts(x, bank.slots, bank.record, picks, routing.weights, of.limit, of.numerics)
        return routed.add_(shared(x))
    return _with_late(of, urgent, lanes, x, routing, picks, shared)


def _with_late(
    of: Layer,
    urgent: UrgentReads,
    lanes: Tensor,
    x: Tensor,
    routing: Routing,
    picks: Tensor,
    shared: Callable[[Tensor], Tensor],
) -> Tensor:
    """lanes [T]; picks [T, k] with -1 where the expert is not here yet. The sum is that of all at once."""
    n, bank, ids = of.numerics, of.bank, routing.ids
    late = urgent.serve(of.layer, torch.unique(ids[picks < 0]).tolist(), (lanes, ids))
    outputs = x.new_empty(*ids.shape, bank.record.hidden)
    pick_outputs(outputs, x, bank.slots, bank.record, picks, routing.weights, of.limit, n)
    beside = shared(x)
    for slot_of in late:
        here = torch.full_like(bank.tables.slot_of[of.layer], -1)
        here[list(slot_of)] = torch.tensor(list(slot_of.values()), dtype=here.dtype, device=here.device)
        pick_outputs(outputs, x, bank.slots, bank.record, here[ids], routing.weights, of.limit, n)
        for expert in (expert for expert, slot in slot_of.items() if slot < 0):
            outputs[ids == expert] = 0.0  # numbers, so that the sums over the ranks go on; they are nobody's answer
    return sum_of_picks(outputs).add_(beside)
