"""The layers that choose which tokens a query attends to; the layers behind use the same choice."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from kernels.indexer import best, index_scores, merged
from kernels.numerics import Numerics
from kernels.packed import Linear, product
from kernels.rope import rotate_
from tided.cache.context import Context
from tided.cache.pool import Pool, physical_rows, rows_between
from tided.cache.share import Share
from tided.models.glm53.config import Config
from tided.models.glm53.rows import Contexts
from tided.models.glm53.step import Pass, Selection, Span
from tided.models.glm53.weights import Weights
from tided.models.parallel import Group

KEY_NORM_EPS = 1e-6  # a LayerNorm of its own; the configuration's eps is that of the RMSNorms
_SCORE_ELEMENTS = 1 << 24  # bounds the [queries, heads, keys] product
_KEYS = 1 << 16  # keys at a time, as fp32; a multiple of a page's
Found = tuple[Tensor, Tensor]  # [T, n]: scores, -inf where there is none, and positions


@dataclass(frozen=True)
class Indexer:
    layer: int
    top_k: int
    heads: int
    head_dim: int
    rope_dim: int
    wq_b: Linear  # [heads * head_dim, q rank]
    wk: Linear  # [head_dim, D]
    k_norm: Tensor
    k_bias: Tensor
    weights_proj: Linear  # [heads, D]
    pool: Pool
    share: Share
    group: Group
    numerics: Numerics

    def select(self, step: Pass, x: Tensor, q_latent: Tensor) -> None:
        """x [T, D] the attention's input, q_latent [T, q rank]: keeps the keys and sets the selection of every span.
        Keys are kept also where all that is visible is attended to: later tokens choose among them.

        Where ranks share contexts: one collective, if a span sees more tokens than are chosen."""
        self.keep(step, x)
        choosing = [span for span in step.spans if span.end > self.top_k]
        for span in step.spans:
            if span.end <= self.top_k:
                span.selection = everything(span, step.positions[span.rows], self.share)
        if not choosing:
            return
        query, weight = self.query(step, x, q_latent)
        found = [self._found(span, query[span.rows], weight[span.rows], step.positions[span.rows]) for span in choosing]
        found = self._of_all_ranks(found, max(span.end for span in choosing))
        for span, (score, position) in zip(choosing, found, strict=True):
            span.selection = self._selection(span, score > -torch.inf, position)

    def keep(self, step: Pass, x: Tensor) -> None:
        held = self.pool.keys[self.layer]
        held[step.places] = step.of_kept(self.keys(step, x)).to(held.dtype)

    def keys(self, step: Pass, x: Tensor) -> Tensor:
        """x [T, D] -> [T, head_dim]"""
        n = self.numerics
        keys = layer_norm(n.store(product(x, self.wk, n)), (self.head_dim,), self.k_norm, self.k_bias, KEY_NORM_EPS)
        return n.store(self._turned(n.store(keys), step.turn))

    def _turned(self, x: Tensor, turn: Tensor) -> Tensor:
        """The first dimensions of x [T, ..., head_dim], in place."""
        rotate_(x[..., : self.rope_dim], turn)
        return x

    def query(self, step: Pass, x: Tensor, q_latent: Tensor) -> tuple[Tensor, Tensor]:
        """-> query [T, heads, head_dim], head weights [T, heads]."""
        n = self.numerics
        query = n.store(product(q_latent, self.wq_b, n)).view(-1, self.heads, self.head_dim)
        scale = self.head_dim**-0.5 * self.heads**-0.5
        return n.store(self._turned(query, step.turn)), product(x, self.weights_proj, n) * scale

    def _found(self, span: Span, query: Tensor, weight: Tensor, positions: Tensor) -> Found:
        """The best of the tokens that this rank keeps. A few queries at a time, so that memory does not grow with
        queries times tokens."""
        own = self.share.positions(torch.arange(self.share.count(span.end), device=query.device))
        size = max(1, _SCORE_ELEMENTS // (max(1, min(len(own), _KEYS)) * self.heads))
        parts = []
        for i in range(0, span.count, size):
            cut = slice(i, i + size)
            score = self.scores(span.lane, len(own), query[cut], weight[cut])
            parts.append(self.best_of(score.masked_fill_(own > positions[cut].unsqueeze(1), -torch.inf), own))
        scores, positions = (torch.cat(part) for part in zip(*parts, strict=True))
        return scores, positions

    def scores(self, lane: Context, rows: int, query: Tensor, weight: Tensor) -> Tensor:
        """query [t, heads, head_dim], weight [t, heads] -> [t, rows]: of a lane's first rows that this rank keeps."""
        score = query.new_empty(len(query), rows)
        for first in range(0, rows, _KEYS):
            last = min(first + _KEYS, rows)
            keys = rows_between(lane, self.share.ranks, first, last, self.pool.keys[self.layer])
            score[:, first:last] = index_scores(query, weight, keys.to(torch.float32))
        return score

    def best_of(self, score: Tensor, positions: Tensor) -> Found:
        """score [T, n] of the tokens at `positions` [n], ascending -> at most top_k of them, ascending."""
        numbers, visible = self.pick(score)
        return score.gather(1, numbers).masked_fill_(~visible, -torch.inf), positions[numbers]

    def pick(self, score: Tensor) -> tuple[Tensor, Tensor]:
        """score [T, n] -> tokens [T, k] ascending, and which of them count."""
        return best(score, min(self.top_k, score.shape[1]))

    def of_all_ranks(self, found: Found, tokens: int) -> Found:
        """What one rank keeping all would have found: every one of its choice is its rank's choice too, and a tie goes
        to the older token on a rank as among them. `tokens` that there are to choose from, more than top_k."""
        return self._of_all_ranks([found], tokens)[0]

    def _of_all_ranks(self, found: Sequence[Found], tokens: int) -> list[Found]:
        """One collective for all rows."""
        if self.share.ranks == 1:
            return list(found)
        width = min(self.top_k, self.share.most(tokens))
        parts = torch.cat([sent(score, position, width) for score, position in found])
        got = self.group.concat(parts).view(len(parts), self.share.ranks, 2, width)
        score, position = got[:, :, 0].flatten(1).view(torch.float32), got[:, :, 1].flatten(1).long()
        score, position = merged(score, position, self.top_k)
        counts = [len(score) for score, _ in found]
        return list(zip(torch.split(score, counts), torch.split(position, counts), strict=True))

    def _selection(self, span: Span, counts: Tensor, position: Tensor) -> Selection:
        """counts, position [T, k] -> those that this rank keeps. A single row that chooses sees more tokens than it
        chooses, so all of its choice counts; a mask would cost every layer behind a wait for the device."""
        if self.share.ranks > 1:
            counts = counts & self.share.owns(position)
            most = int(counts.sum(1).max())
            first = counts.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :most]
            counts, position = counts.gather(1, first), position.gather(1, first)
        places = physical_rows(span.lane, self.share.ranks, self.share.numbers(position))
        return Selection(places, None if span.count == 1 else counts)


def sent(score: Tensor, position: Tensor, width: int) -> Tensor:
    """-> [T, 2 * width] int32: bits of the scores, positions."""
    both = torch.full((len(score), 2, width), -1, dtype=torch.int32, device=score.device)
    both[:, 0] = torch.tensor(-torch.inf).view(torch.int32)
    both[:, 0, : score.shape[1]] = score.contiguous().view(torch.int32)
    both[:, 1, : score.shape[1]] = position.to(torch.int32)
    return both.flatten(1)


def everything(span: Span, positions: Tensor, share: Share) -> Selection:
    """All tokens that a query sees, of those that this rank keeps."""
    numbers = torch.arange(share.count(span.end), device=positions.device)
    places = physical_rows(span.lane, share.ranks, numbers).unsqueeze(0)
    return Selection(places, None if span.count == 1 else share.positions(numbers) <= positions.unsqueeze(1))


def load_indexer(weights: Weights, c: Config, layer: int, contexts: Contexts, numerics: Numerics) -> Indexer:
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
        pool=contexts.pool,
        share=contexts.share,
        group=weights.group,
        numerics=numerics,
    )
