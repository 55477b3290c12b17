"""Attention over window and compressed rows: index selection, candidate pool, and the training of the indexer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from minis import layers as L
from minis.config import Config
from minis.layout import Layout, Mode, Params
from minis.probe import IndexProbe, gather_rows, select_rows


def attention_share(q: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """q [B, n, H, d], rows [B, S, d], visible [B, n, S] -> head-averaged attention over the visible rows [B, n, S]."""
    logits = torch.einsum("bnhd,bsd->bnhs", q.float(), rows.float()) * q.shape[-1] ** -0.5
    return logits.masked_fill(~visible.unsqueeze(2), -1e9).softmax(-1).mean(2)


@dataclass
class Shared:
    """What source layers hand to the layers above."""

    rows: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    selection: Tensor | None = None  # [B, T, S]
    pool: Tensor | None = None


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


def attention(
    p: Params,
    name: str,
    layer: int,
    x: Tensor,
    lay: Layout,
    cfg: Config,
    mode: Mode,
    state: Shared,
    probe: IndexProbe | None,
) -> Tensor:
    """One attention sub-layer. x [B, T, D] normed -> [B, T, D]."""
    a = f"{name}.attn"
    ratio = cfg.ratios[layer]
    cos, sin = lay.rope[ratio > 0]
    eps = cfg.norm_eps
    qr, q = L.attention_in(
        x,
        p[f"{a}.wq_a.weight"],
        p[f"{a}.q_norm.weight"],
        p[f"{a}.wq_b.weight"],
        cos,
        sin,
        cfg.heads,
        eps,
        mode.round_input,
    )
    rows = L.window_rows(
        x, p[f"{a}.wkv.weight"], p[f"{a}.kv_norm.weight"], cos, sin, eps, mode.round_kv, mode.round_input
    )
    mask = lay.masks[ratio]
    if ratio:
        if layer in cfg.kv_sources:
            c, r = f"{a}.compressor", slice(0, x.shape[1] // ratio * ratio, ratio)
            lat = L.latents(x, p[f"{c}.wkv.weight"], p.get(f"{c}.wgate.weight"), p[f"{c}.norm.weight"], eps)
            state.rows[layer] = L.compressed_rows(lat, cos[:, r], sin[:, r], mode.round_kv)
            state.keys[layer] = L.index_keys(
                lat.detach(),
                p[f"{a}.indexer.wk.weight"],
                p[f"{a}.indexer.k_norm.weight"],
                cos[:, r],
                sin[:, r],
                eps,
                mode.round_kv,
            )
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


def _select(
    p: Params, a: str, layer: int, x: Tensor, qr: Tensor, lay: Layout, cfg: Config, mode: Mode, state: Shared
) -> None:
    """Hard selection of compressed rows at an index source, with the candidate pool of the real model."""
    cos, sin = lay.rope[True]
    iq, w = L.index_queries(
        qr,
        x,
        p[f"{a}.indexer.wq_b.weight"],
        p[f"{a}.indexer.weights_proj.weight"],
        cos,
        sin,
        cfg.index_heads,
        mode.round_kv,
        mode.round_input,
    )
    scores = L.index_scores(iq, w, state.keys[cfg.kv_source_of(layer)])
    visible = lay.masks[cfg.ratios[layer]][..., x.shape[1] :]
    if layer == cfg.candidate_source:
        state.pool = candidate_pool(scores, visible, cfg)
    elif state.pool is not None:
        visible = visible & state.pool
    state.selection = mode.forced.get(layer, select_rows(scores, visible, cfg.index_topk))


def _probe(
    p: Params,
    a: str,
    layer: int,
    x: Tensor,
    qr: Tensor,
    q: Tensor,
    kv: Tensor,
    lay: Layout,
    cfg: Config,
    state: Shared,
    probe: IndexProbe,
) -> None:
    """Collects what the index loss needs at this layer; nothing here reaches the trunk's gradients."""
    ratio, at = cfg.ratios[layer], probe.at
    source = cfg.index_source_of(layer)
    if layer == source:
        s = torch.arange(kv.shape[1], device=x.device) * ratio
        probe.visible[layer] = (s + ratio - 1 <= at.unsqueeze(-1)) & (s >= gather_rows(lay.start, at).unsqueeze(-1))
        cos, sin = (gather_rows(v, at) for v in lay.rope[True])
        iq, w = L.index_queries(
            gather_rows(qr, at).detach(),
            gather_rows(x, at).detach(),
            p[f"{a}.indexer.wq_b.weight"],
            p[f"{a}.indexer.weights_proj.weight"],
            cos,
            sin,
            cfg.index_heads,
            True,
            False,
        )
        probe.scores[layer] = L.index_scores(iq, w, state.keys[cfg.kv_source_of(layer)])
    with torch.no_grad():
        target = attention_share(gather_rows(q, at), kv, probe.visible[source])
    probe.targets.setdefault(source, []).append(target)
