"""What one forward pass works on. A span is a chunk of one lane's prompt, or one row of a lane that decodes: a lane's
second row then finds cache and selection as if the first had been a step of its own, and has the same bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rope import frequencies, rotation
from tided.cache.context import Context
from tided.cache.pool import physical_rows
from tided.cache.share import ALONE, Share


@dataclass(frozen=True)
class Selection:
    """Tokens that the queries of a span attend to, as places in the pool: [T, K], or [1, K] the same for all; valid
    [T, K] or None: all, as always of a span of one row. Every layer keeps a token at the same place. Of tokens that
    other ranks keep there is nothing here; K may be 0."""

    places: Tensor
    valid: Tensor | None


@dataclass
class Span:
    """`count` rows of a lane from position `start`; rows [first, first + count) of the pass."""

    lane: Context
    start: int
    first: int
    count: int
    selection: Selection | None = None  # of the last layer that chose

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True)
class Pass:
    spans: list[Span]
    positions: Tensor  # [T]
    lane_of_row: Tensor  # [T]
    places: Tensor  # [n] in the pool, of the tokens that this rank keeps
    kept: Tensor | None  # [n], which rows they are; None: all of them
    turn: Tensor  # rotation, complex [T, r / 2]

    def of_kept(self, rows: Tensor) -> Tensor:
        """rows [T, ...] -> [n, ...]"""
        return rows if self.kept is None else rows[self.kept]


class Rotations:
    """The frequency table of a model, and the rank's `share` of its contexts."""

    def __init__(self, rope_dim: int, theta: float, device: torch.device, share: Share = ALONE) -> None:
        self.table = frequencies(rope_dim, theta, None).to(device)
        self.share = share

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, r / 2]: the parts of `Pass.turn`."""
        angles = torch.outer(positions.to(torch.float32), self.table)
        return angles.cos(), angles.sin()

    def begin(self, lane: Context, count: int) -> Pass:
        """A chunk of `count` rows of a lane that has the pages, from where it stands."""
        return self.of([(lane, lane.position, count)])

    def rows(self, lanes: Sequence[Context], counts: Sequence[int]) -> Pass:
        """So many rows of each lane, each row a span, from where it stands."""
        return self.of(
            [(lane, lane.position + i, 1) for lane, count in zip(lanes, counts, strict=True) for i in range(count)]
        )

    def ahead(self, rows: Sequence[tuple[Context, int]]) -> Pass:
        """(lane, position) each: rows that have no place in the pool."""
        device = self.table.device
        positions = torch.tensor([position for _, position in rows], device=device)
        lanes = torch.tensor([lane.index for lane, _ in rows], device=device)
        none = positions.new_empty(0)
        return Pass([], positions, lanes, none, none, rotation(positions, self.table))

    def of(self, parts: Sequence[tuple[Context, int, int]]) -> Pass:
        """(lane, start, count) each."""
        device, share = self.table.device, self.share
        spans, places, owned, first = list[Span](), list[Tensor](), list[Tensor](), 0
        for lane, start, count in parts:
            spans.append(Span(lane, start, first, count))
            positions = torch.arange(start, start + count, device=device)
            own = share.owns(positions)
            places.append(physical_rows(lane, share.ranks, share.numbers(positions[own])))
            owned.append(own)
            first += count
        positions = torch.cat([torch.arange(span.start, span.end, device=device) for span in spans])
        lanes = torch.tensor([span.lane.index for span in spans for _ in range(span.count)], device=device)
        kept = torch.cat(owned).nonzero()[:, 0] if share.ranks > 1 else None
        return Pass(spans, positions, lanes, torch.cat(places), kept, rotation(positions, self.table))
