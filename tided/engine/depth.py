"""How many drafted tokens a step verifies, and whether drafts are worth making at all. Rank 0's policy: pure, without
a clock; what it decides travels in the step's message.

A step brings the tokens that are accepted and costs its own time and the drafter's (`tided.engine.costs`). How likely
each place of a lane's block is right is believed from what was accepted lately, or from the drafter's confidence. Taken
are the rows that bring the most tokens a second. Where no depth beats plain decoding the drafter rests, but for a probe
that would show that the text has changed: an answer begins with one, and each that changes nothing doubles the tokens
to the next.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

from tided.engine.costs import DRAFT_SHARE, NOTHING, PLACE_SHARE, Costs, Touched

Mode = Literal["off", "fixed", "acceptance", "confidence"]

EXPLORE_STEPS = 30  # apart, of steps that drafts wait for: the least measured width is taken
FIRST_GAP, LAST_GAP = 16, 64  # tokens between the probes of a lane whose drafts are not worth making
PROBED = 1  # drafts of a probe that are verified, whatever is believed of them
MARGIN = 1.02  # that drafting must win by: a step of more rows also makes the others wait
MEMORY = 0.95  # weight of what a place was like a block ago
FORGET = 0.98  # the same, of places that a block does not reach: bad luck there does not last
AGE = 0.99  # the same, by tokens that came without drafts
PRIOR = 0.65  # that a draft is right, before anything was seen
PRIOR_BLOCKS = 1.0  # that count as much as what is believed of a place
ANSWER = 0.2  # weight of the newest answer in what the next one is believed to be like
SLOPE = 0.5  # of the confidence: a drafter that is wrong is still sure
BIAS_FIRST, BIAS_LAST = 1.0, 0.15  # how far a draft moves what is added to it, at first and later


@dataclass
class Place:
    """Accepted and reached drafts of one place of a block, the older the lighter."""

    right: float = 0.0
    seen: float = 0.0

    def rate(self, prior: float) -> float:
        return (self.right + PRIOR_BLOCKS * prior) / (self.seen + PRIOR_BLOCKS)

    def tell(self, right: float) -> None:
        self.right, self.seen = MEMORY * self.right + right, MEMORY * self.seen + 1.0

    def fade(self, weight: float) -> None:
        self.right, self.seen = weight * self.right, weight * self.seen


@dataclass
class LaneDrafts:
    """What is known of the drafts of one answer. `sure`: the drafter's confidence in each place of the block that waits
    to be verified; empty: none waits."""

    places: list[Place]
    prior: float  # that a draft is right, by the answers before
    bias: float = 0.0  # of the confidence in this answer
    sure: list[float] = field(default_factory=list)
    told: int = 0  # drafts that were verified
    quiet: int = 0  # tokens since the last probe
    gap: int = 0  # tokens to the next
    probing: bool = False  # the block that waits is one

    def survival(self) -> list[float]:
        """The probability that a place and all before it are right, of any block. A place that was seldom reached is
        taken to be like the one before it."""
        rates = accumulate(self.places, lambda prior, place: place.rate(prior), initial=self.prior)
        return _running(list(rates)[1:])

    def trusted(self) -> list[float]:
        """The same of the block that waits, by the drafter's word."""
        return _running([self._sure(place) for place in range(len(self.sure))])

    def stepped(self, depth: int, tokens: int) -> None:
        """A step verified `depth` drafts and brought so many tokens."""
        right = min(tokens - 1, depth)
        reached = min(right + 1, depth)
        for place in range(reached):
            self.places[place].tell(place < right)
            rate = max(BIAS_LAST, BIAS_FIRST / (1 + self.told))
            self.bias += rate * ((place < right) - self._sure(place))
            self.told += 1
        if self.sure and not depth:  # left unverified for want of confidence, which is all that is known of it
            self.places[0].tell(self._sure(0))
            reached = 1
        for unseen in self.places[reached:]:
            unseen.fade(FORGET if self.sure else AGE**tokens)
        self.quiet += tokens

    def probe(self) -> None:
        self.probing, self.quiet = True, 0
        self.gap = min(LAST_GAP, max(FIRST_GAP, 2 * self.gap))

    def _sure(self, place: int) -> float:
        return _sigmoid(SLOPE * self.sure[place] + self.bias)


class Row(NamedTuple):
    """A lane of the next step: `room` tokens may be drafted for it (0: none, now or after the step). `waits`: its rows
    may wait for missing experts."""

    lane: int
    room: int
    waits: bool = False


class Depths:
    """`begin` and `begun` before and after a prompt's last chunk, `plan` and `done` before and after a decode step,
    `forget` when a lane is free. `most`: tokens of a block. `one_by_one`: each of them costs as much as the one before
    it, so no more are made than are worth it; what a proposal costs is then told by the token.

    `places`: tokens of the proposal that was decided on last, 0: a whole block."""

    def __init__(self, mode: Mode, most: int, fixed: int = 0, one_by_one: bool = False) -> None:
        self.mode, self.most = mode, most
        self.fixed = min(fixed, most)
        self.costs = Costs(PLACE_SHARE if one_by_one else DRAFT_SHARE)
        self.places = 0
        self._one_by_one = one_by_one
        self._lanes: dict[int, LaneDrafts] = {}
        self._waiting: set[int] = set()  # lanes of the newest step that may wait for experts
        self._prior = PRIOR
        self._steps = 0  # that drafts waited for

    @property
    def drafts(self) -> bool:
        """Whether there is anything to decide."""
        return self.most > 0 and self.mode != "off"

    @property
    def learns(self) -> bool:
        """Whether what steps cost decides anything."""
        return self.most > 0 and self.mode in ("acceptance", "confidence")

    def begin(self, row: Row) -> bool:
        """Whether to draft behind a prompt's last chunk, for the lane's first step."""
        if not self.drafts or row.room <= 0:
            return False
        return self.mode == "fixed" or self._worth([row])

    def begun(self, lane: int, sure: Sequence[float], draft_s: float | None = None) -> None:
        """`sure`: the confidence of what was proposed behind the lane's prompt, within `draft_s`."""
        self._lane(lane).sure = list(sure)
        if draft_s is not None:
            self.costs.drafted(1, draft_s / (self.places or 1))

    def plan(self, rows: Sequence[Row]) -> tuple[list[int], bool]:
        """The drafts to verify of each lane, and whether to draft after the step."""
        if not self.drafts:
            return [0] * len(rows), False
        self._waiting = {row.lane for row in rows if row.waits}
        waiting = [min(row.room, len(self._lane(row.lane).sure)) for row in rows]
        if self.mode == "fixed":
            return [min(self.fixed, count) for count in waiting], any(row.room > 1 for row in rows)
        depths = self._chosen(rows, waiting)
        more = [row._replace(room=row.room - depth - 1) for row, depth in zip(rows, depths, strict=True)]
        return depths, self._worth(more)

    def done(
        self,
        rows: Mapping[int, tuple[int, int]],
        sure: Mapping[int, Sequence[float]],
        seconds: float,
        draft_s: float | None,
        touched: Touched = NOTHING,
    ) -> None:
        """rows: lane -> (drafts verified, tokens that came); sure: the confidence of what was proposed after it, within
        `draft_s` (None: nothing was), which `seconds` leaves out."""
        if not self.drafts:
            return
        self.costs.tell({lane: 1 + depth for lane, (depth, _) in rows.items()}, seconds, touched, self._waiting)
        if draft_s is not None:
            self.costs.drafted(len(rows), draft_s / (self.places or 1))
        for index, (depth, tokens) in rows.items():
            lane = self._lane(index)
            lane.stepped(depth, tokens)
            lane.sure = list(sure.get(index, ()))

    def forget(self, lane: int) -> None:
        self.costs.forget(lane)
        known = self._lanes.pop(lane, None)
        if known is not None and known.told:
            self._prior += ANSWER * (known.places[0].rate(self._prior) - self._prior)

    def _lane(self, index: int) -> LaneDrafts:
        if index not in self._lanes:
            self._lanes[index] = LaneDrafts([Place() for _ in range(self.most)], self._prior)
        return self._lanes[index]

    def _chosen(self, rows: Sequence[Row], waiting: Sequence[int]) -> list[int]:
        """Of the drafts that wait, those that bring the most tokens a second."""
        if not any(waiting):
            return [0] * len(rows)
        self._steps += 1
        if self._steps % EXPLORE_STEPS == 0:
            return self._least_measured(len(rows), waiting)
        lanes = [self._lane(row.lane) for row in rows]
        believed = [lane.trusted() if self.mode == "confidence" else lane.survival() for lane in lanes]
        gains = {row.lane: chances[:count] for row, chances, count in zip(rows, believed, waiting, strict=True)}
        depths, _ = self._best(gains, 0.0)
        least = [min(count, PROBED) if lane.probing else 0 for lane, count in zip(lanes, waiting, strict=True)]
        return [max(depths[row.lane], probed) for row, probed in zip(rows, least, strict=True)]

    def _worth(self, rows: Sequence[Row]) -> bool:
        """Whether the next step will verify enough of a block to pay for making it, or whether it is time to see."""
        lanes = {row.lane: self._lane(row.lane) for row in rows if row.room > 0}
        if not lanes:
            return False
        gains = {row.lane: self._lane(row.lane).survival()[: max(0, row.room)] for row in rows}
        depths, win = self._best(gains, self.costs.draft(gains))
        drafted = {index for index, depth in depths.items() if depth} if win > MARGIN else set[int]()
        for index, lane in lanes.items():
            lane.probing = False
            if index in drafted:
                lane.gap = FIRST_GAP
        due = [] if drafted else [lane for lane in lanes.values() if lane.quiet >= lane.gap]
        for lane in due:
            lane.probe()
        if self._one_by_one:
            self.places = max([PROBED, *(depths[lane] for lane in drafted)])
        return bool(drafted or due)

    def _best(self, gains: Mapping[int, Sequence[float]], draft_s: float) -> tuple[dict[int, int], float]:
        """gains: lane -> survival by place; `draft_s` of a proposal, or of each of its places. The depth of each lane
        that brings the most tokens a second, and by what factor that beats plain decoding. Survival never rises with
        the place, so rows are taken in order of it."""
        depths, widths = dict.fromkeys(gains, 0), dict.fromkeys(gains, 1)
        ranked = sorted((-gain, place, lane) for lane, found in gains.items() for place, gain in enumerate(found))
        plain, tokens, best = self.costs.step(widths) / len(gains), float(len(gains)), 1.0
        made = 1
        for gain, place, lane in ranked:
            tokens, widths[lane] = tokens - gain, place + 2
            made = max(made, place + 1) if self._one_by_one else 1
            win = tokens * plain / (self.costs.step(widths) + made * draft_s)
            if win > best:
                best, depths = win, {lane: rows - 1 for lane, rows in widths.items()}
        return depths, best

    def _least_measured(self, lanes: int, waiting: Sequence[int]) -> list[int]:
        """The width with the fewest samples, the wider first, given to lanes in turn."""
        width = min(range(sum(waiting) + 1), key=lambda more: (self.costs.samples(lanes, lanes + more), -more))
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
