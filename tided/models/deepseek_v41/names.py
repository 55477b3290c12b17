"""Every tensor of a checkpoint by name, dtype and shape. The drafter's and the vision tower's are only checked."""

from collections.abc import Callable

from packers.joined import Part
from packers.shards import TensorSpec
from tided.models.deepseek_v41.config import Config, TextConfig

Inventory = dict[str, TensorSpec]


def expected_tensors(config: Config) -> Inventory:
    """The whole inventory: a checkpoint holds exactly these."""
    t = config.text_config
    found = _globals(t)
    for layer in range(t.num_hidden_layers):
        found |= _block(f"layers.{layer}", t, t.n_routed_experts) | _sources(layer, t)
    for layer, rows in zip(t.engram_layer_ids, t.engram_num_embeddings, strict=True):
        found |= _engram(f"layers.{layer}.engram", rows, t)
    return found | _drafter(t) | _vision(config)


def part_of(name: str) -> Part:
    """Which part of the model a tensor is of."""
    drafter, expert = name.startswith("mtp."), ".ffn.experts." in name
    if expert:
        return "draft experts" if drafter else "experts"
    return "draft" if drafter else "dense"


def expert_names(block: str, expert: int) -> tuple[str, ...]:
    """The six tensors of an expert in the order of a record's parts: w1, w3, w2 codes, then their scales."""
    prefix = f"{block}.ffn.experts.{expert}"
    return tuple(f"{prefix}.{part}.{kind}" for kind in ("weight", "scale") for part in ("w1", "w3", "w2"))


def routed_expert_names() -> Callable[[int, int], tuple[str, ...]]:
    """(MoE layer, expert) -> names. All layers are MoE layers, so both counts agree."""
    return lambda layer, expert: expert_names(f"layers.{layer}", expert)


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec("BF16", shape)


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec("F32", shape)


def _fp8(name: str, rows: int, columns: int) -> Inventory:
    return {
        f"{name}.weight": TensorSpec("F8_E4M3", (rows, columns)),
        f"{name}.scale": TensorSpec("F8_E8M0", (-(-rows // 32), -(-columns // 32))),
    }


def _globals(t: TextConfig) -> Inventory:
    d = t.hidden_size
    images = {name: _bf16(d) for name in ("image_start", "image_end", "image_newline")}
    vocabulary = _bf16(t.vocab_size, d)
    return {"embed.weight": vocabulary, "head.weight": vocabulary, "norm.weight": _bf16(d)} | images


def _block(block: str, t: TextConfig, experts: int) -> Inventory:
    d, heads, streams = t.hidden_size, t.num_attention_heads, t.hc_mult
    mixes = streams * (2 + streams)
    found = {
        f"{block}.attn.q_norm.weight": _bf16(t.q_lora_rank),
        f"{block}.attn.kv_norm.weight": _bf16(t.head_dim),
        f"{block}.attn.attn_sink": _f32(heads),
        f"{block}.attn_norm.weight": _bf16(d),
        f"{block}.ffn_norm.weight": _bf16(d),
        f"{block}.ffn.gate.weight": _bf16(experts, d),
        f"{block}.ffn.gate.bias": _f32(experts),
        f"{block}.ffn.gate.bias_vl": _f32(experts),
    }
    for part in ("attn", "ffn"):
        found[f"{block}.hc_{part}_fn"] = _f32(mixes, streams * d)
        found[f"{block}.hc_{part}_base"] = _f32(mixes)
        found[f"{block}.hc_{part}_scale"] = _f32(3)
    found |= _fp8(f"{block}.attn.wq_a", t.q_lora_rank, d) | _fp8(f"{block}.attn.wkv", t.head_dim, d)
    found |= _fp8(f"{block}.attn.wq_b", heads * t.head_dim, t.q_lora_rank)
    found |= _fp8(f"{block}.attn.wo_a", t.o_groups * t.o_lora_rank, heads * t.head_dim // t.o_groups)
    found |= _fp8(f"{block}.attn.wo_b", d, t.o_groups * t.o_lora_rank)
    return found | _shared(block, t) | _experts(block, t, experts)


def _shared(block: str, t: TextConfig) -> Inventory:
    prefix, n, d = f"{block}.ffn.shared_experts", t.moe_intermediate_size, t.hidden_size
    return _fp8(f"{prefix}.w1", n, d) | _fp8(f"{prefix}.w3", n, d) | _fp8(f"{prefix}.w2", d, n)


def _experts(block: str, t: TextConfig, experts: int) -> Inventory:
    n, d = t.moe_intermediate_size, t.hidden_size
    up, down = TensorSpec("I8", (n, d // 2)), TensorSpec("I8", (d, n // 2))
    up_scale, down_scale = TensorSpec("F8_E8M0", (n, d // 32)), TensorSpec("F8_E8M0", (d, n // 32))
    specs = (up, up, down, up_scale, up_scale, down_scale)
    return {
        name: spec for expert in range(experts) for name, spec in zip(expert_names(block, expert), specs, strict=True)
    }


def _sources(layer: int, t: TextConfig) -> Inventory:
    """What only the layers that write compressed rows, or select among them, have."""
    prefix, d, found = f"layers.{layer}.attn", t.hidden_size, {}
    if layer in t.kv_source_layer_ids:
        found[f"{prefix}.compressor.wkv.weight"] = _bf16(t.head_dim, d)
        found[f"{prefix}.compressor.norm.weight"] = _bf16(t.head_dim)
        found[f"{prefix}.indexer.wk.weight"] = _bf16(t.index_head_dim, t.head_dim)
        found[f"{prefix}.indexer.k_norm.weight"] = _bf16(t.index_head_dim)
        if t.compress_ratios[layer] > 1:
            found[f"{prefix}.compressor.wgate.weight"] = _bf16(t.head_dim, d)
    if layer in t.index_source_layer_ids:
        found[f"{prefix}.indexer.weights_proj.weight"] = _bf16(t.index_n_heads, d)
        found |= _fp8(f"{prefix}.indexer.wq_b", t.index_n_heads * t.index_head_dim, t.q_lora_rank)
    return found


def _engram(prefix: str, rows: int, t: TextConfig) -> Inventory:
    d, streams = t.hidden_size, t.hc_mult
    return {
        f"{prefix}.embed.weight": TensorSpec("F8_E4M3", (rows, t.engram_head_dim)),
        f"{prefix}.embed.scale": TensorSpec("F8_E8M0", (rows, t.engram_head_dim // 32)),
        f"{prefix}.q_weight": _bf16(streams, d),
        f"{prefix}.k_weight": _bf16(streams, d),
    } | _fp8(f"{prefix}.wkv", (streams + 1) * d, t.engram_columns * t.engram_head_dim)


def _drafter(t: TextConfig) -> Inventory:
    if t.num_nextn_predict_layers == 0:
        return {}
    d, rank, last = t.hidden_size, t.dspark_markov_rank, f"mtp.{t.num_nextn_predict_layers - 1}"
    found: Inventory = {}
    for block in range(t.num_nextn_predict_layers):
        found |= _block(f"mtp.{block}", t, t.dspark_n_routed_experts)
    found |= _fp8("mtp.0.main_proj", d, len(t.dspark_target_layer_ids) * d)
    return found | {
        "mtp.0.main_norm.weight": _bf16(d),
        f"{last}.norm.weight": _bf16(d),
        f"{last}.markov_head.embed.weight": _bf16(t.vocab_size, rank),
        f"{last}.markov_head.head.weight": _bf16(t.vocab_size, rank),
        f"{last}.confidence_head.proj.weight": _bf16(1, d + rank),
    }


def _vision(config: Config) -> Inventory:
    v, d = config.vision_config, config.text_config.hidden_size
    width, inner, folded = v.hidden_size, v.intermediate_size, v.hidden_size * v.downsample_ratio**2

    def norm(*shape: int) -> TensorSpec:
        return TensorSpec(("BF16", "F32"), shape)  # both are seen; the tower computes its norms in fp32

    found = {
        "vision.patch_embed.proj.weight": _bf16(width, 3 * v.patch_size**2),
        "vision.patch_embed.proj.bias": _bf16(width),
        "vision.norm.weight": norm(width),
        "aligner.w1.weight": _bf16(d, folded),
        "aligner.w1.bias": _bf16(d),
        "aligner.w2.weight": _bf16(d, d),
        "aligner.w2.bias": _bf16(d),
    }
    for i in range(v.num_hidden_layers):
        block = f"vision.blocks.{i}"
        found |= {
            f"{block}.norm1.weight": norm(width),
            f"{block}.norm2.weight": norm(width),
            f"{block}.attn.wqkv.weight": _bf16(3 * width, width),
            f"{block}.attn.wqkv.bias": _bf16(3 * width),
            f"{block}.attn.wo.weight": _bf16(width, width),
            f"{block}.attn.wo.bias": _bf16(width),
            f"{block}.mlp.w1.weight": _bf16(2 * inner, width),
            f"{block}.mlp.w2.weight": _bf16(width, inner),
        }
    return found
