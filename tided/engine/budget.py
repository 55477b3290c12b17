"""The living budget, on rank 0: what a change of the resident set's size would mean, and its way into the steps.

    forecast    what would leave or come, bytes on each rank, what the best sets cover; refused where it cannot be
    ask         the change is wanted: `engine.motion` begins no reads any more
    begin       called before each step: when every rank has told of all reads, the next step has the new places

A change is of this run. A restart begins with the profile's budget again.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from tided.engine import memory
from tided.engine.memory import gb, passing_bytes
from tided.engine.motion import Motion
from tided.engine.ports import Pilot, Residents
from tided.errors import RequestError
from tided.tide.budget import Budget, rebudget
from tided.tide.coverage import covered
from tided.tide.demand import Grid

if TYPE_CHECKING:
    from tided.engine.build import OpenedModel
    from tided.tide.planner import Pair

log = logging.getLogger("experts")


@dataclass(frozen=True)
class Nodes:
    """`hosts`: of each rank. `keep_bytes`: what stays free of a node's memory whatever the budget is."""

    hosts: tuple[str, ...] = ("",)
    keep_bytes: int = 0

    def refuse_growth(self, more_bytes: int, free_bytes: Mapping[int, int]) -> None:
        """`more_bytes` on each rank; `free_bytes` of the ranks' nodes, as far as they tell. Raises RequestError."""
        for rank, free in sorted(free_bytes.items()):
            asked = more_bytes * self.hosts.count(self.hosts[rank])
            if asked + self.keep_bytes > free:
                raise refusal(
                    f"rank {rank}'s node has {gb(free)} free, of which {gb(self.keep_bytes)} must stay; the change "
                    f"takes {gb(asked)}"
                )


def nodes_of(opened: "OpenedModel") -> Nodes:
    """What both gates of a start leave free, stays."""
    settings, hosts = opened.settings, memory.hosts(opened.settings)
    chunks = passing_bytes(opened) * max(map(hosts.count, hosts)) + settings.memory.exit_below_bytes
    return Nodes(hosts, max(settings.memory.reserve_bytes, chunks))


class Forecast(msgspec.Struct, frozen=True):
    """Of a change, or of none. `bytes`: of residents on a rank; `arena_bytes`: of the memory that a rank's slots have,
    which may be had and given back in larger units than slots. `covered`: of what the next tokens are expected to ask
    for, what the set serves now and the best of the new size would."""

    resident: int
    resident_now: int
    resident_of_profile: int
    experts: int
    least: int
    bytes: int
    bytes_now: int
    arena_bytes: int
    arena_bytes_now: int
    leave: int
    come: int
    covered: float
    covered_now: float
    held: int  # residents that are here
    changing: bool  # one is under way, or places are free still
    may_change: bool
    applied: bool = False


class BudgetAsk(NamedTuple):
    """Experts, or bytes of them on each rank; neither: how it stands. `free_bytes`: of the ranks' nodes. `reply` is
    called by the engine's thread, with what it would mean or why it cannot be."""

    resident: int | None
    nbytes: int | None
    apply: bool
    free_bytes: Mapping[int, int]
    reply: Callable[[Forecast | RequestError], None]


class Budgets:
    """The engine's thread alone uses it. `resident`: the profile's."""

    def __init__(
        self, residents: Residents, motion: Motion, pilot: Pilot | None, resident: int, nodes: Nodes | None = None
    ) -> None:
        self.nodes = nodes or Nodes()
        self.resident = self.of_profile = resident
        self._residents, self._motion, self._pilot = residents, motion, pilot
        self._asked: int | None = None

    def forecast(self, resident: int | None = None, nbytes: int | None = None) -> Forecast:
        """Of so many experts, or as many as so many bytes on each rank hold; of neither: as it is. Raises RequestError
        for a budget that cannot be."""
        if resident is None and nbytes is None:
            return self._standing()
        shape, places = self._motion.hot.shape, self._residents.places
        least, most = shape.layers * self._motion.hot.floor, shape.layers * shape.experts
        if nbytes is not None:
            resident = self._of_bytes(nbytes)
        assert resident is not None
        target = resident
        if not least <= target <= most:
            raise refusal(f"{target} experts: this model needs {least} to {most}")
        scores = self._scores()
        now = list(self._residents.pairs)
        if target == self.resident:
            budget = Budget(places.residents, ())
        else:
            self._refuse_what_stands()
            budget = self._budget(target)
        left = set(now) - set(budget.evict)
        best = self._filled(scores, left, budget)
        sizes = zip(places.nbytes, budget.places, strict=True)
        return Forecast(
            target,
            self.resident,
            self.of_profile,
            most,
            least,
            sum(size * count for size, count in sizes),
            places.resident_bytes,
            self._residents.arena_bytes_with(budget.places),
            self._residents.arena_bytes,
            len(budget.evict),
            max(0, sum(budget.places) - len(left)),
            round(covered(scores, best), 5),
            round(covered(scores, now), 5),
            len(now),
            self.changing,
            self._may_change,
        )

    def _standing(self) -> Forecast:
        """As it is. Who follows a change asks this some times a second, between two steps: no pair is looked at."""
        hot, places, held = self._motion.hot, self._residents.places, self._residents.count
        layers, experts, _ = hot.shape
        nbytes, now, served = places.resident_bytes, self.resident, round(hot.served(self._scores()), 5)
        return Forecast(
            resident=now,
            resident_now=now,
            resident_of_profile=self.of_profile,
            experts=layers * experts,
            least=layers * hot.floor,
            bytes=nbytes,
            bytes_now=nbytes,
            arena_bytes=self._residents.arena_bytes,
            arena_bytes_now=self._residents.arena_bytes,
            leave=0,
            come=max(0, sum(places.residents) - held),
            covered=served,
            covered_now=served,
            held=held,
            changing=self.changing,
            may_change=self._may_change,
        )

    @property
    def _may_change(self) -> bool:
        alike = self._residents.sizes is None
        return self._residents.places.most is not None and (alike or self._kinds() is not None)

    @property
    def owed_bytes(self) -> int:
        """On each rank, of places that were given and that nobody lies in yet, where only writing takes their memory:
        it is free still, and promised."""
        places, of = self._residents.places, self._motion.hot.kind_of
        if not places.by_writing:
            return 0
        return places.resident_bytes - sum(places.nbytes[of(pair)] for pair in self._residents.pairs)

    @property
    def changing(self) -> bool:
        return self._waits or self._motion.filling

    @property
    def _waits(self) -> bool:
        return self._asked is not None or self._motion.resizing

    def ask(self, resident: int) -> None:
        self._asked = resident
        self._motion.hold()

    def begin(self) -> None:
        """Before each step. What has become impossible since it was asked for is dropped."""
        if self._asked is None or self._motion.reading:
            return
        asked, self._asked = self._asked, None
        try:
            budget = self._budget(asked)
        except RequestError as error:
            self._motion.hold(False)
            log.warning("%s", error.what)
            return
        self._motion.resize(budget, self._scores())
        self.resident = asked
        log.info("the budget is %d experts: %d leave", asked, len(budget.evict))

    def _budget(self, resident: int) -> Budget:
        hot, most = self._motion.hot, self._residents.places.most
        assert most is not None
        try:
            return rebudget(self._scores(), self._residents.pairs, resident, hot.floor, most, self._kinds())
        except ValueError as error:
            raise refusal(str(error)) from error

    def _scores(self) -> Grid:
        """[layers, experts]. Without a history all are worth the same."""
        shape = self._motion.hot.shape
        return self._pilot.scores() if self._pilot else np.full((shape.layers, shape.experts), 1.0 / shape.experts)

    def _kinds(self) -> Any:
        return self._pilot.kinds if self._pilot else None

    def _of_bytes(self, nbytes: int) -> int:
        """The most experts that so many bytes on each rank hold."""
        shape, places, kinds = self._motion.hot.shape, self._residents.places, self._kinds()
        if kinds is None:
            return nbytes // places.nbytes[0]
        low, high = 0, shape.layers * shape.experts
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if kinds.most_bytes(middle) <= nbytes else (low, middle - 1)
        return low

    def _refuse_what_stands(self) -> None:
        if self._waits:
            raise refusal("a change of the budget is under way", status=409)
        if self._residents.places.most is None:
            raise refusal(
                "the slots are one allocation of a device with memory of its own, or addresses are counted as memory "
                "here: set experts.resident, and start again"
            )
        if self._residents.sizes is not None and self._kinds() is None:
            raise refusal("records differ in size, and nobody here knows how whole experts do")

    def _filled(self, scores: Grid, left: "set[Pair]", budget: Budget) -> "Sequence[Pair]":
        """`left`, and what free places would be filled with."""
        of = self._motion.hot.kind_of
        room = list(budget.places)
        for pair in left:
            room[of(pair)] -= 1
        filled = list(left)
        if not any(count > 0 for count in room):
            return filled
        for index in np.argsort(-scores, axis=None, kind="stable").tolist():
            pair = divmod(index, scores.shape[1])
            if pair not in left and room[of(pair)] > 0:
                room[of(pair)] -= 1
                filled.append(pair)
        return filled


def refusal(why: str, status: int = 400) -> RequestError:
    return RequestError(f"the budget stays as it is: {why}", status=status, code="budget_refused")
