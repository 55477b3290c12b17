"""The released DeepSeek-V4.1-Flash's configuration, and that of its first layers: for weights that are made up."""

import copy
from typing import Any

LAYERS, EXPERTS, DRAFT_EXPERTS = 40, 384, 128
VOCABULARY = 129_280
# Where the released tokenizer has the tokens that are no text.
SPECIAL = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<｜▁pad▁｜>": 2,
    "<｜dspark_noise｜>": 128_799,
    "<｜User｜>": 128_803,
    "<｜Assistant｜>": 128_804,
    "<｜System｜>": 128_805,
    "<｜latest_reminder｜>": 128_806,
    "｜DSML｜": 128_807,
    "<｜action｜>": 128_808,
    "<｜query｜>": 128_809,
    "<｜authority｜>": 128_810,
    "<｜domain｜>": 128_811,
    "<｜title｜>": 128_812,
    "<｜read_url｜>": 128_813,
    "<think>": 128_821,
    "</think>": 128_822,
    "<｜deepseek_image｜>": 129_264,
}
_KV_SOURCES, _INDEX_SOURCES = (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36)
ENGRAM = (1, 14)


# Parts of config.json in its order: what is the same whatever the number of layers and experts.
_ATTENTION = {
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False,
}
_POSITIONS = {
    "max_position_embeddings": 1_048_576,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
}
_ROUTER = {
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_HYPER_CONNECTIONS = {"hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6}
_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_VISION = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 32,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 1024,
    "min_pixels": 295_936,
    "max_wh_ratio": None,
}


def released(
    layers: int = LAYERS,
    experts: int = EXPERTS,
    engram_rows: tuple[int, ...] = (384_006_168, 384_016_682),
    engram_vocabulary: int = 16_000_000,
    compressed_vocabulary: int = 99_092,
) -> dict[str, Any]:
    """config.json of the released shapes with its first `layers`. Fewer than 21 end in a layer that writes a row of
    context for every token and publishes candidates, as layer 20 does: without one there is no such model."""
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "num_hidden_layers": layers,
        **_ATTENTION,
        **_POSITIONS,
        "n_routed_experts": experts,
        **_ROUTER,
        **_context(layers),
        **_HYPER_CONNECTIONS,
        **_engram(layers, engram_rows, engram_vocabulary, compressed_vocabulary),
        **_drafter(layers, experts),
    }
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": SPECIAL["<｜deepseek_image｜>"],
        "quantization_config": _QUANTIZATION,
        "text_config": text,
        "vision_config": _VISION,
    }
    return copy.deepcopy(config)  # whose it is may change it


def _context(layers: int) -> dict[str, Any]:
    """Windows, compressed rows, and which layers write what others read."""
    last = min(layers - 1, _KV_SOURCES[-1])
    kv = [*(layer for layer in _KV_SOURCES if layer < last), last]
    ratios = [0 if layer < 2 else 2 for layer in range(last)] + [1] * (layers - last)
    return {
        "sliding_window": 128,
        "compress_ratios": [*ratios, 0, 0, 0],
        "compress_rope_theta": 160_000,
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": sorted({*kv, *(n for n in _INDEX_SOURCES if last < n < layers)}),
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": last,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
    }


def _engram(layers: int, rows: tuple[int, ...], vocabulary: int, compressed_vocabulary: int) -> dict[str, Any]:
    own = [layer for layer in ENGRAM if layer < layers]
    return {
        "engram_layer_ids": own,
        "engram_num_embeddings": list(rows[: len(own)]),
        "engram_max_ngram_size": 4,
        "engram_vocab_size": vocabulary,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": compressed_vocabulary,
    }


def _drafter(layers: int, experts: int) -> dict[str, Any]:
    return {
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": SPECIAL["<｜dspark_noise｜>"],
        "dspark_target_layer_ids": list(range(max(0, layers - 3), layers)),
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": min(experts, DRAFT_EXPERTS),
        "dspark_num_experts_per_tok": 3,
    }
