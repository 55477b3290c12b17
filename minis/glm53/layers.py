"""Sub-layers of GLM-5.3 as plain functions. `region`: compiled one by one on a GPU; one version serves all layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from minis.layers import linear, region
from minis.numerics import rms_norm, rotate

LATENT_EPS = 1e-6  # of the two latents' norms, as in the engine
KEY_NORM_EPS = 1e-6
_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # the first takes a mask and values of another width


@region
def attention_in(
    x: Tensor,
    q_a: Tensor,
    q_norm: Tensor,
    q_b: Tensor,
    kv_a: Tensor,
    kv_norm: Tensor,
    kv_b: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    nope: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [B, T, D] normed; cos, sin [B, T, R/2] -> query latent [B, T, rank], q and k [B, H, T, nope + R],
    v [B, H, T, V]."""
    latent = rms_norm(linear(x, q_a), q_norm, LATENT_EPS)
    q = rotate(linear(latent, q_b).unflatten(-1, (heads, -1)), cos.unsqueeze(-2), sin.unsqueeze(-2))
    joint = linear(x, kv_a)
    width = kv_norm.shape[0]
    row = rms_norm(joint[..., :width], kv_norm, LATENT_EPS)
    turned = rotate(joint[..., width:], cos, sin).unsqueeze(-2).expand(-1, -1, heads, -1)
    up = linear(row, kv_b).unflatten(-1, (heads, -1))
    k = torch.cat((up[..., :nope], turned), -1)
    return latent, q.transpose(1, 2), k.transpose(1, 2), up[..., nope:].transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [B, H, T, d], k [B, H, S, d], v [B, H, S, V], mask [B, 1, T, S] added to the scores -> [B, T, H * V]."""
    with sdpa_kernel(_KERNELS, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def index_keys(x: Tensor, wk: Tensor, norm: Tensor, bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, D] -> [B, T, di]; its first dimensions are turned."""
    key = F.layer_norm(linear(x, wk).float(), (wk.shape[0],), norm.float(), bias.float(), KEY_NORM_EPS)
    return rotate_first(key.to(x.dtype), cos, sin)


def index_queries(
    latent: Tensor, x: Tensor, wq_b: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """latent [B, n, rank], x [B, n, D] -> queries [B, n, h, di], head weights [B, n, h] fp32."""
    q = rotate_first(linear(latent, wq_b).unflatten(-1, (heads, -1)), cos.unsqueeze(-2), sin.unsqueeze(-2))
    return q, F.linear(x.float(), weights.float()) * (q.shape[-1] ** -0.5 * heads**-0.5)


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns adjacent pairs of the first 2 * cos.shape[-1] dims."""
    width = 2 * cos.shape[-1]
    return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), -1)


@region
def route(x: Tensor, gate: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """x [N, D] -> [N, E] fp32: scores of the chosen experts, 0 elsewhere. The bias chooses but never weighs."""
    s = torch.sigmoid(F.linear(x.float(), gate.float()))
    chosen = torch.topk(s.detach() + bias, top_k, dim=-1, sorted=False).indices
    return s * torch.zeros_like(s).scatter(1, chosen, 1.0)


def disturbed(w: Tensor, amount: Tensor) -> Tensor:
    """w [E, a, b] with noise of `amount` times each expert's own size, which no gradient sees. A trellis code's error
    is spread over all weights of a matrix by its rotations, much like this."""
    size = w.detach().square().mean((-2, -1), keepdim=True).sqrt()
    return w + (amount * size) * torch.randn_like(w, dtype=torch.bfloat16)


@region
def pack_experts(gate: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up [E, I, D], down [E, D, I] -> [E * I, D], [E * I, D], [D, E * I]."""
    return (
        gate.flatten(0, 1).to(dtype),
        up.flatten(0, 1).to(dtype),
        down.permute(1, 0, 2).flatten(1).to(dtype),
    )
