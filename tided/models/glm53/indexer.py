"""The layers that choose which tokens a query attends to; the layers behind use the same choice."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from kernels.indexer import best, index_scores
from kernels.numerics import Numerics
from kernels.rope import rotate_
from kernels.rows import matmul
from tided.cache.context import Context
from tided.cache.pool import Pool, physical_rows, rows_between
from tided.models.glm53.config import Config
from tided.models.glm53.step import Pass, Selection, Span
from tided.models.glm53.weights import Weights

KEY_NORM_EPS = 1e-6  # a LayerNorm of its own; the configuration's eps is that of the RMSNorms
_SCORE_ELEMENTS = 1 << 24  # bounds the [queries, heads, keys] product
_KEYS = 1 << 16  # keys at a time, as fp32; a multiple of a page's


@dataclass(frozen=True)
class Indexer:
    layer: int
    top_k: int
    heads: int
    head_dim: int
    rope_dim: int
    wq_b: Tensor  # [heads * head_dim, q rank]
    wk: Tensor  # [head_dim, D]
    k_norm: Tensor
    k_bias: Tensor
    weights_proj: Tensor  # [heads, D]
    pool: Pool
    numerics: Numerics

    def select(self, step: Pass, x: Tensor, q_latent: Tensor) -> None:
        """x [T, D] the attention's input, q_latent [T, q rank]: keeps the keys and sets the selection of every span.
        Keys are kept also where all that is visible is attended to: later tokens choose among them."""
        self.pool.keys[self.layer][step.places] = self.keys(step, x).to(self.numerics.cache)
        query: Tensor | None = None
        for span in step.spans:
            if span.end <= self.top_k:
                span.selection = everything(span, step.positions[span.rows])
                continue
            if query is None:
                query, weight = self.query(step, x, q_latent)
            span.selection = self._chosen(span, query[span.rows], weight[span.rows], step.positions[span.rows])

    def keys(self, step: Pass, x: Tensor) -> Tensor:
        """x [T, D] -> [T, head_dim]"""
        n = self.numerics
        keys = layer_norm(n.store(matmul(x, self.wk)), (self.head_dim,), self.k_norm, self.k_bias, KEY_NORM_EPS)
        return n.store(self._turned(n.store(keys), step.turn))

    def _turned(self, x: Tensor, turn: Tensor) -> Tensor:
        """The first dimensions of x [T, ..., head_dim], in place."""
        rotate_(x[..., : self.rope_dim], turn)
        return x

    def query(self, step: Pass, x: Tensor, q_latent: Tensor) -> tuple[Tensor, Tensor]:
        """-> query [T, heads, head_dim], head weights [T, heads]."""
        n = self.numerics
        query = n.store(matmul(q_latent, self.wq_b)).view(-1, self.heads, self.head_dim)
        scale = self.head_dim**-0.5 * self.heads**-0.5
        return n.store(self._turned(query, step.turn)), matmul(x, self.weights_proj) * scale

    def _chosen(self, span: Span, query: Tensor, weight: Tensor, positions: Tensor) -> Selection:
        """A few queries at a time, so that memory does not grow with queries times tokens."""
        size = max(1, _SCORE_ELEMENTS // (min(span.end, _KEYS) * self.heads))
        chosen = []
        for i in range(0, span.count, size):
            cut = slice(i, i + size)
            score = self.scores(span.lane, span.end, query[cut], weight[cut])
            score.masked_fill_(torch.arange(span.end, device=score.device) > positions[cut].unsqueeze(1), -torch.inf)
            chosen.append(self.pick(score))
        numbers, valid = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        return Selection(physical_rows(span.lane, 1, numbers), valid)

    def scores(self, lane: Context, tokens: int, query: Tensor, weight: Tensor) -> Tensor:
        """query [t, heads, head_dim], weight [t, heads] -> [t, tokens]: of a lane's first tokens."""
        score = query.new_empty(len(query), tokens)
        for first in range(0, tokens, _KEYS):
            last = min(first + _KEYS, tokens)
            keys = rows_between(lane, 1, first, last, self.pool.keys[self.layer])
            score[:, first:last] = index_scores(query, weight, keys.to(torch.float32))
        return score

    def pick(self, score: Tensor) -> tuple[Tensor, Tensor]:
        """score [T, n] -> tokens [T, k] ascending, and which of them count."""
        return best(score, min(self.top_k, score.shape[1]))


def everything(span: Span, positions: Tensor) -> Selection:
    """All tokens that a query sees."""
    numbers = torch.arange(span.end, device=positions.device)
    places = physical_rows(span.lane, 1, numbers).unsqueeze(0)
    return Selection(places, None if span.count == 1 else numbers <= positions.unsqueeze(1))


def load_indexer(weights: Weights, c: Config, layer: int, pool: Pool, numerics: Numerics) -> Indexer:
    """`weights` at `model.layers.L.self_attn.indexer`. Replicated: every rank makes the same choice."""
    return Indexer(
        layer,
        c.index_topk,
        c.index_n_heads,
        c.index_head_dim,
        c.qk_rope_head_dim,
        wq_b=weights.linear("wq_b"),
        wk=weights.linear("wk"),
        k_norm=weights.plain("k_norm.weight"),
        k_bias=weights.plain("k_norm.bias"),
        weights_proj=weights.linear("weights_proj"),
        pool=pool,
        numerics=numerics,
    )
