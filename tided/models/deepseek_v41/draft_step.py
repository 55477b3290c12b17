"""A proposal of fixed shape: the drafter's mathematics for a block of each of R lanes, by the kernels of a decode step.

The rows of a block see their lane's window and all of the block. To the attention's kernel the window is the ring of a
row that stands at the newest token, and the block's own rows are what an index would have selected."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import attention_triton, experts_triton, hyper_triton
from kernels import latents_triton as latents
from kernels import router_triton as router
from kernels.device import INTERPRETED, ROW_FIELDS
from kernels.hyper_triton import Mixed
from kernels.linear import Matrix
from kernels.linear_triton import Ending, linear
from tided.cache.context import Context
from tided.models.deepseek_v41.attention import Attention
from tided.models.deepseek_v41.chunk import mixer
from tided.models.deepseek_v41.moe import Moe

if TYPE_CHECKING:
    from tided.models.deepseek_v41.drafter import Drafter

POSITION, LANE, WINDOWS, FIRST_POSITION = 1, 2, 3, 7  # of a row's fields; see `rounding_triton`


class DraftStep:
    """R lanes of a drafter (`tided.models.proposals.Proposal`), of K places each: R * K rows, lane after lane."""

    capturable, one_by_one = True, False

    def __init__(self, drafter: "Drafter", lanes: int) -> None:
        self.drafter: Drafter = weakref.proxy(drafter)
        device, size = drafter.norm.device, drafter.size
        rows, one = lanes * size, drafter.blocks[0]
        self.lanes, self.ranks = lanes, drafter.group.ranks
        self.drawn = torch.zeros(size, lanes, dtype=torch.int64, device=device)
        self.logits = torch.zeros(size, lanes, len(drafter.markov_head), device=device)
        self.confidence = torch.zeros(size, lanes, device=device)
        self._host = torch.zeros(rows, ROW_FIELDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._meta = self._host.to(device)
        self._ids = torch.full((lanes, size), drafter.noise_id, device=device)
        self._step = torch.arange(1, size + 1, device=device).repeat(lanes)  # from the newest token to a row's place
        self._held = torch.zeros(rows, one.attention.head_dim, dtype=torch.bfloat16, device=device)
        of_lane = torch.arange(rows, dtype=torch.int32, device=device).view(lanes, size)
        self._places = of_lane.repeat_interleave(size, 0)  # of each row, in `_held`: its block
        self._first = torch.zeros(rows, one.hc_attn.streams, device=device)
        self._first[:, 0] = 1.0

    def tell(self, lanes: Sequence[Context], anchors: Tensor) -> None:
        fields = self._host.numpy().reshape(self.lanes, -1, ROW_FIELDS)
        for row, lane in enumerate(lanes):
            fields[row, :, POSITION] = lane.position - 1
            fields[row, :, FIRST_POSITION] = lane.position  # no row of the pass stands in the ring
            fields[row, :, LANE], fields[row, :, WINDOWS] = lane.index, lane.windows.data_ptr()
        self._meta.copy_(self._host, non_blocking=True)
        self._ids[:, 0].copy_(anchors, non_blocking=True)

    def offer(self, place: int) -> None:
        drafter = self.drafter
        if place == 0:
            self._block()
        before = self.drawn[place - 1].clamp_min(0) if place else self._ids[:, 0]
        known = drafter.markov_embed[before]
        linear(known.to(torch.bfloat16), drafter.markov_head, Ending.ADDED, out=self.logits[place])
        sure = torch.cat([self._hidden[:, place], known], 1) @ drafter.confidence.t()
        self.confidence[place].copy_(sure[:, 0])

    def settle(self, place: int) -> None:
        """Confidence is of a place before its token."""

    def _block(self) -> None:
        """The logits of all places, as they are without the tokens before; and `_hidden` [R, K, D] fp32."""
        drafter, meta = self.drafter, self._meta
        self._turns = drafter.rotations.angles(meta[:, POSITION] + self._step)
        streams = drafter.embed(self._ids.view(-1)).to(torch.bfloat16)
        pre, partial = self._first, hyper_triton.spread(streams, None, None, drafter.blocks[0].hc_attn.fn)[1]
        for one, follows in zip(drafter.blocks, [*drafter.blocks[1:], None], strict=True):
            assert partial is not None
            mixed = hyper_triton.finish(partial, streams, pre, mixer(one.hc_attn, one.attn_norm, one.eps))
            output = one.group.gather(self._attention(one.attention, mixed))
            streams, partial = hyper_triton.spread(streams, output, mixed, one.hc_ffn.fn)
            assert partial is not None
            mixed = hyper_triton.finish(partial, streams, mixed.pre, mixer(one.hc_ffn, one.ffn_norm, one.eps))
            output = one.group.gather(self._moe(one.moe, mixed))
            fn = None if follows is None else follows.hc_attn.fn
            streams, partial = hyper_triton.spread(streams, output, mixed, fn)
            pre = mixed.pre
        hidden = hyper_triton.collapse(streams, pre, None, 0.0)[0]
        normed = hyper_triton.collapse(streams, pre, drafter.norm, drafter.eps)[0]
        self._hidden = hidden.to(torch.float32).view(self.lanes, drafter.size, -1)
        base = drafter.group.concat(linear(normed, drafter.head, Ending.SUM))
        self.logits.copy_(base.view(self.lanes, drafter.size, -1).transpose(0, 1))

    def _attention(self, one: Attention, mixed: Mixed) -> Tensor:
        """-> [R * K, D] fp32, the part of this rank's heads."""
        cos, sin = self._turns[bool(one.ratio)]
        latent = latents.latents(
            _in_parts(mixed.rounded, one.inputs), one.q_norm, one.kv_norm, cos, sin, one.eps, self._held
        )
        query = linear(latent, one.wq_b, Ending.STORED).view(len(latent), -1, one.head_dim)
        seen = attention_triton.attend(
            query, cos, sin, self._meta, self._held, one.layer, one.window, self._held, self._places, one.sink,
            one.head_dim**-0.5,
        )  # fmt: skip
        seen = seen.view(len(seen), -1)
        out = linear(seen, one.wo_a, Ending.ACTIVATION, groups=seen.shape[1] // one.wo_a.shape[1])
        return linear(out, one.wo_b, Ending.SUM)

    def _moe(self, one: Moe, mixed: Mixed) -> Tensor:
        """-> [R * K, D] fp32, this rank's part. All experts are here, and nobody's demand is recorded."""
        bank, x = one.bank, mixed.rounded
        routed = router.room(len(x), one.top_k, device=x.device)
        tables = bank.tables.routable[one.layer], bank.tables.slot_of[one.layer]
        router.route(_in_parts(mixed.x, one.gate), one.bias, *tables, one.top_k, one.route_scale, routed)
        work = (x, bank.slots, bank.plain_record, routed.slots, routed.weights, one.limit)
        output = experts_triton.grouped_experts(*work, asm=not INTERPRETED)
        hidden = linear(x, one.shared_w13, Ending.SWIGLU, limit=one.limit)
        return linear(hidden, one.shared_w2, Ending.ADDED, out=output)


def _in_parts(x: Tensor, weight: Matrix) -> Tensor:
    return linear(x, weight, Ending.PARTS)
