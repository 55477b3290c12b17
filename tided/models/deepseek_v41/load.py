"""From a checkpoint to a rank's model."""

from dataclasses import replace

import torch

from kernels.device import has_kernels
from kernels.numerics import NATIVE, Numerics, numerics_of
from packers.shards import Checkpoint
from tided.cache.context import ContextShape
from tided.cache.pool import PAGE_TOKENS, Layout, Pool, Source
from tided.errors import ConfigError
from tided.experts.bank import ExpertBank
from tided.models.deepseek_v41.attention import load_attention
from tided.models.deepseek_v41.block import Block, load_hyper_connection
from tided.models.deepseek_v41.captured import DecodeSteps
from tided.models.deepseek_v41.config import Config, TextConfig, read_config
from tided.models.deepseek_v41.drafter import drafter_bank, drafter_bytes, load_drafter
from tided.models.deepseek_v41.engram import load_engrams
from tided.models.deepseek_v41.model import DeepseekV41
from tided.models.deepseek_v41.moe import load_moe
from tided.models.deepseek_v41.names import expected_tensors
from tided.models.deepseek_v41.step import Rotations
from tided.models.deepseek_v41.vision import load_vision
from tided.models.deepseek_v41.vocabulary import compressed_vocabulary
from tided.models.deepseek_v41.weights import Weights
from tided.models.paged import Shape
from tided.models.parallel import Group
from tided.settings import Settings

FAMILY = "deepseek_v41"


def shape_of(config: Config) -> Shape:
    t = config.text_config
    return Shape(
        FAMILY,
        t.vocab_size,
        t.hidden_size,
        moe_layers=t.num_hidden_layers,
        experts_per_layer=t.n_routed_experts,
        top_k=t.num_experts_per_tok,
        context_tokens=t.max_position_embeddings,
        eos_id=config.eos_token_id,
    )


def context_bytes(config: Config, settings: Settings) -> int:
    """Of the pool, which every rank holds whole."""
    layout = _layout(config.text_config, numerics_of(settings.model.numerics))
    pages = -(-settings.cache.pool_tokens // PAGE_TOKENS)
    return pages * layout.page_bytes


def draft_bytes(config: Config, settings: Settings) -> int:
    """Of the drafter and all of its experts on one rank. Raises ConfigError for a checkpoint without one."""
    _require_drafter(config.text_config)
    return drafter_bytes(config.text_config, expected_tensors(config), settings.parallel.ranks, is_packed(settings))


def is_packed(settings: Settings) -> bool:
    """Whether dense weights stay as they are stored."""
    return settings.model.numerics == "native" and has_kernels(torch.device(settings.engine.device))


def load(
    checkpoint: Checkpoint, settings: Settings, group: Group, bank: ExpertBank, device: torch.device
) -> DeepseekV41:
    """Reads the rank's dense weights. Raises TensorError for a checkpoint that holds other tensors than its
    configuration says, DataError for a foreign tokenizer, ConfigError for settings that the model cannot serve."""
    config = read_config(checkpoint.config)
    t = config.text_config
    _check(t, settings, group)
    checkpoint.require(expected_tensors(config))
    numerics = numerics_of(settings.model.numerics)
    weights = Weights(checkpoint, group, device, packed=numerics is NATIVE and has_kernels(device))
    rotations = Rotations(t, device)
    pool = Pool(_layout(t, numerics), settings.cache.pool_tokens, device)
    vocabulary = compressed_vocabulary(checkpoint.path / "tokenizer.json", t.vocab_size, t.engram_compressed_vocab_size)
    cache_bytes = settings.model.engram_cache_bytes
    columns, rows = weights.cut(t.hidden_size), weights.cut(t.vocab_size)
    model = DeepseekV41(
        shape_of(config),
        settings.cache.context_tokens,
        embed=checkpoint.read("embed.weight")[:, columns].to(device).clone(memory_format=torch.contiguous_format),
        blocks=tuple(
            _load_block(weights, t, layer, pool, rotations, bank, numerics) for layer in range(t.num_hidden_layers)
        ),
        norm=weights.plain("norm.weight"),
        eps=t.rms_norm_eps,
        head=weights.matrix("head.weight", rows=rows),
        engrams=load_engrams(checkpoint, weights, t, vocabulary, cache_bytes, numerics),
        rotations=rotations,
        pool=pool,
        context_shape=_context_shape(t, int(vocabulary[t.engram_pad_token_id]), numerics),
        last_kv_source=t.last_kv_source,
        replay=settings.model.decoder_replay,
        group=group,
        numerics=numerics,
    )
    checkpoint.unmap()
    return model


def with_drafter(model: DeepseekV41, checkpoint: Checkpoint, device: torch.device) -> DeepseekV41:
    """The model with its drafter, whose windows stand in a context behind the layers' own. Raises ConfigError for a
    checkpoint without one."""
    t = read_config(checkpoint.config).text_config
    _require_drafter(t)
    packed, shape = model.numerics is NATIVE and has_kernels(device), model.context_shape
    weights = Weights(checkpoint, model.group, device, packed)
    drafter = load_drafter(model, weights, t, drafter_bank(checkpoint, t, model.group, device))
    checkpoint.unmap()
    return replace(
        model,
        tapped=t.dspark_target_layer_ids,
        drafter=drafter,
        steps=DecodeSteps(),
        context_shape=replace(shape, layers=shape.layers + t.num_nextn_predict_layers),
    )


def with_vision(model: DeepseekV41, checkpoint: Checkpoint, rank: int, device: torch.device) -> DeepseekV41:
    """The model with its vision tower, which is read on `rank` alone."""
    vision = load_vision(Weights(checkpoint, model.group, device), read_config(checkpoint.config), rank, model.numerics)
    checkpoint.unmap()
    return replace(model, vision=vision)


def _require_drafter(t: TextConfig) -> None:
    if not t.num_nextn_predict_layers:
        raise ConfigError("this checkpoint has no drafter", hint='set draft = "off" in [engine]')


def _load_block(
    weights: Weights, t: TextConfig, layer: int, pool: Pool, rotations: Rotations, bank: ExpertBank, numerics: Numerics
) -> Block:
    at = weights.under(f"layers.{layer}")
    return Block(
        layer,
        hc_attn=load_hyper_connection(at, t, "attn"),
        hc_ffn=load_hyper_connection(at, t, "ffn"),
        attn_norm=at.plain("attn_norm.weight"),
        ffn_norm=at.plain("ffn_norm.weight"),
        eps=t.rms_norm_eps,
        attention=load_attention(at.under("attn"), t, layer, pool, rotations, numerics),
        moe=load_moe(at.under("ffn"), t, layer, t.num_experts_per_tok, bank, numerics),
        group=weights.group,
        numerics=numerics,
    )


def _layout(t: TextConfig, numerics: Numerics) -> Layout:
    sources = tuple(Source(layer, t.compress_ratios[layer]) for layer in t.kv_source_layer_ids)
    return Layout(sources, t.head_dim, t.index_head_dim, numerics.cache)


def _context_shape(t: TextConfig, pad_id: int, numerics: Numerics) -> ContextShape:
    tail = t.engram_max_ngram_size - 1
    return ContextShape(t.num_hidden_layers, t.sliding_window, t.head_dim, tail, pad_id, numerics.cache)


def _check(t: TextConfig, settings: Settings, group: Group) -> None:
    """Raises ConfigError naming every dimension that the ranks cannot share, and a context that is too long."""
    shared = {
        "num_attention_heads": (t.num_attention_heads, 1),
        "o_groups * o_lora_rank": (t.o_groups * t.o_lora_rank, 32),
        "o_groups": (t.o_groups, 1),
        "moe_intermediate_size": (t.moe_intermediate_size, 32),
        "hidden_size": (t.hidden_size, 1),
        "vocab_size": (t.vocab_size, 1),
    }
    uneven = [
        f"{name} {size}" + (f" in shares of {unit}" if unit > 1 else "")
        for name, (size, unit) in shared.items()
        if size % (unit * group.ranks)
    ]
    if uneven:
        raise ConfigError(
            f"{group.ranks} ranks cannot share {', '.join(uneven)}", hint="choose a number of ranks that divides them"
        )
    if settings.cache.context_tokens > t.max_position_embeddings:
        raise ConfigError(
            f"context_tokens {settings.cache.context_tokens} exceeds the model's {t.max_position_embeddings}",
            hint="lower context_tokens in [cache]",
        )
