"""From a checkpoint to a rank's model."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch

from kernels.exl3_record import Exl3Record
from kernels.experts import has_cuda_form
from kernels.numerics import FP32, WEIGHTS_ONLY, Numerics
from kernels.record import Codec, ExpertRecord
from packers.exl3 import refuse_exports
from packers.shards import Checkpoint, TensorSpec
from tided.cache.context import ContextShape
from tided.cache.pool import PAGE_TOKENS, Layout, Pool, Source
from tided.cache.share import ALONE, Share
from tided.errors import ConfigError, DataError, TensorError
from tided.experts.bank import ExpertBank
from tided.experts.checkpoint import Record, described, source_of
from tided.models.glm53.block import load_block
from tided.models.glm53.config import Config, read_config
from tided.models.glm53.drafter import CHAIN, STATES, load_drafter
from tided.models.glm53.model import Glm53
from tided.models.glm53.names import (
    ABSORBED,
    PROJECTIONS,
    block,
    cut_of,
    expert,
    experts_of,
    linears,
    plain_tensors,
    routed_expert_names,
)
from tided.models.glm53.rows import Contexts, row_format
from tided.models.glm53.step import Rotations
from tided.models.glm53.weights import Layout as LinearLayout
from tided.models.glm53.weights import Weights, expected_of, held_bytes, layout_of
from tided.models.own_experts import resident_bank
from tided.models.paged import Shape
from tided.models.parallel import Group
from tided.settings import Settings

log = logging.getLogger("model")

FAMILY = "glm_moe_dsa"
EMBEDDING = "model.embed_tokens.weight"
COPIES = ("embed_tokens", "shared_head.head")  # of the vocabulary, which some exports write twice


def shape_of(c: Config) -> Shape:
    return Shape(
        FAMILY,
        c.vocab_size,
        c.hidden_size,
        moe_layers=c.moe_layers,
        experts_per_layer=c.n_routed_experts,
        top_k=c.num_experts_per_tok,
        context_tokens=c.max_position_embeddings,
        eos_id=c.eos_token_id[0],
    )


def numerics_of(settings: Settings) -> Numerics:
    """Weights are quantised in this family, activations are not: bf16."""
    return WEIGHTS_ONLY if settings.model.numerics == "native" else FP32


def context_bytes(c: Config, settings: Settings) -> int:
    """Of the pool on one rank: all of every context, or its share."""
    pages = -(-settings.cache.pool_tokens // PAGE_TOKENS)
    return pages * _layout(c, settings, settings.parallel.ranks).page_bytes


def drafter_bytes(checkpoint: Checkpoint, settings: Settings) -> int:
    """Of the layer behind the trunk and all of its experts on one rank. Raises ConfigError for a checkpoint without
    one."""
    c, ranks = read_config(checkpoint.config), settings.parallel.ranks
    _require_drafter(c)
    at, layer = f"{block(c.num_hidden_layers)}.", c.num_hidden_layers
    source = source_of(checkpoint, expert_names(checkpoint, c, layer), expert_record(checkpoint, c, ranks, layer), 0)
    experts = sum(source.slot_bytes(0, number) for number in range(c.n_routed_experts))
    return experts + _held_bytes(checkpoint, c, settings, lambda name: name.startswith(at))


def dense_bytes(checkpoint: Checkpoint, settings: Settings) -> int:
    """Of the trunk's weights on one rank, those of its routed experts excepted."""
    c = read_config(checkpoint.config)
    behind = tuple(f"{block(c.num_hidden_layers + i)}." for i in range(c.num_nextn_predict_layers))
    return _held_bytes(checkpoint, c, settings, lambda name: not name.startswith(behind))


def _held_bytes(checkpoint: Checkpoint, c: Config, settings: Settings, counts: Callable[[str], bool]) -> int:
    """What `load` keeps of the tensors and linear layers whose names count: what is no linear layer as fp32, but the
    embedding."""
    ranks, wide = settings.parallel.ranks, _is_widened(settings)
    whole = numerics_of(settings).cache
    held = sum(
        held_bytes(checkpoint, name, shape, cut_of(name, ranks), wide, whole if name.endswith(ABSORBED) else None)
        for name, shape in linears(c).items()
        if counts(name)
    )
    plain = {name: spec for name, spec in plain_tensors(c).items() if counts(name)}
    if plain.pop(EMBEDDING, None) is not None:
        held += checkpoint.tensors[EMBEDDING].nbytes // ranks
    return held + sum(torch.float32.itemsize * math.prod(spec.shape) for spec in plain.values())


def inventory(checkpoint: Checkpoint, settings: Settings) -> Config:
    """Raises TensorError unless the checkpoint holds exactly the model's tensors; the layer behind the trunk may be
    missing where nothing drafts. Gives the configuration of what is there."""
    c = without_missing_drafter(checkpoint, read_config(checkpoint.config), settings.engine.draft)
    checkpoint.require(expected_tensors(checkpoint, c))
    return c


def _is_widened(settings: Settings) -> bool:
    """Whether linear layers are kept as fp32: where a CPU multiplies by them, and where nothing is rounded to bf16."""
    return settings.engine.device == "cpu" or settings.model.numerics == "fp32"


def load(checkpoint: Checkpoint, settings: Settings, group: Group, bank: ExpertBank, device: torch.device) -> Glm53:
    """Reads the rank's dense weights. Raises TensorError for a checkpoint that holds other tensors than its
    configuration says, ConfigError for settings that the model cannot serve."""
    _check(read_config(checkpoint.config), settings, group)
    c = inventory(checkpoint, settings)
    numerics, weights = numerics_of(settings), Weights(checkpoint, group, device, linears(c), _is_widened(settings))
    pool = Pool(_layout(c, settings, group.ranks), settings.cache.pool_tokens, device)
    share = Share(group.rank, group.ranks) if settings.cache.split else ALONE
    contexts = Contexts(pool, row_format(c, settings, numerics), share)
    columns, rows = weights.cut(c.hidden_size), weights.cut(c.vocab_size)
    embed = checkpoint.read(EMBEDDING)[:, columns]
    model = Glm53(
        shape_of(c),
        settings.cache.context_tokens,
        embed=embed.to(device).clone(memory_format=torch.contiguous_format),
        blocks=tuple(
            load_block(weights, c, layer, contexts, bank, numerics, layer - c.first_k_dense_replace)
            for layer in range(c.num_hidden_layers)
        ),
        norm=weights.plain("model.norm.weight"),
        eps=c.rms_norm_eps,
        head=weights.linear("lm_head", rows=rows),
        rotations=Rotations(c.qk_rope_head_dim, c.rope_parameters.rope_theta, device, contexts.share),
        pool=pool,
        context_shape=ContextShape(0, 1, 1, 0, 0, numerics.cache),
        group=group,
        numerics=numerics,
    )
    if settings.engine.draft != "off":
        model = _with_drafter(model, weights, c, contexts, settings.engine.draft)
    checkpoint.unmap()
    return model


def _with_drafter(model: Glm53, weights: Weights, c: Config, contexts: Contexts, draft: str) -> Glm53:
    """The model with the layer behind its trunk, the experts of which are all read into memory of their own."""
    _require_drafter(c)
    record = expert_record(weights.checkpoint, c, weights.group.ranks, c.num_hidden_layers)
    names = expert_names(weights.checkpoint, c, c.num_hidden_layers)
    mixed = described(weights.checkpoint, names, record, 1, c.n_routed_experts)
    record = record if mixed is None else mixed.record
    source = source_of(weights.checkpoint, names, record, weights.group.rank)
    if weights.device.type == "cuda" and model.numerics is not FP32 and not has_cuda_form(record, model.numerics):
        log.warning("the drafter's experts are not EXL3: without kernels for them drafting may cost more than it saves")
    bank = resident_bank(source, record, 1, c.n_routed_experts, weights.device)
    size = int(draft) if draft.isdigit() else CHAIN
    drafter = load_drafter(model, weights, c, contexts, bank, size)
    shape = ContextShape(1, STATES, c.hidden_size, 0, 0, model.numerics.cache)
    return replace(model, drafter=drafter, context_shape=shape)


def _require_drafter(c: Config) -> None:
    if not c.num_nextn_predict_layers:
        raise ConfigError("this checkpoint has no drafter", hint='set draft = "off" in [engine]')


def expected_tensors(checkpoint: Checkpoint, c: Config) -> dict[str, TensorSpec]:
    """The whole inventory, linear layers in the layouts that they have. Copies of the vocabulary in the layer behind
    the trunk may be there, and are not read."""
    layers = c.num_hidden_layers + c.num_nextn_predict_layers
    found = plain_tensors(c)
    for name, shape in linears(c).items():
        found |= expected_of(checkpoint, name, shape)
    for layer in range(c.first_k_dense_replace, layers):
        found |= _expected_experts(checkpoint, c, layer)
    copies = [f"{block(layer)}.{copy}.weight" for layer in range(c.num_hidden_layers, layers) for copy in COPIES]
    return found | {name: found[EMBEDDING] for name in copies if name in checkpoint.tensors}


def _expected_experts(checkpoint: Checkpoint, c: Config, layer: int) -> dict[str, TensorSpec]:
    """Raises TensorError where not all experts of a layer are stored alike: a record has one layout."""
    found: dict[str, TensorSpec] = {}
    kind = expert_layout(checkpoint, c, layer).kind
    for name, shape in experts_of(c, layer).items():
        layout = layout_of(checkpoint, name, *shape)
        if layout.kind != kind:
            raise TensorError(
                f"{name} is stored as {layout.kind}, the first expert of its layer as {kind}",
                where=str(checkpoint.path),
                hint="serve a release whose experts are stored alike",
            )
        found |= {f"{name}.{leaf}": spec for leaf, spec in layout.leaves.items()}
    return found


def without_missing_drafter(checkpoint: Checkpoint, c: Config, draft: str) -> Config:
    """A file that left the layer behind the trunk out serves without drafts, whatever its configuration says."""
    behind = f"{block(c.num_hidden_layers)}."
    if draft != "off" or any(name.startswith(behind) for name in checkpoint.tensors):
        return c
    return msgspec.structs.replace(c, num_nextn_predict_layers=0)


def expert_layout(checkpoint: Checkpoint, c: Config, layer: int) -> LinearLayout:
    """Of all routed experts of a layer of the file: one for all of them."""
    return layout_of(checkpoint, f"{expert(layer, 0)}.{PROJECTIONS[0]}", c.moe_intermediate_size, c.hidden_size)


def expert_names(checkpoint: Checkpoint, c: Config, first: int) -> Callable[[int, int], tuple[str, ...]]:
    """(layer behind `first`, expert) -> its tensors in the order of a record's parts."""
    layout = expert_layout(checkpoint, c, first)
    return routed_expert_names(first, () if layout.kind == "exl3" else tuple(layout.leaves))


def expert_record(checkpoint: Checkpoint, c: Config, ranks: int, layer: int) -> Record:
    """Of the experts of a layer of the file."""
    layout = expert_layout(checkpoint, c, layer)
    if layout.kind == "exl3":
        refuse_exports(checkpoint)
    elif layout.kind not in ("mxfp4", "plain"):
        raise DataError(
            f"routed experts in {layout.kind.upper()} are not served",
            where=str(checkpoint.path),
            hint="serve a release whose experts are MXFP4, EXL3 or BF16",
        )
    codec: Codec = "mxfp4" if layout.kind == "mxfp4" else "bf16"
    try:
        if layout.kind == "exl3":
            return Exl3Record(c.hidden_size, c.moe_intermediate_size, ranks)
        return ExpertRecord(c.hidden_size, c.moe_intermediate_size, ranks, codec)
    except ValueError as e:
        raise ConfigError(str(e), hint="choose fewer ranks") from e


def _layout(c: Config, settings: Settings, ranks: int) -> Layout:
    """Of the trunk's layers, and of the drafter's where there is one. A rank that shares contexts has a row for as many
    tokens as there are ranks."""
    layers = c.num_hidden_layers + (settings.engine.draft != "off")
    ratio = ranks if settings.cache.split else 1
    sources = tuple(Source(layer, ratio, keyed=c.selects(layer)) for layer in range(layers))
    numerics = numerics_of(settings)
    rows = row_format(c, settings, numerics)
    return Layout(sources, rows.width, c.index_head_dim, rows.dtype, numerics.cache)


def check_cache(settings: Settings) -> None:
    """Raises ConfigError for ranks that cannot share a page."""
    if settings.cache.split and PAGE_TOKENS % settings.parallel.ranks:
        raise ConfigError(
            f"{settings.parallel.ranks} ranks cannot share contexts evenly: a page has {PAGE_TOKENS} tokens",
            where="cache.split",
            hint="set split = false in [cache], or choose 2, 4 or 8 ranks",
        )


def _check(c: Config, settings: Settings, group: Group) -> None:
    """Raises ConfigError naming every dimension that the ranks cannot share, and a context that is too long."""
    shared = {
        "num_attention_heads": c.num_attention_heads,
        "intermediate_size": c.intermediate_size,
        "moe_intermediate_size": c.moe_intermediate_size,
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
    }
    uneven = [f"{name} {size}" for name, size in shared.items() if size % group.ranks]
    if uneven:
        raise ConfigError(
            f"{group.ranks} ranks cannot share {', '.join(uneven)}", hint="choose a number of ranks that divides them"
        )
    if settings.cache.context_tokens > c.max_position_embeddings:
        raise ConfigError(
            f"context_tokens {settings.cache.context_tokens} exceeds the model's {c.max_position_embeddings}",
            hint="lower context_tokens in [cache]",
        )
