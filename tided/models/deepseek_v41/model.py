"""The text path of DeepSeek-V4.1: prompt chunks and decode rows over paged context."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels import head, hyper
from kernels.norm import rms_norm
from kernels.numerics import Numerics
from kernels.rows import ROWS
from tided.cache.context import Context, ContextShape
from tided.cache.pool import PAGE_TOKENS, Pool
from tided.errors import ConfigError, ContextOverflowError
from tided.models.base import LaneState
from tided.models.deepseek_v41.block import Block
from tided.models.deepseek_v41.drafter import Choose, Draft, Drafter
from tided.models.deepseek_v41.engram import Engrams
from tided.models.deepseek_v41.step import Rotations
from tided.models.parallel import Group


@dataclass(frozen=True)
class Shape:
    """The sizes that other rooms ask for (`tided.models.base.ModelShape`)."""

    family: str
    vocab_size: int
    hidden_size: int
    moe_layers: int
    experts_per_layer: int
    top_k: int
    context_tokens: int
    bos_id: int
    eos_id: int


@dataclass(frozen=True)
class DeepseekV41:
    """One rank's model (`tided.models.base.Model`). Owned by the engine's thread."""

    shape: Shape
    context_tokens: int  # most tokens of one lane
    embed: Tensor  # [V, D / ranks] as stored, this rank's columns
    blocks: tuple[Block, ...]
    norm: Tensor
    eps: float
    head: Tensor  # [V / ranks, D], this rank's rows
    engrams: Engrams
    rotations: Rotations
    pool: Pool
    context_shape: ContextShape
    last_kv_source: int
    replay: Literal["full", "bounded"]
    group: Group
    numerics: Numerics
    tapped: tuple[int, ...] = ()  # layers whose input the drafter watches
    drafter: Drafter | None = None

    def open_lane(self, index: int) -> Context:
        context = Context(index, self.context_shape, self.norm.device)
        self.pool.grow([context], 1)
        return context

    def close_lane(self, lane: LaneState) -> None:
        self.pool.release(_context(lane))

    def prefill(self, lane: LaneState, token_ids: Tensor, logits: Literal["none", "last", "all"]) -> Tensor | None:
        """See `Model`. Raises UnavailableError when the pool is short, ContextOverflowError past context_tokens, both
        before anything changed; ConfigError for "all" under bounded replay, which does not compute every row."""
        if logits == "all" and self.replay == "bounded":
            raise ConfigError(
                "logits of every prompt token need the whole path", hint='set decoder_replay = "full" in [model]'
            )
        rows = self.forward([_context(lane)], token_ids.view(1, -1), bounded=self.replay == "bounded")
        if logits == "none":
            return None
        return self.logits(rows if logits == "all" else rows[-1:]).clone()  # an ordinary tensor again

    def decode(self, lanes: Sequence[LaneState], token_ids: Tensor) -> Tensor:
        """See `Model`. Taken in runs of at most ROWS lanes: within them kernels compute row by row."""
        contexts = [_context(lane) for lane in lanes]
        self._check_room(contexts, 1)
        self.pool.grow(contexts, 1)
        parts = []
        for i in range(0, len(contexts), ROWS):
            part = slice(i, i + ROWS)
            parts.append(self.logits(self.forward(contexts[part], token_ids[part].view(-1, 1), bounded=False)))
        return torch.cat(parts)  # outside inference mode: an ordinary tensor

    @property
    def page_tokens(self) -> int:
        return PAGE_TOKENS

    @property
    def page_bytes(self) -> int:
        return self.pool.page_bytes

    def lane_parts(self, lane: LaneState) -> dict[str, Tensor]:
        return _context(lane).parts()

    def page_parts(self, lane: LaneState, first: int, last: int) -> dict[str, Tensor]:
        return self.pool.copied(_context(lane), first, last)

    def restore_lane(
        self, index: int, tokens: int, parts: Mapping[str, Tensor], pages: Sequence[tuple[int, Mapping[str, Tensor]]]
    ) -> Context:
        context = Context(index, self.context_shape, self.norm.device)
        context.put(parts)
        self.pool.grow([context], tokens)
        for first, held in pages:
            self.pool.put(context, first, held)
        context.position = tokens
        return context

    def check(self, lanes: Sequence[LaneState]) -> None:
        self.pool.check(map(_context, lanes))

    def propose(self, lanes: Sequence[LaneState], anchors: Tensor, choose: Choose) -> Draft:
        """What may follow anchors [R] int64, the tokens that come after the contexts. Changes nothing."""
        if self.drafter is None:
            raise ConfigError("this model was loaded without its drafter", hint="set draft in [engine]")
        return self.drafter.propose([_context(lane) for lane in lanes], anchors, choose)

    @torch.inference_mode()
    def forward(self, lanes: list[Context], token_ids: Tensor, bounded: bool) -> Tensor:
        """token_ids [lanes, count] -> rows [T, D] before the final norm, T = lanes * count, or the last window of a
        chunk when `bounded`. Moves the lanes on."""
        count = token_ids.shape[1]
        self._check_room(lanes, count)
        self.pool.grow(lanes, count)
        step = self.rotations.begin(lanes, count)
        asked = self.engrams.ask(lanes, token_ids.cpu().numpy())
        streams = self.embedded(token_ids.view(-1))
        pre = torch.zeros(streams.shape[:2], device=streams.device)
        pre[:, 0] = 1.0
        taps: list[Tensor] = []
        for block in self.blocks:
            engram = self.engrams.layers.get(block.layer)
            if engram is not None:
                streams = engram.mix(streams, asked[block.layer], step.skipped)
            if bounded and block.layer == self.last_kv_source:
                # The rows left behind still owe the global context, and nothing else.
                block.attention.compress(step, block.attention_input(streams, pre))
                kept = min(self.context_shape.window, count)
                step = step.tail(kept, max(0, lanes[0].position + count - self.context_shape.window))
                streams, pre = streams[-kept:], pre[-kept:]
            if block.layer in self.tapped:
                taps.append(self.numerics.store(streams.mean(1)))
            streams, pre = block.forward(step, streams, pre)
        if self.drafter is not None:
            self.drafter.watch(step, taps)
        for lane in lanes:
            lane.position += count
        return self.numerics.store(hyper.collapse(streams, pre))

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """rows [T, D] as `forward` gives them -> fp32 [T, V], whole on every rank."""
        normed = self.numerics.store(rms_norm(rows, self.norm, self.eps))
        return self.group.concat(head.logits(normed, self.head))

    def embedded(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> streams [T, S, D], all equal."""
        row = self.group.concat(self.embed[token_ids.to(self.embed.device)].to(torch.float32))
        return row.unsqueeze(1).repeat(1, self.blocks[0].hc_attn.streams, 1)

    def _check_room(self, lanes: list[Context], tokens: int) -> None:
        for lane in lanes:
            if lane.position + tokens > self.context_tokens:
                raise ContextOverflowError(self.context_tokens, lane.position, tokens)


def _context(lane: LaneState) -> Context:
    assert isinstance(lane, Context), "lanes come from open_lane"
    return lane
