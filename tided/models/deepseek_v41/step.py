"""What one forward pass works on: rows of one or more lanes, their positions and rotations, and the selections so far.

A pass is either a chunk of one lane's prompt or one or a few rows of each of several lanes. Rows of all lanes go
through the dense parts together; attention takes them a span at a time. Rows that are decoded are a span each, in
order: a lane's second row then finds ring, compressed rows and selection as if the first had been a step of its own,
and has the same bits."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.rope import frequencies, rotation
from tided.cache.context import After, Context
from tided.models.deepseek_v41.config import TextConfig


@dataclass(frozen=True)
class Selection:
    """Compressed rows that the queries of a span attend to, as places in the pool [T, K]; valid [T, K] or None: all."""

    places: Tensor
    valid: Tensor | None


@dataclass
class Span:
    """`count` rows of a lane from position `start`; they are rows [first, first + count) of the pass.

    `floor`: no window of this pass reaches below this position (bounded replay; 0 otherwise)."""

    lane: Context
    start: int
    first: int
    count: int
    floor: int = 0
    selection: Selection | None = None  # of the last index source
    candidates: Tensor | None = None  # [T, blocks] int32: what the layers behind may choose from; None: no limit
    after: After | None = None  # of a row that may be taken back; remainders come as layers write

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)


@dataclass
class Pass:
    """`skipped`: rows dropped from the front since the pass began (bounded replay). `pictured` [T] bool: rows of
    images; None: there are none."""

    spans: list[Span]
    positions: Tensor
    lane_of_row: Tensor
    plain: Tensor  # rotation without compression, complex [T, r / 2]
    compressed: Tensor  # rotation of layers with compressed rows
    skipped: int = 0
    pictured: Tensor | None = None
    written: set[int] = field(default_factory=set)  # source layers whose compressed rows are in the pool already

    def turn(self, ratio: int) -> Tensor:
        return self.compressed if ratio else self.plain

    def tail(self, count: int, floor: int) -> "Pass":
        """The last `count` rows of a pass of one span, whose windows do not reach below position `floor`."""
        (span,) = self.spans
        return Pass(
            [Span(span.lane, span.end - count, 0, count, floor)],
            self.positions[-count:],
            self.lane_of_row[-count:],
            self.plain[-count:],
            self.compressed[-count:],
            self.skipped + span.count - count,
            None if self.pictured is None else self.pictured[-count:],
            self.written,
        )


class Rotations:
    """The two frequency tables of a model."""

    def __init__(self, t: TextConfig, device: torch.device) -> None:
        self._plain = frequencies(t.qk_rope_head_dim, t.rope_theta, None).to(device)
        self._compressed = frequencies(t.qk_rope_head_dim, t.compress_rope_theta, t.yarn).to(device)

    def begin(self, lanes: Sequence[Context], count: int) -> Pass:
        """A pass of `count` rows of each lane, a span each, from where it stands."""
        return self._pass([Span(lane, lane.position, i * count, count) for i, lane in enumerate(lanes)])

    def rows(self, lanes: Sequence[Context], counts: Sequence[int]) -> Pass:
        """A pass of so many rows of each lane, each row a span, from where it stands."""
        at = [(lane, lane.position + i) for lane, count in zip(lanes, counts, strict=True) for i in range(count)]
        return self._pass([Span(lane, start, first, 1) for first, (lane, start) in enumerate(at)])

    def _pass(self, spans: list[Span]) -> Pass:
        device = self._plain.device
        positions = torch.cat([torch.arange(span.start, span.end, device=device) for span in spans])
        lane_of_row = torch.tensor([span.lane.index for span in spans for _ in range(span.count)], device=device)
        plain = rotation(positions, self._plain)
        compressed = rotation(positions, self._compressed)
        return Pass(spans, positions, lane_of_row, plain, compressed)

    def angles(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """positions [R] -> cos and sin [R, r / 2] without compression, and with it."""
        both = [torch.outer(positions.to(torch.float32), freqs) for freqs in (self._plain, self._compressed)]
        return [(angles.cos(), angles.sin()) for angles in both]

    def at(self, positions: Tensor) -> Tensor:
        """Rotation of compressed rows that begin at these positions."""
        return rotation(positions, self._compressed)
