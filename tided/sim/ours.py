"""What serves, in the simulator: the engine's `Motion` and `Moments` with the pilot, planner and hot reads behind them.

Nothing of the policy is written here. This room only plays the engine's other parts: the tap that counts what a lane
wants, and the ranks that read what a change of the routable set asks for.

`ours` has a ring; `ours, plans only` is the same without one: the pilot's plans, read in portions beside serving.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tided.control.messages import Load
from tided.engine.moments import Moments
from tided.engine.motion import Motion
from tided.settings import Tide
from tided.sim.policies import Floats, Picks
from tided.sim.trace import Trace
from tided.tide.demand import Demand, Grid
from tided.tide.history import History
from tided.tide.hot import HotReads, Moves
from tided.tide.pilot import Pilot
from tided.tide.planner import Pair
from tided.tide.seed import Seed

RING_SHARE = 0.0064  # of the slots: 64 beside 10,000 residents, as the profile of the real model has them
LEAST_RING = 8
SPARE_SHARE = 0.0032  # of the slots, at least one: where swaps land, of the same memory; 32 beside 10,000
LANE = 0


class _Tap:
    """What the engine's demand tap counts of a lane, since it was last taken."""

    def __init__(self, layers: int, experts: int) -> None:
        self.counts, self.mass = np.zeros((layers, experts)), np.zeros((layers, experts))
        self.totals, self.tokens = np.zeros(4), 0

    def record(self, picks: Picks, weights: Floats, here: npt.NDArray[np.bool_]) -> None:
        """`here` [pairs]: what the step could route to."""
        pairs, missed = self.counts.size, ~here[picks]
        self.counts += np.bincount(picks.ravel(), minlength=pairs).reshape(self.counts.shape)
        self.mass += np.bincount(picks.ravel(), weights.ravel(), minlength=pairs).reshape(self.mass.shape)
        self.totals += [picks.size, missed.sum(), weights.sum(), (weights * missed).sum()]
        self.tokens += len(picks)


class Engine:
    """`slots` hold everything that is routable or being read, so that nobody has more memory. The disks decide what is
    read when: `moves` is not told what a step is worth. To `Motion` the machine is one rank: that a read has landed on
    all of them is told by who simulates their disks, in the same moment, where a real rank tells it a step later."""

    paces_itself = True

    def __init__(self, trace: Trace, slots: int, has_ring: bool = True, settings: Tide | None = None) -> None:
        self.shape, self._settings = trace.shape, settings or Tide()
        ring = max(LEAST_RING, round(slots * RING_SHARE)) if has_ring else 0
        spare = max(1, round(slots * SPARE_SHARE))
        history = History(Path("simulated"), Demand.none(self.shape), None, "")
        seed = Seed(trace.base, "simulated", ("all",))
        pilot = Pilot(history, seed, self._settings, self.shape, slots - ring - spare)
        self.residents = pilot.residents
        hot = HotReads(self.shape, self.residents, ring, pilot.floor, pilot.scores())
        self.motion = Motion(hot, ranks=1, spare=spare, look_rows=self._settings.look_rows)
        self._moments = Moments(self.motion, pilot)
        self._tap, self._wanted, self._rows = self._new_tap(), self._grid(), 0
        self._here = np.zeros(self._wanted.size, dtype=bool)
        self._here[[self._index(pair) for pair in self.residents]] = True
        self._reading: dict[int, Load] = {}  # by ticket

    def observe(self, picks: Picks, weights: Floats, chunks_left: int | None) -> None:
        self._tap.record(picks, weights, self._here)
        heavy = np.where(weights >= self._settings.light_weight, weights, 0.0)
        pairs = self._wanted.size
        self._wanted += np.bincount(picks.ravel(), heavy.ravel(), minlength=pairs).reshape(self._wanted.shape)
        self._rows += len(picks)
        if self.motion.stepped(len(picks)):
            self.motion.observe(self._wanted, np.full(self.shape.layers, self._rows, dtype=np.float32))
            self._wanted, self._rows = self._grid(), 0
        if chunks_left is None:
            return
        if chunks_left:
            self._moments.chunk_done(self._tap.tokens, chunks_left, self._demand, LANE)
        else:
            tap, self._tap = self._tap, self._new_tap()
            self._moments.prompt_done(tap.counts, tap.mass, tap.totals, tap.tokens, LANE)

    def token_done(self) -> None:
        self._moments.step_done({LANE: (self._tap.tokens, self._tap.totals)}, self._demand)

    def request_done(self) -> None:
        tap, self._tap = self._tap, self._new_tap()
        self._moments.request_done(tap.counts, tap.mass, tap.totals, tap.tokens, LANE)

    def rest(self) -> None:
        self._moments.idle()

    def moves(self, reads: int) -> Moves:
        change, moved = self.motion.change()
        self._moments.published(moved)
        for ticket in change.publish:
            load = self._reading.pop(ticket)
            self._here[self._index(load.pair)] = True
            if load.out is not None:
                self._here[self._index(load.out)] = False
        for ticket in change.give_up:
            del self._reading[ticket]
        for pair in change.withdraw:
            self._here[self._index(pair)] = False
        self._reading |= {load.ticket: load for load in change.load}
        return Moves(withdraw=change.withdraw, load=[load.pair for load in change.load])

    def published(self, pair: Pair) -> Pair | None:
        """It landed. The engine publishes with its next change, before which no token is computed."""
        load = self._load_of(pair)
        self.motion.landed([load.ticket])
        return load.out

    def failed(self, pair: Pair) -> None:
        self.motion.failed([self._load_of(pair).ticket])

    def _load_of(self, pair: Pair) -> Load:
        return next(load for load in self._reading.values() if load.pair == pair)

    def _demand(self, lane: int) -> tuple[Grid, Grid, Floats]:
        return self._tap.counts, self._tap.mass, self._tap.totals

    def _new_tap(self) -> _Tap:
        return _Tap(self.shape.layers, self.shape.experts)

    def _grid(self) -> Grid:
        return np.zeros((self.shape.layers, self.shape.experts))

    def _index(self, pair: Pair) -> int:
        return pair[0] * self.shape.experts + pair[1]
