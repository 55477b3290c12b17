"""The text path of GLM-5.3: prompt chunks and decode rows over paged context."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kernels.norm import rms_norm
from kernels.numerics import Numerics
from kernels.packed import Linear, product
from tided.cache.context import After, Context, ContextShape
from tided.cache.pool import Pool
from tided.errors import ConfigError
from tided.experts.bank import ExpertBank
from tided.models.base import Choose, Draft, LaneState, Layers, Pictured, through
from tided.models.glm53.block import Block
from tided.models.glm53.captured import DecodeSteps
from tided.models.glm53.drafter import Drafter
from tided.models.glm53.mlp import Moe
from tided.models.glm53.step import Pass, Rotations
from tided.models.paged import PagedLanes, Shape, context_of
from tided.models.parallel import Group


@dataclass(frozen=True)
class Glm53(PagedLanes):
    """One rank's model (`tided.models.base.Model`). Owned by the engine's thread."""

    shape: Shape
    context_tokens: int  # most tokens of one lane
    embed: Tensor  # [V, D / ranks] as stored, this rank's columns
    blocks: tuple[Block, ...]
    norm: Tensor
    eps: float
    head: Linear  # [V / ranks, D], this rank's rows
    rotations: Rotations
    pool: Pool
    context_shape: ContextShape
    group: Group
    numerics: Numerics
    drafter: Drafter | None = None
    steps: DecodeSteps = field(default_factory=DecodeSteps)  # of fixed shape, where kernels serve the device
    drafts_one_by_one: ClassVar[bool] = True

    def prefill(
        self,
        lane: LaneState,
        token_ids: Tensor,
        logits: Literal["none", "last", "all"],
        pictured: Pictured | None = None,
    ) -> Tensor | None:
        """See `Model`. Raises UnavailableError when the pool is short, ContextOverflowError past context_tokens, both
        before anything changed."""
        context, count = context_of(lane), len(token_ids)
        self.make_room([context], [count])
        rows = self.run(self.rotations.begin(context, count), token_ids)
        if logits == "none":
            return None
        return self.logits(rows if logits == "all" else rows[-1:]).clone()  # an ordinary tensor again

    def prefill_by_layer(self, lane: LaneState, token_ids: Tensor, pictured: Pictured | None = None) -> Layers:
        """See `Model`. Raises as `prefill` does, before anything changed."""
        context, count = context_of(lane), len(token_ids)
        self.make_room([context], [count])
        return (yield from self.layers(self.rotations.begin(context, count), token_ids))

    def step(self, contexts: list[Context], counts: Sequence[int], token_ids: Tensor, alone: bool) -> Tensor:
        if self.steps.serve(self, len(token_ids)):
            return self.steps.run(self, contexts, counts, token_ids, alone)
        return self.logits(self.run(self.rotations.rows(contexts, counts), token_ids))

    @torch.inference_mode()
    def run(self, step: Pass, token_ids: Tensor) -> Tensor:
        """token_ids [T] of the pass, whose lanes have the pages -> rows [T, D] before the final norm. Moves the lanes
        on."""
        return through(self.layers(step, token_ids))

    def layers(self, step: Pass, token_ids: Tensor) -> Layers:
        """`run`, which stops before each layer but the first."""
        x = self.embedded(token_ids)
        for number, block in enumerate(self.blocks):
            if number:
                yield
            x = block.forward(step, x)
        if self.drafter is not None:
            self.drafter.watch(step, token_ids, self.normed(x))
        for span in step.spans:
            span.lane.position = span.end
            if span.lane.undo is not None:
                span.lane.undo.after.append(After({}, span.lane.tail))
        return x

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """rows [T, D] as `run` gives them -> fp32 [T, V], whole on every rank."""
        return self.group.concat(product(self.normed(rows), self.head, self.numerics))

    def embedded(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, D]"""
        return self.group.concat(self.embed[token_ids.to(self.embed.device)].to(torch.float32))

    def normed(self, rows: Tensor) -> Tensor:
        return self.numerics.store(rms_norm(rows, self.norm, self.eps))

    @property
    def bank(self) -> ExpertBank:
        """Of the routed experts of the trunk."""
        return next(block.mlp.bank for block in self.blocks if isinstance(block.mlp, Moe))

    def image_tokens(self, height: int, width: int) -> int:
        return 0

    def see(self, height: int, width: int, pixels: bytes | None) -> Tensor:
        raise ConfigError("this model takes no images")

    def propose(self, lanes: Sequence[LaneState], anchors: Tensor, choose: Choose, places: int = 0) -> Draft:
        """See `Model`."""
        if self.drafter is None:
            raise ConfigError("this model was loaded without its drafter", hint="set draft in [engine]")
        by_kernels = self.steps.serve(self, len(lanes)) and self.steps.by_kernels(self)
        return self.drafter.propose([context_of(lane) for lane in lanes], anchors, choose, places, by_kernels)
