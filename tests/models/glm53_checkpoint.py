"""The golden GLM-5.3 checkpoint stored in other layouts, and what each of them means, worked out number by number."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.rig import GLM
from tided.models.glm53.config import read_config
from tided.models.glm53.names import linears

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
KEPT = ("lm_head", ".gate", ".weights_proj", ".eh_proj")  # no release in these layouts quantises them
Stored = tuple[dict[str, Tensor], Tensor]  # leaves of a linear layer, and the weight [N, K] fp32 that they mean


def mxfp4(weight: Tensor, leaf: str = "weight") -> Stored:
    """Codes and scales like the weight's, without looking for the nearest."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp_min(1e-20))) - 2
    scaled = groups / torch.exp2(exponent).unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - E2M1).abs().argmin(-1).view(rows, columns)
    leaves = {
        leaf: (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": (exponent + 127).to(torch.uint8),
    }
    return leaves, (E2M1[codes].view(rows, -1, 32) * torch.exp2(exponent).unsqueeze(-1)).view(rows, columns)


def packed_mxfp4(weight: Tensor) -> Stored:
    return mxfp4(weight, "weight_packed")


def fp8(scale_leaf: str) -> Callable[[Tensor], Stored]:
    """Scales that are no powers of two, as the release has them."""

    def stored(weight: Tensor) -> Stored:
        rows, columns = weight.shape
        scale = 0.001 + 0.0001 * torch.arange(-(-rows // 128) * -(-columns // 128)).view(-(-rows // 128), -1)
        spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        codes = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, scale_leaf: scale}, codes.float() * spread

    return stored


def trellis(weight: Tensor) -> Stored:
    """Whatever the weight is: a matrix of 256 inputs and 128 outputs that the real quantizer made."""
    assert weight.shape == (128, 256)
    case = {
        name.partition(".")[2]: tensor
        for name, tensor in load_file(GLM.parent / "exl3" / "basic.safetensors").items()
        if name.startswith("n256x128_b3_mcg.")
    }
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    while len(sylvester) < 128:
        sylvester = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.float64), sylvester)
    turn = torch.block_diag(sylvester, sylvester) / 128**0.5, sylvester / 128**0.5
    value = torch.diag(case["suh"].double()) @ turn[0] @ case["w_inner"].double() @ turn[1]
    leaves = {name: case[name] for name in ("trellis", "suh", "svh", "mcg")}
    return leaves, (value @ torch.diag(case["svh"].double())).t().to(torch.float32).contiguous()


def padded(weight: Tensor) -> Stored:
    """As the same tool leaves what it does not quantise."""
    rows, columns = weight.shape
    whole = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128, dtype=torch.float16)
    whole[:rows, :columns] = weight
    return {"weight": whole}, whole[:rows, :columns].to(torch.float32)


def write(path: Path, layouts: dict[str, Callable[[Tensor], Stored]]) -> tuple[Path, Path]:
    """`layouts`: by a part of a linear layer's name. -> a checkpoint in them, and one that holds, in fp32, what they
    mean (routed experts: in bf16, which holds MXFP4 exactly)."""
    quantised = linears(read_config(json.loads((GLM / "config.json").read_text("utf-8"))))
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(GLM / "model.safetensors").items():
        layer, _, leaf = name.rpartition(".")
        chosen = next((one for part, one in layouts.items() if part in layer), None)
        may_be = (layer in quantised and not layer.endswith(KEPT)) or ".experts." in layer
        if chosen is None or leaf != "weight" or not may_be:
            stored[name] = meant[name] = tensor
            continue
        leaves, value = chosen(tensor)
        stored |= {f"{layer}.{key}": part.contiguous() for key, part in leaves.items()}
        meant[name] = value.to(torch.bfloat16) if ".experts." in layer else value
    return saved(path / "stored", stored), saved(path / "meant", meant)


def saved(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    shutil.copyfile(GLM / "config.json", path / "config.json")
    return path


def with_config(path: Path, **changes: object) -> Path:
    """A copy of the golden checkpoint with another configuration."""
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((GLM / "config.json").read_text("utf-8")) | changes
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    shutil.copyfile(GLM / "model.safetensors", path / "model.safetensors")
    return path
