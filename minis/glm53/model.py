"""The trunk of GLM-5.3: batched forward pass over rows that may hold several documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from minis.glm53 import layers as G
from minis.layers import linear, moe_dense, moe_sparse, region, swiglu
from minis.layout import document_starts
from minis.numerics import rms_norm, rope_table
from minis.probe import IndexProbe, gather_rows, select_rows
from tided.models.glm53.config import Config

Params = dict[str, Tensor]
Packed = dict[int, tuple[Tensor, Tensor, Tensor]]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass
class Mode:
    """How the forward pass computes; the default is exact fp32 arithmetic with every token visible."""

    dtype: torch.dtype = torch.float32
    select: bool = False  # hard top-k of tokens
    sparse: bool = True  # run only the chosen experts (processor) or all of them (GPU)
    resident: Tensor | None = None  # [layers with experts, E] bool: experts that may be chosen
    forced: dict[int, Tensor] = field(default_factory=dict)  # layer -> [B, T, T] selection, for tests
    tap: Callable[[str, Tensor], None] = lambda _name, _value: None


@dataclass
class Layout:
    """What follows from the token ids alone."""

    tokens: Tensor  # [B, T] int64
    start: Tensor  # [B, T]: where this position's document begins
    cos: Tensor  # [B, T, R/2]
    sin: Tensor
    visible: Tensor  # [B, T, T] bool: earlier tokens of the same document
    mask: Tensor  # [B, 1, T, T]: 0 where visible, minus infinity elsewhere


def frequencies(cfg: Config, device: torch.device) -> Tensor:
    half = torch.arange(cfg.qk_rope_head_dim // 2, dtype=torch.float64, device=device)
    return (cfg.rope_parameters.rope_theta ** (-2 * half / cfg.qk_rope_head_dim)).float()


def make_layout(tokens: Tensor, cfg: Config, frequency: Tensor, dtype: torch.dtype = torch.float32) -> Layout:
    start = document_starts(tokens)
    at = torch.arange(tokens.shape[1], device=tokens.device)
    visible = (at <= at.unsqueeze(1)) & (at >= start.unsqueeze(-1))
    cos, sin = rope_table(frequency, at - start)
    return Layout(tokens, start, cos, sin, visible, added(visible, dtype))


def added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """bool [B, T, S] -> [B, 1, T, S] to be added to scores."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, float("-inf")).unsqueeze(1)


def block_of(layer: int) -> str:
    return f"model.layers.{layer}"


def expert_layers(cfg: Config) -> range:
    return range(cfg.first_k_dense_replace, cfg.num_hidden_layers + cfg.num_nextn_predict_layers)


def pack_all(p: Params, cfg: Config, dtype: torch.dtype, noise: Tensor | None = None) -> Packed:
    """Expert weights of every layer in the layout of the MoE functions; `noise`: see `disturbed`."""
    packed: Packed = {}
    for layer in expert_layers(cfg):
        weights = [p[f"{block_of(layer)}.mlp.experts.{w}.weight"] for w in PROJECTIONS]
        if noise is not None:
            weights = [G.disturbed(w, noise) for w in weights]
        packed[layer] = G.pack_experts(*weights, dtype)
    return packed


@dataclass
class Attended:
    """What a layer's attention leaves for others."""

    k: Tensor  # [B, H, T, d]
    v: Tensor


def attention(
    p: Params,
    layer: int,
    x: Tensor,
    lay: Layout,
    cfg: Config,
    mode: Mode,
    chosen: Tensor | None,
    probe: IndexProbe | None,
) -> tuple[Tensor, Tensor | None, Attended]:
    """x [B, T, D] normed -> output [B, T, D], selection [B, T, T] in force, keys and values. `chosen`: of the layer
    before."""
    a = f"{block_of(layer)}.self_attn"
    names = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    weights = [p[f"{a}.{name}.weight"] for name in names]
    latent, q, k, v = G.attention_in(x, *weights, lay.cos, lay.sin, cfg.num_attention_heads, cfg.qk_nope_head_dim)
    if mode.select and cfg.selects(layer):
        chosen = mode.forced.get(layer)
        if chosen is None:
            chosen = select_rows(index_scores(p, a, x, x, latent, lay, cfg, None), lay.visible, cfg.index_topk)
    if probe is not None:
        observe(p, layer, x, latent, q, k, lay, cfg, probe)
    out = G.attend(q, k, v, lay.mask if chosen is None else added(chosen, q.dtype))
    return linear(out, p[f"{a}.o_proj.weight"]), chosen, Attended(k, v)


def index_scores(
    p: Params, a: str, keyed: Tensor, asked: Tensor, latent: Tensor, lay: Layout, cfg: Config, at: Tensor | None
) -> Tensor:
    """keyed [B, T, D], asked [B, n, D], latent [B, n, rank]: scores [B, n, T] fp32 of queries at `at` (None: all)."""
    i = f"{a}.indexer"
    key = G.index_keys(keyed, *(p[f"{i}.{n}"] for n in ("wk.weight", "k_norm.weight", "k_norm.bias")), lay.cos, lay.sin)
    cos, sin = (turn if at is None else gather_rows(turn, at) for turn in (lay.cos, lay.sin))
    weights = (p[f"{i}.wq_b.weight"], p[f"{i}.weights_proj.weight"])
    q, head = G.index_queries(latent, asked, *weights, cos, sin, cfg.index_n_heads)
    dots = torch.einsum("bnhd,bsd->bnhs", q, key).float().relu()
    return (dots * head.unsqueeze(-1)).sum(2)


def observe(
    p: Params,
    layer: int,
    x: Tensor,
    latent: Tensor,
    q: Tensor,
    k: Tensor,
    lay: Layout,
    cfg: Config,
    probe: IndexProbe,
) -> None:
    """Collects what the index loss needs: a layer that chooses is compared with the mean attention of the layers that
    use its choice. Nothing here reaches the trunk's gradients."""
    at = probe.at
    source = max(i for i in range(layer + 1) if cfg.selects(i))
    if source == layer:
        probe.visible[layer] = gather_rows(lay.visible, at)
        x, latent = x.detach(), latent.detach()
        asked, latent = gather_rows(x, at), gather_rows(latent, at)
        probe.scores[layer] = index_scores(p, f"{block_of(layer)}.self_attn", x, asked, latent, lay, cfg, at)
    with torch.no_grad():
        some = q.gather(2, at[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
        logits = torch.einsum("bhnd,bhsd->bhns", some, k).float() * q.shape[-1] ** -0.5
        share = logits.masked_fill(~probe.visible[source].unsqueeze(1), -1e9).softmax(-1).mean(1)
    probe.targets.setdefault(source, []).append(share)


@region
def dense_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(swiglu(linear(x, gate), linear(x, up), None).to(x.dtype), down)


def mlp(p: Params, layer: int, x: Tensor, packed: Packed, cfg: Config, mode: Mode) -> tuple[Tensor, Tensor | None]:
    """x [N, D] normed -> output [N, D], scores of the chosen experts [N, E] where the layer has some."""
    m = f"{block_of(layer)}.mlp"
    if cfg.is_dense(layer):
        return dense_mlp(x, *(p[f"{m}.{w}.weight"] for w in PROJECTIONS)), None
    bias = p[f"{m}.gate.e_score_correction_bias"]
    if mode.resident is not None and layer < cfg.num_hidden_layers:
        bias = bias.masked_fill(~mode.resident[layer - cfg.first_k_dense_replace], -1e9)
    picked = G.route(x, p[f"{m}.gate.weight"], bias, cfg.num_experts_per_tok)
    mode.tap(f"experts_in.{layer}", x)
    mode.tap(f"picked.{layer}", picked)
    shared = tuple(p[f"{m}.shared_experts.{w}.weight"] for w in PROJECTIONS)
    run = moe_sparse if mode.sparse else moe_dense
    return run(x, picked, packed[layer], shared, cfg.routed_scaling_factor, None, False), picked


@region
def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps)


@dataclass
class Trunk:
    """`state` [B, T, D] behind the final norm; `picked`: per layer with experts [N, E]."""

    state: Tensor
    picked: list[Tensor]


def trunk(p: Params, cfg: Config, lay: Layout, packed: Packed, mode: Mode, probe: IndexProbe | None = None) -> Trunk:
    x = F.embedding(lay.tokens, p["model.embed_tokens.weight"]).to(mode.dtype)
    chosen: Tensor | None = None
    scores: list[Tensor] = []
    for layer in range(cfg.num_hidden_layers):
        at = block_of(layer)
        y = normed(x, p[f"{at}.input_layernorm.weight"], cfg.rms_norm_eps)
        y, chosen, _ = attention(p, layer, y, lay, cfg, mode, chosen, probe)
        x = x + y
        y = normed(x, p[f"{at}.post_attention_layernorm.weight"], cfg.rms_norm_eps)
        y, picked = mlp(p, layer, y.flatten(0, 1), packed, cfg, mode)
        x = x + y.view_as(x)
        mode.tap(f"resid.{layer}", x)
        scores += [] if picked is None else [picked]
    return Trunk(normed(x, p["model.norm.weight"], cfg.rms_norm_eps), scores)


def logits(p: Params, state: Tensor) -> Tensor:
    """state [..., D] behind the final norm -> [..., V] fp32."""
    return F.linear(state, p["lm_head.weight"].to(state.dtype)).float()
