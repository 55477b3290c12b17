"""The DSpark drafter: five tokens at once from taps of the trunk, three blocks, Markov and confidence heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from minis import layers as L
from minis.config import Config
from minis.layout import Layout, Mode, Params
from minis.model import Packed, first_stream, moe
from minis.numerics import rms_norm, rope_on, rope_table
from minis.probe import gather_rows


@dataclass
class Draft:
    hidden: Tensor  # [B, n, K, D] collapsed, before the norm
    base: Tensor  # [B, n, K, V] fp32 logits without the Markov term


def window_positions(at: Tensor, start: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """at [B, n] last verified positions, start [B, T] -> row numbers and validity [B, n, W]."""
    pos = at.unsqueeze(-1) - torch.arange(window - 1, -1, -1, device=at.device)
    ok = pos >= gather_rows(start, at).unsqueeze(-1)
    return pos.clamp(min=0), ok


def draft(
    p: Params, cfg: Config, lay: Layout, packed: Packed, mode: Mode, taps: Tensor, at: Tensor, anchor: Tensor
) -> Draft:
    """taps [B, T, taps * D]; at [B, n]: last position with known taps; anchor [B, n]: the token that follows it.

    All drafts of one anchor see the same window rows and each other; no causal mask among them.
    """
    b, n = at.shape
    k, s = cfg.draft_size, cfg.streams
    main = rms_norm(
        L.linear(taps, p["mtp.0.main_proj.weight"], mode.round_input), p["mtp.0.main_norm.weight"], cfg.norm_eps
    )
    ids = torch.cat((anchor.unsqueeze(-1), torch.full((b, n, k - 1), cfg.draft_noise, device=at.device)), -1)
    embed = p["embed.weight"].detach()
    h = F.embedding(ids, embed).to(mode.dtype).flatten(0, 2).unsqueeze(1).expand(-1, s, -1).contiguous()
    pre = first_stream(b * n * k, s, h.device)
    local = gather_rows(lay.position, at).unsqueeze(-1) + torch.arange(1, k + 1, device=at.device)
    freq = rope_on(cfg, False, at.device)
    cos, sin = (v.flatten(0, 1) for v in rope_table(freq, local))  # [B * n, K, R/2]
    main_cos, main_sin = lay.rope[False]
    rows_at, rows_ok = window_positions(at, lay.start, cfg.window)
    mask = torch.cat((rows_ok, torch.ones(b, n, k, dtype=torch.bool, device=at.device)), -1)
    mask = mask.flatten(0, 1).unsqueeze(1).expand(-1, k, -1)
    for i in range(cfg.draft_blocks):
        name = f"mtp.{i}"
        a = f"{name}.attn"
        mixes = [p[f"{name}.hc_attn_{w}"] for w in ("fn", "base", "scale")]
        next_pre, post, comb = L.hc_mix(h, *mixes, cfg.sinkhorn_iters, cfg.hc_eps)
        x = L.collapse(h, pre, p[f"{name}.attn_norm.weight"], cfg.norm_eps).unflatten(0, (b * n, k))
        _qr, q = L.attention_in(
            x,
            p[f"{a}.wq_a.weight"],
            p[f"{a}.q_norm.weight"],
            p[f"{a}.wq_b.weight"],
            cos,
            sin,
            cfg.heads,
            cfg.norm_eps,
            mode.round_input,
        )
        kv_w, kv_n = p[f"{a}.wkv.weight"], p[f"{a}.kv_norm.weight"]
        own = L.window_rows(x, kv_w, kv_n, cos, sin, cfg.norm_eps, mode.round_kv, mode.round_input)
        past = L.window_rows(main, kv_w, kv_n, main_cos, main_sin, cfg.norm_eps, mode.round_kv, mode.round_input)
        past = gather_rows(past, rows_at.flatten(1)).unflatten(1, (n, -1)).flatten(0, 1)
        out = L.attend_dense(q, torch.cat((past, own), 1), mask, p[f"{a}.attn_sink"])
        y = L.attention_out(out, cos, sin, p[f"{a}.wo_a.weight"], p[f"{a}.wo_b.weight"], cfg.o_groups, mode.round_input)
        h, pre = L.hc_post(h, y.flatten(0, 1), post, comb), next_pre
        mixes = [p[f"{name}.hc_ffn_{w}"] for w in ("fn", "base", "scale")]
        next_pre, post, comb = L.hc_mix(h, *mixes, cfg.sinkhorn_iters, cfg.hc_eps)
        x = L.collapse(h, pre, p[f"{name}.ffn_norm.weight"], cfg.norm_eps)
        y, _picked = moe(p, name, x, packed, cfg.draft_top_k, cfg, mode)
        h, pre = L.hc_post(h, y, post, comb), next_pre
    hidden = (pre.unsqueeze(-1) * h.float()).sum(1).to(h.dtype)
    normed = rms_norm(hidden, p["mtp.2.norm.weight"], cfg.norm_eps)
    base = F.linear(normed, p["head.weight"].detach().to(normed.dtype)).float()
    return Draft(hidden.unflatten(0, (b, n, k)), base.unflatten(0, (b, n, k)))


def markov(p: Params, previous: Tensor) -> tuple[Tensor, Tensor]:
    """previous [...] token ids -> embedding [..., r], logit term [..., V] fp32."""
    e = F.embedding(previous, p["mtp.2.markov_head.embed.weight"])
    return e, F.linear(e.float(), p["mtp.2.markov_head.head.weight"].float())


def confidence(p: Params, hidden: Tensor, e: Tensor) -> Tensor:
    """hidden [..., D] before the norm, e [..., r] -> raw logit [...]."""
    both = torch.cat((hidden.float(), e.float()), -1)
    return F.linear(both, p["mtp.2.confidence_head.proj.weight"].float()).squeeze(-1)


def greedy(p: Params, d: Draft, anchor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """anchor [B, n] -> drafted ids [B, n, K], logits [B, n, K, V], confidence [B, n, K]."""
    ids, all_logits, conf = [], [], []
    prev = anchor
    for j in range(d.base.shape[2]):
        e, term = markov(p, prev)
        all_logits.append(d.base[:, :, j] + term)
        conf.append(confidence(p, d.hidden[:, :, j], e))
        prev = all_logits[-1].argmax(-1)
        ids.append(prev)
    return torch.stack(ids, 2), torch.stack(all_logits, 2), torch.stack(conf, 2)


def training_loss(
    p: Params,
    cfg: Config,
    lay: Layout,
    packed: Packed,
    mode: Mode,
    taps: Tensor,
    target: Tensor,
    at: Tensor,
    weight: Tensor,
    soft: Tensor,
) -> tuple[Tensor, Tensor]:
    """target [B, T]: tokens of the row; soft [B, n, K, V]: the trunk's own logits at at + 1 + j; weight [B, n, K].

    Returns the cross-entropy against the trunk's distribution and the confidence loss.
    """
    k = cfg.draft_size
    ahead = at.unsqueeze(-1) + torch.arange(1, k + 1, device=at.device)
    known = gather_rows(target, ahead.flatten(1)).unflatten(1, (-1, k))  # tokens at at + 1 .. at + K
    d = draft(p, cfg, lay, packed, mode, taps, at, known[..., 0])
    return _losses(
        d.hidden,
        d.base,
        known,
        weight,
        soft,
        p["mtp.2.markov_head.embed.weight"],
        p["mtp.2.markov_head.head.weight"],
        p["mtp.2.confidence_head.proj.weight"],
    )


@L.region
def _losses(
    hidden: Tensor,
    base: Tensor,
    known: Tensor,
    weight: Tensor,
    soft: Tensor,
    m_embed: Tensor,
    m_head: Tensor,
    c_proj: Tensor,
) -> tuple[Tensor, Tensor]:
    """hidden [B, n, K, D], base and soft [B, n, K, V], known and weight [B, n, K] -> two scalars."""
    e = F.embedding(known, m_embed)
    logp = (base + F.linear(e.to(hidden.dtype), m_head.to(hidden.dtype)).float()).log_softmax(-1)
    truth = soft.softmax(-1)
    decay = 0.85 ** torch.arange(known.shape[-1], device=base.device)
    w = weight * decay
    ce = -(truth * logp).sum(-1)
    overlap = torch.minimum(truth, logp.detach().exp()).sum(-1)
    both = torch.cat((hidden.detach().float(), e.detach().float()), -1)
    c = F.linear(both, c_proj.float()).squeeze(-1)
    bce = F.binary_cross_entropy_with_logits(c, overlap, reduction="none")
    total = w.sum() + 1
    return (ce * w).sum() / total, (bce * w).sum() / total
