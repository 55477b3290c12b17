"""What a decode step costs, learned from steps: by its lanes and rows, by the distinct experts that its rows touch, and
by those that a layer had to read. Pure, without a clock.

A step's seconds are those of its rows, `per_expert_s` for each distinct expert, and what it waited for reads. The first
are kept by width, so nothing is assumed of their shape; what an expert costs is learned from steps of the same width
that touched different numbers of them; a read costs what was waited for it.

No timing rules for long. A width's cost is the median of a few samples, the newest five where it is seldom measured:
what is far off is outvoted, and what has changed is believed when most say so. Fewer rows never cost more than many:
where they seem to, their samples are taken together. Nor do many cost more than their steps one by one. Samples age;
what has not been measured for long is taken from its neighbours.
"""

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KEPT = 9  # samples of a width
FRESH_STEPS = 60  # samples so young all count
SELDOM = 5  # newest samples of a width that has fewer young ones
OLD_STEPS = 400  # a sample counts for so long
ROW_SHARE = 0.35  # of a plain step, that a row more is believed to cost until it was measured
DRAFT_SHARE = 0.3  # of a plain step, that a proposal is believed to cost until it was measured
PLACE_SHARE = 0.1  # the same of each token, where they are made one by one
SPREAD = 0.7  # w rows of a lane touch w^SPREAD times the experts of one: 21 where one row picks 6, at 6 rows
SLOPES = 31  # that the cost of an expert is the median of
LEAST_SLOPES = 8  # fewer say nothing
OTHERS = 0.1  # of a step at least, that is not for its experts, whatever slopes say
LEAST_S = 1e-6  # a step that took no time was timed wrongly
FOLLOW = 0.1  # weight of the newest step in what a lane's rows touch


class Touched(NamedTuple):
    """Distinct experts that the rows of a step asked for, summed over the layers; records that a layer read before it
    went on, and the seconds that it waited for them."""

    experts: int = 0
    reads: int = 0
    waited_s: float = 0.0


NOTHING = Touched()


class Sample(NamedTuple):
    """`seconds` without waits."""

    step: int
    seconds: float
    experts: int = 0


@dataclass
class Appetite:
    """What one row touches: experts, and reads that it waits for."""

    experts: float = 0.0
    reads: float = 0.0
    steps: int = 0  # seen of the lane


class Costs:
    """Seconds of steps without the drafter, and of the drafter by its lanes. `widths`: lane -> its rows."""

    def __init__(self, draft_share: float = DRAFT_SHARE) -> None:
        self._draft_share = draft_share
        self._steps: dict[tuple[int, int], deque[Sample]] = {}
        self._drafts: dict[int, deque[Sample]] = {}
        self._slopes: deque[float] = deque(maxlen=SLOPES)
        self._reads: deque[float] = deque(maxlen=KEPT)
        self._lanes: dict[int, Appetite] = {}
        self._nets: dict[int, dict[int, float]] = {}  # found since the newest sample
        self._now = 0

    def tell(
        self, widths: Mapping[int, int], seconds: float, touched: Touched = NOTHING, waiting: Collection[int] = ()
    ) -> None:
        """A step took so long, its proposals apart. `waiting`: the lanes that may wait for reads."""
        self._now += 1
        self._nets.clear()
        sample = Sample(self._now, max(LEAST_S, seconds - touched.waited_s), touched.experts)
        kept = self._steps.setdefault((len(widths), sum(widths.values())), deque(maxlen=KEPT))
        if kept and kept[-1].experts != sample.experts:
            self._slopes.append((sample.seconds - kept[-1].seconds) / (sample.experts - kept[-1].experts))
        kept.append(sample)
        if touched.reads:
            self._reads.append(touched.waited_s / touched.reads)
        self._learn(widths, touched, [lane for lane in widths if lane in waiting])

    def drafted(self, lanes: int, seconds: float) -> None:
        """A proposal for so many lanes took so long."""
        self._drafts.setdefault(lanes, deque(maxlen=KEPT)).append(Sample(self._now, seconds))

    def forget(self, lane: int) -> None:
        self._lanes.pop(lane, None)

    def samples(self, lanes: int, rows: int) -> int:
        return len(self._young(self._steps.get((lanes, rows), ())))

    def draft(self, lanes: Collection[int]) -> float:
        """Of a proposal, in the unit of `step`."""
        times = self._young(self._drafts.get(len(lanes), ()))
        if not times or not self._net(len(lanes)):
            return self._draft_share * self.step(dict.fromkeys(lanes, 1))
        return statistics.median_low(sample.seconds for sample in times)

    def step(self, widths: Mapping[int, int]) -> float:
        """Reads apart, at least what one row a lane costs, at most what as many steps of one row would. While nothing
        was measured of so many lanes: what is believed, in plain steps instead of seconds."""
        lanes, rows, net = len(widths), sum(widths.values()), self._net(len(widths))
        if not net:
            return 1 + ROW_SHARE * (rows - lanes) / lanes
        each, expected = self.per_expert_s, self._expected(widths)
        plain = net[lanes] + each * self._expected(dict.fromkeys(widths, 1)).experts
        seconds = _between(net, lanes, rows) + each * expected.experts
        return min(max(seconds, plain), plain * rows / lanes) + self.per_read_s * expected.reads

    @property
    def per_expert_s(self) -> float:
        """Of a distinct expert more in a step. Where noise is all that differs, slopes have both signs."""
        return max(0.0, statistics.median(self._slopes)) if len(self._slopes) >= LEAST_SLOPES else 0.0

    @property
    def per_read_s(self) -> float:
        return statistics.median_low(self._reads) if self._reads else 0.0

    def _net(self, lanes: int) -> dict[int, float]:
        """Seconds by rows, experts apart, for so many lanes; those of plain decoding are among them if any are."""
        if lanes not in self._nets:
            self._nets[lanes] = self._found(lanes)
        return self._nets[lanes]

    def _found(self, lanes: int) -> dict[int, float]:
        each = self.per_expert_s
        samples = {
            rows: [max(OTHERS * one.seconds, one.seconds - each * one.experts) for one in young]
            for (count, rows), kept in self._steps.items()
            if count == lanes and (young := self._young(kept))
        }
        known = _rising({rows: found for rows, found in samples.items() if rows == lanes or len(found) > 1})
        if samples and lanes not in known:  # as if rows cost what they are believed to
            least = min(known or samples)
            seconds = known[least] if known else samples[least][0]
            known[lanes] = seconds / (1 + ROW_SHARE * (least - lanes) / lanes)
        for rows in sorted(samples.keys() - known.keys()):
            # Of one sample only good news is believed: what seems to cost too much would never be measured again.
            narrower = max(known[width] for width in known if width < rows)
            known[rows] = max(narrower, min(samples[rows][0], _between(known, lanes, rows)))
        return known

    def _young(self, kept: Iterable[Sample]) -> list[Sample]:
        young = [sample for sample in kept if self._now - sample.step < OLD_STEPS]
        fresh = [sample for sample in young if self._now - sample.step < FRESH_STEPS]
        return fresh if len(fresh) >= SELDOM else young[-SELDOM:]

    def _appetite(self, lane: int) -> Appetite:
        """A lane that is new is like the others."""
        if lane in self._lanes:
            return self._lanes[lane]
        known = self._lanes.values()
        return Appetite(sum(one.experts for one in known) / len(known)) if known else Appetite()

    def _expected(self, widths: Mapping[int, int]) -> Appetite:
        """Of a step, as its lanes have been lately."""
        ones = [(self._appetite(lane), rows**SPREAD) for lane, rows in widths.items()]
        return Appetite(sum(one.experts * rows for one, rows in ones), sum(one.reads * rows for one, rows in ones))

    def _learn(self, widths: Mapping[int, int], touched: Touched, waiting: Collection[int]) -> None:
        """What a step touched beyond, or short of, what was expected is shared out by rows."""
        expected = self._expected(widths)
        experts = (touched.experts - expected.experts) / sum(rows**SPREAD for rows in widths.values())
        reads = (touched.reads - expected.reads) / (sum(widths[lane] ** SPREAD for lane in waiting) or 1.0)
        for lane in widths:
            one = self._lanes[lane] = self._appetite(lane)
            weight = max(FOLLOW, 1 / (1 + one.steps))
            one.steps, one.experts = one.steps + 1, max(0.0, one.experts + weight * experts)
            if lane in waiting:
                one.reads = max(0.0, one.reads + weight * reads)


def _rising(samples: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """The medians of each width's samples; widths that would cost more than wider ones are taken together with them."""
    together: list[tuple[list[int], list[float]]] = []
    for rows in sorted(samples):
        widths, found = [rows], list(samples[rows])
        while together and statistics.median_low(together[-1][1]) > statistics.median_low(found):
            before, more = together.pop()
            widths, found = before + widths, more + found
        together.append((widths, found))
    return {rows: statistics.median_low(found) for widths, found in together for rows in widths}


def _between(known: Mapping[int, float], lanes: int, rows: int) -> float:
    """The seconds of `rows` on the line through its measured neighbours; beyond them, on as steeply as from plain
    decoding to the widest, or less: what is believed to cost too much would never be measured."""
    if rows in known:
        return known[rows]
    below = max(width for width in known if width < rows)
    above = min((width for width in known if width > rows), default=None)
    if above is not None:
        return known[below] + (known[above] - known[below]) * (rows - below) / (above - below)
    slope = ROW_SHARE * known[lanes] / lanes
    if below > lanes:
        slope = min(slope, (known[below] - known[lanes]) / (below - lanes))
    return known[below] + slope * (rows - below)
