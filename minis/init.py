"""Fresh parameters under the released names; experts of a block are stacked."""

from __future__ import annotations

import torch
from torch import Tensor

from minis.config import Config

VISION = {"layers": 2, "dim": 64, "inter": 96, "patch": 14, "merge": 3}


def _block(p: dict[str, Tensor], name: str, cfg: Config, experts: int, g: torch.Generator) -> None:
    d, r, inter = cfg.hidden, cfg.streams, cfg.inter

    def normal(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=g) * (gain * shape[-1] ** -0.5)

    a, f = f"{name}.attn", f"{name}.ffn"
    p[f"{a}.wq_a.weight"] = normal(cfg.q_rank, d)
    p[f"{a}.q_norm.weight"] = torch.ones(cfg.q_rank)
    p[f"{a}.wq_b.weight"] = normal(cfg.heads * cfg.head_dim, cfg.q_rank)
    p[f"{a}.wkv.weight"] = normal(cfg.head_dim, d)
    p[f"{a}.kv_norm.weight"] = torch.ones(cfg.head_dim)
    p[f"{a}.wo_a.weight"] = normal(cfg.o_groups * cfg.o_rank, cfg.heads * cfg.head_dim // cfg.o_groups)
    p[f"{a}.wo_b.weight"] = normal(d, cfg.o_groups * cfg.o_rank, gain=0.5)
    p[f"{a}.attn_sink"] = torch.zeros(cfg.heads)
    for which in ("attn", "ffn"):
        p[f"{name}.{which}_norm.weight"] = torch.ones(d)
        # Streams average at first, sub-layers write with weight near 1, the mix is near the identity; the noise breaks
        # the symmetry of the equal streams.
        noise = torch.randn(r * r + 2 * r, generator=g)
        base = torch.cat((-1.1 + 0.3 * noise[:r], 0.3 * noise[r : 2 * r], 0.1 * noise[2 * r :]))
        base[2 * r :] += 4 * torch.eye(r).flatten()
        p[f"{name}.hc_{which}_fn"] = torch.randn(r * r + 2 * r, r * d, generator=g) * 0.02
        p[f"{name}.hc_{which}_base"] = base
        p[f"{name}.hc_{which}_scale"] = torch.full((3,), 0.3)
    p[f"{f}.gate.weight"] = normal(experts, d)
    p[f"{f}.gate.bias"] = torch.zeros(experts)
    p[f"{f}.gate.bias_vl"] = torch.zeros(experts)
    for w in ("w1", "w3"):
        p[f"{f}.experts.{w}.weight"] = normal(experts, inter, d)
        p[f"{f}.shared_experts.{w}.weight"] = normal(inter, d)
    p[f"{f}.experts.w2.weight"] = normal(experts, d, inter, gain=0.5)
    p[f"{f}.shared_experts.w2.weight"] = normal(d, inter, gain=0.5)


def _vision(p: dict[str, Tensor], cfg: Config, g: torch.Generator) -> None:
    """Random: the tower has the right shapes and is not trained."""
    d, inter = VISION["dim"], VISION["inter"]
    patch, merged = 3 * VISION["patch"] ** 2, VISION["dim"] * VISION["merge"] ** 2

    def linear(name: str, out: int, inp: int, bias: bool = True) -> None:
        p[f"{name}.weight"] = torch.randn(out, inp, generator=g) * inp**-0.5
        if bias:
            p[f"{name}.bias"] = torch.zeros(out)

    linear("vision.patch_embed.proj", d, patch)
    for i in range(VISION["layers"]):
        b = f"vision.blocks.{i}"
        p[f"{b}.norm1.weight"], p[f"{b}.norm2.weight"] = torch.ones(d), torch.ones(d)
        linear(f"{b}.attn.wqkv", 3 * d, d)
        linear(f"{b}.attn.wo", d, d)
        linear(f"{b}.mlp.w1", 2 * inter, d, bias=False)
        linear(f"{b}.mlp.w2", d, inter, bias=False)
    p["vision.norm.weight"] = torch.ones(d)
    linear("aligner.w1", cfg.hidden, merged)
    linear("aligner.w2", cfg.hidden, cfg.hidden)
    for name in ("image_start", "image_end", "image_newline"):
        p[name] = torch.randn(cfg.hidden, generator=g) * 0.7


def fresh(cfg: Config, engram_rows: list[int], seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    p: dict[str, Tensor] = {}
    d = cfg.hidden

    def normal(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=g) * (gain * shape[-1] ** -0.5)

    p["embed.weight"] = torch.randn(cfg.vocab, d, generator=g) * 0.7
    p["head.weight"] = torch.randn(cfg.vocab, d, generator=g) * 0.02
    p["norm.weight"] = torch.ones(d)
    for i in range(cfg.layers):
        _block(p, f"layers.{i}", cfg, cfg.experts, g)
        a = f"layers.{i}.attn"
        if i in cfg.kv_sources:
            p[f"{a}.compressor.wkv.weight"] = normal(cfg.head_dim, d)
            if cfg.ratios[i] == 2:
                p[f"{a}.compressor.wgate.weight"] = torch.randn(cfg.head_dim, d, generator=g) * 0.02
            p[f"{a}.compressor.norm.weight"] = torch.ones(cfg.head_dim)
            p[f"{a}.indexer.wk.weight"] = normal(cfg.index_dim, cfg.head_dim)
            p[f"{a}.indexer.k_norm.weight"] = torch.ones(cfg.index_dim)
        if i in cfg.index_sources:
            p[f"{a}.indexer.wq_b.weight"] = normal(cfg.index_heads * cfg.index_dim, cfg.q_rank)
            p[f"{a}.indexer.weights_proj.weight"] = normal(cfg.index_heads, d)
    for i, rows in zip(cfg.engram_layers, engram_rows, strict=True):
        e, s = f"layers.{i}.engram", cfg.streams
        p[f"{e}.embed.weight"] = torch.randn(rows, cfg.engram_dim, generator=g) * 0.5
        p[f"{e}.wkv.weight"] = normal((s + 1) * d, cfg.engram_columns * cfg.engram_dim)
        p[f"{e}.wkv.weight"][s * d :] *= 0.3
        p[f"{e}.q_weight"], p[f"{e}.k_weight"] = torch.ones(s, d), torch.ones(s, d)
    for k in range(cfg.draft_blocks):
        _block(p, f"mtp.{k}", cfg, cfg.draft_experts, g)
    p["mtp.0.main_proj.weight"] = normal(d, d * len(cfg.draft_taps))
    p["mtp.0.main_norm.weight"] = torch.ones(d)
    p["mtp.2.norm.weight"] = torch.ones(d)
    p["mtp.2.markov_head.embed.weight"] = torch.randn(cfg.vocab, cfg.markov_rank, generator=g) * 0.3
    p["mtp.2.markov_head.head.weight"] = torch.randn(cfg.vocab, cfg.markov_rank, generator=g) * 0.02
    p["mtp.2.confidence_head.proj.weight"] = torch.zeros(1, d + cfg.markov_rank)
    _vision(p, cfg, g)
    return p
