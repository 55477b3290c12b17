"""The dimensions of a DeepSeek-V4.1 model, read and checked from a checkpoint's config.json."""

import math
from typing import Any

import msgspec

from kernels.rope import Yarn
from tided.errors import DataError
from tided.images.geometry import Geometry

WHERE = "config.json"
MAX_NGRAM, MAX_ENGRAM_HEADS = 8, 64  # a token looks up a row of each size and head, each with a prime to be found


class RopeScaling(msgspec.Struct, frozen=True):
    rope_type: str
    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


class TextConfig(msgspec.Struct, frozen=True):
    """`text_config`, in the names of the file; keys that nothing here needs are ignored."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    dspark_block_size: int
    dspark_noise_token_id: int

    @property
    def yarn(self) -> Yarn:
        r = self.rope_scaling
        return Yarn(r.factor, r.beta_fast, r.beta_slow, r.original_max_position_embeddings)

    @property
    def engram_columns(self) -> int:
        """Table rows that a token looks up in one Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def last_kv_source(self) -> int:
        return self.kv_source_layer_ids[-1]

    def kv_source_of(self, layer: int) -> int | None:
        """The layer whose compressed rows `layer` reads; None for a layer with its window alone."""
        if self.compress_ratios[layer] == 0:
            return None
        return max(source for source in self.kv_source_layer_ids if source <= layer)


class VisionConfig(msgspec.Struct, frozen=True):
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.patch_size, self.downsample_ratio, self.max_image_tokens, self.min_pixels)


class QuantizationConfig(msgspec.Struct, frozen=True):
    quant_method: str
    weight_block_size: tuple[int, int]
    scale_fmt: str
    expert_dtype: str


class Config(msgspec.Struct, frozen=True):
    model_type: str
    bos_token_id: int
    eos_token_id: int
    image_token_id: int
    text_config: TextConfig
    vision_config: VisionConfig
    quantization_config: QuantizationConfig


def read_config(raw: dict[str, Any]) -> Config:
    """Raises DataError naming the key that is missing, of a wrong type, or impossible."""
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as e:
        raise DataError(str(e), where=WHERE, hint="this is not the configuration of a DeepSeek-V4.1 model") from e
    faults = [text for fine, text in _rules(config) if not fine]
    if faults:
        raise DataError("; ".join(faults), where=WHERE, hint="this build computes no such model")
    return config


def _rules(config: Config) -> list[tuple[bool, str]]:
    t, q = config.text_config, config.quantization_config
    sizes = [
        f for f in t.__struct_fields__ if isinstance(getattr(t, f), int) and not f.startswith(("engram_pad", "tie"))
    ]
    bad_sizes = [f for f in sizes if getattr(t, f) < 1 and f not in ("norm_topk_prob", "num_nextn_predict_layers")]
    rules = [
        (not bad_sizes, f"{', '.join(bad_sizes)} must be at least 1"),
        (q.quant_method == "fp8" and q.scale_fmt == "ue8m0", "quantization_config must be fp8 with ue8m0 scales"),
        (q.expert_dtype == "fp4", f"expert_dtype {q.expert_dtype!r} is not fp4"),
        (q.weight_block_size == (32, 32), f"weight_block_size {list(q.weight_block_size)} is not [32, 32]"),
        (t.scoring_func == "sqrtsoftplus", f"scoring_func {t.scoring_func!r} is not sqrtsoftplus"),
        (t.topk_method == "noaux_tc", f"topk_method {t.topk_method!r} is not noaux_tc"),
        (t.norm_topk_prob, "norm_topk_prob must be true"),
        (t.num_key_value_heads == 1, "num_key_value_heads must be 1: keys and values are one latent"),
        (t.n_shared_experts == 1, "n_shared_experts must be 1"),
        (not t.tie_word_embeddings, "tie_word_embeddings must be false"),
        (t.rope_scaling.rope_type == "yarn", f"rope_type {t.rope_scaling.rope_type!r} is not yarn"),
        (t.num_experts_per_tok <= t.n_routed_experts, "num_experts_per_tok exceeds n_routed_experts"),
    ]
    if bad_sizes:
        return rules
    return rules + _number_rules(t) + _shape_rules(t) + _layer_rules(t) + _vision_rules(config)


def _number_rules(t: TextConfig) -> list[tuple[bool, str]]:
    """Numbers that the arithmetic divides by, takes the logarithm of, or counts up to."""
    r = t.rope_scaling
    positive = [
        f
        for f in ("rms_norm_eps", "hc_eps", "routed_scaling_factor", "swiglu_limit")
        if not 0 < getattr(t, f) < math.inf
    ]
    turning = [f for f in ("rope_theta", "compress_rope_theta") if not 1 < getattr(t, f) < math.inf]
    return [
        (not positive, f"{', '.join(positive)} must be positive"),
        (not turning, f"{', '.join(turning)} must be above 1"),
        (1 <= r.factor < math.inf, "rope_scaling.factor must be at least 1"),
        (0 < r.beta_slow < r.beta_fast < math.inf, "rope_scaling.beta_slow and beta_fast must be positive and rise"),
        (r.original_max_position_embeddings >= 1, "rope_scaling.original_max_position_embeddings must be at least 1"),
        (2 <= t.engram_max_ngram_size <= MAX_NGRAM, f"engram_max_ngram_size must be 2 to {MAX_NGRAM}"),
        (t.engram_n_heads <= MAX_ENGRAM_HEADS, f"engram_n_heads must be at most {MAX_ENGRAM_HEADS}"),
    ]


def _shape_rules(t: TextConfig) -> list[tuple[bool, str]]:
    quantised = ("hidden_size", "moe_intermediate_size", "head_dim", "q_lora_rank", "index_head_dim", "engram_head_dim")
    uneven = [name for name in quantised if getattr(t, name) % 32]
    return [
        (not uneven, f"{', '.join(uneven)} must be a multiple of 32, the width of a scale"),
        (t.o_groups * t.o_lora_rank % 32 == 0, "o_groups * o_lora_rank must be a multiple of 32"),
        (t.num_attention_heads % t.o_groups == 0, "o_groups must divide num_attention_heads"),
        (t.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim must be even"),
        (t.qk_rope_head_dim <= min(t.head_dim, t.index_head_dim), "qk_rope_head_dim exceeds a head"),
        (0 <= t.engram_pad_token_id < t.vocab_size, "engram_pad_token_id is not in the vocabulary"),
    ]


def _vision_rules(config: Config) -> list[tuple[bool, str]]:
    v = config.vision_config
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "patch_size")
    bad_sizes = [name for name in (*sizes, "downsample_ratio", "min_pixels") if getattr(v, name) < 1]
    if bad_sizes:
        return [(False, f"{', '.join(bad_sizes)} of vision_config must be at least 1")]
    return [
        (v.hidden_size % (4 * v.num_attention_heads) == 0, "a head of vision_config must be a multiple of 4 wide"),
        (1 < v.rope_theta < math.inf, "rope_theta of vision_config must be above 1"),
        (v.max_image_tokens >= 4, "max_image_tokens must be at least 4: an image of one token"),
        (v.max_wh_ratio is None, "max_wh_ratio must be null"),
        (0 <= config.image_token_id < config.text_config.vocab_size, "image_token_id is not in the vocabulary"),
    ]


def _drafter_rules(t: TextConfig) -> list[tuple[bool, str]]:
    if not t.num_nextn_predict_layers:
        return []
    taps = t.dspark_target_layer_ids
    return [
        (bool(taps) and list(taps) == sorted(set(taps)), "dspark_target_layer_ids must rise"),
        (t.dspark_block_size >= 1, "dspark_block_size must be at least 1"),
        (0 <= t.dspark_noise_token_id < t.vocab_size, "dspark_noise_token_id is not in the vocabulary"),
        (
            1 <= t.dspark_num_experts_per_tok <= t.dspark_n_routed_experts,
            "dspark_num_experts_per_tok must be between 1 and dspark_n_routed_experts",
        ),
    ]


def _layer_rules(t: TextConfig) -> list[tuple[bool, str]]:
    blocks = t.num_hidden_layers + t.num_nextn_predict_layers
    if len(t.compress_ratios) != blocks:
        return [(False, f"compress_ratios has {len(t.compress_ratios)} entries for {blocks} blocks")]
    ratios = t.compress_ratios[: t.num_hidden_layers]
    kv, index = t.kv_source_layer_ids, t.index_source_layer_ids
    sources = {*kv, *index, *t.engram_layer_ids, *t.dspark_target_layer_ids, t.candidate_source_layer_id}
    if not all(0 <= layer < t.num_hidden_layers for layer in sources) or not kv:
        return [(False, "a source layer lies outside the model")]
    compressed = [layer for layer, ratio in enumerate(ratios) if ratio]
    return [
        (set(t.compress_ratios) <= {0, 1, 2}, "compress_ratios other than 0, 1 and 2"),
        (not any(t.compress_ratios[t.num_hidden_layers :]), "compress_ratios of the drafter must be 0"),
        (all(list(ids) == sorted(set(ids)) for ids in (kv, index)), "source layers must rise"),
        (set(kv) <= set(index), "a layer that writes compressed rows must select among them too"),
        (all(ratios[layer] for layer in index), "a source layer has compress_ratio 0"),
        (
            all(kv[0] <= layer and ratios[layer] == ratios[max(s for s in kv if s <= layer)] for layer in compressed),
            "a layer reads compressed rows of another ratio, or of no source",
        ),
        *_drafter_rules(t),
        (t.candidate_source_layer_id == kv[-1], "candidate_source_layer_id must be the last of kv_source_layer_ids"),
        (len(t.engram_num_embeddings) == len(t.engram_layer_ids), "engram_num_embeddings and engram_layer_ids differ"),
        (list(t.engram_layer_ids) == sorted(set(t.engram_layer_ids)), "engram_layer_ids must rise"),
    ]
