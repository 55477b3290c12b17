"""The trunk: batched forward pass over rows that may hold several documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from minis import layers as L
from minis.attention import Shared, attention
from minis.config import Config
from minis.layout import Layout, Mode, Params
from minis.numerics import rms_norm
from minis.probe import IndexProbe

Packed = dict[str, tuple[Tensor, ...]]


def pack_all(p: Params, cfg: Config, dtype: torch.dtype, amount: Tensor) -> Packed:
    """Expert weights of every block in the layout of the MoE functions, rounded to MXFP4 if `amount` is 1."""
    return {
        b: L.pack_experts(*(p[f"{b}.ffn.experts.{w}.weight"] for w in ("w1", "w3", "w2")), amount, dtype)
        for b in cfg.block_layers()
    }


def first_stream(n: int, streams: int, device: torch.device) -> Tensor:
    """[n, streams]: the mix that layer 0 collapses with."""
    pre = torch.zeros(n, streams, device=device)
    pre[:, 0] = 1.0
    return pre


@dataclass
class Trunk:
    """Result of the trunk."""

    x: Tensor  # [B, T, D] collapsed streams, before the final norm
    taps: Tensor  # [B, T, taps * D] drafter inputs
    picked: list[Tensor]  # per layer [N, E]: router scores of the chosen experts


def moe(
    p: Params, name: str, x: Tensor, packed: Packed, top_k: int, cfg: Config, mode: Mode, resident: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [N, D] -> output [N, D], picked scores [N, E]."""
    f = f"{name}.ffn"
    bias = p[f"{f}.gate.bias"]
    if resident is not None:
        bias = bias.masked_fill(~resident, -1e9)
    picked = L.route(x, p[f"{f}.gate.weight"], bias, top_k)
    shared = tuple(p[f"{f}.shared_experts.{w}.weight"] for w in ("w1", "w3", "w2"))
    run = L.moe_sparse if mode.sparse else L.moe_dense
    return run(x, picked, packed[name], shared, cfg.route_scale, cfg.clamp, mode.round_input), picked


def trunk(p: Params, cfg: Config, lay: Layout, packed: Packed, mode: Mode, probe: IndexProbe | None = None) -> Trunk:
    """Token ids (in `lay`) -> final state. Residual streams are [N, streams, D] with N = B * T."""
    b, t = lay.tokens.shape
    tap = mode.tap or (lambda _name, _value: None)
    e = F.embedding(lay.tokens, p["embed.weight"]).to(mode.dtype)
    h = e.flatten(0, 1).unsqueeze(1).expand(-1, cfg.streams, -1).contiguous()
    pre = first_stream(b * t, cfg.streams, h.device)
    state, taps, all_picked = Shared(), [], []
    for i in range(cfg.layers):
        name = f"layers.{i}"
        if i in cfg.engram_layers:
            g = f"{name}.engram"
            ids = lay.engram[cfg.engram_layers.index(i)].flatten(0, 1)
            h, gate = L.engram_mix(
                h,
                ids,
                p[f"{g}.embed.weight"],
                p[f"{g}.wkv.weight"],
                p[f"{g}.q_weight"],
                p[f"{g}.k_weight"],
                mode.round_input,
            )
            tap(f"engram_gate.{i}", gate)
        if i in cfg.draft_taps:
            taps.append(h.float().mean(1).to(h.dtype).detach())
        mixes = [p[f"{name}.hc_attn_{w}"] for w in ("fn", "base", "scale")]
        next_pre, post, comb = L.hc_mix(h, *mixes, cfg.sinkhorn_iters, cfg.hc_eps)
        x = L.collapse(h, pre, p[f"{name}.attn_norm.weight"], cfg.norm_eps)
        tap(f"attn_in.{i}", x)
        y = attention(p, name, i, x.unflatten(0, (b, t)), lay, cfg, mode, state, probe).flatten(0, 1)
        tap(f"attn_out.{i}", y)
        h, pre = L.hc_post(h, y, post, comb), next_pre
        mixes = [p[f"{name}.hc_ffn_{w}"] for w in ("fn", "base", "scale")]
        next_pre, post, comb = L.hc_mix(h, *mixes, cfg.sinkhorn_iters, cfg.hc_eps)
        x = L.collapse(h, pre, p[f"{name}.ffn_norm.weight"], cfg.norm_eps)
        tap(f"ffn_in.{i}", x)
        resident = mode.resident[i] if mode.resident is not None else None
        y, picked = moe(p, name, x, packed, cfg.top_k, cfg, mode, resident)
        all_picked.append(picked)
        tap(f"ffn_out.{i}", y)
        h, pre = L.hc_post(h, y, post, comb), next_pre
        tap(f"resid.{i}", h)
    x = (pre.unsqueeze(-1) * h.float()).sum(1).to(h.dtype)
    return Trunk(x.unflatten(0, (b, t)), torch.cat(taps, -1).unflatten(0, (b, t)), all_picked)


def logits(p: Params, x: Tensor, cfg: Config) -> Tensor:
    """x [..., D] collapsed -> logits [..., V] fp32."""
    n = rms_norm(x, p["norm.weight"], cfg.norm_eps)
    return F.linear(n, p["head.weight"].to(n.dtype)).float()
