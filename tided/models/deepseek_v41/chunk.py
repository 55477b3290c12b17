"""A chunk of a prompt by the kernels of `kernels/*_triton.py`: the decode step's (`decode`) where they take any number
of rows, and forms of their own for products, hyper-connections and attention.

All rows are one lane's, at positions that follow each other. The host reads nothing but what a request that waits for
experts makes it read, so its launches run ahead of the device."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import (
    attention_chunk_triton,
    engram_triton,
    experts_chunk_triton,
    experts_triton,
    hyper_chunk_triton,
    hyper_triton,
    indexer_triton,
)
from kernels import latents_triton as latents
from kernels import linear_chunk_triton as linear
from kernels.device import ROW_FIELDS
from kernels.hyper_triton import Mixed, Mixer
from kernels.linear import Fp8Matrix
from kernels.linear_triton import Ending
from kernels.rows import ROWS
from tided.cache.pool import PAGE_TOKENS
from tided.models.base import Layers, Pictured
from tided.models.deepseek_v41.attention import Attention
from tided.models.deepseek_v41.block import Block, HyperConnection
from tided.models.deepseek_v41.engram_rows import Asked
from tided.models.deepseek_v41.indexer import Indexer
from tided.models.deepseek_v41.moe import Moe
from tided.models.deepseek_v41.routed import routed_experts
from tided.models.deepseek_v41.step import Pass, Span

if TYPE_CHECKING:
    from tided.models.deepseek_v41.model import DeepseekV41

POSITION, PAGES = 1, 4  # of a row's fields; see `rounding_triton`
SCORES = 1 << 26  # of an indexer at a time: rows times entries


@dataclass(frozen=True)
class Rows:
    """What all layers know of the rows [T] of a pass: where they stand, and where their window lies in a ring."""

    span: Span
    meta: Tensor  # [T, ROW_FIELDS], of which kernels that only look at position and pages read two
    plain: tuple[Tensor, Tensor]  # cos and sin [T, r / 2]
    compressed: tuple[Tensor, Tensor]
    before: Tensor  # places in a ring of the window - 1 rows before the first
    kept: Tensor  # places in a ring of the newest rows

    def turn(self, ratio: int) -> tuple[Tensor, Tensor]:
        return self.compressed if ratio else self.plain


def rows_of(step: Pass, window: int) -> Rows:
    (span,), device = step.spans, step.positions.device
    meta = torch.zeros(span.count, ROW_FIELDS, dtype=torch.int64, device=device)
    meta[:, POSITION], meta[:, PAGES] = step.positions, span.lane.page_table.data_ptr()
    plain, compressed = ((turn.real.contiguous(), turn.imag.contiguous()) for turn in (step.plain, step.compressed))
    before = torch.arange(span.start - window + 1, span.start, device=device) % window
    kept = torch.arange(max(span.start, span.end - window), span.end, device=device) % window
    return Rows(span, meta, plain, compressed, before, kept)


class Chunk:
    """One pass over a chunk. Used once."""

    def __init__(self, model: "DeepseekV41", step: Pass) -> None:
        self.model, self.step = model, step
        self._window = model.context_shape.window
        self._rows = rows_of(step, self._window)
        self._places: Tensor | None = None  # what the last index source selected
        self._pool: tuple[Indexer, Tensor] | None = None  # who limits later layers, and to what [T, blocks] uint8

    def layers(self, token_ids: Tensor, asked: dict[int, Asked], bounded: bool, pictured: Pictured | None) -> Layers:
        """As `DeepseekV41.layers`."""
        model, streams = self.model, model_streams(self.model, token_ids, pictured)
        pre, taps = one_hot(streams), list[Tensor]()
        partial: Tensor | None = None
        for number, block in enumerate(model.blocks):
            if number:
                yield
            if block.layer in model.engrams.layers:
                streams = self._engram(block.layer, streams, asked[block.layer])
            if bounded and block.layer == model.last_kv_source:
                streams, pre = self._leave(block, streams, pre)
                partial = None
            if block.layer in model.tapped:
                taps.append(self._tap(streams))
            if partial is None:
                partial = hyper_chunk_triton.spread(streams, None, None, block.hc_attn.fn)[1]
            assert partial is not None
            mixed = hyper_triton.finish(partial, streams, pre, mixer(block.hc_attn, block.attn_norm, block.eps))
            output = model.group.sum(self._attention(block.attention, mixed))
            streams, partial = hyper_chunk_triton.spread(streams, output, mixed, block.hc_ffn.fn)
            assert partial is not None
            mixed = hyper_triton.finish(partial, streams, mixed.pre, mixer(block.hc_ffn, block.ffn_norm, block.eps))
            output = model.group.sum(self._moe(block.moe, mixed))
            fn = self._next_fn(number, bounded)
            streams, partial = hyper_chunk_triton.spread(streams, output, mixed, fn)
            pre = mixed.pre
            del mixed, output  # where it stops here, others are computed beside what it holds
        if model.drafter is not None:
            self._watch(taps)
        self._rows.span.lane.position = self._rows.span.end
        return hyper_triton.collapse(streams, pre, None, 0.0)[0].to(torch.float32)

    def _next_fn(self, number: int, bounded: bool) -> Tensor | None:
        """Of the mix that follows at once; None: the streams change before it, or there is none."""
        model = self.model
        if number + 1 == len(model.blocks):
            return None
        follows = model.blocks[number + 1]
        changed = follows.layer in model.engrams.layers or (bounded and follows.layer == model.last_kv_source)
        return None if changed else follows.hc_attn.fn

    def _engram(self, layer: int, streams: Tensor, asked: Asked) -> Tensor:
        part, step = self.model.engrams.layers[layer], self.step
        raw = torch.from_numpy(asked.raw()[step.skipped :]).to(streams.device)
        projected = linear.product(engram_triton.activation(raw), part.wkv).to(torch.bfloat16)
        before = streams if step.pictured is None else streams.clone()
        engram_triton.mix_(streams, projected, part.weight)
        return streams if step.pictured is None else torch.where(step.pictured[:, None, None], before, streams)

    def _leave(self, block: Block, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        """Bounded replay: the rows before the last window owe the global context, and nothing else."""
        x = hyper_triton.collapse(streams, pre, block.attn_norm, block.eps)[0]
        self._compress(block.attention, x)
        span = self._rows.span
        kept = min(self._window, span.count)
        self.step = self.step.tail(kept, max(0, span.end - self._window))
        self._rows = rows_of(self.step, self._window)
        return streams[-kept:], pre[-kept:]

    def _tap(self, streams: Tensor) -> Tensor:
        """-> [n, D] fp32 of the newest rows: older ones would leave the drafter's windows at once."""
        last = streams[-self._window :]
        mean = torch.full(last.shape[:2], 1.0 / last.shape[1], device=last.device)
        return hyper_triton.collapse(last, mean, None, 0.0)[0].to(torch.float32)

    def _watch(self, taps: list[Tensor]) -> None:
        drafter, span = self.model.drafter, self._rows.span
        assert drafter is not None
        drafter.watch(self.step.tail(min(self._window, span.count), span.floor), taps)

    def _compress(self, one: Attention, x: Tensor) -> None:
        compressor = one.compressor
        if compressor is not None and compressor.layer not in self.step.written:
            products, width = linear.product(x, compressor.inputs), compressor.norm.numel()
            gates = products[:, -width:].contiguous()
            compressor.write_products(self.step, products[:, :width].contiguous(), gates)

    def _attention(self, one: Attention, mixed: Mixed) -> Tensor:
        """-> [T, D] fp32, the part of this rank's heads."""
        rows, span, width = self._rows, self._rows.span, one.head_dim
        cos, sin = rows.turn(one.ratio)
        near = torch.empty(self._window - 1 + span.count, width, dtype=torch.bfloat16, device=mixed.x.device)
        ring = span.lane.windows[one.layer]
        torch.index_select(ring, 0, rows.before, out=near[: self._window - 1])
        latent = latents.latents(
            linear.product(mixed.rounded, one.inputs)[None], one.q_norm, one.kv_norm, cos, sin, one.eps,
            near[self._window - 1 :],
        )  # fmt: skip
        ring.index_copy_(0, rows.kept, near[-len(rows.kept) :])
        self._compress(one, mixed.x)
        if one.indexer is not None:
            self._places = self._selected(one.indexer, mixed.x, latent)
        query = linear.product(latent, one.wq_b).view(span.count, -1, width)
        held = None if one.source is None else one.pool.rows[one.source]
        seen = attention_chunk_triton.attend(
            query, cos, sin, near, span.start, span.floor, held, None if held is None else self._places, one.ratio,
            one.sink, width**-0.5,
        )  # fmt: skip
        seen = seen.view(span.count, -1)
        groups, wo_a = seen.shape[1] // one.wo_a.shape[1], one.wo_a
        assert isinstance(wo_a, Fp8Matrix)
        out = linear.ended(linear.grouped(seen, wo_a, groups), Ending.ACTIVATION)
        return linear.product(out, one.wo_b)

    def _selected(self, indexer: Indexer, x: Tensor, latent: Tensor) -> Tensor:
        """x [T, D], latent [T, q rank] -> places [T, top_k] int32, -1 behind what a row sees."""
        rows, ratio = self._rows, indexer.ratio
        count, entries = rows.span.count, rows.span.end // ratio
        bound = indexer.blocks * indexer.block_size
        places = torch.empty(count, indexer.top_k, dtype=torch.int32, device=x.device)
        if indexer.publishes:
            blocks = _padded(-(-entries // indexer.block_size))
            kept = torch.empty(count, blocks, dtype=torch.uint8, device=x.device)
            self._pool = (indexer, kept) if entries > bound else None
        limits = self._pool is not None
        least = min(indexer.top_k, bound) if limits else indexer.top_k
        size = count
        query = weights = None
        if entries > least:
            query = indexer_triton.query(linear.product(latent, indexer.wq_b)[None], *rows.turn(ratio), indexer.heads)
            weights = linear.product(x, indexer.weights_proj)
            size = max(1, SCORES // entries)
        for first in range(0, count, size):
            self._select(indexer, slice(first, first + size), places, query, weights, least)
        return places

    def _select(
        self, indexer: Indexer, part: slice, places: Tensor, query: Tensor | None, weights: Tensor | None, least: int
    ) -> None:
        """A part of the rows, so that memory does not grow with rows times entries."""
        meta, ratio = self._rows.meta[part], indexer.ratio
        page = {"ratio": ratio, "page_size": PAGE_TOKENS // ratio}
        if query is None or weights is None:
            score = torch.empty(
                len(meta), _padded(1), device=meta.device
            )  # nobody reads it: what a row sees is taken whole
            indexer_triton.select(score, meta, places[part], least=least, **page)
            return
        score = torch.empty(len(meta), _padded(self._rows.span.end // ratio), device=meta.device)
        pool = None if self._pool is None else self._pool[1][part]
        bound = indexer_triton.UNLIMITED if pool is None else indexer.blocks * indexer.block_size
        indexer_triton.scores(
            query[part], weights[None, part], meta, indexer.pool.keys[indexer.source], score,
            None if indexer.publishes else pool, block_size=indexer.block_size, least=least, bound=bound, **page,
        )  # fmt: skip
        if indexer.publishes and pool is not None:
            indexer_triton.keep_blocks(
                score, meta, torch.empty(pool.shape, device=meta.device), pool, ratio=ratio, blocks=indexer.blocks,
                block_size=indexer.block_size,
            )  # fmt: skip
        indexer_triton.select(score, meta, places[part], least=least, **page)

    def _moe(self, moe: Moe, mixed: Mixed) -> Tensor:
        """-> [T, D] fp32, this rank's part."""
        x = mixed.rounded
        few = len(x) <= ROWS and moe.limit <= experts_triton.MAX_LIMIT
        most = moe.bank.tables.slot_of.shape[1]  # slots are of all layers, a layer picks no more
        form = (
            experts_triton.pick_outputs if few else functools.partial(experts_chunk_triton.pick_outputs, distinct=most)
        )

        def shared() -> Tensor:
            return linear.ended(linear.product(x, moe.shared_w13)[None], Ending.SWIGLU, moe.limit)

        parts = linear.product(mixed.x, moe.gate)[None]
        output, hidden = routed_experts(moe, self.step, parts, x, form, shared)
        return output.add_(linear.product(hidden, moe.shared_w2))


def model_streams(model: "DeepseekV41", token_ids: Tensor, pictured: Pictured | None) -> Tensor:
    """token_ids [T] -> streams [T, S, D] bf16, all equal; rows of images in place of their tokens."""
    row = model.group.concat(model.embed[token_ids.to(model.embed.device)].to(torch.float32)).to(torch.bfloat16)
    if pictured is not None:
        row[pictured.places] = pictured.rows.to(torch.bfloat16)
    return row.unsqueeze(1).repeat(1, model.blocks[0].hc_attn.streams, 1)


def _padded(columns: int) -> int:
    """A width of one kind: kernels are compiled apart for 1, for multiples of 16, and for others."""
    return -(-columns // 16) * 16


def one_hot(streams: Tensor) -> Tensor:
    pre = torch.zeros(streams.shape[:2], device=streams.device)
    pre[:, 0] = 1.0
    return pre


def mixer(by: HyperConnection, norm: Tensor, norm_eps: float) -> Mixer:
    return Mixer(by.fn, by.scale, by.base, by.iterations, by.eps, norm, norm_eps)
