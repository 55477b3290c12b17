"""The production policy in the simulator: the pilot, planner and hot reads of the engine, none of them a copy.

What the engine puts around them is not simulated: how many swaps a step begins, that the ring is looked at every few
rows (`engine.motion`), plans inside prompts and answers, and those of a pair at rest. The engine therefore reads less
and misses more than what is told here.

`Ours` has a ring and plans; `Plans` is what is left of it without hot reads: the pilot's own plans, after a prompt and
between requests, read in portions beside serving.
"""

from collections import deque
from pathlib import Path

import numpy as np

from tided.settings import Tide
from tided.tide.demand import Demand, Grid
from tided.tide.history import History
from tided.tide.hot import HotReads, Moves
from tided.tide.pilot import Pilot
from tided.tide.planner import Pair, PairSwap
from tided.tide.seed import Seed
from tided.tide.sim.policies import Floats, Picks
from tided.tide.sim.trace import Trace

RING_SHARE = 0.0064  # of the slots: 64 beside 10,000 residents, as the profile of the real model has them
LEAST_RING = 8
SPARE_SHARE = 0.0012  # of the slots, at least one: where swaps land, of the same memory


class _Tap:
    """What the engine's demand tap counts of a lane, since it was last taken."""

    def __init__(self, layers: int, experts: int) -> None:
        self.counts, self.mass, self.tokens = np.zeros((layers, experts)), np.zeros((layers, experts)), 0

    def record(self, picks: Picks, weights: Floats) -> None:
        pairs = self.counts.size
        self.counts += np.bincount(picks.ravel(), minlength=pairs).reshape(self.counts.shape)
        self.mass += np.bincount(picks.ravel(), weights.ravel(), minlength=pairs).reshape(self.mass.shape)
        self.tokens += len(picks)

    def totals(self, here: Grid) -> list[float]:
        """Picks, missed picks, weight, missed weight, by what is routable now (1 or 0) [layers, experts]."""
        grids = (self.counts, self.counts * (1 - here), self.mass, self.mass * (1 - here))
        return [float(grid.sum()) for grid in grids]


class _Piloted:
    """A pilot and what it is told; `slots` hold everything that is routable, so that nobody has more memory."""

    def __init__(self, trace: Trace, slots: int, ring: int, settings: Tide) -> None:
        self.shape = trace.shape
        history = History(Path("simulated"), Demand.none(self.shape), None, "")
        seed = Seed(trace.base, "simulated", ("all",))
        self._spare = max(1, round(slots * SPARE_SHARE))
        self.pilot = Pilot(history, seed, settings, self.shape, slots - ring - self._spare)
        self.residents = self.pilot.residents
        self._tap = self._new_tap()
        self._in_prompt = True
        self._queue: deque[PairSwap] = deque()
        self._swaps: dict[Pair, Pair] = {}  # that are being read: what comes -> what it replaces

    def observe(self, picks: Picks, weights: Floats, is_prompt: bool) -> None:
        if self._in_prompt and not is_prompt:
            self._end_prompt()
        self._tap.record(picks, weights)

    def _end_prompt(self) -> None:
        tap, self._tap, self._in_prompt = self._tap, self._new_tap(), False
        self._plan_for(self.pilot.prompt_done(tap.counts, tap.mass, tap.totals(self._here()), tap.tokens, lane=0), tap)

    def request_done(self) -> None:
        tap, self._tap, self._in_prompt = self._tap, self._new_tap(), True
        self.pilot.request_done(tap.counts, tap.mass, tap.totals(self._here()), tap.tokens, lane=0)

    def _plan_for(self, plan: list[PairSwap], prompt: _Tap) -> None:
        self._queue = deque(plan)

    def _here(self) -> Grid:
        here = np.zeros((self.shape.layers, self.shape.experts))
        for pair in self.pilot.residents:
            here[pair] = 1.0
        return here

    def _new_tap(self) -> _Tap:
        return _Tap(self.shape.layers, self.shape.experts)


class Plans(_Piloted):
    """Without hot reads."""

    def __init__(self, trace: Trace, slots: int) -> None:
        super().__init__(trace, slots, 0, Tide())
        self._held = set(self.residents)

    def moves(self, reads: int) -> Moves:
        moves = Moves()
        while self._queue and len(moves.load) < reads and len(self._swaps) < self._spare:
            out, in_ = self._queue.popleft()
            if out not in self._held or in_ in self._held or out in self._swaps.values() or in_ in self._swaps:
                continue  # a swap that was under way when this plan was made has done it, or will
            self._swaps[in_] = out
            moves.load.append(in_)
        return moves

    def published(self, pair: Pair) -> Pair | None:
        out = self._swaps.pop(pair)
        self.pilot.applied([(out, pair)])
        self._held = self._held - {out} | {pair}
        return out

    def failed(self, pair: Pair) -> None:
        del self._swaps[pair]

    def request_done(self) -> None:
        super().request_done()
        self._queue = deque(self.pilot.idle_plan())  # an older plan is dropped for it


class Ours(_Piloted):
    """Hot reads first, and what disk time they leave for the plan made after the prompt."""

    def __init__(self, trace: Trace, slots: int) -> None:
        ring = max(LEAST_RING, round(slots * RING_SHARE))
        super().__init__(trace, slots, ring, Tide())
        self.hot = HotReads(self.shape, self.residents, ring, self.shape.top_k, self.pilot.scores())
        self._prompt_mass: Grid = np.zeros((self.shape.layers, self.shape.experts))

    def observe(self, picks: Picks, weights: Floats, is_prompt: bool) -> None:
        super().observe(picks, weights, is_prompt)
        self.hot.observe(picks, weights / len(picks), len(picks))

    def moves(self, reads: int) -> Moves:
        moves = self.hot.moves(reads)
        if moves.promote:
            self.pilot.applied(moves.promote)
        while self._queue and len(moves.load) < reads and len(self._swaps) < self._spare:
            out, in_ = self._queue.popleft()
            try:
                self.hot.swap_begun(out, in_)
            except ValueError:  # overtaken since the plan was made
                continue
            self._swaps[in_] = out
            moves.load.append(in_)
        return moves

    def published(self, pair: Pair) -> Pair | None:
        out = self._swaps.pop(pair, None)
        if out is None:
            self.hot.published(pair)
            return None
        self.hot.swapped(out, pair)
        self.pilot.applied([(out, pair)])
        return out

    def failed(self, pair: Pair) -> None:
        out = self._swaps.pop(pair, None)
        if out is None:
            self.hot.failed(pair)
        else:
            self.hot.swap_dropped(out, pair)

    def request_done(self) -> None:
        mass = self._prompt_mass + self._tap.mass
        super().request_done()
        self.hot.request_done(mass, lane=0)
        self.hot.rebase(self.pilot.scores())

    def _plan_for(self, plan: list[PairSwap], prompt: _Tap) -> None:
        self._prompt_mass = prompt.mass
        self.hot.prompt_done(prompt.mass, lane=0)
        self.hot.rebase(self.pilot.scores())
        self._queue = deque(self.hot.plan(self.pilot.settings.max_swaps) if plan else [])

    def _here(self) -> Grid:
        here = super()._here()
        for pair in self.hot.ring:
            here[pair] = 1.0
        return here
