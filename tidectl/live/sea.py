"""What a server tells of its experts (`/v1/expert-map/events`), put together: the map, the tide, what is now."""

import base64
from collections import deque
from typing import Any, NamedTuple

import msgspec

from tided.errors import TideError

MISSING, RESIDENT, HOT, LOADING = range(4)
NO_HEAT = 15
KEPT_SAMPLES, KEPT_MOVES = 900, 64
COVERAGE_S = 60.0
MOST_CELLS = 1 << 18


class Map(msgspec.Struct):
    model: str
    layers: int
    experts: int
    cells: str


class Cells(msgspec.Struct):
    cells: str


class Tide(msgspec.Struct):
    """Columns of samples; `whole`: all that there are."""

    at: list[float]
    weight: list[float]
    missed: list[float]
    substituted: list[float]
    swaps: list[int]
    hot_reads: list[int]
    read_bytes: list[int]
    held: list[float | None]
    whole: bool = False


class Lane(msgspec.Struct):
    lane: int
    phase: str
    prompt_tokens: int
    computed_tokens: int
    answer_tokens: int
    drafted: int
    accepted: int
    fidelity: str
    tok_s: float | None = None


class Now(msgspec.Struct):
    state: str
    fault: str
    queue: int
    lanes_total: int
    lanes: list[Lane]
    tok_s: float | None
    counts: dict[str, int]
    swaps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    kv_tokens_used: int | None = None
    kv_tokens_capacity: int | None = None
    arena_bytes: int | None = None
    device_bytes: int | None = None
    available_bytes: dict[str, int] = {}
    reads_nbytes: int | None = None
    reads_failed: int | None = None
    reads_hot_issued: int | None = None


class Sample(NamedTuple):
    """Counters since the start, at a Unix time; `held`: share of what is expected next that is in memory."""

    at: float
    weight: float
    missed: float
    substituted: float
    moved: int
    read_bytes: int
    held: float | None


class Coverage(NamedTuple):
    """Shares of the routing weight of a span; None where nothing was routed in it. `since_start`: that is the span."""

    covered: float | None
    substituted: float | None
    since_start: bool = False


class Move(NamedTuple):
    at_s: float
    layer: int
    expert: int
    state: int


class Sea:
    """`take` the events as they come. Raises TideError for what is none of ours."""

    def __init__(self) -> None:
        self.model, self.layers, self.experts = "", 0, 0
        self.cells = bytearray()
        self.changed_s: dict[int, float] = {}  # when a cell changed its state last
        self.samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self.moves: deque[Move] = deque(maxlen=KEPT_MOVES)  # the newest first
        self.now: Now | None = None

    def take(self, name: str, value: Any, now_s: float) -> None:
        """An event by its name; others than we know are left alone."""
        try:
            if name == "map":
                self._map(msgspec.convert(value, Map), now_s)
            elif name == "cells":
                self._cells(base64.b64decode(msgspec.convert(value, Cells).cells, validate=True), now_s)
            elif name == "tide":
                self._tide(msgspec.convert(value, Tide))
            elif name == "now":
                self.now = msgspec.convert(value, Now)
        except (msgspec.ValidationError, ValueError, IndexError) as error:
            raise TideError(f"what the server tells of its experts cannot be read ({error})") from error

    def coverage(self, seconds: float = COVERAGE_S) -> Coverage:
        """Of the newest `seconds` in which anything was routed; before that of all since the start."""
        if not self.samples:
            return Coverage(None, None)
        samples = list(self.samples)
        end = next((at for at in range(len(samples) - 1, 0, -1) if samples[at].weight > samples[at - 1].weight), 0)
        first = next(at for at, one in enumerate(samples) if samples[end].at - one.at <= seconds)
        found = between(samples[first], samples[end])
        nothing = samples[end]._replace(weight=0.0, missed=0.0, substituted=0.0)
        return found if found.covered is not None else between(nothing, samples[end])._replace(since_start=True)

    def _map(self, found: Map, now_s: float) -> None:
        cells = base64.b64decode(found.cells, validate=True)
        if not 0 < len(cells) == found.layers * found.experts <= MOST_CELLS:
            raise ValueError(f"{len(cells)} cells of {found.layers} layers of {found.experts}")
        self.model, self.layers, self.experts = found.model, found.layers, found.experts
        if len(self.cells) == len(cells):
            for index, cell in enumerate(cells):
                if cell != self.cells[index]:
                    self._set(index, cell, now_s)
        else:
            self.cells, self.changed_s = bytearray(cells), {}
            self.moves.clear()

    def _cells(self, codes: bytes, now_s: float) -> None:
        for at in range(0, len(codes), 3):
            code = int.from_bytes(codes[at : at + 3])
            self._set(code >> 6, code & 63, now_s)

    def _set(self, index: int, cell: int, now_s: float) -> None:
        before, state = self.cells[index] >> 4, cell >> 4
        self.cells[index] = cell
        if before != state:
            self.changed_s[index] = now_s
            if state != LOADING:
                self.moves.appendleft(Move(now_s, *divmod(index, self.experts), state))

    def _tide(self, found: Tide) -> None:
        if found.whole:
            self.samples.clear()
        moved = [sum(both) for both in zip(found.swaps, found.hot_reads, strict=True)]
        columns = found.at, found.weight, found.missed, found.substituted, moved, found.read_bytes, found.held
        self.samples.extend(Sample(*row) for row in zip(*columns, strict=True))


def between(first: Sample, last: Sample) -> Coverage:
    weight = last.weight - first.weight
    if weight <= 0:
        return Coverage(None, None)
    return Coverage(1 - (last.missed - first.missed) / weight, (last.substituted - first.substituted) / weight)
