"""How prompts share time with running answers, and with each other.

While somebody decodes, each decode step of `d` seconds earns prompts `d * share / (1 - share)` seconds, and a chunk
begins once what it will cost is earned: from a newcomer's admission to its first token, running answers keep
`1 - share` of their rate. Chunks stay as long as they are, for their ends are where snapshots fit; what changes is how
many decode steps lie between two of them. Time is told by whoever measures it: there is no clock here.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Protocol, TypeVar

REMEMBERED = 9  # chunks whose cost is known: their median stands against one that was slow
MOST_DEBT = 4  # chunks: what a slow one may cost those that follow it
MOST_STEPS = 1024  # between two chunks: nobody waits for ever, whatever the clock says


class Pace:
    """`share`: of the time, at most, that prompts take while somebody decodes."""

    def __init__(self, share: float) -> None:
        self._earning = share / (1 - share)
        self._costs: deque[float] = deque(maxlen=REMEMBERED)  # seconds a token
        self._earned_s = 0.0
        self._steps = 0  # decode steps since the last chunk

    def may_prefill(self, tokens: int) -> bool:
        """Whether a chunk of so many tokens may begin now, beside running answers. Before one was measured they take
        turns with decode steps."""
        return self._steps >= MOST_STEPS or self._earned_s >= self._cost_s(tokens)

    def alone(self) -> None:
        """No prompt is waiting, or nobody decodes: nothing is saved up, nothing is owed."""
        self._earned_s, self._steps = 0.0, 0

    def decoded(self, seconds: float) -> None:
        self._steps += 1
        self._earned_s += seconds * self._earning

    def prefilled(self, tokens: int, seconds: float, beside: bool) -> None:
        """A chunk was computed; `beside`: answers were running."""
        if beside:
            self._earned_s -= min(seconds, MOST_DEBT * self._cost_s(tokens) or seconds)
            self._steps = 0
        self._costs.append(seconds / tokens)

    def _cost_s(self, tokens: int) -> float:
        return median(self._costs) * tokens if self._costs else 0.0


class Newcomer(Protocol):
    turn: int


Someone = TypeVar("Someone", bound=Newcomer)


def whose_turn(newcomers: Iterable[Someone]) -> Someone | None:
    """The prompt that has waited longest since its last chunk, or since it got its lane: of n prompts each has every
    n-th chunk, so a short one is not held up by a long one, and none starves."""
    return min(newcomers, key=lambda newcomer: newcomer.turn, default=None)
