"""The sub-layers of the model as plain functions over tensors.

Functions marked `region` are compiled one by one on a GPU. Their parameters arrive as tensors, so that one compiled
version serves all layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from minis.numerics import qdq4_e4m3, qdq4_ue8m0, qdq8, qdq_mxfp4, rms_norm, rotate, sqrt_softplus, straight_through
from minis.sinkhorn import sinkhorn

T = TypeVar("T")
_state = {"compile": False}


def enable_compile(on: bool) -> None:
    _state["compile"] = on


def region(fn: Callable[..., T]) -> Callable[..., T]:
    """Compiles `fn` when a training run asked for it, and not before: the compiler takes seconds to be imported. No
    region calls another."""

    @functools.cache
    def compiled() -> Callable[..., T]:
        return torch.compile(fn, dynamic=False)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> T:
        return (compiled() if _state["compile"] else fn)(*args, **kwargs)

    return call


def linear(x: Tensor, w: Tensor, round_input: bool = False) -> Tensor:
    """x [..., in], w [out, in] -> [..., out] in x's dtype; `round_input`: FP8 activation rounding."""
    if round_input:
        x = qdq8(x)
    return F.linear(x, w.to(x.dtype))


@region
def hc_mix(h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """h [N, S, D] -> pre [N, S], post [N, S], comb [N, S, S], all fp32, from the streams as they enter a sub-layer."""
    s = h.shape[1]
    u = h.flatten(1).float()
    m = F.linear(u, fn) * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-20)
    pre = torch.sigmoid(m[:, :s] * scale[0] + base[:s]) + eps
    post = 2 * torch.sigmoid(m[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = sinkhorn((m[:, 2 * s :] * scale[2] + base[2 * s :]).view(-1, s, s), iters, eps)
    return pre, post, comb


@region
def collapse(h: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
    """h [N, S, D], pre [N, S] (of the PREVIOUS sub-layer) -> normed input [N, D]."""
    x = (pre.unsqueeze(-1) * h.float()).sum(1).to(h.dtype)
    return rms_norm(x, norm, eps)


@region
def hc_post(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """h [N, S, D], y [N, D] -> h' [N, S, D]; the mix is transposed: stream j takes comb[i, j] of stream i."""
    hf = h.float()
    mixed = (comb.unsqueeze(-1) * hf.unsqueeze(2)).sum(1)
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(h.dtype)


@region
def attention_in(
    x: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    eps: float,
    round_input: bool,
) -> tuple[Tensor, Tensor]:
    """x [B, T, D]; cos, sin [B, T, R/2] -> low-rank query [B, T, rank], rotated q [B, T, H, d]."""
    qr = rms_norm(linear(x, wq_a, round_input), q_norm, eps)
    q = linear(qr, wq_b, round_input).unflatten(-1, (heads, -1))
    return qr, rotate(q, cos.unsqueeze(-2), sin.unsqueeze(-2))


@region
def window_rows(
    x: Tensor, wkv: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, eps: float, round_kv: bool, round_input: bool
) -> Tensor:
    """x [..., T, D] -> window rows [..., T, d]: rotated, then FP8-rounded including the rotated part."""
    kv = rotate(rms_norm(linear(x, wkv, round_input), kv_norm, eps), cos, sin)
    return straight_through(kv, qdq8(kv)) if round_kv else kv


@region
def latents(x: Tensor, wkv: Tensor, wgate: Tensor | None, norm: Tensor, eps: float) -> Tensor:
    """x [B, T, D] -> latents before rotation, [B, T, d] (ratio 1) or [B, T // 2, d] (pairs pooled per channel)."""
    if wgate is None:
        return rms_norm(linear(x, wkv), norm, eps)
    even = x[:, : x.shape[1] // 2 * 2].float()
    k = F.linear(even, wkv.float()).unflatten(1, (-1, 2))
    g = F.linear(even, wgate.float()).unflatten(1, (-1, 2)).softmax(2)
    return rms_norm((k * g).sum(2).to(x.dtype), norm, eps)


@region
def compressed_rows(lat: Tensor, cos: Tensor, sin: Tensor, round_kv: bool) -> Tensor:
    """lat [B, S, d] -> stored rows [B, S, d], rotated at the position of their first token."""
    row = rotate(lat, cos, sin)
    return straight_through(row, qdq4_e4m3(row)) if round_kv else row


@region
def index_keys(lat: Tensor, wk: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, eps: float, rounding: bool) -> Tensor:
    """lat [B, S, d] (before rotation) -> index keys [B, S, di]."""
    key = rotate(rms_norm(linear(lat, wk), norm, eps), cos, sin)
    return straight_through(key, qdq4_ue8m0(key)) if rounding else key


@region
def index_queries(
    qr: Tensor,
    x: Tensor,
    wq_b: Tensor,
    weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    rounding: bool,
    round_input: bool,
) -> tuple[Tensor, Tensor]:
    """qr [B, n, rank], x [B, n, D] -> queries [B, n, h, di], head weights [B, n, h]."""
    q = rotate(linear(qr, wq_b, round_input).unflatten(-1, (heads, -1)), cos.unsqueeze(-2), sin.unsqueeze(-2))
    w = linear(x, weights).float() * (q.shape[-1] ** -0.5 * heads**-0.5)
    return (straight_through(q, qdq4_ue8m0(q)) if rounding else q), w


def index_scores(iq: Tensor, w: Tensor, ik: Tensor) -> Tensor:
    """iq [B, n, h, di], w [B, n, h], ik [B, S, di] -> scores [B, n, S] fp32."""
    dots = torch.einsum("bnhd,bsd->bnhs", iq.float(), ik.float()).relu()
    return (dots * w.unsqueeze(-1)).sum(2)


def attend_dense(q: Tensor, rows: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """q [B, T, H, d], rows [B, S, d] (keys and values), mask [B, T, S] -> [B, T, H, d]; the sink has no value."""
    logits = torch.einsum("bthd,bsd->bhts", q, rows).float() * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~mask.unsqueeze(1), float("-inf"))
    extra = sink.float().view(1, -1, 1, 1).expand(logits.shape[0], -1, logits.shape[2], 1)
    p = torch.cat((logits, extra), -1).softmax(-1)[..., :-1]
    return torch.einsum("bhts,bsd->bthd", p.to(rows.dtype), rows)


@region
def attention_out(
    out: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor, groups: int, round_input: bool
) -> Tensor:
    """out [B, T, H, d] -> [B, T, D]: rotate back at the query position, grouped low rank, output projection."""
    o = rotate(out, cos.unsqueeze(-2), -sin.unsqueeze(-2)).flatten(-2).unflatten(-1, (groups, -1))
    low = torch.einsum("btgi,goi->btgo", o, wo_a.to(o.dtype).unflatten(0, (groups, -1)))
    return linear(low.flatten(-2), wo_b, round_input)


def swiglu(g: Tensor, u: Tensor, clamp: float | None) -> Tensor:
    if clamp is None:
        return F.silu(g.float()) * u.float()
    return F.silu(g.float().clamp(max=clamp)) * u.float().clamp(-clamp, clamp)


@region
def pack_experts(w1: Tensor, w3: Tensor, w2: Tensor, amount: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """w1, w3 [E, I, D], w2 [E, D, I] -> [E * I, D], [E * I, D], [D, E * I]; `amount` 0 or 1 turns MXFP4 rounding on."""
    a, b, c = (w + (amount * (qdq_mxfp4(w.detach()) - w)).detach() for w in (w1, w3, w2))
    return a.flatten(0, 1).to(dtype), b.flatten(0, 1).to(dtype), c.permute(1, 0, 2).flatten(1).to(dtype)


@region
def route(x: Tensor, gate: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """x [N, D] -> [N, E] fp32: scores of the chosen experts, 0 elsewhere. The bias chooses but never weighs."""
    s = sqrt_softplus(F.linear(x.float(), gate.float()))
    chosen = torch.topk(s.detach() + bias, top_k, dim=-1, sorted=False).indices
    return s * torch.zeros_like(s).scatter(1, chosen, 1.0)


@region
def moe_dense(
    x: Tensor,
    picked: Tensor,
    experts: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
    scale: float,
    clamp: float | None,
    round_input: bool,
) -> Tensor:
    """x [N, D], picked [N, E] -> [N, D]. Every expert is computed and most are weighted 0.

    Twelve times the arithmetic of a sparse layer, but three plain matrix products without sorting: at this size that
    is as fast, and it never synchronises with the host.
    """
    w1, w3, w2 = experts
    s1, s3, s2 = shared
    weight = picked / (picked.sum(-1, keepdim=True) + 1e-20) * scale
    xq = qdq8(x) if round_input else x
    a = swiglu(F.linear(xq, w1), F.linear(xq, w3), clamp)
    a = (a.unflatten(-1, (weight.shape[1], -1)) * weight.unsqueeze(-1)).flatten(1).to(x.dtype)
    y = linear(a, w2, round_input).float()
    b = swiglu(linear(xq, s1), linear(xq, s3), clamp).to(x.dtype)
    return (y + linear(b, s2, round_input).float()).to(x.dtype)


def moe_sparse(
    x: Tensor,
    picked: Tensor,
    experts: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
    scale: float,
    clamp: float | None,
    round_input: bool,
) -> Tensor:
    """The same for a processor: only the chosen experts run."""
    w1, w3, w2 = experts
    s1, s3, s2 = shared
    inter = w1.shape[0] // picked.shape[1]
    weight = picked / (picked.sum(-1, keepdim=True) + 1e-20) * scale
    xq = qdq8(x) if round_input else x
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in range(picked.shape[1]):
        rows = picked[:, e].nonzero().squeeze(-1)
        if rows.numel():
            part = slice(e * inter, (e + 1) * inter)
            a = swiglu(F.linear(xq[rows], w1[part]), F.linear(xq[rows], w3[part]), clamp) * weight[rows, e, None]
            y.index_add_(0, rows, linear(a.to(x.dtype), w2[:, part], round_input).float())
    b = swiglu(linear(xq, s1), linear(xq, s3), clamp).to(x.dtype)
    return (y + linear(b, s2, round_input).float()).to(x.dtype)


@region
def engram_mix(
    h: Tensor,
    ids: Tensor,
    table: Tensor,
    wkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    round_input: bool,
) -> tuple[Tensor, Tensor]:
    """h [N, S, D], ids [N, columns], table [rows, e] -> h + gate * value, gate [N, S]."""
    s, d = h.shape[1:]
    e = F.embedding(ids, table).to(h.dtype).flatten(1)
    kv = linear(e, wkv, round_input).float().unflatten(-1, (s + 1, d))
    k, v = kv[:, :s], kv[:, s]
    hf = h.float()
    dot = (hf * q_weight.float() * k_weight.float() * k).sum(-1)
    dot = dot * torch.rsqrt(hf.square().mean(-1) + 1e-20) * torch.rsqrt(k.square().mean(-1) + 1e-20) * d**-0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    return (hf + gate.unsqueeze(-1) * v.unsqueeze(1)).to(h.dtype), gate
