"""Rank 0's owner of demand and plans. The engine calls it at its moments; what it returns is applied on every rank.

    boot            -> boot_pairs()
    prompt computed -> prompt_done(): the plan knows the prompt it follows, before one token of its answer
    request ended   -> request_done(): prompt and answer become one vote of the history
    nothing to do   -> idle_plan(): at most one plan for each request
    swaps published -> applied(): a plan may be applied in portions, in its order, and be dropped for a newer one

Same calls, same history, same seed: same plans. Not thread-safe; once serving has begun, the engine's thread alone
calls it.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tided.errors import ConfigError, PairError
from tided.settings import Tide
from tided.tide.demand import (
    SENSITIVITY,
    Demand,
    Grid,
    RouterShape,
    Vote,
    blended,
    joined,
    observed_weight,
    vote_of,
)
from tided.tide.history import History
from tided.tide.planner import Pair, PairSwap, boot_set, check_budget, first_set, swap_plan
from tided.tide.seed import Seed

log = logging.getLogger(__name__)

MIN_GAIN = 0.005  # of the mean score: swaps that gain less are noise


@dataclass
class Picks:
    """Sums over requests: router picks and how many of them were not resident, and the same in routing weight."""

    picks: float = 0.0
    missed: float = 0.0
    weight: float = 0.0
    missed_weight: float = 0.0

    def add(self, totals: npt.ArrayLike) -> "Picks":
        """Adds totals [4] in the order of the fields; returns them alone."""
        one = Picks(*(float(value) for value in np.asarray(totals, dtype=np.float64)))
        self.picks += one.picks
        self.missed += one.missed
        self.weight += one.weight
        self.missed_weight += one.missed_weight
        return one

    @property
    def miss_rate(self) -> float:
        return self.missed / self.picks if self.picks else 0.0


class _Prompt(NamedTuple):
    vote: Vote
    tokens: int


class Pilot:
    """`budget` pairs are resident. counts, mass [layers, experts] and totals [4] are what `DemandTap.take` gives, on
    CPU: picks and scores of newly computed tokens of one lane."""

    def __init__(self, history: History, seed: Seed | None, settings: Tide, shape: RouterShape, budget: int) -> None:
        self.history, self.seed, self.settings, self.shape = history, seed, settings, shape
        self.sensitivity = SENSITIVITY[settings.sensitivity]
        self.floor = settings.floor_per_layer or shape.top_k
        self.plan_version = 0  # portions of plans that were applied
        self.prefill, self.decode = Picks(), Picks()  # what was missed while prompts, and while answers, were computed
        self._prompts: dict[int, _Prompt] = {}  # by lane, of requests whose vote is not folded yet
        self._requests_since_plan = 0
        self._last = Picks()  # of the newest request that ended
        self._check(budget)
        self._residents = set(self._first_residents(budget))

    @property
    def residents(self) -> list[Pair]:
        """The pairs that are resident now, sorted."""
        return sorted(self._residents)

    def boot_pairs(self) -> list[Pair]:
        """The resident set to start with, sorted."""
        if self.plan_version:
            raise PairError("the boot set was asked for after plans had changed it")
        return self.residents

    def applied(self, swaps: Iterable[PairSwap]) -> None:
        """These swaps are published on every rank. Raises PairError for swaps that no plan can hold."""
        for out, in_ in swaps:
            if out not in self._residents or in_ in self._residents:
                raise PairError(f"the pilot's resident set does not allow the swap of {out} for {in_}")
            self._residents.remove(out)
            self._residents.add(in_)
        self.plan_version += 1

    def scores(self) -> Grid:
        """[layers, experts]: what a plan made now is made from, requests still running included. Writes nothing."""
        return blended(self._preview(), self.seed.prior if self.seed else None, self.settings.prior_votes)

    def prompt_done(
        self, counts: npt.ArrayLike, mass: npt.ArrayLike, totals: npt.ArrayLike, tokens: int, *, lane: int
    ) -> list[PairSwap]:
        """A prompt's `tokens` newly computed tokens are through. Plans for it if it missed enough by itself."""
        picks = self.prefill.add(totals)
        self._prompts[lane] = _Prompt(self._vote(counts, mass), tokens)
        if tokens < self.settings.min_prefill_tokens or picks.miss_rate < self.sensitivity.gate:
            return []
        return self._plan("a prompt", picks.miss_rate)

    def request_done(
        self, counts: npt.ArrayLike, mass: npt.ArrayLike, totals: npt.ArrayLike, tokens: int, *, lane: int
    ) -> None:
        """A request ended, in whatever way. The demand is that since `prompt_done`, of `tokens` generated tokens; of a
        request that ended before, it is that of the part of its prompt that was computed."""
        vote, prompt = self._vote(counts, mass), self._prompts.pop(lane, None)
        self._last = (self.prefill if prompt is None else self.decode).add(totals)
        if prompt is not None:
            vote = joined(prompt.vote, prompt.tokens, vote, tokens)
        if vote.empty:
            return
        self.history.fold(vote, self.sensitivity.decay)
        self._requests_since_plan += 1

    def idle_plan(self) -> list[PairSwap]:
        """A plan from all that is known, once after each request. Never by growth of the history: in equilibrium a
        history does not grow, and adaptation would stop for good."""
        if not self._requests_since_plan:
            return []
        return self._plan("a request", self._last.miss_rate)

    def _plan(self, cause: str, miss_rate: float) -> list[PairSwap]:
        self._requests_since_plan = 0
        if self.settings.sensitivity == "off":
            return []
        scores = self.scores()
        plan = swap_plan(scores, self._residents, self.floor, self.settings.max_swaps, MIN_GAIN * float(scores.mean()))
        if plan:
            weight = float(observed_weight(self.history.demand, self.settings.prior_votes).mean())
            log.info(
                "plan after %s: %d swaps, %.2f %% of picks missed, history weighs %.2f",
                cause, len(plan), 100 * miss_rate, weight,
            )  # fmt: skip
        return plan

    def _preview(self) -> Demand:
        """History as it would be if the running requests, of which only the prompts are known, ended now. Without
        them a plan for one lane would throw out what another lane's prompt just brought in."""
        demand = self.history.demand
        for lane in sorted(self._prompts):
            demand = demand.folded(self._prompts[lane].vote, self.sensitivity.decay)
        return demand

    def _vote(self, counts: npt.ArrayLike, mass: npt.ArrayLike) -> Vote:
        try:
            return vote_of(counts, mass, self.shape)
        except ValueError as e:
            raise PairError(f"the router's demand is not usable: {e}") from e

    def _first_residents(self, budget: int) -> list[Pair]:
        if self.seed is None and not self.history.demand.requests:
            return first_set(self.shape.layers, self.shape.experts, budget, self.floor)
        return boot_set(self.scores(), budget, self.floor)

    def _check(self, budget: int) -> None:
        if self.floor < self.shape.top_k:
            raise ConfigError(
                f"floor_per_layer = {self.floor}, but a token of this model picks {self.shape.top_k} experts a layer",
                where="[tide]",
            )
        try:
            check_budget(self.shape.layers, self.shape.experts, budget, self.floor)
        except ValueError as e:
            raise ConfigError(str(e), where="[experts] resident") from e
