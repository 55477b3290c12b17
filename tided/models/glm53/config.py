"""config.json of GLM-5.3 (`glm_moe_dsa`), checked."""

import math
from typing import Any

import msgspec

from tided.errors import DataError

WHERE = "config.json"
MODEL_TYPE = "glm_moe_dsa"


class RopeParameters(msgspec.Struct, frozen=True):
    rope_theta: float
    rope_type: str = "default"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """`head_dim` of the file is nobody's width and is not read. `eos_token_id`: any of them ends an answer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int = 0
    intermediate_size: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int = 1
    topk_group: int = 1
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    hidden_act: str
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attention_bias: bool = False
    rope_parameters: RopeParameters
    rope_interleave: bool = True
    indexer_rope_interleave: bool = True
    rms_norm_eps: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_topk_freq: int = 4
    index_skip_topk_offset: int = 3
    index_share_for_mtp_iteration: bool = True
    indexer_types: tuple[str, ...] | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    eos_token_id: tuple[int, ...]
    pad_token_id: int = 0

    @property
    def moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def query_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row_dim(self) -> int:
        """Values that a token leaves in a layer: its latent, and the rotated key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def selects(self, layer: int) -> bool:
        """Whether the layer chooses the tokens it attends to; others use the choice of the nearest before them. The
        layers behind the trunk choose for themselves."""
        if layer >= self.num_hidden_layers:
            return True
        if self.indexer_types is not None:
            return self.indexer_types[layer] == "full"
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    def is_dense(self, layer: int) -> bool:
        return layer < self.first_k_dense_replace


def read_config(raw: dict[str, Any]) -> Config:
    """Raises DataError naming the key that is missing, of a wrong type, or impossible."""
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as e:
        raise DataError(str(e), where=WHERE, hint="this is not the configuration of a GLM-5.3 model") from e
    faults = [text for fine, text in _rules(config) if not fine]
    if faults:
        raise DataError("; ".join(faults), where=WHERE, hint="this build computes no such model")
    return config


def _rules(c: Config) -> list[tuple[bool, str]]:
    loose = ("first_k_dense_replace", "num_nextn_predict_layers", "pad_token_id")
    sizes = [f for f in c.__struct_fields__ if type(getattr(c, f)) is int and f not in loose]
    bad = [f for f in sizes if getattr(c, f) < 1] + [f for f in loose if getattr(c, f) < 0]
    if bad:
        return [(False, f"{', '.join(bad)} must be at least 1")]
    types = c.indexer_types
    return [
        (c.model_type == MODEL_TYPE, f"model_type {c.model_type!r} is not {MODEL_TYPE}"),
        (c.scoring_func == "sigmoid", f"scoring_func {c.scoring_func!r} is not sigmoid"),
        (c.topk_method == "noaux_tc", f"topk_method {c.topk_method!r} is not noaux_tc"),
        (c.hidden_act == "silu", f"hidden_act {c.hidden_act!r} is not silu"),
        (c.norm_topk_prob, "norm_topk_prob must be true"),
        (c.n_group == c.topk_group == 1, "n_group and topk_group must be 1"),
        (c.n_shared_experts == 1, "n_shared_experts must be 1"),
        (not c.attention_bias, "attention_bias must be false"),
        (not c.tie_word_embeddings, "tie_word_embeddings must be false"),
        (c.rope_interleave and c.indexer_rope_interleave, "rotary pairs must be interleaved"),
        (c.rope_parameters.rope_type == "default", f"rope_type {c.rope_parameters.rope_type!r} is not default"),
        (1 < c.rope_parameters.rope_theta < math.inf, "rope_theta must be above 1"),
        (0 < c.rms_norm_eps < math.inf, "rms_norm_eps must be positive"),
        (0 < c.routed_scaling_factor < math.inf, "routed_scaling_factor must be positive"),
        (c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim must be even"),
        (c.qk_rope_head_dim <= c.index_head_dim, "qk_rope_head_dim exceeds index_head_dim"),
        (c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok exceeds n_routed_experts"),
        (c.first_k_dense_replace < c.num_hidden_layers, "no layer has experts: first_k_dense_replace"),
        (c.num_nextn_predict_layers <= 1, "num_nextn_predict_layers above 1"),
        (bool(c.eos_token_id), "eos_token_id is empty"),
        (all(0 <= one < c.vocab_size for one in (*c.eos_token_id, c.pad_token_id)), "a token is not in the vocabulary"),
        (
            types is None or (len(types) == c.num_hidden_layers and set(types) <= {"full", "shared"}),
            "indexer_types must say full or shared of every layer",
        ),
        (types is None or types[:1] == ("full",), "the first layer must choose for itself: indexer_types"),
    ]
