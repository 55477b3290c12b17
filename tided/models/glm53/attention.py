"""Multi-head latent attention in its absorbed form: this rank's heads over the rows of the selected tokens.

A token leaves one row in a layer, its normalised latent and a rotated key that all heads share; a query is brought into
the latent's space by the key half of kv_b, and what it gathers is brought out by the value half.

Where ranks share contexts, a rank asks with the queries of all heads what its own rows hold for them, and joins what
all ranks found for its own heads: two collectives a layer beside the sum, and one more where the layer chooses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import latent_attention
from kernels.norm import rms_norm
from kernels.numerics import Numerics
from kernels.packed import Linear, product
from kernels.partial_attention import joined, partial_attention
from kernels.rope import rotate_
from kernels.rows import by_row
from tided.cache.pool import Pool
from tided.cache.share import Share
from tided.models.glm53.config import Config
from tided.models.glm53.indexer import Indexer, load_indexer
from tided.models.glm53.rows import Contexts, RowFormat
from tided.models.glm53.step import Pass, Span
from tided.models.glm53.weights import Weights
from tided.models.parallel import Group

LATENT_NORM_EPS = 1e-6  # of the two latents, as the reference has it; serving engines use the configuration's 1e-5
# Bound of the [queries, rows, row_dim] gather of a prompt chunk: 16 MiB of fp32, and on a GPU, where each part costs a
# launch of everything, 128 MiB: with what unpacking takes no more than the experts' outputs of a chunk.
_ROW_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}


@dataclass(frozen=True)
class Attention:
    layer: int
    nope_dim: int
    latent_dim: int
    scale: float
    q_a: Linear
    q_norm: Tensor
    q_b: Linear  # this rank's heads
    kv_a: Linear
    kv_norm: Tensor
    up: Tensor  # [H, nope + v, c], this rank's heads: of each the key half over the value half
    o: Linear  # [D, H * v]
    no_sink: Tensor  # [H]: minus infinity
    indexer: Indexer | None
    pool: Pool
    rows: RowFormat
    share: Share
    group: Group
    numerics: Numerics

    def forward(self, step: Pass, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D] fp32: the part of this rank's heads, to be summed over the ranks and then rounded."""
        q_latent, query = self.queries(step, x)
        self.keep(step, x)
        if self.indexer is not None:
            self.indexer.select(step, x, q_latent)
        query = self.asked(query)
        return self.output(self.gathered(torch.cat([self._attend(span, query[span.rows]) for span in step.spans])))

    def keep(self, step: Pass, x: Tensor) -> None:
        """x [T, D]: the rows of those tokens that this rank keeps."""
        self.pool.rows[self.layer][step.places] = self.rows.kept(step.of_kept(self.row(step, x)))

    def queries(self, step: Pass, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> the latent [T, q rank], which the indexer asks with too, and [T, H, c + r]: every head's query in
        the space of the rows."""
        n = self.numerics
        q_latent = n.store(rms_norm(n.store(product(x, self.q_a, n)), self.q_norm, LATENT_NORM_EPS))
        query = n.store(product(q_latent, self.q_b, n)).view(len(x), self.heads, -1)
        turned = n.store(rotate_(query[..., self.nope_dim :].contiguous(), step.turn))
        key_up = self.up[:, : self.nope_dim]
        absorbed = n.store(by_row(lambda rows: _by_head(rows, key_up), query[..., : self.nope_dim].contiguous()))
        return q_latent, torch.cat([absorbed, turned], -1)

    def asked(self, query: Tensor) -> Tensor:
        """query [T, H, c + r] of this rank's heads -> of all heads whose answers lie in this rank's rows."""
        if self.share.ranks == 1:
            return query
        return self.group.concat(query.flatten(1)).view(len(query), -1, query.shape[2])

    def gathered(self, found: Tensor) -> Tensor:
        """found [T, all heads asked with, ..] as `over` gives it -> [T, H, c], whole, of this rank's heads."""
        if self.share.ranks == 1:
            return found[..., : self.latent_dim]
        parts = self.group.concat(found.flatten(1)).view(len(found), self.share.ranks, -1, found.shape[2])
        return by_row(joined, parts[:, :, self.share.rank * self.heads :][:, :, : self.heads].contiguous())

    def output(self, gathered: Tensor) -> Tensor:
        """gathered [T, H, c] -> [T, D], this rank's part."""
        n = self.numerics
        value_up = self.up[:, self.nope_dim :].transpose(1, 2)
        heads = n.store(by_row(lambda rows: _by_head(rows, value_up), n.store(gathered).contiguous()))
        return product(heads.flatten(1), self.o, n)

    def row(self, step: Pass, x: Tensor) -> Tensor:
        """x [T, D] -> [T, c + r]: what the tokens leave in this layer."""
        n = self.numerics
        joint = n.store(product(x, self.kv_a, n))
        latent = n.store(rms_norm(joint[:, : self.latent_dim].contiguous(), self.kv_norm, LATENT_NORM_EPS))
        return torch.cat([latent, n.store(rotate_(joint[:, self.latent_dim :].contiguous(), step.turn))], -1)

    @property
    def heads(self) -> int:
        """Of this rank."""
        return len(self.no_sink)

    def _attend(self, span: Span, query: Tensor) -> Tensor:
        """query [T, H, c + r] of one lane -> as `over`."""
        chosen, held = span.selection, self.pool.rows[self.layer]
        assert chosen is not None, "the first layer chooses"
        if span.count == 1:
            return self.over(query, self.rows.read(held.index_select(0, chosen.places[0])).unsqueeze(0), None)
        shared = self.rows.read(held[chosen.places[0]]) if len(chosen.places) == 1 else None
        block = max(1, _ROW_ELEMENTS[query.device.type] // (max(1, chosen.places.shape[1]) * query.shape[2]))
        parts = []
        for i in range(0, span.count, block):
            cut = slice(i, i + block)
            if shared is None:
                rows = self.rows.read(held[chosen.places[cut]])
            else:
                rows = shared.expand(len(query[cut]), -1, -1)
            parts.append(self.over(query[cut], rows, None if chosen.valid is None else chosen.valid[cut]))
        return torch.cat(parts)

    def over(self, query: Tensor, rows: Tensor, valid: Tensor | None) -> Tensor:
        """query [T, H, c + r], rows [T, N, c + r] -> [T, H, c + r], of which the last r mean nothing; where ranks share
        contexts a part of it, [T, H, c + 2]."""
        if self.share.ranks == 1:
            return latent_attention(query, rows, valid, self.no_sink, self.scale, self.numerics.probability)
        return partial_attention(query, rows, valid, self.scale, self.latent_dim, self.numerics.probability)


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H, a] fp32 that weight's dtype holds, weight [H, a, b] -> [T, H, b], sums in fp32."""
    x = x.transpose(0, 1)
    if weight.dtype is torch.float32:
        return torch.bmm(x, weight).transpose(0, 1)
    return torch.bmm(x.to(weight.dtype), weight, out_dtype=torch.float32).transpose(0, 1)  # of a GPU alone


def load_attention(weights: Weights, c: Config, layer: int, contexts: Contexts, numerics: Numerics) -> Attention:
    """`weights` at `model.layers.L.self_attn`. Heads are cut over the ranks."""
    heads = weights.cut(c.num_attention_heads)
    both = c.qk_nope_head_dim + c.v_head_dim
    return Attention(
        layer,
        c.qk_nope_head_dim,
        c.kv_lora_rank,
        c.query_dim**-0.5,
        q_a=weights.linear("q_a_proj"),
        q_norm=weights.plain("q_a_layernorm.weight"),
        q_b=weights.linear("q_b_proj", rows=_of(heads, c.query_dim)),
        kv_a=weights.linear("kv_a_proj_with_mqa"),
        kv_norm=weights.plain("kv_a_layernorm.weight"),
        up=weights.whole("kv_b_proj", numerics.cache, rows=_of(heads, both)).view(-1, both, c.kv_lora_rank),
        o=weights.linear("o_proj", columns=_of(heads, c.v_head_dim)),
        no_sink=torch.full((heads.stop - heads.start,), -torch.inf, device=weights.device),
        indexer=load_indexer(weights.under("indexer"), c, layer, contexts, numerics) if c.selects(layer) else None,
        pool=contexts.pool,
        rows=contexts.rows,
        share=contexts.share,
        group=weights.group,
        numerics=numerics,
    )


def _of(heads: slice, width: int) -> slice:
    return slice(heads.start * width, heads.stop * width)
