"""Directions that are projected out at run time: the model is the one whose weights were edited, but for rounding."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from packers.ablation import write
from packers.shards import Checkpoint
from tided.engine.offline import logits, settings_of
from tided.errors import ConfigError, DataError, TensorError
from tided.models.families import open_checkpoint
from tided.models.glm53.ablation import Projection
from tided.settings import Model

GLM = Path(__file__).parents[1] / "golden" / "glm53"
DEEPSEEK = GLM.parent / "deepseek-v41"
IDS = list(range(5, 60))
CONFIG: dict[str, Any] = json.loads((GLM / "config.json").read_text("utf-8"))
HIDDEN, LAYERS = CONFIG["hidden_size"], range(CONFIG["num_hidden_layers"])
ATTENTION, SHARED, DENSE = "self_attn.o_proj.", "mlp.shared_experts.down_proj.", "mlp.down_proj."
EDITED = (0, LAYERS[-1])


def direction(layer: int) -> Tensor:
    found = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(layer), dtype=torch.float64)
    return found / found.norm()


def file(path: Path, alphas: dict[str, float], layers: tuple[int, ...] = EDITED) -> Path:
    write(path, [(layer, np.asarray(direction(layer)), alphas) for layer in layers])
    return path


def under(path: Path, numerics: str = "fp32") -> Any:
    settings = settings_of(GLM)
    return replace(settings, model=replace(settings.model, ablation=str(path), numerics=numerics))


def edited_checkpoint(directory: Path, parts: tuple[str, ...], alpha: float) -> Path:
    """Those of its matrices that are stored as numbers and not as codes, edited and kept as exactly as that."""
    shutil.copytree(GLM, directory)
    edited = 0
    for shard in directory.glob("*.safetensors"):
        if not shard.name.startswith("model"):
            continue
        tensors = load_file(shard)
        for name, weight in tensors.items():
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
            if layer in EDITED and any(part in name for part in parts):
                assert weight.dtype in (torch.bfloat16, torch.float32)
                d = direction(layer)
                tensors[name] = (weight.double() - alpha * d[:, None] * (d @ weight.double())).to(weight.dtype)
                edited += 1
        save_file(tensors, shard)
    assert edited
    return directory


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())
