"""What every model whose contexts lie in the paged pool does with them: the part of `tided.models.base.Model` that is
no mathematics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tided.cache.context import Context, ContextShape
from tided.cache.pool import PAGE_TOKENS, Pool
from tided.errors import ContextOverflowError
from tided.models.base import LaneState


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
    eos_id: int


class PagedLanes:
    """For a model that has these. Owned by the engine's thread."""

    pool: Pool
    context_shape: ContextShape
    context_tokens: int  # most tokens of one lane
    norm: Tensor  # lies where contexts do
    drafts_one_by_one: ClassVar[bool] = False

    def open_lane(self, index: int) -> Context:
        context = Context(index, self.context_shape, self.norm.device)
        self.pool.grow([context], 1)
        return context

    def close_lane(self, lane: LaneState) -> None:
        self.pool.release(context_of(lane))

    def keep(self, lane: LaneState, rows: int) -> None:
        """See `Model`."""
        context = context_of(lane)
        if context.undo is not None:
            context.keep(rows)
            self.pool.trim(context)

    @property
    def page_tokens(self) -> int:
        return PAGE_TOKENS

    @property
    def page_bytes(self) -> int:
        return self.pool.page_bytes

    def lane_parts(self, lane: LaneState) -> dict[str, Tensor]:
        return context_of(lane).parts()

    def page_parts(self, lane: LaneState, first: int, last: int) -> dict[str, Tensor]:
        return self.pool.copied(context_of(lane), first, last)

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
        self.pool.check(map(context_of, lanes))

    def make_room(self, contexts: Sequence[Context], counts: Sequence[int]) -> None:
        """Pages for so many more tokens of each. Raises UnavailableError when the pool is short, ContextOverflowError
        past context_tokens, both before anything changed."""
        short = False
        for context, tokens in zip(contexts, counts, strict=True):
            end = context.position + tokens
            if end > self.context_tokens:
                raise ContextOverflowError(self.context_tokens, context.position, tokens)
            short = short or end > len(context.pages) * PAGE_TOKENS
        if short:  # seldom, and a device waits meanwhile
            self.pool.grow(contexts, counts)


def context_of(lane: LaneState) -> Context:
    assert isinstance(lane, Context), "lanes come from open_lane"
    return lane
