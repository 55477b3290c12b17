"""How prompts share time with running answers, and with each other.

While somebody decodes, decode steps earn prompts time, and a chunk begins once what it will cost is earned. From a
newcomer's admission to its first token, running answers keep `1 - share` of the time, and of the rate that they had
alone: steps that have become slower beside a prompt, by what is read for it say, earn less. A prompt gets half of its
share at least, whatever made them slower. Chunks stay as long as they are, for their ends are where snapshots fit; what
changes is how many decode steps lie between two of them. Time is told by whoever measures it: there is no clock here.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from statistics import median
from typing import Protocol, TypeVar

REMEMBERED = 9  # chunks whose cost is known: their median stands against one that was slow
REMEMBERED_STEPS = 64  # without a prompt beside them, that a rate is told by
MOST_DEBT = 4  # chunks: what a slow one may cost those that follow it
MOST_STEPS = 1024  # between two chunks: nobody waits for ever, whatever the clock says
LEAST_PART = 0.5  # of its share, that a prompt gets


class Pace:
    """`share`: of the time, at most, that prompts take while somebody decodes."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._costs: deque[float] = deque(maxlen=REMEMBERED)  # seconds a token
        # By lanes: tokens and seconds of steps that no prompt was beside.
        self._rates: defaultdict[int, deque[tuple[int, float]]] = defaultdict(partial(deque, maxlen=REMEMBERED_STEPS))
        self._begin()

    def _begin(self) -> None:
        self._decoded_s = self._alone_s = self._spent_s = 0.0
        self._steps = 0  # decode steps since the last chunk

    def may_prefill(self, tokens: int) -> bool:
        """Whether a chunk of so many tokens may begin now, beside running answers. Before one was measured they take
        turns with decode steps."""
        return self._steps >= MOST_STEPS or self._earned_s - self._spent_s >= self._cost_s(tokens)

    def alone(self) -> None:
        """No prompt is waiting, or nobody decodes: nothing is saved up, nothing is owed."""
        self._begin()

    def decoded(self, lanes: int, tokens: int, seconds: float, beside: bool) -> None:
        """A step of so many lanes brought so many tokens; `beside`: a prompt was waiting."""
        if beside:
            self._steps += 1
            self._decoded_s += seconds
            self._alone_s += self._usual_s(lanes, tokens, seconds)
        else:
            self._rates[lanes].append((tokens, seconds))

    def prefilled(self, tokens: int, seconds: float, beside: bool) -> None:
        """A chunk was computed; `beside`: answers were running."""
        if beside:
            self._spent_s += min(seconds, MOST_DEBT * self._cost_s(tokens) or seconds)
            self._steps = 0
        self._costs.append(seconds / tokens)

    @property
    def _earned_s(self) -> float:
        by_time = self._decoded_s * self._share / (1 - self._share)
        by_rate = self._alone_s / (1 - self._share) - self._decoded_s
        return min(by_time, max(by_rate, LEAST_PART * by_time))

    def _usual_s(self, lanes: int, tokens: int, seconds: float) -> float:
        """What so many tokens take such lanes without a prompt beside them; unknown: what they took."""
        known = self._rates[lanes]
        before = sum(came for came, _ in known)
        return tokens * sum(took for _, took in known) / before if before else seconds

    def _cost_s(self, tokens: int) -> float:
        return median(self._costs) * tokens if self._costs else 0.0


class Newcomer(Protocol):
    turn: int


Someone = TypeVar("Someone", bound=Newcomer)


def whose_turn(newcomers: Iterable[Someone]) -> Someone | None:
    """The prompt that has waited longest since its last chunk, or since it got its lane: of n prompts each has every
    n-th chunk, so a short one is not held up by a long one, and none starves."""
    return min(newcomers, key=lambda newcomer: newcomer.turn, default=None)
