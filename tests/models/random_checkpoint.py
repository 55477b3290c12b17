"""Writes a checkpoint of any configuration with random weights: every tensor of the inventory, in its format."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from packers.shards import TensorSpec
from tests.models.rig import GOLDEN
from tided.models.deepseek_v41.config import read_config
from tided.models.deepseek_v41.names import expected_tensors


def golden_config(**changes: Any) -> dict[str, Any]:
    """The golden configuration with `changes` in its text_config."""
    config: dict[str, Any] = json.loads((GOLDEN / "config.json").read_text("utf-8"))
    config["text_config"].update(changes)
    return config


def write_checkpoint(path: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """One shard, with the golden tokenizer. Values have the size that keeps activations near one."""
    generator = torch.Generator().manual_seed(seed)
    inventory = expected_tensors(read_config(config))
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: _random(name, spec, generator) for name, spec in inventory.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    shutil.copyfile(GOLDEN / "tokenizer.json", path / "tokenizer.json")
    return path


def _random(name: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
    dtype = spec.dtype if isinstance(spec.dtype, str) else spec.dtype[0]
    if dtype == "I8":
        return torch.randint(-128, 128, spec.shape, dtype=torch.int8, generator=generator)
    if dtype == "F8_E8M0":
        exponent = 127 - round(math.log2(32 * spec.shape[-1]) / 2) - (2 if ".experts." in name else 0)
        return torch.full(spec.shape, exponent, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = torch.randn(spec.shape, generator=generator)
    if dtype == "F8_E4M3":
        return values.to(torch.float8_e4m3fn)
    if name.endswith("norm.weight"):
        values = 1 + 0.1 * values
    elif len(spec.shape) == 2:
        values = values / math.sqrt(spec.shape[1])
    return values.to(torch.bfloat16 if dtype == "BF16" else torch.float32)
