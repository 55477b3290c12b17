"""What answers missed lately, lane by lane, and when that makes a plan due while tokens are generated.

Every counter is a lane's own and begins with its answer: a rate over all that was ever served stops moving after some
hundred requests. Two clocks, and neither spends what is the other's: `decode` plans come after so many tokens of an
answer, `urgent` ones when the newest tokens miss badly, at most one attempt in so many tokens, empty ones included.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Due = Literal["decode", "urgent"]

WINDOW_TOKENS = 30  # of one answer; a step's tokens stay together, so a window ends with the step that fills it


@dataclass
class Stretch:
    """Generated tokens, their picks, and those of them that were not resident."""

    tokens: int = 0
    picks: float = 0.0
    missed: float = 0.0

    @property
    def miss_rate(self) -> float:
        return self.missed / self.picks if self.picks else 0.0

    def __add__(self, other: "Stretch") -> "Stretch":
        return Stretch(self.tokens + other.tokens, self.picks + other.picks, self.missed + other.missed)

    def __sub__(self, other: "Stretch") -> "Stretch":
        return Stretch(self.tokens - other.tokens, self.picks - other.picks, self.missed - other.missed)


@dataclass
class _Lane:
    seen: Stretch = field(default_factory=Stretch)  # since the answer began
    stretch: Stretch = field(default_factory=Stretch)  # since the last decode plan, or since one was not worth making
    recent: deque[Stretch] = field(default_factory=deque)  # the newest steps, one entry each
    window: Stretch = field(default_factory=Stretch)  # their sum; of counts, so what is added comes off again exactly


class Windows:
    """`every_tokens` of an answer between decode plans, 0: never; worth making from `gate` missed on. Urgent above
    `urgent_rate` missed, 1: never, with `gap_tokens` generated tokens, of whatever lane, between attempts."""

    def __init__(self, every_tokens: int, gate: float, urgent_rate: float, gap_tokens: int) -> None:
        self._every_tokens, self._gate = every_tokens, gate
        self._urgent_rate, self._gap_tokens = urgent_rate, gap_tokens
        self._lanes: dict[int, _Lane] = {}
        self._since_urgent = gap_tokens

    def advance(self, lane: int, tokens: int, picks: float, missed: float) -> int:
        """The lane's answer has so many generated tokens, picks and missed picks by now. Returns the new tokens; raises
        ValueError for counters that went back."""
        now, watched = Stretch(tokens, picks, missed), self._lanes.setdefault(lane, _Lane())
        new = now - watched.seen
        if new.tokens < 0 or new.picks < 0 or new.missed < 0:
            raise ValueError(f"the counters of lane {lane} went back from {watched.seen} to {now}")
        if not new.tokens:
            return 0
        watched.seen, watched.stretch = now, watched.stretch + new
        watched.recent.append(new)
        watched.window += new
        while watched.window.tokens - watched.recent[0].tokens >= WINDOW_TOKENS:
            watched.window -= watched.recent.popleft()
        self._since_urgent += new.tokens
        return new.tokens

    def due(self, moving: bool = False) -> tuple[Due, float] | None:
        """Which plan is due now, and what was missed that makes it so. `moving`: nothing is urgent now."""
        return self._decode_due() or (None if moving else self._urgent_due())

    def attempted(self, due: Due) -> None:
        """A plan was made, if only an empty one. What was missed before says nothing about the set that follows."""
        for lane in self._lanes.values():
            lane.recent.clear()
            lane.window = Stretch()
            if due == "decode":
                lane.stretch = Stretch()
        if due == "urgent":
            self._since_urgent = 0

    def ended(self, lane: int) -> None:
        self._lanes.pop(lane, None)

    def _decode_due(self) -> tuple[Due, float] | None:
        found: tuple[Due, float] | None = None
        for lane in self._lanes.values():
            if not self._every_tokens or lane.stretch.tokens < self._every_tokens:
                continue
            rate = lane.stretch.miss_rate
            if rate < self._gate:
                lane.stretch = Stretch()
            elif found is None or rate > found[1]:
                found = ("decode", rate)
        return found

    def _urgent_due(self) -> tuple[Due, float] | None:
        if self._since_urgent < self._gap_tokens:
            return None
        windows = [lane.window for lane in self._lanes.values()]
        worst = max((window.miss_rate for window in windows if window.tokens >= WINDOW_TOKENS), default=0.0)
        return ("urgent", worst) if worst > self._urgent_rate else None
