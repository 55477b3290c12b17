"""The layers that choose which compressed rows a query attends to; the layers behind use the same choice."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.indexer import best, candidate_mask, index_scores
from kernels.linear import fp8_linear
from kernels.numerics import Numerics
from kernels.rope import rotate_
from kernels.rows import matmul
from tided.cache.pool import Pool, first_rows, physical_rows
from tided.models.deepseek_v41.config import TextConfig
from tided.models.deepseek_v41.step import Pass, Selection, Span
from tided.models.deepseek_v41.weights import Weights


@dataclass(frozen=True)
class Indexer:
    layer: int
    source: int  # the layer whose keys and rows are scored
    ratio: int
    top_k: int
    heads: int
    head_dim: int
    wq_b: Tensor  # [heads * head_dim, q rank]
    weights_proj: Tensor  # [heads, D]
    publishes: bool  # this layer decides the candidate pool of the layers behind
    blocks: int
    block_size: int
    pool: Pool
    numerics: Numerics

    def select(self, step: Pass, x: Tensor, q_latent: Tensor) -> None:
        """x [T, D] the attention's input, q_latent [T, q rank]: sets the selection of every span."""
        query: Tensor | None = None
        for span in step.spans:
            entries = span.end // self.ratio
            if not self._must_score(span, entries):
                span.selection = self._everything(span, entries, step.positions[span.rows])
                continue
            if query is None:
                query, weight = self._query(step, x, q_latent)
            visible = (step.positions[span.rows] + 1) // self.ratio
            score = self._scores(span, query[span.rows], weight[span.rows], visible)
            span.selection = self._chosen(span, score)

    def _must_score(self, span: Span, entries: int) -> bool:
        """Where all that is visible fits, it is taken without asking, unless later layers need the scores."""
        limits = self.publishes and entries > self.blocks * self.block_size
        return entries > self.top_k or limits or span.candidates is not None

    def _query(self, step: Pass, x: Tensor, q_latent: Tensor) -> tuple[Tensor, Tensor]:
        """-> query [T, heads, head_dim], head weights [T, heads]."""
        n = self.numerics
        query = n.store(fp8_linear(q_latent, self.wq_b, n.activation)).view(-1, self.heads, self.head_dim)
        query = n.index(n.store(rotate_(query, step.turn(self.ratio))))
        return query, n.store(matmul(x, self.weights_proj)) * (self.head_dim**-0.5 * self.heads**-0.5)

    def _scores(self, span: Span, query: Tensor, weight: Tensor, visible: Tensor) -> Tensor:
        """-> [T, entries] with -inf where a query does not see an entry. Later layers' pool limits come after."""
        entries = span.end // self.ratio
        keys = first_rows(span.lane, self.ratio, entries, self.pool.keys[self.source]).to(torch.float32)
        score = index_scores(query, weight, keys)
        score.masked_fill_(torch.arange(entries, device=score.device) >= visible.unsqueeze(1), -torch.inf)
        if self.publishes and entries > self.blocks * self.block_size:
            span.candidates = candidate_mask(score, visible, self.blocks, self.block_size)
        elif span.candidates is not None:
            score.masked_fill_(~span.candidates, -torch.inf)
        return score

    def _chosen(self, span: Span, score: Tensor) -> Selection:
        entries, valid = self.pick(score)
        return Selection(physical_rows(span.lane, self.ratio, entries), valid)

    def pick(self, score: Tensor) -> tuple[Tensor, Tensor]:
        """score [T, n] -> entries [T, k] ascending, and which of them count."""
        return best(score, min(self.top_k, score.shape[1]))

    def _everything(self, span: Span, entries: int, positions: Tensor) -> Selection | None:
        if entries == 0:
            return None
        numbers = torch.arange(entries, device=positions.device)
        places = physical_rows(span.lane, self.ratio, numbers).expand(span.count, entries)
        if span.count == 1:
            return Selection(places, None)
        return Selection(places, numbers < ((positions + 1) // self.ratio).unsqueeze(1))


def load_indexer(weights: Weights, t: TextConfig, layer: int, pool: Pool, numerics: Numerics) -> Indexer:
    """`weights` at `layers.L.attn`. Replicated: every rank makes the same choice from the same bits."""
    source = t.kv_source_of(layer)
    assert source is not None, "the configuration was checked: an index source reads compressed rows"
    return Indexer(
        layer,
        source,
        t.compress_ratios[layer],
        t.index_topk,
        t.index_n_heads,
        t.index_head_dim,
        wq_b=weights.fp8("indexer.wq_b"),
        weights_proj=weights.plain("indexer.weights_proj.weight"),
        publishes=layer == t.candidate_source_layer_id,
        blocks=t.candidate_topk_blocks,
        block_size=t.candidate_block_size,
        pool=pool,
        numerics=numerics,
    )
