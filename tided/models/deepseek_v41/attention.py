"""Latent attention of a layer: this rank's heads over the window and the selected compressed rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import latent_attention
from kernels.linear import Matrix, fp8_linear, grouped_linear, rows_of, stacked
from kernels.norm import rms_norm
from kernels.numerics import Numerics
from kernels.rope import rotate_
from kernels.rows import by_row
from tided.cache.context import Context
from tided.cache.pool import Pool
from tided.models.deepseek_v41.compressor import Compressor, load_compressor
from tided.models.deepseek_v41.config import TextConfig
from tided.models.deepseek_v41.indexer import Indexer, load_indexer
from tided.models.deepseek_v41.step import Pass, Rotations, Span
from tided.models.deepseek_v41.weights import Weights

_ROW_ELEMENTS = 1 << 22  # bounds the [queries, rows, head_dim] gather of a prompt chunk


@dataclass(frozen=True)
class Attention:
    layer: int
    ratio: int
    source: int | None  # the layer whose compressed rows are read
    window: int
    head_dim: int
    eps: float
    inputs: Matrix  # wq_a over wkv
    q_norm: Tensor
    wq_b: Matrix  # this rank's heads
    kv_norm: Tensor
    wo_a: Matrix  # [groups * o rank, heads of a group * head_dim], this rank's groups
    wo_b: Matrix  # [D, this rank's groups * o rank]
    sink: Tensor
    compressor: Compressor | None
    indexer: Indexer | None
    pool: Pool
    numerics: Numerics

    @property
    def wq_a(self) -> Matrix:
        return rows_of(self.inputs, 0, self.q_norm.numel())

    @property
    def wkv(self) -> Matrix:
        return rows_of(self.inputs, self.q_norm.numel(), self.inputs.shape[0])

    def forward(self, step: Pass, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D] fp32: the part of this rank's heads, to be summed over the ranks and then rounded."""
        n, turn = self.numerics, step.turn(self.ratio)
        q_latent = n.store(rms_norm(n.store(fp8_linear(x, self.wq_a, n.activation)), self.q_norm, self.eps))
        query = n.store(fp8_linear(q_latent, self.wq_b, n.activation)).view(len(x), -1, self.head_dim)
        query = n.store(rotate_(query, turn))
        row = self.window_row(x, turn)
        self.compress(step, x)
        if self.indexer is not None:
            self.indexer.select(step, x, q_latent)
        heads = [self._attend(span, query[span.rows], row[span.rows]) for span in step.spans]
        output = n.store(rotate_(n.store(torch.cat(heads)), turn.conj()))
        grouped = output.view(len(x), -1, self.wo_a.shape[-1])
        latent = n.store(by_row(lambda o: grouped_linear(o, self.wo_a), grouped))
        return fp8_linear(latent, self.wo_b, n.activation)

    def window_row(self, x: Tensor, turn: Tensor) -> Tensor:
        """x [T, D], turn its rotation -> [T, d]: key and value at once, as the window holds it."""
        n = self.numerics
        row = n.store(rms_norm(n.store(fp8_linear(x, self.wkv, n.activation)), self.kv_norm, self.eps))
        return n.window(n.store(rotate_(row, turn)))

    def compress(self, step: Pass, x: Tensor) -> None:
        """Writes what x [T, D] adds to the global context, if this layer is a source."""
        if self.compressor is not None:
            self.compressor.write(step, x)

    def _attend(self, span: Span, query: Tensor, row: Tensor) -> Tensor:
        """query [T, H, d], row [T, d] of one lane -> [T, H, d]; the lane's ring takes the rows."""
        if span.count == 1:
            return self._attend_one(span, query, row)
        windows, seen = self._windows(span, row)
        self.keep(span.lane, span.start, row)
        selected = None if self.source is None else span.selection
        size = self.window + (0 if selected is None else selected.places.shape[1])
        block = max(1, _ROW_ELEMENTS // (size * self.head_dim))
        parts = []
        for i in range(0, span.count, block):
            cut = slice(i, i + block)
            rows, valid = windows[cut], seen[cut]
            if selected is not None and self.source is not None:
                chosen = self.pool.rows[self.source][selected.places[cut]].to(torch.float32)
                rows = torch.cat([rows, chosen], 1)
                visible = seen.new_ones(chosen.shape[:2]) if selected.valid is None else selected.valid[cut]
                valid = torch.cat([valid, visible], 1)
            parts.append(self._softmax(query[cut], rows, valid))
        return torch.cat(parts)

    def _attend_one(self, span: Span, query: Tensor, row: Tensor) -> Tensor:
        """One new row: the ring itself is the window, in the order of its places."""
        self.keep(span.lane, span.start, row)
        rows = span.lane.windows[self.layer, : span.end].unsqueeze(0).to(torch.float32)
        if self.source is None or span.selection is None:
            return self._softmax(query, rows, None)
        chosen = span.selection
        places = chosen.places[0] if chosen.valid is None else chosen.places[chosen.valid]
        picked = self.pool.rows[self.source].index_select(0, places).to(torch.float32)
        return self._softmax(query, torch.cat([rows, picked.unsqueeze(0)], 1), None)

    def _windows(self, span: Span, row: Tensor) -> tuple[Tensor, Tensor]:
        """The rows each query sees, oldest first, [T, window, d], and which of them exist, [T, window] bool."""
        before = torch.arange(span.start - self.window + 1, span.start, device=row.device)
        past = span.lane.windows[self.layer][before % self.window].to(torch.float32)
        reach = torch.arange(span.start - self.window + 1, span.end, device=row.device)
        seen = (reach >= span.floor).unfold(0, self.window, 1)
        return torch.cat([past, row]).unfold(0, self.window, 1).transpose(1, 2), seen

    def keep(self, lane: Context, start: int, row: Tensor) -> None:
        """Puts the newest rows into the ring at their positions."""
        kept = row[-self.window :].to(lane.windows.dtype)
        if len(row) == 1:
            lane.windows[self.layer, start % self.window] = kept[0]
            return
        end = start + len(row)
        places = torch.arange(end - len(kept), end, device=row.device) % self.window
        lane.windows[self.layer][places] = kept

    def _softmax(self, query: Tensor, rows: Tensor, valid: Tensor | None) -> Tensor:
        return latent_attention(query, rows, valid, self.sink, self.head_dim**-0.5, self.numerics.probability)


def load_attention(
    weights: Weights, t: TextConfig, layer: int, pool: Pool, rotations: Rotations, numerics: Numerics
) -> Attention:
    """`weights` at `layers.L.attn`. Heads, output groups and the inputs of wo_b are cut over the ranks alike."""
    heads, groups = weights.cut(t.num_attention_heads), weights.cut(t.o_groups)
    head_rows = slice(heads.start * t.head_dim, heads.stop * t.head_dim)
    group_rows = slice(groups.start * t.o_lora_rank, groups.stop * t.o_lora_rank)
    compresses, selects = layer in t.kv_source_layer_ids, layer in t.index_source_layer_ids
    return Attention(
        layer,
        t.compress_ratios[layer],
        t.kv_source_of(layer),
        t.sliding_window,
        t.head_dim,
        t.rms_norm_eps,
        inputs=stacked(weights.fp8("wq_a"), weights.fp8("wkv")),
        q_norm=weights.plain("q_norm.weight"),
        wq_b=weights.fp8("wq_b", rows=head_rows),
        kv_norm=weights.plain("kv_norm.weight"),
        wo_a=weights.fp8("wo_a", rows=group_rows),
        wo_b=weights.fp8("wo_b", columns=group_rows),
        sink=weights.plain("attn_sink", rows=heads),
        compressor=load_compressor(weights, t, layer, pool, rotations, numerics) if compresses else None,
        indexer=load_indexer(weights, t, layer, pool, numerics) if selects else None,
        pool=pool,
        numerics=numerics,
    )
