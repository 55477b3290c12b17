"""GLM-5.3's configuration, or that of its first layers, and its tensors, the routed experts in EXL3 of 2 to 4 bits and
the other large matrices of 6: for weights that are made up."""

from typing import Any

from kernels.exl3_record import BLOCK, TILE, Stored
from packers.shards import TensorSpec
from tided.models.glm53.config import Config
from tided.models.glm53.names import PROJECTIONS, Inventory, expert, linears, plain_tensors

LAYERS, DENSE_LAYERS, EXPERTS, TOP_K = 78, 3, 256, 8
VOCABULARY = 154_880
# Where the released tokenizer has the tokens that are no text.
SPECIAL = {
    "<|endoftext|>": 154_820,
    "[MASK]": 154_821,
    "[gMASK]": 154_822,
    "[sMASK]": 154_823,
    "<sop>": 154_824,
    "<eop>": 154_825,
    "<|system|>": 154_826,
    "<|user|>": 154_827,
    "<|assistant|>": 154_828,
    "<|observation|>": 154_829,
    "<think>": 154_841,
    "</think>": 154_842,
    "<tool_call>": 154_843,
    "</tool_call>": 154_844,
    "<tool_response>": 154_845,
    "</tool_response>": 154_846,
    "<arg_key>": 154_847,
    "</arg_key>": 154_848,
    "<arg_value>": 154_849,
    "</arg_value>": 154_850,
}
STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
PLAIN = (".gate", ".weights_proj", ".eh_proj")  # matrices that are not quantised
DENSE_BITS = 6
# Half bits of gate, up and down, by the number of an expert in turns: 2.75 bits a weight on average.
WIDTHS = ((4, 4, 4), (4, 4, 6), (6, 6, 6), (6, 6, 8), (4, 4, 6), (6, 6, 6), (6, 6, 6), (6, 6, 6))


def widths_of(layer: int, number: int) -> Stored:
    """Of an expert; no two layers in a row have the same."""
    return Stored(WIDTHS[(layer + number) % len(WIDTHS)], ("mcg", "mcg", "mcg"))


def released(layers: int = LAYERS, experts: int = EXPERTS) -> dict[str, Any]:
    """config.json of the released shapes with its first `layers`, and the drafting layer behind them."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": 6144,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": DENSE_LAYERS,
        "mlp_layer_types": ["dense" if layer < DENSE_LAYERS else "sparse" for layer in range(layers)],
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": TOP_K,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
        "rope_interleave": True,
        "max_position_embeddings": 1_048_576,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "indexer_types": ["shared" if max(layer - 2, 0) % 4 else "full" for layer in range(layers)],
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": [SPECIAL[token] for token in STOPS],
        "pad_token_id": SPECIAL["<|endoftext|>"],
    }


def stored_tensors(c: Config) -> Inventory:
    """Every tensor of the checkpoint, layer by layer; an expert's side by side, as its converter writes them."""
    found = {name: TensorSpec(_one_of(spec), spec.shape) for name, spec in plain_tensors(c).items()}
    for name, shape in linears(c).items():
        if name.endswith(PLAIN):
            found[f"{name}.weight"] = TensorSpec("BF16", shape)
        else:
            found |= _exl3(name, shape, 2 * DENSE_BITS)
    for layer in range(c.first_k_dense_replace, c.num_hidden_layers + c.num_nextn_predict_layers):
        for number in range(c.n_routed_experts):
            found |= _expert(c, layer, number)
    return found


def _expert(c: Config, layer: int, number: int) -> Inventory:
    inward, outward = (c.moe_intermediate_size, c.hidden_size), (c.hidden_size, c.moe_intermediate_size)
    found: Inventory = {}
    parts = zip(PROJECTIONS, (inward, inward, outward), widths_of(layer, number).half_bits, strict=True)
    for part, shape, half_bits in parts:
        found |= _exl3(f"{expert(layer, number)}.{part}", shape, half_bits)
    return found


def _exl3(name: str, shape: tuple[int, int], half_bits: int) -> Inventory:
    """A linear layer [N, K], padded to whole blocks."""
    n, k = (-(-side // BLOCK) * BLOCK for side in shape)
    return {
        f"{name}.suh": TensorSpec("F16", (k,)),
        f"{name}.svh": TensorSpec("F16", (n,)),
        f"{name}.mcg": TensorSpec("I32", ()),
        f"{name}.trellis": TensorSpec("I16", (k // TILE, n // TILE, half_bits * TILE // 2)),
    }


def _one_of(spec: TensorSpec) -> str:
    return spec.dtype if isinstance(spec.dtype, str) else spec.dtype[0]
