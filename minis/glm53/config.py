"""config.json of the GLM-5.3 mini. The trainer reads it as the engine does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tided.chat import glm53
from tided.models.glm53.config import Config, read_config


def load(path: Path) -> Config:
    return read_config(json.loads(path.read_text("utf-8")))


def mini_config(vocabulary: int, specials: Mapping[str, int]) -> dict[str, Any]:
    """Two ranks share an expert of 256: each half is one block of the transform that EXL3 rotates weights with."""
    layers, dense = 9, 1
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": dense,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_router_dtype": "float32",
        "hidden_act": "silu",
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "qk_head_dim": 64,
        "v_head_dim": 32,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "rope_interleave": True,
        "max_position_embeddings": 4096,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 128,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_topk_pattern": None,
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(layers)],
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "use_cache": True,
        "eos_token_id": [specials[token] for token in glm53.STOPS],
        "pad_token_id": specials[glm53.END_OF_TEXT],
    }
