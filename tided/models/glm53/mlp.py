"""What follows attention in a layer: a dense SwiGLU in the first layers, experts beside a shared one in all others."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.numerics import Numerics
from kernels.packed import Linear, product, stacked
from kernels.router import Routing, route
from kernels.rows import by_row
from kernels.swiglu import clamped_swiglu
from tided.experts.bank import ExpertBank
from tided.models.glm53.ablation import Projection
from tided.models.glm53.config import Config
from tided.models.glm53.step import Pass
from tided.models.glm53.weights import Weights
from tided.models.mixture import mixture

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
        """x [T, D] -> [T, D] fp32: this rank's part of routed and shared experts, to be summed and then rounded."""
        return mixture(self, step.lane_of_row, x, self.route(x), self.bias, self.shared.of)

    def route(self, x: Tensor) -> Routing:
        score = by_row(lambda rows: torch.sigmoid(product(rows, self.gate, self.numerics)), x)
        return route(score, self.bias, self.bank.tables.routable[self.layer], self.top_k, self.route_scale)

    @property
    def limit(self) -> float:
        return NO_LIMIT


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
