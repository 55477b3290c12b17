"""What follows attention in a layer: a dense SwiGLU in the first layers, experts beside a shared one in all others."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.experts import grouped_experts, pick_outputs, sum_of_picks
from kernels.numerics import Numerics
from kernels.packed import Linear, product, stacked
from kernels.router import Routing, reroute, route
from kernels.rows import by_row
from kernels.swiglu import clamped_swiglu
from tided.experts.bank import ExpertBank
from tided.experts.fetch import UrgentReads
from tided.models.glm53.ablation import Projection
from tided.models.glm53.config import Config
from tided.models.glm53.step import Pass
from tided.models.glm53.weights import Weights

NO_LIMIT = math.inf  # this family's SwiGLU is not clamped


@dataclass(frozen=True)
class Dense:
    """A SwiGLU, or the shared expert of a layer: this rank's part of the inner dimension."""

    gate_up: Linear  # [2n, D]
    down: Linear  # [D, n]
    numerics: Numerics
    edit: Projection | None = None  # of what it gives

    def forward(self, step: Pass, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D] fp32, to be summed over the ranks and then rounded."""
        return self.of(x)

    def of(self, x: Tensor) -> Tensor:
        n = self.numerics
        gate_up = n.store(product(x, self.gate_up, n))
        found = product(n.store(by_row(lambda rows: clamped_swiglu(rows, NO_LIMIT), gate_up)), self.down, n)
        return self.edit(found) if self.edit else found


@dataclass(frozen=True)
class Moe:
    layer: int  # of the bank
    top_k: int
    route_scale: float
    gate: Linear  # [E, D]
    bias: Tensor  # [E]: of the choice, never of the weights
    shared: Dense
    bank: ExpertBank
    numerics: Numerics

    def forward(self, step: Pass, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D] fp32: this rank's part of routed and shared experts, to be summed and then rounded.

        Experts that rows wait for are read while the shared expert and those that are here are computed."""
        bank, lanes = self.bank, step.lane_of_row
        routing = self.route(x)
        urgent = bank.urgent if bank.urgent is not None and bank.urgent.active else None
        allowed = urgent.allowed(self.layer, lanes, routing) if urgent else None
        read = None
        if allowed is not None:
            routing = reroute(routing, self.bias, allowed, self.route_scale)
            read = routing.missed & allowed.gather(1, routing.wanted)
        wish = (routing.wanted, routing.wanted_scores, routing.wanted_weights)
        bank.tap.record(self.layer, lanes, *wish, routing.missed, read)
        picks = bank.tables.slot_of[self.layer][routing.ids]
        if urgent is None or allowed is None:
            routed = grouped_experts(x, bank.slots, bank.record, picks, routing.weights, NO_LIMIT, self.numerics)
            return routed.add_(self.shared.of(x))
        return self._with_late(urgent, x, routing, picks)

    def route(self, x: Tensor) -> Routing:
        score = by_row(lambda rows: torch.sigmoid(product(rows, self.gate, self.numerics)), x)
        return route(score, self.bias, self.bank.tables.routable[self.layer], self.top_k, self.route_scale)

    def _with_late(self, urgent: UrgentReads, x: Tensor, routing: Routing, picks: Tensor) -> Tensor:
        """picks [T, k] with -1 where the expert is not here yet. The sum is that of all at once."""
        n, bank, ids = self.numerics, self.bank, routing.ids
        late = urgent.serve(self.layer, torch.unique(ids[picks < 0]).tolist())
        outputs = x.new_empty(*ids.shape, bank.record.hidden)
        pick_outputs(outputs, x, bank.slots, bank.record, picks, routing.weights, NO_LIMIT, n)
        shared = self.shared.of(x)
        for slot_of in late:
            here = torch.full_like(self.bias, -1, dtype=torch.int32)
            here[list(slot_of)] = torch.tensor(list(slot_of.values()), dtype=torch.int32, device=here.device)
            pick_outputs(outputs, x, bank.slots, bank.record, here[ids], routing.weights, NO_LIMIT, n)
        return sum_of_picks(outputs).add_(shared)


def load_dense(weights: Weights, inner_size: int, numerics: Numerics, edit: Projection | None = None) -> Dense:
    """`weights` where gate_proj, up_proj and down_proj are."""
    inner = weights.cut(inner_size)
    gate_up = stacked(weights.linear("gate_proj", rows=inner), weights.linear("up_proj", rows=inner))
    return Dense(gate_up, weights.linear("down_proj", columns=inner), numerics, edit)


def load_moe(
    weights: Weights, c: Config, layer: int, bank: ExpertBank, numerics: Numerics, edit: Projection | None = None
) -> Moe:
    """`weights` at `model.layers.L.mlp`; `edit` of the shared expert; `layer` counts
    those of the bank. The shared expert is cut like the routed ones, so that one sum serves both."""
    return Moe(
        layer,
        c.num_experts_per_tok,
        c.routed_scaling_factor,
        gate=weights.linear("gate"),
        bias=weights.plain("gate.e_score_correction_bias"),
        shared=load_dense(weights.under("shared_experts"), c.moe_intermediate_size, numerics, edit),
        bank=bank,
        numerics=numerics,
    )
