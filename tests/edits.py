"""The bundled models with directions taken out of what their layers write, in both of the ways that there are: a file
over the stock weights, and a checkpoint whose own weights are edited, W' = W - alpha d (d^T W).

DeepSeek-V4.1's file holds the edited weights of its attention's output, so both ways are the same bits; GLM-5.3's holds
the directions, so they are the same but for rounding. Its edited matrices are stored in fp32."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels import exl3
from kernels.formats import e8m0, fp4_rows, fp8_blocks
from packers.ablation import write
from packers.shards import Checkpoint
from tests.bundled import DEEPSEEK, GLM, Mini
from tided.engine.offline import settings_of
from tided.settings import Settings

INDEX = "model.safetensors.index.json"
DEEPSEEK_OUTPUT = re.compile(r"layers\.(\d+)\.(attn\.wo_b|ffn\.(shared_experts|experts\.\d+)\.w2)\.weight")
Change = Callable[[str, dict[str, Tensor]], dict[str, Tensor]]  # (matrix, its leaves) -> the leaves that it gets
POINTS = {  # the matrices that a point of GLM-5.3's file stands for
    "attention": ("self_attn.o_proj",),
    "shared": ("mlp.shared_experts.down_proj", "mlp.down_proj"),
    "mlp": (".down_proj",),
}


def direction(layer: int, width: int = 256) -> Tensor:
    """[width] fp64 of length 1"""
    found = torch.randn(width, generator=torch.Generator().manual_seed(layer), dtype=torch.float64)
    return found / found.norm()


def strongest(weight: Tensor) -> Tensor:
    """weight [N, K] -> [N] fp64 of length 1: what its outputs have most of; without it a model is another."""
    return torch.linalg.svd(weight.double(), full_matrices=False).U[:, 0]


def projected(weight: Tensor, d: Tensor, alpha: float) -> Tensor:
    """weight [N, K] -> the same in fp64 with `alpha` times d [N] taken out of its outputs."""
    whole = weight.double()
    return whole - alpha * d[:, None] * (d @ whole)


def matrix(leaves: Mapping[str, Tensor]) -> Tensor:
    """[N, K] fp32: what the leaves of a linear layer of either model stand for."""
    if "trellis" in leaves:
        return exl3.dense(exl3.Exl3Matrix(leaves["trellis"], leaves["suh"], leaves["svh"], "mcg"))
    weight, scale = leaves["weight"], leaves.get("weight_scale_inv", leaves.get("scale"))
    if scale is None:
        return weight.float()
    if weight.dtype == torch.int8:
        return fp4_rows(weight.view(torch.uint8), scale.view(torch.uint8))
    if scale.dtype == torch.float32:
        spread = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        return weight.float() * spread
    return fp8_blocks(weight, scale)


def rewritten(source: Path, out: Path, change: Change, keep: Callable[[str], bool] = lambda name: True) -> Path:
    """A copy of a checkpoint in which every matrix has the leaves that `change` gives it; other tensors stay if `keep`
    says so. A shard of which nothing changes is copied byte by byte."""
    out.mkdir(parents=True)
    index = {}
    for file in sorted(source.iterdir()):
        if file.suffix != ".safetensors":
            shutil.copyfile(file, out / file.name)
            continue
        held = load_file(file)
        found = {name: tensor for name, tensor in _changed(held, change).items() if keep(name)}
        same = found.keys() == held.keys() and all(found[name] is held[name] for name in found)
        shutil.copyfile(file, out / file.name) if same else save_file(found, out / file.name)
        index |= dict.fromkeys(found, file.name)
    (out / INDEX).write_text(json.dumps({"weight_map": index}))
    return out


def _changed(held: Mapping[str, Tensor], change: Change) -> dict[str, Tensor]:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in held.items():
        of, _, leaf = name.rpartition(".")
        groups.setdefault(of, {})[leaf] = tensor
    return {
        f"{of}.{leaf}".removeprefix("."): tensor
        for of, leaves in groups.items()
        for leaf, tensor in change(of, leaves).items()
    }


@dataclass(frozen=True)
class Edit:
    """`file`: what a profile names as `key`. `checkpoint`: the edit in the weights, which needs no file. `stock`: what
    it is laid over. `points`: what is told of the file."""

    mini: Mini
    key: str
    file: Path
    checkpoint: Path
    stock: Path
    points: str

    def over_stock(self, numerics: str = "fp32") -> Settings:
        return settings(self.stock, numerics, **{self.key: str(self.file)})

    def in_weights(self, numerics: str = "fp32") -> Settings:
        return settings(self.checkpoint, numerics)


def settings(path: Path, numerics: str = "fp32", **model: Any) -> Settings:
    found = settings_of(path)
    return replace(found, model=replace(found.model, numerics=numerics, **model))


def edited(mini: Mini, folder: Path, layers: Iterable[int] = range(1, 9), alpha: float = 3.0) -> Edit:
    """Of the attention's output, its strongest direction; with GLM-5.3 out of its shared experts' (of its first layer:
    its MLP's) too."""
    return sidecar(folder, list(layers), alpha) if mini is DEEPSEEK else ablation(folder, list(layers), alpha)


def sidecar(folder: Path, layers: list[int], alpha: float) -> Edit:
    tensors = {}

    def change(of: str, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = of.split(".")
        if parts[0] != "layers" or int(parts[1]) not in layers or not of.endswith(".attn.wo_b"):
            return leaves
        steps, weight = e8m0(leaves["scale"]).double().repeat_interleave(32, 0).repeat_interleave(32, 1), matrix(leaves)
        codes = (projected(weight, strongest(weight), alpha) / steps).clamp(-448, 448).to(torch.float8_e4m3fn)
        found = {"weight": codes, "scale": leaves["scale"]}
        tensors.update({f"{of}.{leaf}": tensor for leaf, tensor in found.items()})
        return found

    checkpoint = rewritten(DEEPSEEK.path, folder / "edited", change)
    save_file(tensors, folder / "edit.safetensors")
    points = f"layers {layers[0]}-{layers[-1]} attn.wo_b"
    return Edit(DEEPSEEK, "overlay", folder / "edit.safetensors", checkpoint, DEEPSEEK.path, points)


def ablation(
    folder: Path,
    layers: list[int],
    alpha: float,
    points: tuple[str, ...] = ("attention", "shared"),
    stock: Path = GLM.path,
) -> Edit:
    held = Checkpoint.open(stock)
    directions = {n: strongest(matrix(_leaves(held, f"model.layers.{n}.self_attn.o_proj"))) for n in layers}
    checkpoint = rewritten(stock, folder / "edited", glm_change(directions, points, alpha))
    found = [(n, np.asarray(d), dict.fromkeys(points, alpha)) for n, d in directions.items()]
    write(folder / "edit.safetensors", found)
    told = (
        f"{len(layers)} layers ({layers[0]}-{layers[-1]}), {', '.join(sorted(points))}, alpha {alpha:.3f}-{alpha:.3f}"
    )
    return Edit(GLM, "ablation", folder / "edit.safetensors", checkpoint, stock, told)


def _leaves(checkpoint: Checkpoint, of: str) -> dict[str, Tensor]:
    names = [name for name in checkpoint.tensors if name.rpartition(".")[0] == of]
    return {name.rpartition(".")[2]: checkpoint.read(name) for name in names}


def glm_change(directions: Mapping[int, Tensor], points: Iterable[str], alpha: float) -> Change:
    """directions: by layer. Edited matrices in fp32; those in bf16, in which alone routed experts are served, stay
    bf16."""
    parts = tuple(part for point in points for part in POINTS[point])

    def change(of: str, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        number = of.split(".")[2] if of.startswith("model.layers.") else ""
        if not number or int(number) not in directions or not of.endswith(parts):
            return leaves
        plain = leaves["weight"].dtype if leaves.keys() == {"weight"} else torch.float32
        return {"weight": projected(matrix(leaves), directions[int(number)], alpha).to(plain)}

    return change


def first_layers(folder: Path, layers: int = 3) -> Path:
    """The GLM mini's first layers, their routed experts decoded to bf16: a model whose every matrix can be edited."""
    behind = tuple(f"model.layers.{n}." for n in range(layers, 32))

    def change(of: str, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        if "trellis" not in leaves or of.startswith(behind):
            return leaves
        return {"weight": matrix(leaves).to(torch.bfloat16)}

    out = rewritten(GLM.path, folder, change, lambda name: not name.startswith(behind))
    config = json.loads((out / "config.json").read_text("utf-8"))
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 0}
    if config.get("indexer_types"):
        config["indexer_types"] = config["indexer_types"][:layers]
    (out / "config.json").write_text(json.dumps(config))
    return out


def released_layout(mini: Mini, folder: Path) -> Path:
    """A mini's matrices that write to its residual stream, in bf16 and by the names that GLM-5.3's releases give them;
    of GLM-5.3 with the mark of its drafting layer, which is none of the trunk's."""
    if mini is GLM:
        return rewritten(mini.path, folder, _outputs)
    checkpoint, tensors = Checkpoint.open(mini.path), {}
    for name in checkpoint.tensors:
        if match := DEEPSEEK_OUTPUT.fullmatch(name):
            of = name.removesuffix(".weight")
            leaves = {kind: checkpoint.read(f"{of}.{kind}") for kind in ("weight", "scale")}
            to = "self_attn.o_proj" if match[2] == "attn.wo_b" else f"mlp.{match[3]}.down_proj"
            tensors[f"model.layers.{match[1]}.{to}.weight"] = matrix(leaves).to(torch.bfloat16)
    return _in_shards(tensors, folder)


def _outputs(of: str, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    is_output = of.endswith(("self_attn.o_proj", ".down_proj", ".eh_proj"))
    return {"weight": matrix(leaves).to(torch.bfloat16)} if is_output else {}


def _in_shards(tensors: Mapping[str, Tensor], folder: Path) -> Path:
    """A shard a layer, with an index."""
    folder.mkdir(parents=True)
    index = {name: f"model-{int(name.split('.')[2]):05}.safetensors" for name in tensors}
    for file in set(index.values()):
        save_file({name: tensors[name] for name, at in index.items() if at == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text("{}")
    return folder
