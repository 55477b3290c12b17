"""The moments of requests, told to whom they concern: pilot, hot reads, motion.

Rank 0's ledger calls it while it serves, and the simulator (`tided.sim`) as the ledger would: what a plan is made of,
and whether one is, stands nowhere else. Beside a ring, plans come from the estimate that hot reads follow, or the two
would undo each other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any

import numpy.typing as npt

from tided.engine.motion import Motion, Moved, Plan
from tided.engine.ports import Pilot
from tided.tide.pilot import LaneDemand
from tided.tide.planner import PairSwap

Array = npt.NDArray[Any]


class Moments:
    """counts, mass [layers, experts] and totals [4] are a lane's demand as the pilot takes it, on the host."""

    def __init__(self, motion: Motion, pilot: Pilot) -> None:
        self._motion, self._pilot = motion, pilot
        self._prompt_mass: dict[int, Array] = {}  # by lane
        self.wanted: Array = pilot.scores().ravel()  # [pairs], replaced and never changed: by the newest request

    def chunk_done(self, tokens: int, chunks_left: int, demand: Callable[[int], LaneDemand], lane: int) -> None:
        """`tokens` of a prompt are computed, and it goes on."""
        self._plan(self._pilot.chunk_done(tokens, chunks_left, demand, lane=lane), "chunk")

    def prompt_done(self, counts: Array, mass: Array, totals: Array, tokens: int, lane: int) -> None:
        self._prompt_mass[lane] = mass
        if self._motion.has_ring:
            self._motion.hot.prompt_done(mass, lane)
        self._plan(self._pilot.prompt_done(counts, mass, totals, tokens, lane=lane), "prompt")
        self.wanted = self._pilot.scores().ravel()

    def step_done(self, answers: Mapping[int, tuple[int, npt.ArrayLike]], demand: Callable[[int], LaneDemand]) -> None:
        """Tokens were drawn for answers that go on (`Pilot.step_done`)."""
        planned = self._pilot.step_done(answers, demand, self._motion.planned > 0)
        if planned is not None:
            self._plan(planned.swaps, planned.reason)

    def request_done(self, counts: Array, mass: Array, totals: Array, tokens: int, lane: int) -> None:
        """The demand is that since `prompt_done`; of an incomplete prompt, all."""
        self._pilot.request_done(counts, mass, totals, tokens, lane=lane)
        scores = self._pilot.scores()
        self.wanted = scores.ravel()
        prompt = self._prompt_mass.pop(lane, None)
        if self._motion.has_ring:
            self._motion.hot.request_done(mass if prompt is None else mass + prompt, lane)
            self._motion.hot.rebase(scores)

    def idle(self) -> None:
        """Nothing is asked for."""
        for _ in self.rest():
            pass

    def rest(self) -> Iterator[None]:
        """The same in pieces of some milliseconds: it may end behind any of them, and the plan is still due then."""
        pilot, motion = self._pilot, self._motion
        if not pilot.rest_due:
            return
        if not motion.has_ring:
            motion.take_plan(pilot.idle_plan(), "idle")
            return
        motion.hot.rebase(pilot.scores())
        scores = pilot.rest_scores()
        yield
        motion.take_plan(motion.hot.rest_plan(pilot.max_swaps, scores), "idle")
        pilot.rested()

    def published(self, moved: Moved) -> None:
        """A change of the routable set is done on every rank."""
        if moved.evicted or moved.joined:
            self._pilot.resized(moved.evicted, moved.joined)
        for settled, swaps in groupby(zip_longest(moved.swaps, moved.plans), lambda one: self._settled(one[1])):
            self._pilot.applied([swap for swap, _ in swaps], settled)

    def _settled(self, plan: Plan | None) -> bool:
        """Whether somebody has asked for what a swap of this plan exchanges (None: a promotion)."""
        return plan is None or plan.reason != "idle" or not self._motion.has_ring

    def _plan(self, swaps: Sequence[PairSwap], reason: str) -> None:
        pilot, hot = self._pilot, self._motion.hot
        if swaps and self._motion.has_ring:
            hot.rebase(pilot.scores())
            swaps = hot.plan(len(swaps), pilot.steadied)
        self._motion.take_plan(swaps, reason)
