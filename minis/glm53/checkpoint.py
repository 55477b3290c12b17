"""Reading and writing checkpoints in the layouts of the releases: FP8 for what every token passes, routed experts as
MXFP4 or EXL3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minis.checkpoint import quantise_mxfp4, write_shards
from minis.numerics import FP8_MAX
from packers.shards import Checkpoint
from tided.models.glm53.config import Config, read_config
from tided.models.glm53.names import experts_of, linears, plain_tensors
from tided.models.glm53.weights import Weights
from tided.models.parallel import Alone

BLOCK = 128
EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\w+)\.weight")  # stacked, as in training
_ONE_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)")
# Kept in BF16 by the original release, beside norms and the vocabulary.
_BF16 = ("lm_head.weight", ".mlp.gate.weight", ".indexer.weights_proj.weight", ".eh_proj.weight")

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
EXL3 = {
    "quant_method": "exl3",
    "codebook": "mcg",
    "out_scales": "auto",
    "scope": "routed experts",
    "original_quantization_config": FP8,
}


def quantise_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [N, K] fp32 -> E4M3 [N, K], scale fp32 [ceil(N / 128), ceil(K / 128)]: code times scale is the weight."""
    rows, columns = w.shape
    padded = torch.nn.functional.pad(w, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [R, 128, C, 128]
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-20) / FP8_MAX
    codes = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scale


def dense_tensors(p: Mapping[str, Tensor], cfg: Config) -> dict[str, Tensor]:
    """All but the routed experts, as the original release stores them."""
    plain = plain_tensors(cfg)
    out: dict[str, Tensor] = {}
    for name, w in p.items():
        w = w.detach().float()
        if EXPERTS.fullmatch(name):
            continue
        if name.endswith("e_score_correction_bias"):
            out[name] = w
        elif name in plain or name.endswith(_BF16):
            out[name] = w.bfloat16()
        else:
            out[name], out[f"{name}_scale_inv"] = quantise_fp8(w)
    return {name: t.cpu() for name, t in out.items()}


def mxfp4_experts(p: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Routed experts as `weight` and `weight_scale` bytes."""
    out: dict[str, Tensor] = {}
    for name, w in p.items():
        found = EXPERTS.fullmatch(name)
        for e in range(len(w)) if found else ():
            codes, scale = quantise_mxfp4(w[e].detach().float())
            at = f"{found[1]}.{e}.{found[2]}"
            out[f"{at}.weight"], out[f"{at}.weight_scale"] = (
                codes.view(torch.uint8).cpu(),
                scale.view(torch.uint8).cpu(),
            )
    return out


def plain_experts(p: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Routed experts unquantised, in BF16."""
    out: dict[str, Tensor] = {}
    for name, w in p.items():
        found = EXPERTS.fullmatch(name)
        for e in range(len(w)) if found else ():
            out[f"{found[1]}.{e}.{found[2]}.weight"] = w[e].detach().bfloat16().cpu()
    return out


def dense_of(folder: Path) -> dict[str, Tensor]:
    """All but the routed experts of a checkpoint, as stored."""
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(name).clone() for name in checkpoint.tensors if ".mlp.experts." not in name}


def shard_of(name: str, cfg: Config) -> int:
    """Embedding first, a shard for every layer, norm and head last."""
    if name.startswith("model.layers."):
        return 2 + int(name.split(".")[2])
    return 1 if name.startswith("model.embed_tokens") else 2 + cfg.num_hidden_layers + cfg.num_nextn_predict_layers


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], cfg: Config) -> int:
    """Writes shards and index; returns the bytes of all tensors."""
    count = 2 + cfg.num_hidden_layers + cfg.num_nextn_predict_layers
    return write_shards(folder, tensors, lambda name: shard_of(name, cfg), count)


def load_parameters(folder: Path) -> tuple[Config, dict[str, Tensor]]:
    """Any checkpoint of the family as fp32, read by the engine's readers, experts stacked."""
    checkpoint = Checkpoint.open(folder)
    cfg = read_config(checkpoint.config)
    shapes = linears(cfg)
    for layer in range(cfg.first_k_dense_replace, cfg.num_hidden_layers + cfg.num_nextn_predict_layers):
        shapes |= experts_of(cfg, layer)
    weights = Weights(checkpoint, Alone(), torch.device("cpu"), shapes)
    p = {name: weights.plain(name) for name in plain_tensors(cfg)}
    stacks: dict[str, list[Tensor]] = {}
    for name in shapes:
        found = _ONE_EXPERT.fullmatch(name)
        if found:
            stacks.setdefault(f"{found[1]}.{found[3]}.weight", []).append(_floats(weights.linear(name)))
        else:
            p[f"{name}.weight"] = _floats(weights.linear(name))
    return cfg, p | {name: torch.stack(parts) for name, parts in stacks.items()}


def _floats(w: Any) -> Tensor:
    """A linear layer as the engine keeps it -> fp32 [N, K]."""
    whole: Tensor = w if isinstance(w, Tensor) else w.dense(0, w.shape[0])
    return whole
