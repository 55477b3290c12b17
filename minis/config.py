"""Dimensions of a DeepSeek-V4.1 shaped model, read from a Hugging Face style config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Config:
    """The numbers that training needs; names are short because formulas use them often."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_rank: int
    o_groups: int
    window: int
    norm_eps: float
    theta: float
    compress_theta: float
    yarn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_original: int
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source: int
    candidate_blocks: int
    candidate_size: int
    experts: int
    top_k: int
    inter: int
    route_scale: float
    clamp: float
    streams: int
    sinkhorn_iters: int
    hc_eps: float
    engram_layers: tuple[int, ...]
    engram_ngram: int
    engram_vocab: int
    engram_heads: int
    engram_dim: int
    engram_pad: int
    engram_compressed: int
    draft_blocks: int
    draft_size: int
    draft_noise: int
    draft_taps: tuple[int, ...]
    draft_experts: int
    draft_top_k: int
    markov_rank: int

    @property
    def engram_columns(self) -> int:
        return (self.engram_ngram - 1) * self.engram_heads

    def block_layers(self) -> list[str]:
        """Prefixes of every transformer block: trunk, then drafter."""
        return [f"layers.{i}" for i in range(self.layers)] + [f"mtp.{k}" for k in range(self.draft_blocks)]

    def kv_source_of(self, layer: int) -> int:
        """Greatest layer <= this one that writes compressed rows."""
        return max(s for s in self.kv_sources if s <= layer)

    def index_source_of(self, layer: int) -> int:
        return max(s for s in self.index_sources if s <= layer)


def from_dict(config: dict[str, Any]) -> Config:
    """Reads the nested layout (`text_config`) of the released model."""
    t = config["text_config"]
    rope = t["rope_scaling"]
    return Config(
        vocab=t["vocab_size"],
        hidden=t["hidden_size"],
        layers=t["num_hidden_layers"],
        heads=t["num_attention_heads"],
        head_dim=t["head_dim"],
        rope_dim=t["qk_rope_head_dim"],
        q_rank=t["q_lora_rank"],
        o_rank=t["o_lora_rank"],
        o_groups=t["o_groups"],
        window=t["sliding_window"],
        norm_eps=t["rms_norm_eps"],
        theta=t["rope_theta"],
        compress_theta=t["compress_rope_theta"],
        yarn_factor=rope["factor"],
        yarn_beta_fast=rope["beta_fast"],
        yarn_beta_slow=rope["beta_slow"],
        yarn_original=rope["original_max_position_embeddings"],
        ratios=tuple(t["compress_ratios"]),
        kv_sources=tuple(t["kv_source_layer_ids"]),
        index_sources=tuple(t["index_source_layer_ids"]),
        index_heads=t["index_n_heads"],
        index_dim=t["index_head_dim"],
        index_topk=t["index_topk"],
        candidate_source=t["candidate_source_layer_id"],
        candidate_blocks=t["candidate_topk_blocks"],
        candidate_size=t["candidate_block_size"],
        experts=t["n_routed_experts"],
        top_k=t["num_experts_per_tok"],
        inter=t["moe_intermediate_size"],
        route_scale=t["routed_scaling_factor"],
        clamp=t["swiglu_limit"],
        streams=t["hc_mult"],
        sinkhorn_iters=t["hc_sinkhorn_iters"],
        hc_eps=t["hc_eps"],
        engram_layers=tuple(t["engram_layer_ids"]),
        engram_ngram=t["engram_max_ngram_size"],
        engram_vocab=t["engram_vocab_size"],
        engram_heads=t["engram_n_heads"],
        engram_dim=t["engram_head_dim"],
        engram_pad=t["engram_pad_token_id"],
        engram_compressed=t["engram_compressed_vocab_size"],
        draft_blocks=t["num_nextn_predict_layers"],
        draft_size=t["dspark_block_size"],
        draft_noise=t["dspark_noise_token_id"],
        draft_taps=tuple(t["dspark_target_layer_ids"]),
        draft_experts=t["dspark_n_routed_experts"],
        draft_top_k=t["dspark_num_experts_per_tok"],
        markov_rank=t["dspark_markov_rank"],
    )


def load(path: Path) -> Config:
    return from_dict(json.loads(path.read_text("utf-8")))


def mini_config(compressed_vocab: int, engram_rows: list[int], specials: dict[str, int]) -> dict[str, Any]:
    """config.json of the DeepSeek mini; the tokenizer decides the two numbers that are passed in."""
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": 8192,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 4,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "n_routed_experts": 48,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 64,
        "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 4, 6],
        "index_source_layer_ids": [2, 4, 6, 8],
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 128,
        "candidate_source_layer_id": 6,
        "candidate_topk_blocks": 48,
        "candidate_block_size": 4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": engram_rows,
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 1536,
        "engram_n_heads": 4,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": compressed_vocab,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": specials["noise"],
        "dspark_target_layer_ids": [7, 8, 9],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
    }
    vision = {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 96,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 64,
        "min_pixels": 7056,
        "max_wh_ratio": None,
    }
    quant = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": specials["image"],
        "quantization_config": quant,
        "text_config": text,
        "vision_config": vision,
    }
