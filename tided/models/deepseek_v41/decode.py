"""A decode step of fixed shape: the model's mathematics for R rows by the kernels of `kernels/*_triton.py`.

Whatever changes from step to step is read from memory of fixed address: `Inputs`. Nothing here looks at a value, so
the same code runs eagerly and is captured into graphs (`captured`). The rows of a lane are in order, and see each other
as if each had been a step of its own; what they leave behind in the lane's ring is written at the very end."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import attention_triton, compressor_triton, engram_triton, experts_triton, hyper_triton, indexer_triton
from kernels import latents_triton as latents
from kernels import router_triton as router
from kernels.device import INTERPRETED
from kernels.hyper_triton import Mixed, Mixer
from kernels.linear import Matrix
from kernels.linear_triton import Ending, linear
from tided.cache.pool import PAGE_TOKENS
from tided.models.deepseek_v41.attention import Attention
from tided.models.deepseek_v41.block import Block, HyperConnection
from tided.models.deepseek_v41.indexer import Indexer
from tided.models.deepseek_v41.moe import Moe
from tided.models.deepseek_v41.routed import routed_experts
from tided.models.deepseek_v41.step import Pass

if TYPE_CHECKING:
    from tided.models.deepseek_v41.model import DeepseekV41

POSITION, LANE = 1, 2  # of a row's fields; see `rounding_triton`


@dataclass(frozen=True)
class Scratch:
    """What steps of any row count write and read again, one after another: for up to ROWS rows, scores [rows, most
    entries], block_scores and kept [rows, most blocks], places [rows, top_k]."""

    scores: Tensor
    block_scores: Tensor
    kept: Tensor
    places: Tensor


@dataclass(frozen=True)
class Inputs:
    """meta [R, ROW_FIELDS] int64; engram: of each Engram layer [R, columns, row bytes] uint8; both are written on the
    host (`_here`, pinned), and copied by the step. What comes out: held [rings, R, d] bf16, new rows of all rings;
    routed, [layers, R, k] each."""

    meta_here: Tensor
    meta: Tensor
    engram_here: dict[int, Tensor]
    engram: dict[int, Tensor]
    held: Tensor
    routed: router.Routed

    def routed_of(self, layer: int) -> router.Routed:
        return router.Routed(*(field[layer] for field in vars(self.routed).values()))


@dataclass(frozen=True)
class Turns:
    """cos and sin [R, r / 2], by compression: 0 for layers without, else the token's own; `starts`: of the first
    position of a row's group."""

    own: dict[int, tuple[Tensor, Tensor]]
    starts: dict[int, tuple[Tensor, Tensor]]


class DecodeStep:
    """R rows of a model. `waiting`: the pass, when rows may wait for experts: then each layer looks at the choice."""

    def __init__(self, model: "DeepseekV41", inputs: Inputs, scratch: Scratch) -> None:
        self.model, self.inputs, self.scratch = weakref.proxy(model), inputs, scratch
        self.rows = len(inputs.meta)
        self.waiting: Pass | None = None
        self.logits: Tensor | None = None
        self._candidates: Indexer | None = None
        streams, device = model.blocks[0].hc_attn.streams, inputs.meta.device
        self._first = torch.zeros(self.rows, streams, device=device)
        self._first[:, 0] = 1.0
        self._mean = torch.full((self.rows, streams), 1.0 / streams, device=device)

    def parts(self) -> Iterator[int]:
        """Computes all of it; yields an Engram layer's number before its rows are needed. Then `logits` [R, V]."""
        model, inputs = self.model, self.inputs
        inputs.meta.copy_(inputs.meta_here, non_blocking=True)
        turns, places, taps, self._candidates = self._turns(), None, [], None
        streams = model.embedded(inputs.meta[:, 0]).to(torch.bfloat16)
        pre, partial = self._first, None
        for number, block in enumerate(model.blocks):
            engram = model.engrams.layers.get(block.layer)
            if engram is not None:
                yield block.layer
                inputs.engram[block.layer].copy_(inputs.engram_here[block.layer], non_blocking=True)
                active = engram_triton.activation(inputs.engram[block.layer])
                engram_triton.mix_(streams, linear(active, engram.wkv, Ending.STORED), engram.weight)
            if block.layer in model.tapped:
                taps.append(hyper_triton.collapse(streams, self._mean, None, 0.0)[1])
            if partial is None:
                partial = hyper_triton.spread(streams, None, None, block.hc_attn.fn)[1]
            assert partial is not None
            mixed = hyper_triton.finish(partial, streams, pre, _mixer(block.hc_attn, block.attn_norm, block.eps))
            places = self._selected(block.attention, mixed, turns, places)
            output = model.group.gather(self._attention(block, mixed, turns, places))
            streams, partial = hyper_triton.spread(streams, output, mixed, block.hc_ffn.fn)
            assert partial is not None
            mixed = hyper_triton.finish(partial, streams, mixed.pre, _mixer(block.hc_ffn, block.ffn_norm, block.eps))
            output = model.group.gather(self._moe(block.moe, mixed))
            follows = model.blocks[number + 1] if number + 1 < len(model.blocks) else None
            at_once = follows is not None and follows.layer not in model.engrams.layers
            fn = follows.hc_attn.fn if follows is not None and at_once else None
            streams, partial = hyper_triton.spread(streams, output, mixed, fn)
            pre = mixed.pre
        if model.drafter is not None:
            self._watch(taps, turns)
        latents.keep_rows(inputs.meta, inputs.held, model.context_shape.window)
        x, _ = hyper_triton.collapse(streams, pre, model.norm, model.eps)
        self.logits = model.group.concat(linear(x, model.head, Ending.SUM))

    def _turns(self) -> Turns:
        positions, rotations = self.inputs.meta[:, POSITION], self.model.rotations
        ratios = {block.attention.ratio for block in self.model.blocks if block.attention.compressor is not None}
        plain, compressed = rotations.angles(positions)
        own = dict.fromkeys(ratios, compressed) | {0: plain}
        starts = {ratio: rotations.angles(positions // ratio * ratio)[1] for ratio in ratios if ratio > 1}
        return Turns(own, starts | ({1: compressed} if 1 in ratios else {}))

    def _selected(self, attention: Attention, mixed: Mixed, turns: Turns, places: Tensor | None) -> Tensor | None:
        """The query's latent and the new rows of this layer, then what it selects: `places` of the source before, or
        its own."""
        cos, sin = turns.own[attention.ratio]
        self._query = latents.latents(
            _in_parts(mixed.rounded, attention.inputs), attention.q_norm, attention.kv_norm, cos, sin, attention.eps,
            self.inputs.held[attention.layer],
        )  # fmt: skip
        compressor, meta = attention.compressor, self.inputs.meta
        if compressor is not None:
            latent = compressor_triton.pool(
                _in_parts(mixed.x, compressor.inputs), meta, compressor.norm, compressor.eps,
                self.model.remainder_layers.index(compressor.layer) if compressor.ratio > 1 else 0, compressor.ratio,
            )  # fmt: skip
            compressor_triton.append(
                _in_parts(latent, compressor.wk), meta, latent, compressor.k_norm, *turns.starts[compressor.ratio],
                compressor.eps, compressor.pool.rows[compressor.layer], compressor.pool.keys[compressor.layer],
                PAGE_TOKENS // compressor.ratio, compressor.ratio,
            )  # fmt: skip
        if attention.indexer is not None:
            places = self.scratch.places[: self.rows]
            self._select(attention.indexer, mixed, turns, places)
        return places

    def _select(self, indexer: Indexer, mixed: Mixed, turns: Turns, places: Tensor) -> None:
        meta, scratch, ratio = self.inputs.meta, self.scratch, indexer.ratio
        scores, kept = scratch.scores[: self.rows], scratch.kept[: self.rows]
        page = {"ratio": ratio, "page_size": PAGE_TOKENS // ratio}
        if indexer.publishes:
            self._candidates = indexer
        pool = self._candidates
        bound = indexer_triton.UNLIMITED if pool is None else pool.blocks * pool.block_size
        query = indexer_triton.query(
            _in_parts(self._query, indexer.wq_b), *turns.own[ratio], indexer.heads
        )  # fmt: skip
        indexer_triton.scores(
            query, _in_parts(mixed.x, indexer.weights_proj), meta, indexer.pool.keys[indexer.source], scores,
            kept if pool is not None and not indexer.publishes else None, block_size=indexer.block_size,
            least=min(bound, indexer.top_k), bound=bound, **page,
        )  # fmt: skip
        if indexer.publishes:
            indexer_triton.keep_blocks(
                scores, meta, scratch.block_scores[: self.rows], kept, ratio=ratio, blocks=indexer.blocks,
                block_size=indexer.block_size,
            )  # fmt: skip
        indexer_triton.select(scores, meta, places, least=min(bound, indexer.top_k), **page)

    def _attention(self, block: Block, mixed: Mixed, turns: Turns, places: Tensor | None) -> Tensor:
        """-> [R, D] fp32, the part of this rank's heads."""
        one, inputs = block.attention, self.inputs
        query = linear(self._query, one.wq_b, Ending.STORED).view(self.rows, -1, one.head_dim)
        rows, places = (None, None) if one.source is None else (one.pool.rows[one.source], places)
        seen = attention_triton.attend(
            query, *turns.own[one.ratio], inputs.meta, inputs.held[one.layer], one.layer, one.window, rows, places,
            one.sink, one.head_dim**-0.5,
        )  # fmt: skip
        seen = seen.view(self.rows, -1)
        latent = linear(seen, one.wo_a, Ending.ACTIVATION, groups=seen.shape[1] // one.wo_a.shape[1])
        return linear(latent, one.wo_b, Ending.SUM)

    def _moe(self, moe: Moe, mixed: Mixed) -> Tensor:
        """-> [R, D] fp32, this rank's part."""
        parts, x = _in_parts(mixed.x, moe.gate), mixed.rounded

        def shared() -> Tensor:
            return linear(x, moe.shared_w13, Ending.SWIGLU, limit=moe.limit)

        if self.waiting is None:
            output, hidden = self._here(moe, parts, x), shared()
        else:
            output, hidden = routed_experts(moe, self.waiting, parts, x, experts_triton.pick_outputs, shared)
        return linear(hidden, moe.shared_w2, Ending.ADDED, out=output)

    def _here(self, moe: Moe, parts: Tensor, x: Tensor) -> Tensor:
        """`routed_experts`, where nobody waits: into memory of fixed address. Its demand is counted behind the step."""
        bank, routed = moe.bank, self.inputs.routed_of(moe.layer)
        tables = bank.tables.routable[moe.layer], bank.tables.slot_of[moe.layer]
        router.route(parts, moe.bias, *tables, moe.top_k, moe.route_scale, routed)
        work = (x, bank.slots, bank.plain_record, routed.slots, routed.weights, moe.limit)
        return experts_triton.grouped_experts(*work, asm=not INTERPRETED)

    def _watch(self, taps: list[Tensor], turns: Turns) -> None:
        """The rows of the drafter's own rings (`Drafter.watch`)."""
        drafter = self.model.drafter
        assert drafter is not None
        main = latents.normed(
            _in_parts(torch.cat(taps, 1), drafter.main_proj), drafter.main_norm, drafter.eps
        )  # fmt: skip
        for block in drafter.blocks:
            one = block.attention
            held = self.inputs.held[one.layer]
            latents.window_row(_in_parts(main, one.wkv), one.kv_norm, *turns.own[0], one.eps, held)


def _mixer(by: HyperConnection, norm: Tensor, norm_eps: float) -> Mixer:
    return Mixer(by.fn, by.scale, by.base, by.iterations, by.eps, norm, norm_eps)


def _in_parts(x: Tensor, weight: Matrix) -> Tensor:
    return linear(x, weight, Ending.PARTS)
