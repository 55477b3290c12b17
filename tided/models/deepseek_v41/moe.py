"""The mixture of experts of a layer: routed experts out of the arena, the shared expert beside them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear import Matrix, rounded_product, stacked
from kernels.numerics import Numerics
from kernels.router import Routing, route, scores
from kernels.rows import by_row
from kernels.swiglu import clamped_swiglu
from tided.experts.bank import ExpertBank
from tided.models.deepseek_v41.config import TextConfig
from tided.models.deepseek_v41.step import Pass
from tided.models.deepseek_v41.weights import Weights
from tided.models.mixture import mixture


@dataclass(frozen=True)
class Moe:
    layer: int
    top_k: int
    route_scale: float
    limit: float
    gate: Tensor  # [E, D]
    bias: Tensor  # [E], of text
    bias_vl: Tensor  # [E], of images
    shared_w13: Matrix  # [2n, D], this rank's part: w1 over w3
    shared_w2: Matrix  # [D, n]
    bank: ExpertBank
    numerics: Numerics

    def forward(self, step: Pass, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D] fp32: this rank's part of routed and shared experts, to be summed and then rounded."""
        bias = self.bias_of(step)
        routing = self.route(x, bias)
        return mixture(self, step.lane_of_row, self.numerics.activation(x), routing, bias, self._shared)

    def route(self, x: Tensor, bias: Tensor) -> Routing:
        """bias [E], or [T, E] where rows differ in it."""
        routable = self.bank.tables.routable[self.layer]
        return route(scores(x, self.gate), bias, routable, self.top_k, self.route_scale)

    def bias_of(self, step: Pass) -> Tensor:
        """What the choice adds to the scores: text and images have their own."""
        return self.bias if step.pictured is None else torch.where(step.pictured[:, None], self.bias_vl, self.bias)

    def _shared(self, rounded: Tensor) -> Tensor:
        n = self.numerics
        gate_up = n.store(rounded_product(rounded, self.shared_w13))
        hidden = by_row(lambda rows: clamped_swiglu(rows, self.limit), gate_up)
        return rounded_product(n.activation(n.store(hidden)), self.shared_w2)


def load_moe(weights: Weights, t: TextConfig, layer: int, top_k: int, bank: ExpertBank, numerics: Numerics) -> Moe:
    """`weights` at `layers.L.ffn`; `layer` counts those of the bank. The shared expert is cut like the routed ones, so
    that one sum serves both."""
    inner = weights.cut(t.moe_intermediate_size)
    shared = weights.under("shared_experts")
    return Moe(
        layer,
        top_k,
        t.routed_scaling_factor,
        t.swiglu_limit,
        gate=weights.matrix("gate.weight"),
        bias=weights.plain("gate.bias"),
        bias_vl=weights.plain("gate.bias_vl"),
        shared_w13=stacked(shared.fp8("w1", rows=inner), shared.fp8("w3", rows=inner)),
        shared_w2=shared.fp8("w2", columns=inner),
        bank=bank,
        numerics=numerics,
    )
