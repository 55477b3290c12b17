"""What became of the experts that a request wanted, kept for the newest requests: `tidectl why`.

The engine's thread writes, others read what is finished. Numbers alone: pairs, counts, weights, steps, milliseconds; no
token and no text.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tided.control.messages import Change, Load

KEPT_REQUESTS = 64
KEPT_EVENTS = 8192  # of all requests together
MOST_PAIRS = 256  # of a request: those that were missed by the most weight
MOST_EVENTS = 1024

Grid = npt.NDArray[np.float32]
Pair = tuple[int, int]
What = Literal["asked", "routable", "promoted", "left", "not read"]


class PairUse(msgspec.Struct, frozen=True):
    """A pair (layer, expert) that the request's rows wanted: how many picks, and the normalised routing weight that was
    missed of it, and that part of it which was read before use."""

    layer: int
    expert: int
    picks: int
    missed_weight: float
    read_weight: float


class Movement(msgspec.Struct, frozen=True):
    """Something that happened to a pair in a step, `ms` after the request was taken in. `asked`: a read began, for
    the place of `out` or for the ring; `routable`: every rank had it; `promoted`: from the ring to a resident's place
    `out`, or to a free one; `left`: no longer routable; `not read`: some rank could not. `why`: the moment of its
    plan, "hot read", or "budget"."""

    step: int
    ms: float
    what: What
    layer: int
    expert: int
    out: Pair | None
    why: str


class Trace(msgspec.Struct, frozen=True):
    """`pairs` are ordered by missed weight; `pairs_wanted`, `pairs_missed` and `pairs_read` (before use; that weight is
    part of the missed one) count all. `movements` are of pairs that the request wanted, and of reads beside the steps
    alone; `movements_of_others` counts the rest."""

    request_id: str
    ended: str
    first_step: int
    last_step: int
    ms: float
    pairs_wanted: int
    pairs_missed: int
    missed_weight: float
    pairs_read: int
    read_weight: float
    pairs: list[PairUse]
    movements: list[Movement]
    movements_of_others: int


class Uses(msgspec.Struct, frozen=True):
    """Of one request, [layers, experts] each: picks, missed weight, weight read before use."""

    picks: Grid
    missed: Grid
    read: Grid


@dataclass(frozen=True)
class _Seen:
    step: int
    at_s: float
    what: What
    pair: Pair
    out: Pair | None
    why: str


class Traces:
    """One thread writes. `find` and `newest` may be called by others."""

    def __init__(self) -> None:
        self._seen: deque[_Seen] = deque(maxlen=KEPT_EVENTS)
        self._asked: dict[int, tuple[Load, str]] = {}
        self._began: dict[str, tuple[int, float]] = {}
        self._done: dict[str, Trace] = {}

    @property
    def newest(self) -> Trace | None:
        return next(reversed(self._done.values()), None)

    def find(self, request_id: str) -> Trace | None:
        return self._done.get(request_id)

    def began(self, request_id: str, step: int, now_s: float) -> None:
        """Its first step is the one after `step`."""
        self._began[request_id] = step, now_s

    def changed(self, step: int, change: Change, why_of: Callable[[int], str], now_s: float) -> None:
        """A step changed the routable set; `why_of` knows the tickets of its loads."""
        self._seen.extend(_Seen(step, now_s, *one) for one in self._what(change, why_of))

    def ended(self, request_id: str, how: str, step: int, now_s: float, uses: Uses | None) -> None:
        """None: it had no lane, and wanted nothing."""
        first, began_s = self._began.pop(request_id, (step, now_s))
        if uses is None:
            return
        wanted = uses.picks > 0
        own = [one for one in self._seen if one.step > first and wanted[one.pair]]
        others = sum(one.step > first for one in self._seen) - len(own)
        movements = [
            Movement(one.step, round(1000 * (one.at_s - began_s), 2), one.what, *one.pair, one.out, one.why)
            for one in own[-MOST_EVENTS:]
        ]
        self._done[request_id] = Trace(
            request_id, how, first + 1, step, round(1000 * (now_s - began_s), 2),
            int(wanted.sum()), int((uses.missed > 0).sum()), float(uses.missed.sum()),
            int((uses.read > 0).sum()), float(uses.read.sum()),
            _heaviest(uses), movements, others,
        )  # fmt: skip
        while len(self._done) > KEPT_REQUESTS:
            del self._done[next(iter(self._done))]

    def _what(self, change: Change, why_of: Callable[[int], str]) -> Iterator[tuple[What, Pair, Pair | None, str]]:
        for ticket in change.publish:
            load, why = self._asked.pop(ticket)
            if load.out is not None:
                yield "left", load.out, None, why
            yield "routable", load.pair, load.out, why
        for swap in change.promote:
            yield "promoted", swap.in_, swap.out, "hot read"
        for pair in change.withdraw:
            yield "left", pair, None, "hot read"
        for pair in change.adopt:
            yield "promoted", pair, None, "budget"
        for pair in change.resize.evict if change.resize else ():
            yield "left", pair, None, "budget"
        for ticket in change.give_up:
            load, why = self._asked.pop(ticket)
            yield "not read", load.pair, load.out, why
        for load in change.load:
            self._asked[load.ticket] = load, why_of(load.ticket)
            yield "asked", load.pair, load.out, self._asked[load.ticket][1]


def _heaviest(uses: Uses) -> list[PairUse]:
    """The pairs with the most missed weight, then those picked most; ties to the lower pair."""
    experts = uses.picks.shape[1]
    order = np.lexsort((-uses.picks.ravel(), -uses.missed.ravel()))
    picked = [int(at) for at in order[:MOST_PAIRS] if uses.picks.flat[at] > 0]
    return [_use(uses, at, *divmod(at, experts)) for at in picked]


def _use(uses: Uses, at: int, layer: int, expert: int) -> PairUse:
    return PairUse(layer, expert, int(uses.picks.flat[at]), float(uses.missed.flat[at]), float(uses.read.flat[at]))


def as_json(trace: Trace) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(trace)
    return built
