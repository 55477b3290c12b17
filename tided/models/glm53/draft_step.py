"""A proposal of fixed shape: passes of the layer behind the trunk for R lanes, by the kernels of a decode step.

What a chain has made stands in memory of its own, beside the pool: the attention asks the cache and the chain apart,
and joins what both gave. The first pass chooses among the cache and its own row, by the scores of a decode step with
one more, and the later ones attend to what it chose and to the chain."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels import latent_attention_triton as attention
from kernels import latent_decode_triton as between
from kernels.experts import has_cuda_form
from kernels.latent_select_triton import select
from kernels.partial_attention import gathered_parts, joined
from tided.cache.context import Context
from tided.cache.pool import PAGE_TOKENS
from tided.models.glm53.attention import LATENT_NORM_EPS, Attention
from tided.models.glm53.decode import FIELDS, LANE, POSITION, inputs_of
from tided.models.glm53.fused import FusedStep
from tided.models.glm53.indexer import KEY_NORM_EPS, Indexer
from tided.models.glm53.mlp import Dense
from tided.models.glm53.page_tables import PageTables

if TYPE_CHECKING:
    from tided.models.glm53.drafter import Drafter


class DraftStep(FusedStep):
    """R lanes of a drafter (`tided.models.proposals.Proposal`), of K places each, one pass a place. A row's position is
    that of its row of the drafter's cache, one before its token's."""

    one_by_one = True

    def __init__(self, drafter: "Drafter", lanes: int) -> None:
        one, device, size = drafter.block.attention, drafter.norm.device, drafter.size
        pages, mlp = drafter.context_pages, drafter.block.mlp
        self._tables = PageTables(lanes, pages, device)
        as_model: Any = drafter  # it has what a step of one layer asks of a model
        super().__init__(
            as_model,
            inputs_of(self._tables.there, 1, 1 if isinstance(mlp, Dense) else mlp.top_k, len(drafter.norm)),
            torch.empty(lanes, pages * PAGE_TOKENS // drafter.rotations.share.ranks, device=device),
        )
        assert one.indexer is not None, "this layer chooses for itself"
        self.drafter, self.indexer = self.model, one.indexer
        self.ranks = drafter.group.ranks
        self.capturable = isinstance(mlp, Dense) or has_cuda_form(mlp.bank.record, drafter.numerics)
        self.drawn = torch.zeros(size, lanes, dtype=torch.int64, device=device)
        self.logits = torch.zeros(size, lanes, drafter.head.shape[0] * drafter.group.ranks, device=device)
        self.confidence = torch.zeros(size, lanes, device=device)
        self._host = torch.zeros(lanes, FIELDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._anchors = torch.zeros(lanes, dtype=torch.int64, device=device)
        held, keys = one.pool.rows[one.layer], one.pool.keys[one.layer]
        self._rows = torch.zeros(size * lanes, held.shape[1], dtype=held.dtype, device=device)  # place after place
        self._keys = torch.zeros(lanes, keys.shape[1], dtype=keys.dtype, device=device)
        self._own = torch.arange(size * lanes, device=device).view(size, lanes)
        chain = self._own.t().to(torch.int32)
        made = torch.arange(size, device=device)
        seen = torch.where(made <= made[:, None, None], chain, -1)
        self._chain = seen.contiguous()  # [K, R, K]: what a place's row sees of it
        self._state = torch.empty(0, device=device)  # [R, D] of the place before
        self._ones = torch.ones(lanes, dtype=torch.int32, device=device)

    def tell(self, lanes: Sequence[Context], anchors: Tensor) -> None:
        fields = self._host.numpy()
        for row, lane in enumerate(lanes):
            fields[row, [POSITION, LANE]] = lane.position - 1, lane.index
            ring = lane.windows[0]
            self.inputs.before[row].copy_(ring[(lane.position - 1) % len(ring)])
        self.inputs.meta.copy_(self._host, non_blocking=True)
        self._tables.tell(lanes)
        self._anchors.copy_(anchors, non_blocking=True)

    def offer(self, place: int) -> None:
        drafter, block, one = self.drafter, self.drafter.block, self.drafter.block.attention
        self.cos, self.sin = drafter.rotations.angles(self.inputs.meta[:, POSITION] + place)
        if place:
            x = self._joined(self.drawn[place - 1].clamp_min(0), self._state)
        else:
            x = self._joined(self._anchors, self.inputs.before)
        h = between.normed(x, block.input_norm, block.eps, rounds=False)
        q_latent, query = self.queries(one, h)
        turn = self.cos, self.sin
        between.keep_rows(self.times(h, one.kv_a), one.kv_norm, LATENT_NORM_EPS, *turn, self._own[place], self._rows)
        if place == 0:
            self._places = self._first_choice(one.indexer or self.indexer, h, q_latent)
        x, h = self.normed(x, block.group.sum(self._attended(one, query, place)), block.mlp_norm, block.eps)
        found = self.dense(block.mlp, h) if isinstance(block.mlp, Dense) else self.moe(block.mlp, h)
        self._state = self.normed(x, block.group.sum(found), drafter.norm, drafter.eps)[1]
        self.logits[place].copy_(drafter.group.concat(self.times(self._state, drafter.head)))

    def settle(self, place: int) -> None:
        from tided.models.glm53.drafter import sureness

        self.confidence[place].copy_(sureness(self.logits[place], self.drawn[place].clamp_min(0)))

    def _joined(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """token_ids [R], states [R, D] of the tokens before -> the layer's input [R, D] bf16."""
        drafter = self.drafter
        token = between.normed(drafter.embed(token_ids), drafter.token_norm, drafter.eps, rounds=False)
        both = torch.cat([token, between.normed(states, drafter.state_norm, drafter.eps, rounds=False)], 1)
        return self.times(both, drafter.joint).to(torch.bfloat16)

    def _first_choice(self, index: Indexer, h: Tensor, q_latent: Tensor) -> Tensor:
        """-> places [R, K] int32 in the pool, -1: none. The chain's own row may be among the best; it is attended to
        whether or not it is, as one of the chain."""
        position, share, page = self.inputs.meta[:, POSITION], self.share, self.page_rows
        own, turn, tables = self._own[0], (self.cos, self.sin), self.inputs.tables
        keys = self.times(h, index.wk)
        between.keep_keys(keys, index.k_norm, index.k_bias, KEY_NORM_EPS, *turn, own, self._keys)
        query = between.index_query(self.times(q_latent, index.wq_b), *turn, index.heads)
        weight, alone = self.times(h, index.weights_proj), share.ranks == 1
        seen = ((position - 1 + share.ranks - share.rank) // share.ranks).to(torch.int32)  # of the cache, here
        held, score = index.pool.keys[index.layer], torch.empty_like(self.scores[:, :1])
        between.index_scores(
            query, weight, tables, seen, held, self.scores, page, least=index.top_k - 1 if alone else -1,
            fills=not alone,
        )  # fmt: skip
        between.index_scores(query, weight, own.unsqueeze(1), self._ones, self._keys, score, 1, least=-1, fills=False)
        number, mine = share.numbers(position).unsqueeze(1), share.owns(position).unsqueeze(1)
        self.scores.scatter_(1, number, torch.where(mine, score, self.scores.gather(1, number)))
        if alone:
            places = select(self.scores, (position + 1).to(torch.int32), tables, index.top_k, page)
        else:
            chosen = self.best(index, self.scores)
            places = torch.where(chosen.valid, chosen.places, -1).to(torch.int32)
        return torch.where(mine & (places == self.found(number)), -1, places)

    def _attended(self, one: Attention, query: Tensor, place: int) -> Tensor:
        """query [R, H, c + r] -> [R, D], this rank's part. Where ranks share contexts, the first has the chains."""
        held, query = one.pool.rows[one.layer], one.asked(query)

        def part(rows: Tensor, places: Tensor) -> Tensor:
            return attention.attend(query, rows, places, one.latent_dim, one.scale, whole=False)

        found = part(held, self._places)
        both = torch.stack([found, part(self._rows, self._chain[place])], 1) if self.share.rank == 0 else None
        if both is not None and self.share.ranks == 1:
            gathered = joined(both)
        else:
            gathered = one.gathered(found if both is None else gathered_parts(both))
        return self.times(between.brought_out(gathered.to(torch.bfloat16).contiguous(), one.up, one.nope_dim), one.o)
