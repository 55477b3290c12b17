"""How many drafted tokens a step verifies, and whether drafts are worth making at all. Rank 0's policy: pure, without
a clock; what it decides travels in the step's message.

A step of w rows brings the tokens that are accepted and costs its own time and the drafter's. `Acceptance` knows how
likely each place of a lane's draft is right, `Costs` what a width costs; `Depths` takes the rows that bring the most
tokens a second. Where no depth beats plain decoding nothing is drafted, but for a rare probe, which would show that the
text has changed.

No timing rules for long: costs are medians of a few samples, old ones go, a width is never believed to cost more than
its tokens one by one would, and every now and then the width that was measured least is taken.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

Mode = Literal["off", "fixed", "acceptance", "confidence"]

KEPT = 9  # samples of a width; a median of so many outlives four that are wrong
OLD_STEPS = 400  # a sample counts for so long
EXPLORE_STEPS = 30  # apart: the least measured width is taken
PROBE_TOKENS = 64  # between probes of a lane whose drafts are not worth making
PROBED = 2  # drafts of a probe
FIRST_PROBES = 2  # blocks that an answer begins with, whatever its predecessor was like
MARGIN = 1.03  # that drafting must win by: a step of more rows also makes the others wait
ROW_SHARE = 0.35  # of a step, that a row more is believed to cost until it was measured
MEMORY = 0.95  # weight of what a place was like a block ago
FORGET = 0.98  # the same, of places that a block does not reach: bad luck there does not last
PRIOR = 0.6  # that a draft is right, before anything was seen
PRIOR_BLOCKS = 1.0  # that count as much as what is believed of a place


@dataclass
class Place:
    """Accepted and reached drafts of one place of a block, the older the lighter."""

    right: float = 0.0
    seen: float = 0.0

    def rate(self, prior: float) -> float:
        return (self.right + PRIOR_BLOCKS * prior) / (self.seen + PRIOR_BLOCKS)

    def tell(self, right: bool) -> None:
        self.right, self.seen = MEMORY * self.right + right, MEMORY * self.seen + 1.0

    def fade(self) -> None:
        self.right, self.seen = FORGET * self.right, FORGET * self.seen


@dataclass
class LaneDrafts:
    """What is known of the drafts of one answer. `sure`: the drafter's confidence in each place of the block that waits
    to be verified; empty: none waits."""

    places: list[Place]
    sure: list[float] = field(default_factory=list)
    blocks: int = 0
    since_block: int = 0  # tokens since a draft was last verified
    hopeful: bool = False  # the last block was all right: once more, whatever is believed

    def survival(self) -> list[float]:
        """The probability that a place and all before it are right. A place that was seldom reached is taken to be like
        the one before it."""
        rates = accumulate(self.places, lambda prior, place: place.rate(prior), initial=PRIOR)
        return _running(list(rates)[1:])


@dataclass(frozen=True)
class Row:
    """A lane of the next step: `room` tokens may be drafted for it (0: none, now or after the step)."""

    lane: int
    room: int


class Costs:
    """Seconds of a step by its lanes and rows, without the drafter, and of the drafter by its lanes."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], deque[tuple[int, float]]] = {}
        self._drafts: dict[int, deque[tuple[int, float]]] = {}
        self._now = 0

    def tell(self, lanes: int, rows: int, seconds: float, draft_seconds: float | None) -> None:
        """`draft_seconds` None: nothing was proposed."""
        self._now += 1
        self._steps.setdefault((lanes, rows), deque(maxlen=KEPT)).append((self._now, seconds))
        if draft_seconds is not None:
            self._drafts.setdefault(lanes, deque(maxlen=KEPT)).append((self._now, draft_seconds))

    def samples(self, lanes: int, rows: int) -> int:
        return len(self._young(self._steps.get((lanes, rows), ())))

    def draft(self, lanes: int) -> float | None:
        times = self._young(self._drafts.get(lanes, ()))
        return statistics.median(times) if times else None

    def step(self, lanes: int, rows: int) -> float | None:
        """None while nothing was measured of so many lanes. At least what one row a lane costs, at most what as many
        steps of one row would."""
        known = {
            width: statistics.median(times)
            for (count, width), kept in self._steps.items()
            if count == lanes and (times := self._young(kept))
        }
        if not known:
            return None
        if lanes not in known:  # plain decoding was not measured: as if rows cost what they are believed to
            least = min(known)
            known[lanes] = known[least] / (1 + ROW_SHARE * (least - lanes) / lanes)
        return min(max(_between(known, lanes, rows), known[lanes]), known[lanes] * rows / lanes)

    def _young(self, kept: Sequence[tuple[int, float]] | deque[tuple[int, float]]) -> list[float]:
        return [seconds for when, seconds in kept if self._now - when < OLD_STEPS]


def _between(known: Mapping[int, float], lanes: int, rows: int) -> float:
    """The seconds of `rows` on the line through its measured neighbours."""
    if rows in known:
        return known[rows]
    below = max(width for width in known if width < rows)
    above = min((width for width in known if width > rows), default=None)
    if above is None:
        return known[below] + ROW_SHARE * known[lanes] / lanes * (rows - below)
    return known[below] + (known[above] - known[below]) * (rows - below) / (above - below)


class Depths:
    """`begin` and `begun` before and after a prompt's last chunk, `plan` and `done` before and after a decode step,
    `forget` when a lane is free. `most`: tokens of a block."""

    def __init__(self, mode: Mode, most: int, fixed: int = 0) -> None:
        self.mode, self.most = mode, most
        self.fixed = min(fixed, most)
        self.costs = Costs()
        self._lanes: dict[int, LaneDrafts] = {}
        self._steps = 0
        self._doubt = [0.0] * most  # what is added to the drafter's confidence of a place, as measured

    def plan(self, rows: Sequence[Row]) -> tuple[list[int], bool]:
        """The drafts to verify of each lane, and whether to draft after the step."""
        if self.mode == "off" or not self.most:
            return [0] * len(rows), False
        self._steps += 1
        waiting = [min(row.room, len(self._lane(row.lane).sure)) for row in rows]
        if self.mode == "fixed":
            depths = [min(self.fixed, count) for count in waiting]
            return depths, any(row.room > 1 for row in rows)
        depths = self._chosen(rows, waiting)
        more = [Row(row.lane, row.room - depth - 1) for row, depth in zip(rows, depths, strict=True)]
        return depths, self._worth(more)

    def begin(self, row: Row) -> bool:
        """Whether to draft behind a prompt's last chunk, for the lane's first step."""
        if self.mode == "off" or not self.most or row.room <= 0:
            return False
        return self.mode == "fixed" or self._worth([row])

    def begun(self, lane: int, sure: Sequence[float]) -> None:
        """`sure`: the confidence of what was proposed behind the lane's prompt."""
        self._lane(lane).sure = list(sure)

    def done(
        self,
        rows: Mapping[int, tuple[int, int]],
        sure: Mapping[int, Sequence[float]],
        seconds: float,
        draft_seconds: float | None,
    ) -> None:
        """rows: lane -> (drafts verified, tokens that came); sure: the confidence of what was proposed after it."""
        self.costs.tell(len(rows), sum(1 + depth for depth, _ in rows.values()), seconds, draft_seconds)
        for index, (depth, tokens) in rows.items():
            lane = self._lane(index)
            right = min(tokens - 1, depth)
            lane.since_block = 0 if depth else lane.since_block + tokens
            if depth:
                lane.blocks, lane.hopeful = lane.blocks + 1, right == depth
                for unseen in lane.places[min(right + 1, depth) :]:
                    unseen.fade()
            for place in range(min(right + 1, depth)):
                lane.places[place].tell(place < right)
                if place < len(lane.sure):
                    self._learn(place, lane.sure[place], place < right)
            lane.sure = list(sure.get(index, ()))

    def forget(self, lane: int) -> None:
        self._lanes.pop(lane, None)

    def _lane(self, index: int) -> LaneDrafts:
        return self._lanes.setdefault(index, LaneDrafts([Place() for _ in range(self.most)]))

    def _learn(self, place: int, sure: float, right: bool) -> None:
        self._doubt[place] += 0.1 * (right - _sigmoid(sure + self._doubt[place]))

    def _survival(self, index: int, known: bool) -> list[float]:
        """`known`: of the block that waits, else of any."""
        lane = self._lane(index)
        if known and self.mode == "confidence":
            return _running([_sigmoid(sure + self._doubt[place]) for place, sure in enumerate(lane.sure)])
        return lane.survival()

    def _chosen(self, rows: Sequence[Row], waiting: Sequence[int]) -> list[int]:
        """Of the drafts that wait, those that bring the most tokens a second."""
        if not any(waiting):
            return [0] * len(rows)
        if self._steps % EXPLORE_STEPS == 0:
            return self._least_measured(len(rows), waiting)
        gains = {row.lane: self._survival(row.lane, True)[:count] for row, count in zip(rows, waiting, strict=True)}
        probes = {
            row.lane: min(count, PROBED) for row, count in zip(rows, waiting, strict=True) if self._must_probe(row.lane)
        }
        depths, _ = self._best(gains, 0.0)
        return [max(depths[row.lane], probes.get(row.lane, 0)) for row in rows]

    def _worth(self, rows: Sequence[Row]) -> bool:
        """Whether the next step will verify enough of a block to pay for making it."""
        lanes = [row for row in rows if row.room > 0]
        if not lanes:
            return False
        if any(self._must_probe(row.lane) for row in lanes):
            return True
        gains = {row.lane: self._survival(row.lane, False)[: max(0, row.room)] for row in rows}
        draft = self.costs.draft(len(rows))
        depths, win = self._best(gains, draft or 0.0)
        return any(depths.values()) and win > MARGIN

    def _must_probe(self, index: int) -> bool:
        lane = self._lane(index)
        return lane.blocks < FIRST_PROBES or lane.hopeful or lane.since_block >= PROBE_TOKENS

    def _best(self, gains: Mapping[int, Sequence[float]], draft_s: float) -> tuple[dict[int, int], float]:
        """gains: lane -> survival by place. The depth of each lane that brings the most tokens a second, and by what
        factor that beats plain decoding. Survival never rises with the place, so rows are taken in order of it."""
        lanes, depths = len(gains), dict.fromkeys(gains, 0)
        ranked = sorted(((-gain, place, lane) for lane, found in gains.items() for place, gain in enumerate(found)))
        plain = self.costs.step(lanes, lanes)
        best, best_depths = 1.0, dict(depths)
        tokens = float(lanes)
        for taken, (gain, _, lane) in enumerate(ranked, 1):
            tokens -= gain
            depths[lane] += 1
            seconds = self.costs.step(lanes, lanes + taken)
            wider = 1 + ROW_SHARE * taken / lanes if plain is None or seconds is None else (seconds + draft_s) / plain
            win = tokens / lanes / wider
            if win > best:
                best, best_depths = win, dict(depths)
        return best_depths, best

    def _least_measured(self, lanes: int, waiting: Sequence[int]) -> list[int]:
        """The width with the fewest samples, the narrower first, given to lanes in turn."""
        width = min(range(sum(waiting) + 1), key=lambda more: (self.costs.samples(lanes, lanes + more), more))
        depths = [0] * lanes
        while sum(depths) < width:
            place = min((i for i in range(lanes) if depths[i] < waiting[i]), key=lambda i: depths[i])
            depths[place] += 1
        return depths


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))


def _running(rates: Sequence[float]) -> list[float]:
    found, product = [], 1.0
    for rate in rates:
        product *= rate
        found.append(product)
    return found
