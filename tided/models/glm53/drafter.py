"""The layer behind the trunk (MTP) as a drafter: from a token and the trunk's state before it, the token after it, and
from its own state the next ones.

    watch      the rows of a pass: what each token and the state before it leave in the drafter's own cache
    propose    an anchor that is drawn and not computed yet -> the tokens that may follow it, one after the other

Row j of its cache comes from token j + 1 and the trunk's state of token j, after the trunk's last norm. So the newest
state waits for its token: it stands in the ring of the `Context`, with those of a block that may be taken back. What a
proposal computes stays outside the pool; it is computed anew from true states once the tokens have come.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.indexer import index_scores
from kernels.norm import rms_norm
from kernels.numerics import Numerics
from kernels.packed import Linear, product
from tided.cache.context import Context
from tided.cache.pool import physical_rows
from tided.experts.bank import ExpertBank
from tided.models.base import Choose, Draft
from tided.models.glm53.block import Block, load_block
from tided.models.glm53.config import Config
from tided.models.glm53.rows import Contexts
from tided.models.glm53.step import Pass, Rotations
from tided.models.glm53.weights import Weights
from tided.models.parallel import Group
from tided.models.proposals import Proposals

if TYPE_CHECKING:
    from tided.models.glm53.model import Glm53

STATES = 16  # of the trunk that a context remembers: a verified block and one before it
CHAIN = 7  # tokens at most, where a policy chooses how many are made; each costs a pass of the layer


@dataclass
class _Chain:
    """What a lane's proposal has computed so far: rows [k, c + r], keys [k, index dim]; `chosen`: cache rows that its
    first step attended to."""

    lane: Context
    rows: Tensor
    keys: Tensor
    chosen: Tensor | None = None

    @property
    def cached(self) -> int:
        """Rows of the cache: one fewer than tokens are computed."""
        return self.lane.position - 1


@dataclass(frozen=True)
class Drafter:
    """One rank's part. `embed` gives rows [T, D] of token ids [T], `head` is this rank's rows of the output head; both
    are the trunk's."""

    size: int
    shares_choice: bool  # later tokens of a chain attend to what the first one chose, and to the chain itself
    token_norm: Tensor
    state_norm: Tensor
    joint: Linear  # [D, 2 D]: token half, state half
    block: Block
    norm: Tensor
    eps: float
    embed: Callable[[Tensor], Tensor]
    head: Linear  # [V / ranks, D]
    rotations: Rotations
    context_pages: int  # most of one lane
    group: Group
    numerics: Numerics
    proposals: Proposals = field(default_factory=Proposals)  # of fixed shape, where kernels serve the device

    @torch.inference_mode()
    def watch(self, step: Pass, token_ids: Tensor, states: Tensor) -> None:
        """token_ids [T], states [T, D] after the last norm, of the rows of a pass. Called before the lanes move on."""
        parts, tokens, before = [], [], []
        for span in step.spans:
            own = states[span.rows]
            skipped = int(span.start == 0)  # nothing stands before the first token
            if span.count > skipped:
                parts.append((span.lane, span.start - 1 + skipped, span.count - skipped))
                tokens.append(token_ids[span.rows][skipped:])
                before.append(own[:-1] if skipped else torch.cat([_state(span.lane, span.start - 1), own[:-1]]))
            _remember(span.lane, span.start, own)
        if parts:
            self._cache(self.rotations.of(parts), self.joined(torch.cat(tokens), torch.cat(before)))

    def _cache(self, step: Pass, x: Tensor) -> None:
        attention = self.block.attention
        assert attention.indexer is not None, "this layer chooses for itself"
        normed = self.input(x)
        attention.keep(step, normed)
        attention.indexer.keep(step, normed)

    @torch.inference_mode()
    def propose(
        self, lanes: list[Context], anchors: Tensor, choose: Choose, places: int = 0, by_kernels: bool = False
    ) -> Draft:
        """anchors [R] int64: the token of each lane that comes after its context. `places` tokens, or `size`.
        `by_kernels`: as the trunk's steps of so many rows are computed."""
        count = min(places or self.size, self.size)
        if by_kernels and self.shares_choice:
            from tided.models.glm53.draft_step import DraftStep  # a compiler, which a CPU need not have

            return self.proposals.run(lanes, anchors, choose, count, len(lanes), lambda some: DraftStep(self, some))
        attention, none = self.block.attention, self.norm.new_empty
        widths = attention.rows.row_dim, attention.pool.keys[self.block.layer].shape[1]
        chains = [_Chain(lane, none(0, widths[0]), none(0, widths[1])) for lane in lanes]
        states = torch.cat([_state(lane, lane.position - 1) for lane in lanes])
        ids, logits, sure, token = [], [], [], anchors
        for place in range(count):
            states = self._step(chains, place, self.joined(token, states))
            logits.append(self.group.concat(product(states, self.head, self.numerics)))
            token = choose(place, logits[-1])
            ids.append(token)
            sure.append(sureness(logits[-1], token))
        return Draft(torch.stack(ids, 1), torch.stack(logits, 1), torch.stack(sure, 1))

    def _step(self, chains: Sequence[_Chain], place: int, x: Tensor) -> Tensor:
        """x [R, D], a row of each lane -> the layer's normed output [R, D]."""
        n, block, attention = self.numerics, self.block, self.block.attention
        step = self.rotations.ahead([(chain.lane, chain.cached + place) for chain in chains])
        normed = self.input(x)
        q_latent, query = attention.queries(step, normed)
        self._extend(chains, step, normed, q_latent)
        query = attention.asked(query)
        found = [attention.over(query[i : i + 1], self._rows(chain), None) for i, chain in enumerate(chains)]
        x = n.store(x + n.store(self.group.sum(attention.output(attention.gathered(torch.cat(found))))))
        normed = n.store(rms_norm(x, block.mlp_norm, block.eps))
        x = n.store(x + n.store(self.group.sum(block.mlp.forward(step, normed))))
        return n.store(rms_norm(x, self.norm, self.eps))

    def _extend(self, chains: Sequence[_Chain], step: Pass, x: Tensor, q_latent: Tensor) -> None:
        """Adds the new row of every lane, and chooses what it attends to."""
        attention, indexer = self.block.attention, self.block.attention.indexer
        assert indexer is not None, "this layer chooses for itself"
        rows, keys = attention.row(step, x), indexer.keys(step, x)
        query: Tensor | None = None
        for i, chain in enumerate(chains):
            chain.rows = torch.cat([chain.rows, rows[i : i + 1]])
            chain.keys = torch.cat([chain.keys, keys[i : i + 1]])
            if self.shares_choice and chain.chosen is not None:
                continue
            if chain.cached + len(chain.keys) <= indexer.top_k:
                chain.chosen = torch.arange(chain.cached + len(chain.keys), device=x.device)
                continue
            if query is None:
                query, weight = indexer.query(step, x, q_latent)
            chain.chosen = self._choice(chain, query[i : i + 1], weight[i : i + 1])

    def _choice(self, chain: _Chain, query: Tensor, weight: Tensor) -> Tensor:
        """query [1, heads, d] -> [K]: rows of the cache and, behind them, of the chain, which the first rank offers."""
        indexer = self.block.attention.indexer
        assert indexer is not None, "this layer chooses for itself"
        share, total = indexer.share, chain.cached + len(chain.keys)
        numbers = torch.arange(total, device=query.device)
        own = numbers[: chain.cached][share.owns(numbers[: chain.cached])]
        score = indexer.scores(chain.lane, len(own), query, weight)
        if share.rank == 0:
            score = torch.cat([score, index_scores(query, weight, chain.keys)], 1)
            own = torch.cat([own, numbers[chain.cached :]])
        _, chosen = indexer.of_all_ranks(indexer.best_of(score, own), total + share.ranks * len(chain.keys))
        return chosen[0]

    def _rows(self, chain: _Chain) -> Tensor:
        """[1, K, c + r]: chosen rows of the cache that this rank keeps; of the chain, on the first rank, those chosen,
        or all where a choice is shared."""
        assert chain.chosen is not None, "it was just extended"
        attention = self.block.attention
        share, chosen = attention.share, chain.chosen
        cached, own = chosen[(chosen < chain.cached) & share.owns(chosen)], chosen[chosen >= chain.cached]
        places = physical_rows(chain.lane, share.ranks, share.numbers(cached))
        old = attention.rows.read(attention.pool.rows[self.block.layer].index_select(0, places))
        if share.rank:
            return old.unsqueeze(0)
        return torch.cat([old, chain.rows if self.shares_choice else chain.rows[own - chain.cached]]).unsqueeze(0)

    def joined(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """token_ids [T], states [T, D] of the tokens before -> the layer's input [T, D]."""
        n = self.numerics
        token = n.store(rms_norm(self.embed(token_ids), self.token_norm, self.eps))
        both = torch.cat([token, n.store(rms_norm(states, self.state_norm, self.eps))], 1)
        return n.store(product(both, self.joint, n))

    def input(self, x: Tensor) -> Tensor:
        return self.numerics.store(rms_norm(x, self.block.input_norm, self.block.eps))


def sureness(logits: Tensor, token: Tensor) -> Tensor:
    """logits [R, V], token [R] -> [R]: the logit of each token by itself."""
    log_probability = torch.log_softmax(logits, 1).gather(1, token.unsqueeze(1)).squeeze(1)
    return log_probability - torch.log(-torch.expm1(log_probability.clamp(max=-1e-6)))


def _state(lane: Context, position: int) -> Tensor:
    """[1, D]"""
    return lane.windows[0, position % STATES].to(torch.float32).unsqueeze(0)


def _remember(lane: Context, start: int, states: Tensor) -> None:
    kept = states[-STATES:]
    end = start + len(states)
    places = torch.arange(end - len(kept), end, device=states.device) % STATES
    lane.windows[0][places] = kept.to(lane.windows.dtype)


def load_drafter(
    trunk: "Glm53", weights: Weights, c: Config, contexts: Contexts, bank: ExpertBank, size: int
) -> Drafter:
    """`weights` at the root; `bank` holds this layer's experts as its layer 0; `size`: tokens of a chain. All else is
    the trunk's own."""
    layer = c.num_hidden_layers
    at = weights.under(f"model.layers.{layer}")
    return Drafter(
        size,
        c.index_share_for_mtp_iteration,
        token_norm=at.plain("enorm.weight"),
        state_norm=at.plain("hnorm.weight"),
        joint=at.linear("eh_proj"),
        block=load_block(weights, c, layer, contexts, bank, trunk.numerics, bank_layer=0),
        norm=at.plain("shared_head.norm.weight"),
        eps=c.rms_norm_eps,
        embed=trunk.embedded,
        head=trunk.head,
        rotations=trunk.rotations,
        context_pages=trunk.context_pages,
        group=trunk.group,
        numerics=trunk.numerics,
    )
