"""What every model whose contexts lie in the paged pool does with them: the part of `tided.models.base.Model` that is
no mathematics."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tided.cache.context import Context, ContextShape
from tided.cache.pool import PAGE_TOKENS, Pool
from tided.errors import ContextOverflowError
from tided.models.base import LaneState
from tided.models.prepared import FixedSteps
from tided.models.runs import runs


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


class Drafts(Protocol):
    @property
    def size(self) -> int: ...  # most tokens of a proposal


class PagedLanes(ABC):
    """For a model that has these. Owned by the engine's thread."""

    pool: Pool
    context_shape: ContextShape
    context_tokens: int  # most tokens of one lane
    norm: Tensor  # lies where contexts do
    steps: FixedSteps[Any]  # where kernels serve the device
    drafter: Drafts | None
    drafts_one_by_one: ClassVar[bool] = False

    @property
    def context_pages(self) -> int:
        """Most pages of one lane."""
        return min(self.pool.pages, -(-self.context_tokens // PAGE_TOKENS))

    def open_lane(self, index: int) -> Context:
        context = Context(index, self.context_shape, self.norm.device)
        self.pool.grow([context], 1)
        return context

    def close_lane(self, lane: LaneState) -> None:
        self.pool.release(context_of(lane))

    def is_captured(self, rows: int) -> bool:
        return self.steps.has_captured(rows)

    def decode(self, lanes: Sequence[LaneState], token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """See `Model`. Taken in runs of at most ROWS rows: within them kernels compute row by row."""
        contexts, counts = [context_of(lane) for lane in lanes], counts or [1] * len(lanes)
        self.make_room(contexts, counts)
        for context, count in zip(contexts, counts, strict=True):
            if count > 1:
                context.begin_block(count)
        parts, first, all_runs = [], 0, list(runs(counts))
        for part in all_runs:
            end = first + sum(counts[part])
            parts.append(self.step(contexts[part], counts[part], token_ids[first:end], len(all_runs) == 1))
            first = end
        return torch.cat(parts)  # outside inference mode: an ordinary tensor

    @abstractmethod
    def step(self, contexts: list[Context], counts: Sequence[int], token_ids: Tensor, alone: bool) -> Tensor:
        """One run of `decode`, of lanes whose pages are there -> logits [R, V]. Moves the lanes on. `alone`: nothing is
        computed before these are used."""

    @property
    def draft_tokens(self) -> int:
        return 0 if self.drafter is None else self.drafter.size

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
