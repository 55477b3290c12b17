"""The production policy in the simulator: planner, pilot and hot reads as the engine calls them, none of them a copy."""

from pathlib import Path

import numpy as np

from tided.settings import Tide
from tided.tide.demand import Demand, RouterShape
from tided.tide.history import History
from tided.tide.hot import HotReads, Moves
from tided.tide.pilot import Pilot
from tided.tide.planner import Pair
from tided.tide.seed import Seed
from tided.tide.sim.policies import Floats, Picks
from tided.tide.sim.trace import Trace

RING_SHARE = 0.0064  # of the residents: 64 of 10,000, as the profile of the real model has them


class Ours:
    """`slots` hold residents and ring together, so that it has no more memory than the others."""

    def __init__(self, trace: Trace, slots: int, sensitivity: str = "high") -> None:
        self.shape: RouterShape = trace.shape
        ring = max(8, round(slots * RING_SHARE))
        settings = Tide(sensitivity=sensitivity)  # type: ignore[arg-type]
        history = History(Path("simulated"), Demand.none(self.shape), None, "")
        self.pilot = Pilot(history, Seed(trace.base, "simulated", ("all",)), settings, self.shape, slots - ring)
        self.residents = self.pilot.residents
        self.hot = HotReads(self.shape, self.residents, ring, self.shape.top_k, self.pilot.scores())
        self._clear()

    def observe(self, picks: Picks, weights: Floats, is_prompt: bool) -> None:
        if not is_prompt and not self._prompt_done:
            self._end_prompt()
        self.hot.observe(picks, weights, len(picks))
        self._counts += np.bincount(picks.ravel(), minlength=len(self._counts))
        self._mass += np.bincount(picks.ravel(), weights.ravel(), minlength=len(self._mass))
        self._tokens += len(picks)

    def moves(self, reads: int) -> Moves:
        moves = self.hot.moves(reads)
        if moves.promote:
            self.pilot.applied(moves.promote)
        return moves

    def published(self, pair: Pair) -> None:
        self.hot.published(pair)

    def failed(self, pair: Pair) -> None:
        self.hot.failed(pair)

    def request_done(self) -> None:
        grid = (self.shape.layers, self.shape.experts)
        self.pilot.request_done(
            self._counts.reshape(grid), self._mass.reshape(grid), [0, 0, 0, 0], self._tokens, lane=0
        )
        self.hot.rebase(self.pilot.scores())
        self.hot.request_done((self._prompt_mass + self._mass).reshape(grid), lane=0)
        self._clear()

    def _end_prompt(self) -> None:
        grid = (self.shape.layers, self.shape.experts)
        self.pilot.prompt_done(self._counts.reshape(grid), self._mass.reshape(grid), [0, 0, 0, 0], self._tokens, lane=0)
        self.hot.rebase(self.pilot.scores())
        self.hot.prompt_done(self._mass.reshape(grid), lane=0)
        mass = self._mass
        self._clear()
        self._prompt_mass = mass
        self._prompt_done = True

    def _clear(self) -> None:
        pairs = self.shape.layers * self.shape.experts
        self._counts, self._mass, self._tokens, self._prompt_done = np.zeros(pairs), np.zeros(pairs), 0, False
        self._prompt_mass = np.zeros(pairs)
