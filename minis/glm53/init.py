"""Fresh parameters under the released names; experts of a layer are stacked."""

from __future__ import annotations

import torch
from torch import Tensor

from minis.glm53.model import PROJECTIONS, block_of
from tided.models.glm53.config import Config
from tided.models.glm53.names import linears, plain_tensors

EMBEDDING, HEAD = 0.7, 0.02
_WRITERS = ("o_proj", "down_proj")  # into the residual stream


def fresh(cfg: Config, seed: int) -> dict[str, Tensor]:
    """The engine's own inventory: every tensor of it is made, and no other."""
    g = torch.Generator().manual_seed(seed)
    quiet = (2 * cfg.num_hidden_layers) ** -0.5

    def linear(name: str, *shape: int) -> Tensor:
        if name == "lm_head":
            return torch.randn(*shape, generator=g) * HEAD
        gain = quiet if name.endswith(_WRITERS) else 1.0
        return torch.randn(*shape, generator=g) * (gain * shape[-1] ** -0.5)

    p: dict[str, Tensor] = {}
    for name, spec in plain_tensors(cfg).items():
        if name == "model.embed_tokens.weight":
            p[name] = torch.randn(*spec.shape, generator=g) * EMBEDDING
        else:
            p[name] = torch.zeros(spec.shape) if name.endswith("bias") else torch.ones(spec.shape)
    p |= {f"{name}.weight": linear(name, *shape) for name, shape in linears(cfg).items()}
    wide = {
        "gate_proj": (cfg.moe_intermediate_size, cfg.hidden_size),
        "up_proj": (cfg.moe_intermediate_size, cfg.hidden_size),
    }
    wide["down_proj"] = (cfg.hidden_size, cfg.moe_intermediate_size)
    for layer in range(cfg.first_k_dense_replace, cfg.num_hidden_layers + cfg.num_nextn_predict_layers):
        for part in PROJECTIONS:
            name = f"{block_of(layer)}.mlp.experts.{part}"
            p[f"{name}.weight"] = linear(name, cfg.n_routed_experts, *wide[part])
    return p
