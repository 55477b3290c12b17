"""The trunk: batched forward pass over rows that may hold several documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minis import layers as L
from minis.config import Config
from minis.engram import Hasher
from minis.numerics import rms_norm, rope_on, rope_table

Params = dict[str, Tensor]
Packed = dict[str, tuple[Tensor, ...]]


@dataclass
class Mode:
    """What the forward pass rounds and how it selects; the default is exact fp32 arithmetic."""

    dtype: torch.dtype = torch.float32
    round_kv: bool = False
    round_input: bool = False
    select: bool = False  # hard top-k of compressed rows; training sees every visible row
    sparse: bool = True  # run only the chosen experts (processor) or all of them (GPU)
    flex: bool = False
    resident: Tensor | None = None  # [layers, E] bool: experts that may be chosen
    forced: dict[int, Tensor] = field(default_factory=dict)  # source layer -> [B, T, S] selection, for tests
    tap: Callable[[str, Tensor], None] | None = None


@dataclass
class Layout:
    """Everything that follows from the token ids alone."""

    tokens: Tensor  # [B, T] int64
    start: Tensor  # [B, T] int64: where this position's document begins in the row
    position: Tensor  # [B, T] int64 inside the document
    rope: dict[bool, tuple[Tensor, Tensor]]  # compressed layer? -> cos, sin [B, T, R/2]
    masks: dict[int, Any]  # ratio -> [B, T, T + S] bool, or a BlockMask
    engram: list[Tensor]  # per Engram layer [B, T, columns]


def document_starts(tokens: Tensor, bos: int = 0) -> Tensor:
    """tokens [B, T] -> start [B, T]: every BOS opens a document."""
    at = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return torch.where(tokens == bos, at, 0).cummax(1).values


def mask_rule(start: Tensor, length: int, ratio: int, window: int) -> Callable[..., Tensor]:
    """Rule (b, h, query, row) -> visible, over [window rows | compressed rows]; start [B, T]."""

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        first = start[b, q]
        near = (k < length) & (k <= q) & (q - k < window) & (k >= first)
        if ratio == 0:
            return near
        s = (k - length) * ratio
        return near | ((k >= length) & (s + ratio - 1 <= q) & (s >= first))

    return rule


def dense_mask(start: Tensor, ratio: int, window: int) -> Tensor:
    """[B, T, T + S] bool."""
    b, t = start.shape
    size = t + (t // ratio if ratio else 0)
    dev = start.device
    rule = mask_rule(start, t, ratio, window)
    ib = torch.arange(b, device=dev).view(-1, 1, 1)
    iq = torch.arange(t, device=dev).view(1, -1, 1)
    ik = torch.arange(size, device=dev).view(1, 1, -1)
    return rule(ib, ib, iq, ik).expand(b, t, size)


def make_layout(tokens: Tensor, cfg: Config, hasher: Hasher, flex: Callable[..., Any] | None = None) -> Layout:
    """tokens [B, T]; `flex` builds a block mask from a rule, otherwise masks are dense."""
    b, t = tokens.shape
    start = document_starts(tokens)
    position = torch.arange(t, device=tokens.device) - start
    rope = {c: rope_table(rope_on(cfg, c, tokens.device), position) for c in (False, True)}
    masks: dict[int, Any] = {}
    for ratio in sorted(set(cfg.ratios[: cfg.layers])):
        if flex is None:
            masks[ratio] = dense_mask(start, ratio, cfg.window)
        else:
            size = t + (t // ratio if ratio else 0)
            masks[ratio] = flex(mask_rule(start, t, ratio, cfg.window), b, t, size)
    return Layout(tokens, start, position, rope, masks, hasher.ids(tokens, position))


def pack_all(p: Params, cfg: Config, dtype: torch.dtype, amount: Tensor) -> Packed:
    """Expert weights of every block in the layout of the MoE functions, rounded to MXFP4 if `amount` is 1."""
    return {
        b: L.pack_experts(*(p[f"{b}.ffn.experts.{w}.weight"] for w in ("w1", "w3", "w2")), amount, dtype)
        for b in cfg.block_layers()
    }


@dataclass
class IndexProbe:
    """Training of the indexer: query positions [B, n]; attention targets collected layer by layer."""

    at: Tensor
    targets: dict[int, list[Tensor]] = field(default_factory=dict)  # source -> [B, n, S] each
    scores: dict[int, Tensor] = field(default_factory=dict)
    visible: dict[int, Tensor] = field(default_factory=dict)

    def loss(self) -> Tensor:
        """Mean KL(attention over compressed rows || softmax of index scores) over sources and usable queries."""
        total = []
        for source, parts in self.targets.items():
            vis = self.visible[source]
            target = torch.stack(parts).mean(0)
            log_q = self.scores[source].masked_fill(~vis, -1e9).log_softmax(-1)
            kl = torch.where(vis, target * ((target + 1e-9).log() - log_q), 0.0).sum(-1)
            some = vis.any(-1).float()
            total.append((kl * some).sum() / (some.sum() + 1))
        return torch.stack(total).mean()


def _gather(x: Tensor, at: Tensor) -> Tensor:
    """x [B, T, ...], at [B, n] -> [B, n, ...]."""
    return x[torch.arange(x.shape[0], device=x.device).unsqueeze(1), at]


def attention_share(q: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """q [B, n, H, d], rows [B, S, d], visible [B, n, S] -> head-averaged attention over the visible rows [B, n, S]."""
    logits = torch.einsum("bnhd,bsd->bnhs", q.float(), rows.float()) * q.shape[-1] ** -0.5
    return logits.masked_fill(~visible.unsqueeze(2), -1e9).softmax(-1).mean(2)


@dataclass
class _Shared:
    """What source layers hand to the layers above."""

    rows: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    selection: Tensor | None = None  # [B, T, S]
    pool: Tensor | None = None


def select_rows(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """scores, visible [B, T, S] -> bool [B, T, S]: the best k visible entries of every query."""
    if scores.shape[-1] <= k:
        return visible
    top = scores.masked_fill(~visible, float("-inf")).topk(k, -1).indices
    return torch.zeros_like(visible).scatter(-1, top, True) & visible


def candidate_pool(scores: Tensor, visible: Tensor, cfg: Config) -> Tensor:
    """[B, T, S] -> bool [B, T, S]: entries of the best blocks; the block of the newest visible entry always stays."""
    size = cfg.candidate_size
    s = scores.shape[-1]
    padded = F.pad(scores.masked_fill(~visible, float("-inf")), (0, -s % size), value=float("-inf"))
    block = padded.unflatten(-1, (-1, size)).amax(-1)
    newest = (visible.sum(-1, keepdim=True) - 1).clamp(min=0) // size
    block = block.scatter(-1, newest, float("inf"))
    keep = select_rows(block, block > float("-inf"), cfg.candidate_blocks)
    return keep.repeat_interleave(size, -1)[..., :s]


def attention(p: Params, name: str, layer: int, x: Tensor, lay: Layout, cfg: Config, mode: Mode, state: _Shared,
              probe: IndexProbe | None) -> Tensor:  # fmt: skip
    """One attention sub-layer. x [B, T, D] normed -> [B, T, D]."""
    a = f"{name}.attn"
    ratio = cfg.ratios[layer]
    cos, sin = lay.rope[ratio > 0]
    eps = cfg.norm_eps
    qr, q = L.attention_in(x, p[f"{a}.wq_a.weight"], p[f"{a}.q_norm.weight"], p[f"{a}.wq_b.weight"], cos, sin,
                           cfg.heads, eps, mode.round_input)  # fmt: skip
    rows = L.window_rows(
        x, p[f"{a}.wkv.weight"], p[f"{a}.kv_norm.weight"], cos, sin, eps, mode.round_kv, mode.round_input
    )
    mask = lay.masks[ratio]
    if ratio:
        if layer in cfg.kv_sources:
            c, r = f"{a}.compressor", slice(0, x.shape[1] // ratio * ratio, ratio)
            lat = L.latents(x, p[f"{c}.wkv.weight"], p.get(f"{c}.wgate.weight"), p[f"{c}.norm.weight"], eps)
            state.rows[layer] = L.compressed_rows(lat, cos[:, r], sin[:, r], mode.round_kv)
            state.keys[layer] = L.index_keys(lat.detach(), p[f"{a}.indexer.wk.weight"], p[f"{a}.indexer.k_norm.weight"],
                                             cos[:, r], sin[:, r], eps, mode.round_kv)  # fmt: skip
        kv = state.rows[cfg.kv_source_of(layer)]
        if mode.select:
            if layer in cfg.index_sources:
                _select(p, a, layer, x, qr, lay, cfg, mode, state)
            assert state.selection is not None
            mask = torch.cat((mask[..., : x.shape[1]], state.selection), -1)
        if probe is not None:
            _probe(p, a, layer, x, qr, q, kv, lay, cfg, state, probe)
        rows = torch.cat((rows, kv), 1)
    if mode.flex:
        from minis.flex import attend_flex

        out = attend_flex(q, rows, mask, p[f"{a}.attn_sink"])
    else:
        out = L.attend_dense(q, rows, mask, p[f"{a}.attn_sink"])
    return L.attention_out(out, cos, sin, p[f"{a}.wo_a.weight"], p[f"{a}.wo_b.weight"], cfg.o_groups, mode.round_input)


def _select(p: Params, a: str, layer: int, x: Tensor, qr: Tensor, lay: Layout, cfg: Config, mode: Mode,
            state: _Shared) -> None:  # fmt: skip
    """Hard selection of compressed rows at an index source, with the candidate pool of the real model."""
    cos, sin = lay.rope[True]
    iq, w = L.index_queries(qr, x, p[f"{a}.indexer.wq_b.weight"], p[f"{a}.indexer.weights_proj.weight"], cos, sin,
                            cfg.index_heads, mode.round_kv, mode.round_input)  # fmt: skip
    scores = L.index_scores(iq, w, state.keys[cfg.kv_source_of(layer)])
    visible = lay.masks[cfg.ratios[layer]][..., x.shape[1] :]
    if layer == cfg.candidate_source:
        state.pool = candidate_pool(scores, visible, cfg)
    elif state.pool is not None:
        visible = visible & state.pool
    state.selection = mode.forced.get(layer, select_rows(scores, visible, cfg.index_topk))


def _probe(p: Params, a: str, layer: int, x: Tensor, qr: Tensor, q: Tensor, kv: Tensor, lay: Layout, cfg: Config,
           state: _Shared, probe: IndexProbe) -> None:  # fmt: skip
    """Collects what the index loss needs at this layer; nothing here reaches the trunk's gradients."""
    ratio, at = cfg.ratios[layer], probe.at
    source = cfg.index_source_of(layer)
    if layer == source:
        s = torch.arange(kv.shape[1], device=x.device) * ratio
        probe.visible[layer] = (s + ratio - 1 <= at.unsqueeze(-1)) & (s >= _gather(lay.start, at).unsqueeze(-1))
        cos, sin = (_gather(v, at) for v in lay.rope[True])
        iq, w = L.index_queries(_gather(qr, at).detach(), _gather(x, at).detach(), p[f"{a}.indexer.wq_b.weight"],
                                p[f"{a}.indexer.weights_proj.weight"], cos, sin, cfg.index_heads, True, False)  # fmt: skip
        probe.scores[layer] = L.index_scores(iq, w, state.keys[cfg.kv_source_of(layer)])
    with torch.no_grad():
        target = attention_share(_gather(q, at), kv, probe.visible[source])
    probe.targets.setdefault(source, []).append(target)


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


def moe(p: Params, name: str, x: Tensor, packed: Packed, top_k: int, cfg: Config, mode: Mode,
        resident: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
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
    state, taps, all_picked = _Shared(), [], []
    for i in range(cfg.layers):
        name = f"layers.{i}"
        if i in cfg.engram_layers:
            g = f"{name}.engram"
            ids = lay.engram[cfg.engram_layers.index(i)].flatten(0, 1)
            h, gate = L.engram_mix(h, ids, p[f"{g}.embed.weight"], p[f"{g}.wkv.weight"], p[f"{g}.q_weight"],
                                   p[f"{g}.k_weight"], mode.round_input)  # fmt: skip
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
