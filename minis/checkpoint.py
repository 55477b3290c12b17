"""Reading and writing checkpoints in the released layout and formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from minis.config import Config
from minis.numerics import FP8_MAX, ceil_pow2, mxfp4_scale, round_e2m1

BLOCK = 32
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w[123])\.weight")
# Linear weights that the released checkpoint stores as FP8 with a scale per 32 x 32 block.
_FP8_TAILS = (
    ".attn.wq_a.weight",
    ".attn.wq_b.weight",
    ".attn.wkv.weight",
    ".attn.wo_a.weight",
    ".attn.wo_b.weight",
    ".indexer.wq_b.weight",
    ".shared_experts.w1.weight",
    ".shared_experts.w2.weight",
    ".shared_experts.w3.weight",
    ".engram.wkv.weight",
    "mtp.0.main_proj.weight",
)
_FP32_TAILS = (".attn_sink", ".gate.bias", ".gate.bias_vl")


def to_e8m0(scale: Tensor) -> Tensor:
    """Powers of two (fp32) -> exponent bytes viewed as float8_e8m0fnu."""
    return (scale.float().contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def from_e8m0(scale: Tensor) -> Tensor:
    return torch.exp2(scale.view(torch.uint8).float() - 127)


def quantise_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [out, in] fp32 -> E4M3 [out, in], scale [ceil(out / 32), ceil(in / 32)]."""
    rows, cols = w.shape
    padded = torch.nn.functional.pad(w, (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [R, 32, C, 32]
    scale = ceil_pow2(blocks.abs().amax((1, 3)).clamp(min=1e-20) / FP8_MAX)
    q = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.flatten(2).flatten(0, 1)[:rows, :cols].contiguous(), to_e8m0(scale)


def quantise_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """Engram rows [n, d] -> E4M3 [n, d], scale [n, d / 32]."""
    v = table.unflatten(1, (-1, BLOCK))
    scale = ceil_pow2(v.abs().amax(-1).clamp(min=1e-20) / FP8_MAX)
    q = (v / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.flatten(1), to_e8m0(scale)


def quantise_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [out, in] -> packed int8 [out, in / 2] (low nibble = even input), scale [out, in / 32]."""
    v = w.unflatten(1, (-1, BLOCK))
    scale = mxfp4_scale(v)
    x = round_e2m1(v / scale).flatten(1)
    code = torch.bucketize(x.abs(), _E2M1.to(x.device)).to(torch.uint8) | (x < 0).to(torch.uint8) << 3
    packed = code[:, 0::2] | code[:, 1::2] << 4
    return packed.view(torch.int8).contiguous(), to_e8m0(scale.squeeze(-1))


def dequantise(w: Tensor, scale: Tensor | None) -> Tensor:
    """Any stored weight -> fp32."""
    if scale is None:
        return w.float()
    s = from_e8m0(scale)
    if w.dtype == torch.int8:
        b = w.view(torch.uint8)
        code = torch.stack((b & 15, b >> 4), -1).flatten(1).long()
        x = _E2M1[code & 7] * torch.where(code > 7, -1.0, 1.0)
        return (x.unflatten(1, (-1, BLOCK)) * s.unsqueeze(-1)).flatten(1)
    if s.shape[0] == w.shape[0]:  # a scale per row: Engram tables
        return (w.float().unflatten(1, (-1, BLOCK)) * s.unsqueeze(-1)).flatten(1)
    full = s.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return w.float() * full[: w.shape[0], : w.shape[1]]


def load_dequantised(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint as fp32 under their real names, experts stacked to [E, out, in]."""
    raw: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        with safe_open(path, "pt") as f:
            raw.update({name: f.get_tensor(name) for name in f.keys()})  # noqa: SIM118
    result: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, w in raw.items():
        if name.endswith(".scale") and name.removesuffix("scale") + "weight" in raw:
            continue
        scale = raw.get(name.removesuffix("weight") + "scale") if name.endswith(".weight") else None
        value = dequantise(w, scale)
        m = _EXPERT.fullmatch(name)
        if m:
            experts.setdefault(f"{m[1]}.{m[3]}.weight", {})[int(m[2])] = value
        else:
            result[name] = value
    for name, parts in experts.items():
        result[name] = torch.stack([parts[e] for e in range(len(parts))])
    return result


def quantise_all(p: dict[str, Tensor]) -> dict[str, Tensor]:
    """fp32 parameters (experts stacked) -> tensors as they are stored, under their real names."""
    out: dict[str, Tensor] = {}
    for name, w in p.items():
        w = w.detach().float()
        stem = name.removesuffix("weight")
        if ".ffn.experts." in name:
            head, tail = name.rsplit(".experts.", 1)
            for e in range(w.shape[0]):
                base = f"{head}.experts.{e}.{tail.removesuffix('weight')}"
                out[f"{base}weight"], out[f"{base}scale"] = quantise_mxfp4(w[e])
        elif name.endswith(".engram.embed.weight"):
            out[name], out[f"{stem}scale"] = quantise_rows(w)
        elif name.endswith(_FP8_TAILS) and not name.startswith("vision"):
            out[name], out[f"{stem}scale"] = quantise_fp8(w)
        elif name.endswith(_FP32_TAILS) or ".hc_" in name:
            out[name] = w
        else:
            out[name] = w.bfloat16()
    return {name: t.cpu() for name, t in out.items()}


def shard_of(name: str, cfg: Config) -> int:
    """Shard number as the released model cuts it."""
    if name.startswith(("vision.", "aligner.")):
        return 1
    if name.startswith(("embed.", "image_")):
        return 2
    if ".engram." in name:
        return 4 + cfg.layers + cfg.draft_blocks + cfg.engram_layers.index(int(name.split(".")[1]))
    if name.startswith("layers."):
        return 3 + int(name.split(".")[1])
    if name.startswith("mtp."):
        return 4 + cfg.layers + int(name.split(".")[1])
    return 3 + cfg.layers


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], cfg: Config) -> int:
    """Writes shards and index; returns the bytes of all tensors."""
    count = 3 + cfg.layers + cfg.draft_blocks + len(cfg.engram_layers)
    return write_shards(folder, tensors, lambda name: shard_of(name, cfg), count)


def write_shards(folder: Path, tensors: dict[str, Tensor], shard: Callable[[str], int], count: int) -> int:
    """Writes shards, numbered from 1 to `count`, and index; returns the bytes of all tensors.

    Within a shard safetensors orders by alignment of the dtype, then by name: fp32, bf16, then scales (e8m0), FP8 and
    packed FP4, so that scales lie early and weights behind, as in the released files.
    """
    shards: dict[int, dict[str, Tensor]] = {}
    for name, t in tensors.items():
        shards.setdefault(shard(name), {})[name] = t.contiguous()
    weight_map: dict[str, str] = {}
    total = 0
    for number in sorted(shards):
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(shards[number], folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shards[number], file))
        total += sum(t.numel() * t.element_size() for t in shards[number].values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    return total
