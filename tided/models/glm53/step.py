"""What one forward pass works on. A span is a chunk of one lane's prompt, or one row of a lane that decodes: a lane's
second row then finds cache and selection as if the first had been a step of its own, and has the same bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rope import frequencies, rotation
from tided.cache.context import Context
from tided.cache.pool import physical_rows


@dataclass(frozen=True)
class Selection:
    """Tokens that the queries of a span attend to, as places in the pool: [T, K], or [1, K] the same for all; valid
    [T, K] or None: all. Every layer keeps a token at the same place."""

    places: Tensor
    valid: Tensor | None


@dataclass
class Span:
    """`count` rows of a lane from position `start`; rows [first, first + count) of the pass."""

    lane: Context
    start: int
    first: int
    count: int
    places: Tensor  # [count] of these tokens in the pool
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
    places: Tensor  # [T]
    turn: Tensor  # rotation, complex [T, r / 2]


class Rotations:
    """The frequency table of a model."""

    def __init__(self, rope_dim: int, theta: float, device: torch.device) -> None:
        self._table = frequencies(rope_dim, theta, None).to(device)

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
        device = self._table.device
        positions = torch.tensor([position for _, position in rows], device=device)
        lanes = torch.tensor([lane.index for lane, _ in rows], device=device)
        return Pass([], positions, lanes, positions.new_empty(0), rotation(positions, self._table))

    def of(self, parts: Sequence[tuple[Context, int, int]]) -> Pass:
        """(lane, start, count) each."""
        device, spans, first = self._table.device, list[Span](), 0
        for lane, start, count in parts:
            positions = torch.arange(start, start + count, device=device)
            spans.append(Span(lane, start, first, count, places_of(lane, positions)))
            first += count
        positions = torch.cat([torch.arange(span.start, span.end, device=device) for span in spans])
        lanes = torch.tensor([span.lane.index for span in spans for _ in range(span.count)], device=device)
        places = torch.cat([span.places for span in spans])
        return Pass(spans, positions, lanes, places, rotation(positions, self._table))


def places_of(lane: Context, positions: Tensor) -> Tensor:
    """Where a lane's tokens lie in the pool; same shape, int64."""
    return physical_rows(lane, 1, positions)
