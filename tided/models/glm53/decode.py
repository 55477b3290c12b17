"""A decode step of fixed shape: R rows of a model, a row a token of a lane.

What changes from step to step is read from memory of fixed address, `Inputs`, and nothing here looks at a value. This
is the step's meaning, in operations that any device has; `fused` computes it by kernels, and can be captured. A row
sees all rows of its lane before it, those of the same step included, through its lane's page table, and is masked where
its context ends: shapes do not depend on how long contexts are."""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.experts import grouped_experts, has_cuda_form
from kernels.indexer import best, index_scores, merged
from kernels.norm import rms_norm
from kernels.packed import Linear, product
from kernels.rope import rotation
from tided.cache.pool import PAGE_TOKENS
from tided.models.glm53.attention import Attention
from tided.models.glm53.block import Block
from tided.models.glm53.indexer import Indexer, sent
from tided.models.glm53.mlp import Dense, Moe
from tided.models.glm53.step import Pass

if TYPE_CHECKING:
    from tided.models.glm53.model import Glm53

TOKEN, POSITION, LANE, FIRST_ROW = range(4)  # of a row's fields
FIELDS = 4


@dataclass(frozen=True)
class Wishes:
    """What rows wanted of the experts of each layer of the bank, [layers, R, k] each, as `kernels.router.Routing`; and
    the ids, slots and weights of those that they got."""

    wanted: Tensor
    wanted_scores: Tensor
    wanted_weights: Tensor
    missed: Tensor
    ids: Tensor
    slots: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Inputs:
    """meta [R, FIELDS] int64; tables [R, most pages] int64, a lane's page table and behind it its first page;
    before [R, D] fp32, of a lane's first row: the trunk's state of the token before, for the drafter. What comes out:
    wishes."""

    meta: Tensor
    tables: Tensor
    before: Tensor
    wishes: Wishes


def inputs_of(page_tables: Tensor, layers: int, top_k: int, width: int) -> Inputs:
    """For R rows of hidden size `width`, whose pages stand in page_tables [R, most pages]."""
    rows, device = len(page_tables), page_tables.device

    def of(dtype: torch.dtype) -> Tensor:
        return torch.zeros(layers, rows, top_k, dtype=dtype, device=device)

    real, whole = torch.float32, torch.int64
    wishes = Wishes(of(whole), of(real), of(real), of(torch.bool), of(whole), of(torch.int32), of(real))
    meta = torch.zeros(rows, FIELDS, dtype=whole, device=device)
    return Inputs(meta, page_tables, torch.zeros(rows, width, device=device), wishes)


@dataclass(frozen=True)
class Chosen:
    """places [R, K] in the pool, and which of them count."""

    places: Tensor
    valid: Tensor


class DecodeStep:
    """R rows of a model. `waiting`: the pass, when rows may wait for experts: then the experts are computed by the
    layer itself, which looks at values."""

    def __init__(self, model: "Glm53", inputs: Inputs) -> None:
        self.model, self.inputs = weakref.proxy(model), inputs
        self.rows = len(inputs.meta)
        self.waiting: Pass | None = None
        self.share = model.rotations.share
        self.page_rows = PAGE_TOKENS // self.share.ranks
        self.chosen: Chosen | None = None

    def run(self) -> tuple[Tensor, Tensor]:
        """Computes all of it -> logits [R, V]; the states [R, D] behind the trunk's last norm."""
        model, meta = self.model, self.inputs.meta
        self.begin(meta[:, POSITION])
        x, y = model.embedded(meta[:, TOKEN]), None
        for block in model.blocks:
            x, h = self.normed(x, y, block.input_norm, block.eps)
            y = self.attention(block, h)
            x, h = self.normed(x, y, block.mlp_norm, block.eps)
            y = self.mlp(block, h)
        _, states = self.normed(x, y, model.norm, model.eps)
        if model.drafter is not None:
            self.watch(states)
        return self.head(states), states

    def begin(self, positions: Tensor) -> None:
        """positions [R], -1: a row that keeps nothing."""
        own = self.share.owns(positions) & (positions >= 0)
        places, kept = self.places(positions), None
        if self.share.ranks > 1 or bool((positions < 0).any()):
            kept = own.nonzero()[:, 0]
            places = places[kept]
        table = self.model.rotations.table
        self.step = Pass([], positions, self.inputs.meta[:, LANE], places, kept, rotation(positions, table))

    def places(self, positions: Tensor) -> Tensor:
        """[R] -> where the rows of those tokens lie, if this rank keeps them."""
        return self.found(self.share.numbers(positions).clamp_min(0).unsqueeze(1))[:, 0]

    def found(self, numbers: Tensor) -> Tensor:
        """Numbers [R, n] of rows of each one's context -> places."""
        size = self.page_rows
        return self.inputs.tables.gather(1, numbers // size) * size + numbers % size

    def normed(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x [R, D], and what a sub-layer adds to it -> the sum and its norm."""
        store = self.model.numerics.store
        x = x if y is None else store(x + store(y))
        return x, store(rms_norm(x, weight, eps))

    def times(self, x: Tensor, weight: Linear) -> Tensor:
        """x [R, K] -> [R, N] fp32"""
        return product(x, weight, self.model.numerics)

    def head(self, states: Tensor) -> Tensor:
        logits: Tensor = self.model.group.concat(self.times(states, self.model.head))
        return logits

    def attention(self, block: Block, h: Tensor) -> Tensor:
        """h [R, D] -> [R, D], summed over the ranks."""
        one = block.attention
        q_latent, query = self.queries(one, h)
        self.keep(one, h)
        if one.indexer is not None:
            self.chosen = self.choose(one.indexer, h, q_latent)
        found = block.group.sum(self.output(one, one.asked(query)))
        return block.edits.attention(found) if block.edits.attention else found

    def queries(self, one: Attention, h: Tensor) -> tuple[Tensor, Tensor]:
        return one.queries(self.step, h)

    def keep(self, one: Attention, h: Tensor) -> None:
        """The rows and the index keys of the tokens."""
        one.keep(self.step, h)
        if one.indexer is not None:
            one.indexer.keep(self.step, h)

    def choose(self, one: Indexer, h: Tensor, q_latent: Tensor) -> Chosen:
        query, weight = one.query(self.step, h, q_latent)
        numbers = torch.arange(self.inputs.tables.shape[1] * self.page_rows, device=h.device)
        keys = one.pool.keys[one.layer].view(-1, self.page_rows, one.head_dim)
        parts = [
            index_scores(query[row : row + 1], weight[row : row + 1], keys[table].flatten(0, 1).to(torch.float32))
            for row, table in enumerate(self.inputs.tables)
        ]
        unseen = self.share.positions(numbers) > self.step.positions.unsqueeze(1)
        return self.best(one, torch.cat(parts).masked_fill_(unseen, -torch.inf))

    def best(self, one: Indexer, score: Tensor) -> Chosen:
        """score [R, n], -inf behind what a row sees. Where ranks share contexts: one collective."""
        numbers, valid = best(score, min(one.top_k, score.shape[1]))
        if self.share.ranks == 1:
            return Chosen(self.found(numbers), valid)
        score, width = score.gather(1, numbers).masked_fill_(~valid, -torch.inf), numbers.shape[1]
        got = one.group.concat(sent(score, self.share.positions(numbers), width))
        got = got.view(self.rows, self.share.ranks, 2, width)
        score, position = got[:, :, 0].flatten(1).view(torch.float32), got[:, :, 1].flatten(1).long()
        score, position = merged(score, position, min(one.top_k, score.shape[1]))
        valid = (score > -torch.inf) & self.share.owns(position)
        return Chosen(self.found(self.share.numbers(position)), valid)

    def output(self, one: Attention, query: Tensor) -> Tensor:
        """query [R, heads asked with, c + r] -> [R, D], this rank's part."""
        chosen, held = self.chosen, one.pool.rows[one.layer]
        assert chosen is not None, "the first layer chooses"
        parts = [
            one.over(query[row : row + 1], one.rows.read(held[chosen.places[row]]).unsqueeze(0), valid.unsqueeze(0))
            for row, valid in enumerate(chosen.valid)
        ]
        return one.output(one.gathered(torch.cat(parts)))

    def mlp(self, block: Block, h: Tensor) -> Tensor:
        """h [R, D] -> [R, D], summed over the ranks."""
        one = block.mlp
        found = block.group.sum(self.dense(one, h) if isinstance(one, Dense) else self.moe(one, h))
        return block.edits.mlp(found) if block.edits.mlp else found

    def dense(self, one: Dense, h: Tensor) -> Tensor:
        return one.of(h)

    def moe(self, one: Moe, h: Tensor) -> Tensor:
        if self.waiting is not None:
            return self.waited(one, h, self.waiting)
        self.route(one, h)
        wishes, bank = self.inputs.wishes, one.bank
        picks, weights = wishes.slots[one.layer], wishes.weights[one.layer]
        x = h if h.is_cuda and has_cuda_form(bank.record, one.numerics) else h.to(torch.float32)
        routed = grouped_experts(x, bank.slots, bank.record, picks, weights, one.limit, one.numerics)
        return routed.add_(self.dense(one.shared, h))

    def waited(self, one: Moe, h: Tensor, step: Pass) -> Tensor:
        """`moe`, of rows that may wait for experts."""
        return one.forward(step, h)

    def route(self, one: Moe, h: Tensor) -> None:
        """Into the layer's wishes."""
        routing, wishes = one.route(h), self.inputs.wishes
        for name in ("wanted", "wanted_scores", "wanted_weights", "missed", "ids", "weights"):
            getattr(wishes, name)[one.layer].copy_(getattr(routing, name))
        wishes.slots[one.layer].copy_(one.bank.tables.slot_of[one.layer][routing.ids])

    def watch(self, states: Tensor) -> None:
        """What the drafter keeps: row j of its cache is of token j + 1 and the state of token j."""
        drafter, meta = self.model.drafter, self.inputs.meta
        assert drafter is not None
        is_first = meta[:, FIRST_ROW] == torch.arange(self.rows, device=meta.device)
        states = states.to(torch.float32)
        before = torch.where(is_first.unsqueeze(1), self.inputs.before, states.roll(1, 0))
        self.begin(meta[:, POSITION] - 1)
        self.keep(drafter.block.attention, drafter.input(drafter.joined(meta[:, TOKEN], before)))
