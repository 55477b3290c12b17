"""Rank 0's word on what is read back: snapshots of the prompt cache for a request, contexts of parked lanes.

    step t      Recall(ticket, keys)      every rank looks for the keys, and reads the first that it holds
    between     Recalled(rank, ticket)    each tells what it holds and what it has read; steps go on
                once all told             all read the same: it may be restored. Else the longest that all hold is
                                          asked for alone; nothing in common: computed from the start
    step t + n  restore, or forget        the lane begins there; or what was read is not wanted any more

No step waits for a read. State alone decides: no clock, no tensor.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tided.control.messages import Recall, Recalled, Restore
from tided.engine.types import Request
from tided.errors import PairError


class Candidate(NamedTuple):
    """A snapshot that rank 0 holds: the first `tokens` of a prompt."""

    tokens: int
    key: str


class Found(NamedTuple):
    """The answer to a question; `restore` None: nothing to restore."""

    restore: Restore | None


NOTHING = Found(None)
Lookup = Callable[[Request], Sequence[Candidate]]  # the longest first


@dataclass
class _Asked:
    ticket: int
    candidates: list[Candidate]  # of a parked lane: none
    answers: list[Recalled] = field(default_factory=list)


class Recalls:
    """`ranks` tell of each recall. `lookup`: what rank 0 itself holds for a request."""

    def __init__(self, ranks: int = 1, lookup: Lookup = lambda request: ()) -> None:
        self._ranks, self._lookup = ranks, lookup
        self._tickets = 0
        self._requests: dict[str, _Asked | Found] = {}
        self._lanes: dict[int, _Asked | bool] = {}  # True: every rank has read it; False: one cannot
        self._begin: list[Recall] = []
        self._forget: list[int] = []

    @property
    def pending(self) -> int:
        """Recalls that some rank has not told of."""
        return sum(isinstance(asked, _Asked) for asked in (*self._requests.values(), *self._lanes.values()))

    def find(self, request: Request) -> Found | None:
        """What the request's lane may begin with; None while ranks are still asked."""
        name = request.request_id
        if name not in self._requests:
            self._requests[name] = self._ask(list(self._lookup(request))) or NOTHING
        state = self._requests[name]
        return state if isinstance(state, Found) else None

    def taken(self, request: Request) -> None:
        """The request has its lane."""
        self._requests.pop(request.request_id, None)

    def drop(self, request: Request) -> None:
        """The request is gone before it had a lane."""
        self._drop(request.request_id)

    def _drop(self, name: str) -> None:
        state = self._requests.pop(name, None)
        if isinstance(state, _Asked):
            self._give_up(state.ticket)
        elif state is not None and state.restore is not None:
            self._give_up(state.restore.ticket)

    def _give_up(self, ticket: int) -> None:
        """What no step has asked for yet is not asked for; a step would forget it before it is read."""
        begun = len(self._begin)
        self._begin = [recall for recall in self._begin if recall.ticket != ticket]
        if len(self._begin) == begun:
            self._forget.append(ticket)

    def is_back(self, lane: int) -> bool | None:
        """Whether every rank has read the parked lane, None while they do; the first question begins the reads."""
        if lane not in self._lanes:
            self._tickets += 1
            self._begin.append(Recall(self._tickets, lane=lane))
            self._lanes[lane] = _Asked(self._tickets, [])
        state = self._lanes[lane]
        return state if isinstance(state, bool) else None

    def left(self, lane: int) -> None:
        """The lane is resumed, or over."""
        self._lanes.pop(lane, None)

    def renew(self) -> None:
        """Snapshots that were found count no more (the routable set changed, and they serve under theirs alone)."""
        for name in list(self._requests):
            self._drop(name)

    def check(self, waiting: Collection[str], parked: Collection[int]) -> None:
        """Raises PairError when something is remembered for who does not wait for it any more."""
        if not (self._requests.keys() <= set(waiting) and self._lanes.keys() <= set(parked)):
            raise PairError("a context is read back for a request that does not wait for it")

    def take(self) -> tuple[list[Recall], list[int]]:
        """What the next step begins and forgets."""
        begin, forget, self._begin, self._forget = self._begin, self._forget, [], []
        return begin, forget

    def heard(self, answer: Recalled) -> None:
        """A rank has told. Of a recall that is not wanted any more, nothing is kept."""
        for lane, asked in self._lanes.items():
            if isinstance(asked, _Asked) and asked.ticket == answer.ticket and self._complete(asked, answer):
                self._lanes[lane] = all(told.loaded == 0 for told in asked.answers)
        for name, state in self._requests.items():
            if isinstance(state, _Asked) and state.ticket == answer.ticket and self._complete(state, answer):
                self._requests[name] = self._agreed(state)

    def _complete(self, asked: _Asked, answer: Recalled) -> bool:
        asked.answers.append(answer)
        return len(asked.answers) == self._ranks

    def _agreed(self, asked: _Asked) -> _Asked | Found:
        """Every rank has read the same; or what all of them hold is asked for by itself, the longest first."""
        loaded = {answer.loaded for answer in asked.answers}
        if len(loaded) == 1 and (best := loaded.pop()) >= 0:
            return Found(Restore(asked.ticket, asked.candidates[best].tokens))
        self._forget.append(asked.ticket)
        common = set.intersection(*(set(answer.held) for answer in asked.answers))
        if len(asked.candidates) == 1:  # asked for by itself, and somebody could not read it
            return NOTHING
        return self._ask([asked.candidates[min(common)]]) or NOTHING if common else NOTHING

    def _ask(self, candidates: list[Candidate]) -> _Asked | None:
        if not candidates:
            return None
        self._tickets += 1
        self._begin.append(Recall(self._tickets, [candidate.key for candidate in candidates]))
        return _Asked(self._tickets, candidates)
