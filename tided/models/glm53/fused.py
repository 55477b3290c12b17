"""`DecodeStep` by the kernels of `kernels/*_triton.py`, with the native rounding. Streams, and all that is multiplied,
are bf16."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import latent_attention_triton as attention
from kernels import latent_decode_triton as between
from kernels import router_triton as router
from kernels.experts import has_cuda_form, pick_outputs, sum_of_picks
from kernels.latent_select_triton import select
from kernels.packed import Linear, has_kernel, product
from tided.models.glm53.attention import LATENT_NORM_EPS, Attention
from tided.models.glm53.decode import Chosen, DecodeStep, Inputs
from tided.models.glm53.indexer import KEY_NORM_EPS, Indexer
from tided.models.glm53.mlp import Dense, Moe
from tided.models.glm53.step import Pass

if TYPE_CHECKING:
    from tided.models.glm53.model import Glm53


class FusedStep(DecodeStep):
    """`scores` [ROWS, most rows of a context] fp32 is written and read again by every layer that chooses."""

    def __init__(self, model: "Glm53", inputs: Inputs, scores: Tensor) -> None:
        super().__init__(model, inputs)
        self.scores = scores[: self.rows]

    def begin(self, positions: Tensor) -> None:
        own = self.share.owns(positions) & (positions >= 0)
        self.own_places = torch.where(own, self.places(positions), -1)
        self.cos, self.sin = self.model.rotations.angles(positions)
        self.visible = ((positions + self.share.ranks - self.share.rank) // self.share.ranks).to(torch.int32)

    def times(self, x: Tensor, weight: Linear) -> Tensor:
        kept = x.is_cuda and has_kernel(weight)  # a trellis that ranks cut inside a block is a matrix in fp32
        return product(x if kept else x.to(torch.float32), weight, self.model.numerics)

    def normed(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return (x, between.normed(x, weight, eps, rounds=False)) if y is None else between.added(x, y, weight, eps)

    def queries(self, one: Attention, h: Tensor) -> tuple[Tensor, Tensor]:
        q_latent = between.normed(self.times(h, one.q_a), one.q_norm, LATENT_NORM_EPS)
        query = self.times(q_latent, one.q_b)
        return q_latent, between.absorbed(query, one.up, self.cos, self.sin, one.nope_dim)

    def keep(self, one: Attention, h: Tensor) -> None:
        turn, places = (self.cos, self.sin), self.own_places
        joint = self.times(h, one.kv_a)
        between.keep_rows(joint, one.kv_norm, LATENT_NORM_EPS, *turn, places, one.pool.rows[one.layer])
        index = one.indexer
        if index is not None:
            keys, held = self.times(h, index.wk), index.pool.keys[index.layer]
            between.keep_keys(keys, index.k_norm, index.k_bias, KEY_NORM_EPS, *turn, places, held)

    def choose(self, one: Indexer, h: Tensor, q_latent: Tensor) -> Chosen:
        """`valid` of one rank alone is told by the places."""
        query = between.index_query(self.times(q_latent, one.wq_b), self.cos, self.sin, one.heads)
        weight, alone = self.times(h, one.weights_proj), self.share.ranks == 1
        between.index_scores(
            query, weight, self.inputs.tables, self.visible, one.pool.keys[one.layer], self.scores, self.page_rows,
            least=one.top_k if alone else -1, fills=not alone,
        )  # fmt: skip
        if not alone:
            chosen = self.best(one, self.scores)
            return Chosen(torch.where(chosen.valid, chosen.places, -1).to(torch.int32), chosen.valid)
        places = select(self.scores, self.visible, self.inputs.tables, one.top_k, self.page_rows)
        return Chosen(places, places)

    def output(self, one: Attention, query: Tensor) -> Tensor:
        assert self.chosen is not None, "the first layer chooses"
        held, alone = one.pool.rows[one.layer], self.share.ranks == 1
        found = attention.attend(query, held, self.chosen.places, one.latent_dim, one.scale, whole=alone)
        gathered = found if alone else one.gathered(found).to(torch.bfloat16)
        return self.times(between.brought_out(gathered.contiguous(), one.up, one.nope_dim), one.o)

    def dense(self, one: Dense, h: Tensor) -> Tensor:
        hidden = between.swiglu(self.times(h, one.gate_up), float("inf"))
        found = self.times(hidden, one.down)
        return one.edit(found) if one.edit else found

    def waited(self, one: Moe, h: Tensor, step: Pass) -> Tensor:
        """As `tided.models.mixture`, by the launches of a step where nobody waits: the choice is made anew by the one
        that made it first, and a row has the bits that it has there."""
        bank, layer, lanes, logits = one.bank, one.layer, step.lane_of_row, self.times(h, one.gate).unsqueeze(0)
        routed = chosen = self.routed(one, logits, bank.tables.routable[layer])
        wish, read = (routed.wanted, routed.wanted_scores, routed.wanted_weights, routed.missed), None
        late: Iterable[Mapping[int, int]] = ()
        allowed = bank.urgent.allowed(layer, lanes, routed) if bank.urgent is not None else None
        if bank.urgent is not None and allowed is not None:
            chosen = self.routed(one, logits, allowed)
            read = routed.missed & ~chosen.missed
            late = bank.urgent.serve(layer, torch.unique(chosen.ids[chosen.slots < 0]).tolist(), (lanes, chosen.ids))
        bank.tap.record(layer, lanes, *wish, read)
        x = h if h.is_cuda and has_cuda_form(bank.record, one.numerics) else h.to(torch.float32)
        outputs = x.new_zeros(*chosen.ids.shape, bank.record.hidden, dtype=torch.float32)

        def compute(picks: Tensor) -> None:
            pick_outputs(outputs, x, bank.slots, bank.record, picks, chosen.weights, one.limit, one.numerics)

        compute(chosen.slots)
        beside = self.dense(one.shared, h)
        for arrived in late:
            here = torch.full_like(bank.tables.slot_of[layer], -1)
            here[list(arrived)] = torch.tensor(list(arrived.values()), dtype=here.dtype, device=here.device)
            compute(here[chosen.ids])  # of what could not be read zeros stay, which are nobody's answer
        return sum_of_picks(outputs).add_(beside)

    def routed(self, one: Moe, logits: Tensor, allowed: Tensor) -> router.Routed:
        """logits [1, R, E] of the gate; allowed [E] or [R, E] bool."""
        out = router.room(self.rows, one.top_k, device=logits.device)
        slot_of = one.bank.tables.slot_of[one.layer]
        router.route(logits, one.bias, allowed, slot_of, one.top_k, one.route_scale, out, sigmoid=True)
        return out

    def route(self, one: Moe, h: Tensor) -> None:
        wishes, tables = self.inputs.wishes, one.bank.tables
        out = router.Routed(**{name: part[one.layer] for name, part in vars(wishes).items()})
        logits = self.times(h, one.gate).unsqueeze(0)
        routable, slot_of = tables.routable[one.layer], tables.slot_of[one.layer]
        router.route(logits, one.bias, routable, slot_of, one.top_k, one.route_scale, out, sigmoid=True)
