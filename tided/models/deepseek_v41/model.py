"""The text path of DeepSeek-V4.1: prompt chunks and decode rows over paged context."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kernels import head, hyper
from kernels.norm import rms_norm
from kernels.numerics import Numerics
from tided.cache.context import Context, ContextShape
from tided.cache.pool import Pool
from tided.errors import ConfigError
from tided.images.geometry import Size
from tided.models.base import Choose, Draft, LaneState, Layers, Pictured, through
from tided.models.deepseek_v41.block import Block
from tided.models.deepseek_v41.captured import DecodeSteps
from tided.models.deepseek_v41.drafter import Drafter
from tided.models.deepseek_v41.engram import Engrams
from tided.models.deepseek_v41.step import Pass, Rotations
from tided.models.deepseek_v41.vision import Vision
from tided.models.paged import PagedLanes, Shape, context_of
from tided.models.parallel import Group


@dataclass(frozen=True)
class DeepseekV41(PagedLanes):
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
    steps: DecodeSteps = field(default_factory=DecodeSteps)  # of fixed shape, where kernels serve the device
    vision: Vision | None = None  # None: images are refused

    @property
    def remainder_layers(self) -> tuple[int, ...]:
        """Layers whose compressed rows are of several tokens, so that a context may end inside one."""
        compressors = (block.attention.compressor for block in self.blocks)
        return tuple(one.layer for one in compressors if one is not None and one.ratio > 1)

    def prefill(
        self,
        lane: LaneState,
        token_ids: Tensor,
        logits: Literal["none", "last", "all"],
        pictured: Pictured | None = None,
    ) -> Tensor | None:
        """See `Model`. Raises UnavailableError when the pool is short, ContextOverflowError past context_tokens, both
        before anything changed. Where every row is asked for, every row takes the whole path, also under bounded
        replay."""
        bounded = self.replay == "bounded" and logits != "all"
        rows = self.forward([context_of(lane)], token_ids.view(1, -1), bounded, pictured)
        if logits == "none":
            return None
        return self.logits(rows if logits == "all" else rows[-1:]).clone()  # an ordinary tensor again

    def prefill_by_layer(self, lane: LaneState, token_ids: Tensor, pictured: Pictured | None = None) -> Layers:
        """See `Model`. Every row takes the whole path. Raises as `prefill` does, before anything changed."""
        context, count = context_of(lane), len(token_ids)
        self.make_room([context], [count])
        return (yield from self.layers(self.rotations.begin([context], count), token_ids, False, pictured))

    def image_tokens(self, height: int, width: int) -> int:
        return 0 if self.vision is None else self.vision.geometry.tokens(Size(height, width))

    def see(self, height: int, width: int, pixels: bytes | None) -> Tensor:
        if self.vision is None:
            raise ConfigError("this model was loaded without its vision tower", hint="set rank in [vision]")
        return self.vision.see(Size(height, width), pixels)

    def step(self, contexts: list[Context], counts: Sequence[int], token_ids: Tensor, alone: bool) -> Tensor:
        if self.steps.serve(self, len(token_ids)):
            return self.steps.run(self, contexts, counts, token_ids, alone)
        return self.logits(self.run(self.rotations.rows(contexts, counts), token_ids, bounded=False))

    def propose(self, lanes: Sequence[LaneState], anchors: Tensor, choose: Choose, places: int = 0) -> Draft:
        """What may follow anchors [R] int64, the tokens that come after the contexts. Changes nothing. Always a whole
        block, which is made at once."""
        if self.drafter is None:
            raise ConfigError("this model was loaded without its drafter", hint="set draft in [engine]")
        return self.drafter.propose([context_of(lane) for lane in lanes], anchors, choose)

    @torch.inference_mode()
    def forward(
        self, lanes: list[Context], token_ids: Tensor, bounded: bool, pictured: Pictured | None = None
    ) -> Tensor:
        """token_ids [lanes, count] -> rows [T, D] before the final norm, T = lanes * count, or the last window of a
        chunk when `bounded`. Moves the lanes on."""
        count = token_ids.shape[1]
        self.make_room(lanes, [count] * len(lanes))
        return self.run(self.rotations.begin(lanes, count), token_ids.view(-1), bounded, pictured)

    @torch.inference_mode()
    def run(self, step: Pass, token_ids: Tensor, bounded: bool, pictured: Pictured | None = None) -> Tensor:
        """token_ids [T] of the pass, whose lanes have the pages. Otherwise as `forward`."""
        return through(self.layers(step, token_ids, bounded, pictured))

    def layers(self, step: Pass, token_ids: Tensor, bounded: bool, pictured: Pictured | None) -> Layers:
        """`run`, which stops before each layer but the first."""
        if pictured is not None:
            step.pictured = torch.zeros_like(step.positions, dtype=torch.bool).index_fill_(0, pictured.places, True)
        asked = self.engrams.ask(step, token_ids.cpu().numpy())
        if len(step.spans) == 1 and self.steps.serve(self, rows=1):
            from tided.models.deepseek_v41.chunk import Chunk  # a compiler, which a CPU need not have

            return (yield from Chunk(self, step).layers(token_ids, asked, bounded, pictured))
        streams = self.embedded(token_ids)
        if pictured is not None:
            streams[pictured.places] = pictured.rows.unsqueeze(1)
        pre = torch.zeros(streams.shape[:2], device=streams.device)
        pre[:, 0] = 1.0
        taps: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            if number:
                yield
            engram = self.engrams.layers.get(block.layer)
            if engram is not None:
                streams = engram.mix(streams, asked[block.layer], step)
            if bounded and block.layer == self.last_kv_source:
                # The rows left behind still owe the global context, and nothing else.
                block.attention.compress(step, block.attention_input(streams, pre))
                window, (span,) = self.context_shape.window, step.spans
                kept = min(window, span.count)
                step = step.tail(kept, max(0, span.end - window))
                streams, pre = streams[-kept:], pre[-kept:]
            if block.layer in self.tapped:
                taps.append(self.numerics.store(streams.mean(1)))
            streams, pre = block.forward(step, streams, pre)
        if self.drafter is not None:
            self.drafter.watch(step, taps)
        for span in step.spans:
            span.lane.position = span.end
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
