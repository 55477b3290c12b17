"""A layer: attention and what follows it, each beside the plain residual stream."""

from dataclasses import dataclass

from torch import Tensor

from kernels.norm import rms_norm
from kernels.numerics import Numerics
from tided.experts.bank import ExpertBank
from tided.models.glm53.ablation import Points, load_points
from tided.models.glm53.attention import Attention, load_attention
from tided.models.glm53.config import Config
from tided.models.glm53.mlp import Dense, Moe, load_dense, load_moe
from tided.models.glm53.rows import Contexts
from tided.models.glm53.step import Pass
from tided.models.glm53.weights import Weights
from tided.models.parallel import Group


@dataclass(frozen=True)
class Block:
    layer: int
    input_norm: Tensor
    mlp_norm: Tensor
    eps: float
    attention: Attention
    mlp: Dense | Moe
    edits: Points
    group: Group
    numerics: Numerics

    def forward(self, step: Pass, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]: the residual stream behind this layer."""
        n, edits = self.numerics, self.edits
        found = self.group.sum(self.attention.forward(step, self._normed(x, self.input_norm)))
        x = n.store(x + n.store(edits.attention(found) if edits.attention else found))
        found = self.group.sum(self.mlp.forward(step, self._normed(x, self.mlp_norm)))
        return n.store(x + n.store(edits.mlp(found) if edits.mlp else found))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.numerics.store(rms_norm(x, weight, self.eps))


def load_block(
    weights: Weights, c: Config, layer: int, contexts: Contexts, bank: ExpertBank, numerics: Numerics, bank_layer: int
) -> Block:
    """`weights` at the root; `bank_layer`: where the bank has the layer's experts, if it has some."""
    at = weights.under(f"model.layers.{layer}")
    mlp, edits = at.under("mlp"), load_points(weights.checkpoint, c, layer, weights.device)
    return Block(
        layer,
        input_norm=at.plain("input_layernorm.weight"),
        mlp_norm=at.plain("post_attention_layernorm.weight"),
        eps=c.rms_norm_eps,
        attention=load_attention(at.under("self_attn"), c, layer, contexts, numerics),
        mlp=load_dense(mlp, c.intermediate_size, numerics, edits.shared)
        if c.is_dense(layer)
        else load_moe(mlp, c, bank_layer, bank, numerics, edits.shared),
        edits=edits,
        group=weights.group,
        numerics=numerics,
    )
