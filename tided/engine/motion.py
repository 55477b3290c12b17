"""Rank 0's word on the routable set while it serves: which reads begin, which become routable, in which step.

A read is asked of every rank by a step (`Load`). When every rank has told that it landed, the next step publishes it;
no step waits for one. Plans of the pilot are carried in portions: a few swaps begin with a step, and as many are read
at once as there are spare slots. Hot reads fill the ring beside them, as many at once as the disks have shown to manage
between steps. State alone decides: no clock, no tensor.

A record that some rank cannot read is given up on every rank in one step, and nothing of it was ever routable. It is
asked for again later, each time later than before, and is substituted meanwhile like anything that is not here. When
many different records fail and nothing between them can be read, or too many again and again, the disk is at fault, and
that ends the pair. A few records that are wanted again and again are no such sign, however often they fail.

A change of the budget waits until nothing is being read, and nothing begins meanwhile: then one step tells every rank
how many places there are, and who leaves. Free places are filled like swaps are read, a few a step, by what is wanted
most.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tided.control.messages import Change, Load, Resize, Swap
from tided.errors import PairError
from tided.tide.budget import Budget
from tided.tide.demand import Grid
from tided.tide.hot import HotReads
from tided.tide.planner import Pair, PairSwap

log = logging.getLogger("experts")

MAX_SWAPS_AT_ONCE = 512
MOST_FAILED = 64  # different records one after the other, and none between them that landed
TRIES = 3  # that failed, and a record counts as damaged
MOST_DAMAGED = 64
LEFT_ALONE_STEPS = 32  # after a record's first failure; eight times as many after each further one
FIRST_READS = 4
TIMELY_STEPS = 2  # a hot read that is published within so many steps came in time
SWAPS_A_STEP = 8  # begin together, whatever room there is: reads and publications of more would show in a step's time


@dataclass(frozen=True, eq=False)
class Plan:
    """How many swaps were planned, and why. Each plan is itself, whatever others say."""

    reason: str
    swaps: int


@dataclass
class HotCount:
    """Since the start, of all requests: hot reads asked for, of those published late, entries that a later step wanted
    (once each) and the routing weight they served, entries that left without that, promotions without a read; and
    reads of any kind that some rank gave up."""

    issued: int = 0
    late: int = 0
    used: int = 0
    used_weight: float = 0.0
    evicted_unused: int = 0
    promoted: int = 0
    failed: int = 0


@dataclass
class _Reading:
    load: Load
    step: int  # in which it began
    missing: int  # ranks that have not told yet
    plan: Plan | None
    failed: bool = False  # on some rank


@dataclass
class Moved:
    """What a change means to the books of rank 0: who became resident, in order, and by which plans: one for each of
    the first swaps, the others are promotions. `evicted` and `joined`: by a change of the budget."""

    swaps: list[PairSwap] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    evicted: list[Pair] = field(default_factory=list)
    joined: list[Pair] = field(default_factory=list)

    @property
    def residents(self) -> bool:
        """Whether it changes who is resident."""
        return bool(self.swaps or self.evicted or self.joined)


class Motion:
    """`ranks` tell of each read. `spare` swaps are read at once at most. The ring looks at what was wanted once
    `look_rows` have come together: each look costs the host a while."""

    def __init__(self, hot: HotReads, ranks: int, spare: int, look_rows: int = 1) -> None:
        self.hot, self.count = hot, HotCount()
        places = (spare,) if hot.kinds is None else hot.kinds.spare
        self._ranks, self._spare = ranks, [min(most, MAX_SWAPS_AT_ONCE) for most in places]
        self._planned: deque[tuple[PairSwap, Plan]] = deque()
        self.newest: Plan | None = None  # that had something to exchange
        self.done = 0  # of its swaps
        self._reading: dict[int, _Reading] = {}
        self._tickets = self._clock = 0
        self._at_once = FIRST_READS
        self._look_rows = look_rows
        self._rows = 0  # computed since the last look
        self._due = False  # a look has told what was wanted, and nothing was asked for since
        self._used: dict[Pair, bool] = {}  # entries of the ring: whether a step has wanted them
        self._failures: dict[Pair, int] = {}  # by pair, since it was last read
        self._left_alone: dict[Pair, int] = {}  # until which step
        self._failed_in_a_row: set[Pair] = set()  # since anything was read
        self._holding = False  # nothing begins to be read
        self._resize: Resize | None = None  # for the next step
        self._places: tuple[int, ...] = ()  # of residents, by kind, while some are free
        self._worth: Grid | None = None  # by which free places are filled

    @property
    def has_ring(self) -> bool:
        return self.hot.ring_slots > 0

    @property
    def reading(self) -> int:
        return len(self._reading)

    @property
    def planned(self) -> int:
        """Swaps of the newest plan that are still to be read."""
        return len(self._planned)

    def why(self, ticket: int) -> str:
        """The moment of the plan that a read under way belongs to, or that it is a hot read."""
        plan = self._reading[ticket].plan
        return plan.reason if plan else "hot read"

    def take_plan(self, swaps: Sequence[PairSwap], reason: str) -> None:
        """The plan's swaps are read next, in order. It knows the set as published, and newer traffic: what is left of
        the plan before it is dropped, what is being read is not. An empty plan has nothing to say and drops nothing."""
        if not swaps:
            return
        plan = Plan(reason, len(swaps))
        self.newest, self.done = plan, 0
        self._planned = deque((swap, plan) for swap in swaps)

    def hold(self, holds: bool = True) -> None:
        """Nothing begins to be read until `resize` has been told, or that there will be none."""
        self._holding = holds

    def resize(self, budget: Budget, scores: Grid) -> None:
        """Nothing is being read: the next step has these places. `scores` say what free ones are filled with."""
        if self._reading:
            raise PairError("the budget is to change while experts are being read")
        self.hot.evicted(budget.evict)
        self._resize, self._holding = Resize(list(budget.places), list(budget.evict)), False
        self._places, self._worth = budget.places, scores

    @property
    def resizing(self) -> bool:
        """Whether a change of the budget is still to be told to the ranks."""
        return self._holding or self._resize is not None

    @property
    def filling(self) -> bool:
        """Whether places are free still."""
        return bool(self._places)

    def landed(self, tickets: Sequence[int]) -> None:
        """These reads have ended well on one more rank."""
        for ticket in tickets:
            self._reading[ticket].missing -= 1

    def failed(self, tickets: Sequence[int]) -> None:
        """These reads have ended on one more rank, and it has nothing of them."""
        for ticket in tickets:
            self._reading[ticket].failed = True
        self.landed(tickets)

    def stepped(self, rows: int) -> bool:
        """A step of so many rows is over. Whether the ring is to look at what was wanted since its last look."""
        self._clock += 1
        self._rows += rows
        return self.has_ring and self._rows >= self._look_rows

    def observe(self, weights: Grid, rows: npt.NDArray[np.float32]) -> None:
        """What the rows since the last look wanted: weights [layers, experts], summed over the `rows` [layers] that
        each layer computed. Hot reads follow with the next step."""
        flat = (weights / np.maximum(rows, 1.0)[:, None]).ravel()
        wanted = np.flatnonzero(flat)
        self.hot.observe(wanted, flat[wanted], self._rows)
        self._rows, self._due = 0, True
        for pair in self._used:
            if weights[pair] > 0:
                self.count.used += not self._used[pair]
                self.count.used_weight += float(weights[pair])
                self._used[pair] = True

    def change(self) -> tuple[Change, Moved]:
        """What the next step does to the routable set."""
        change, moved = Change(resize=self._resize), Moved()
        self._resize = None
        self._forgive()
        self._publish(change, moved)
        if change.resize is not None:
            moved.evicted += change.resize.evict
            return change, moved
        if self._holding:
            return change, moved
        self._begin_swaps(change)
        if self._places:
            self._fill_places(change, moved)
        if self._due and not change.adopt:  # its entries are of the ring until the step's end: a look may not move them
            self._due = False
            self._begin_hot(change, moved)
        return change, moved

    def _publish(self, change: Change, moved: Moved) -> None:
        for ticket in [ticket for ticket, reading in self._reading.items() if not reading.missing]:
            reading = self._reading.pop(ticket)
            load = reading.load
            if reading.failed:
                change.give_up.append(ticket)
                self._give_up(load)
                continue
            change.publish.append(ticket)
            self._failures.pop(load.pair, None)
            self._failed_in_a_row.clear()
            if load.joins:
                self.hot.joined(load.pair)
                moved.joined.append(load.pair)
            elif load.out is None:
                self.hot.published(load.pair)
                self._used[load.pair] = False
                self.count.late += self._clock - reading.step > TIMELY_STEPS
            else:
                self.hot.swapped(load.out, load.pair)
                moved.swaps.append((load.out, load.pair))
                assert reading.plan is not None
                moved.plans.append(reading.plan)
                self.done += reading.plan is self.newest

    def _give_up(self, load: Load) -> None:
        """Raises PairError when this is no matter of single records any more."""
        pair = load.pair
        if load.joins:
            self.hot.join_dropped(pair)
        elif load.out is None:
            self.hot.failed(pair)
        else:
            self.hot.swap_dropped(load.out, pair)
        times = self._failures[pair] = self._failures.get(pair, 0) + 1
        self._left_alone[pair] = self._clock + LEFT_ALONE_STEPS * 8 ** (times - 1)
        self.hot.leave_alone(pair)
        self.count.failed += 1
        self._failed_in_a_row.add(pair)
        log.warning("expert %d of layer %d stays missing: %d reads of it failed", pair[1], pair[0], times)
        damaged = sum(times >= TRIES for times in self._failures.values())
        in_a_row = len(self._failed_in_a_row)
        if in_a_row >= MOST_FAILED or damaged > MOST_DAMAGED:
            raise PairError(
                f"experts cannot be read: the last {in_a_row} that were tried failed, {damaged} of all each time",
                hint="the log of the rank that failed names files and offsets; check its disk (dmesg)",
            )

    def _forgive(self) -> None:
        """What was left alone for long enough may be asked for again."""
        for pair in [pair for pair, until in self._left_alone.items() if self._clock >= until]:
            del self._left_alone[pair]
            self.hot.ask_again(pair)

    def _begin_swaps(self, change: Change) -> None:
        room = list(self._spare)
        for reading in self._reading.values():
            room[self.hot.kind_of(reading.load.pair)] -= reading.load.out is not None
        left, later = SWAPS_A_STEP, deque[tuple[PairSwap, Plan]]()
        while self._planned and left > 0 and any(room):
            (out, in_), plan = self._planned.popleft()
            kind = self.hot.kind_of(in_)
            if not room[kind]:
                later.append(((out, in_), plan))
                continue
            try:
                self.hot.swap_begun(out, in_)
            except ValueError:  # overtaken since the plan was made, or left alone
                continue
            left -= 1
            room[kind] -= 1
            self._load(change, in_, out, plan)
        self._planned.extendleft(reversed(later))

    def _fill_places(self, change: Change, moved: Moved) -> None:
        """The most wanted first, a few a step, as many under way as swaps may be. What is in the ring is here
        already."""
        assert self._worth is not None
        under_way = sum(reading.load.joins for reading in self._reading.values())
        left = min(SWAPS_A_STEP, sum(self._spare) - under_way)
        taken = self.hot.residents_of_kind(len(self._places))
        if taken == self._places and not under_way:
            self._places, self._worth = (), None
            return
        for kind, places in enumerate(self._places):
            for _ in range(min(left, places - taken[kind])):
                pair = self.hot.next_resident(self._worth, kind)
                if pair is None:  # the rest could not be read
                    break
                left -= 1
                if self.hot.in_ring(pair):
                    self.hot.adopted(pair)
                    self._used.pop(pair)
                    change.adopt.append(pair)
                    moved.joined.append(pair)
                    continue
                self.hot.join_begun(pair)
                self._load(change, pair, None, Plan("budget", 1), joins=True)

    def _begin_hot(self, change: Change, moved: Moved) -> None:
        under_way = [reading.step for reading in self._reading.values() if not reading.load.moves_residents]
        self._pace(under_way)
        moves = self.hot.moves(max(0, self._at_once - len(under_way)))
        change.promote.extend(Swap(out, in_) for out, in_ in moves.promote)
        moved.swaps += moves.promote
        for out, in_ in moves.promote:
            self._used.pop(in_)
            self._used[out] = True
            self.count.promoted += 1
        for pair in moves.withdraw:
            change.withdraw.append(pair)
            self.count.evicted_unused += not self._used.pop(pair)
        for pair in moves.load:
            self.count.issued += 1
            self._load(change, pair, None, None)

    def _pace(self, under_way: Sequence[int]) -> None:
        """Twice as many at once after a look that found all of them done, half as many when some are late."""
        if not under_way:
            self._at_once = min(2 * self._at_once, max(1, self.hot.ring_slots // 2))
        elif self._clock - min(under_way) > TIMELY_STEPS:
            self._at_once = max(1, self._at_once // 2)

    def _load(self, change: Change, pair: Pair, out: Pair | None, plan: Plan | None, joins: bool = False) -> None:
        self._tickets += 1
        load = Load(self._tickets, pair, out, joins)
        self._reading[self._tickets] = _Reading(load, self._clock, self._ranks, plan)
        change.load.append(load)
