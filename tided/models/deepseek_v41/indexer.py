"""The layers that choose which compressed rows a query attends to; the layers behind use the same choice."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.indexer import best, candidate_blocks, index_scores, limit_to_blocks_
from kernels.linear import Matrix, fp8_linear
from kernels.numerics import Numerics
from kernels.rope import rotate_
from kernels.rows import matmul
from tided.cache.pool import Pool, physical_rows, rows_between
from tided.models.deepseek_v41.config import TextConfig
from tided.models.deepseek_v41.step import Pass, Selection, Span
from tided.models.deepseek_v41.weights import Weights

_SCORE_ELEMENTS = 1 << 24  # bounds the [queries, heads, keys] product
# Keys at a time, as fp32: of a million entries, all would be 512 MB for every token. A multiple of a page's rows.
_KEYS = 1 << 16


@dataclass(frozen=True)
class Indexer:
    layer: int
    source: int  # the layer whose keys and rows are scored
    ratio: int
    top_k: int
    heads: int
    head_dim: int
    wq_b: Matrix  # [heads * head_dim, q rank]
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
            span.selection = self._chosen(span, entries, query[span.rows], weight[span.rows], visible)

    def _must_score(self, span: Span, entries: int) -> bool:
        """Where all that is visible fits, it is taken without asking, unless later layers need the scores."""
        return entries > self.top_k or self._limits(entries) or span.candidates is not None

    def _limits(self, entries: int) -> bool:
        """Whether this layer's candidate pool leaves any of the entries out."""
        return self.publishes and entries > self.blocks * self.block_size

    def _query(self, step: Pass, x: Tensor, q_latent: Tensor) -> tuple[Tensor, Tensor]:
        """-> query [T, heads, head_dim], head weights [T, heads]."""
        n = self.numerics
        query = n.store(fp8_linear(q_latent, self.wq_b, n.activation)).view(-1, self.heads, self.head_dim)
        query = n.index(n.store(rotate_(query, step.turn(self.ratio))))
        return query, n.store(matmul(x, self.weights_proj)) * (self.head_dim**-0.5 * self.heads**-0.5)

    def _chosen(self, span: Span, entries: int, query: Tensor, weight: Tensor, visible: Tensor) -> Selection:
        """A few queries at a time, so that memory does not grow with queries times entries."""
        size = max(1, _SCORE_ELEMENTS // (min(entries, _KEYS) * self.heads))
        chosen, kept = [], []
        for i in range(0, span.count, size):
            cut = slice(i, i + size)
            score = self._scores(span, entries, query[cut], weight[cut])
            score.masked_fill_(torch.arange(entries, device=score.device) >= visible[cut].unsqueeze(1), -torch.inf)
            if span.candidates is not None:
                limit_to_blocks_(score, span.candidates[cut], self.block_size)
            elif self._limits(entries):
                kept.append(candidate_blocks(score, visible[cut], self.blocks, self.block_size))
            chosen.append(self.pick(score))
        if kept:
            span.candidates = torch.cat(kept)
        numbers, valid = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        return Selection(physical_rows(span.lane, self.ratio, numbers), valid)

    def _scores(self, span: Span, entries: int, query: Tensor, weight: Tensor) -> Tensor:
        """query [t, heads, head_dim], weight [t, heads] -> [t, entries]."""
        score = query.new_empty(len(query), entries)
        for first in range(0, entries, _KEYS):
            last = min(first + _KEYS, entries)
            keys = rows_between(span.lane, self.ratio, first, last, self.pool.keys[self.source])
            score[:, first:last] = index_scores(query, weight, keys.to(torch.float32))
        return score

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
        weights_proj=weights.matrix("indexer.weights_proj.weight"),
        publishes=layer == t.candidate_source_layer_id,
        blocks=t.candidate_topk_blocks,
        block_size=t.candidate_block_size,
        pool=pool,
        numerics=numerics,
    )
