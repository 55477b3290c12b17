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


def released_config() -> dict[str, Any]:
    """The released model's dimensions, as its documentation and inference code state them."""
    config = golden_config(
        vocab_size=129280,
        hidden_size=5120,
        moe_intermediate_size=2304,
        num_hidden_layers=40,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1280,
        o_lora_rank=1024,
        o_groups=8,
        swiglu_limit=10.0,
        max_position_embeddings=1048576,
        n_routed_experts=384,
        num_experts_per_tok=6,
        sliding_window=128,
        compress_ratios=[0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        kv_source_layer_ids=[2, 8, 14, 20],
        index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36],
        index_n_heads=32,
        index_head_dim=128,
        index_topk=512,
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        engram_layer_ids=[1, 14],
        engram_num_embeddings=[384006168, 384016682],
        engram_vocab_size=16000000,
        engram_n_heads=8,
        engram_head_dim=256,
        engram_compressed_vocab_size=99092,
        dspark_target_layer_ids=[37, 38, 39],
        dspark_markov_rank=256,
        dspark_n_routed_experts=128,
        dspark_num_experts_per_tok=3,
        dspark_noise_token_id=128799,
    )
    config["vision_config"].update(num_hidden_layers=32, hidden_size=1024, intermediate_size=2816)
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
