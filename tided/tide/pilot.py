"""Rank 0's owner of demand and plans. The engine calls it at its moments; what it returns is applied on every rank.

    boot            -> boot_pairs()
    chunk computed  -> chunk_done(): a long prompt is planned for while most of it is still to come
    prompt computed -> prompt_done(): the plan knows the prompt it follows, before one token of its answer
    tokens drawn    -> step_done(): a plan every so many tokens of an answer ("decode"), and a small one at once when
                       the newest tokens miss badly ("urgent")
    request ended   -> request_done(): prompt and answer become one vote of the history
    nothing to do   -> idle_plan(), beside a ring rest_scores() and rested(): at most one plan for each request
    swaps published -> applied(): a plan may be applied in portions, in its order, and be dropped for a newer one

Every plan sees the history and what all lanes asked for so far. Who has just come or left is judged by
`tided.tide.residence`.

Same calls, same history, same seed: same plans. Not thread-safe; once serving has begun, the engine's thread alone
calls it.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tided.errors import PairError
from tided.settings import Tide
from tided.tide.demand import (
    Demand,
    Grid,
    RouterShape,
    Vote,
    blended,
    guessed,
    joined,
    observed_weight,
    sensitivity_of,
    vote_of,
)
from tided.tide.first_residents import boot_residents, check_boot, tie_breaks
from tided.tide.history import History
from tided.tide.kinds import Kinds
from tided.tide.planner import (
    Pair,
    PairSwap,
    Sizes,
    swap_plan,
)
from tided.tide.residence import Residence
from tided.tide.rest import Cases, LastRequests, rest_scores
from tided.tide.seed import Seed
from tided.tide.windows import Due, Windows

log = logging.getLogger(__name__)

MIN_GAIN = 0.005  # of the mean score: swaps that gain less are noise

# (counts, mass [layers, experts], totals [4 or more]) of a lane since they were last taken
LaneDemand = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]


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


class Planned(NamedTuple):
    """`swaps` may be empty: the plan was due, and found nothing to gain."""

    reason: Due
    swaps: list[PairSwap]


@dataclass
class _Request:
    """A lane's request, as far as it was told of. Token counts are of prompt and answer apart."""

    prompt: Vote | None = None
    prompt_tokens: int = 0
    is_answering: bool = False
    answer: Vote | None = None
    answer_tokens: int = 0
    next_chunk_tokens: int = 0  # of the prompt, computed, before it is planned for again

    @property
    def vote(self) -> Vote | None:
        if self.prompt is None or self.answer is None:
            return self.prompt
        return joined(self.prompt, self.prompt_tokens, self.answer, self.answer_tokens)


class Pilot:
    """`budget` pairs are resident; where records differ in size (`kinds`), what the bytes of so many mean ones hold.
    counts, mass [layers, experts] and totals [4] are what `DemandTap.take` gives, on CPU: picks and scores of newly
    computed tokens of one lane."""

    def __init__(
        self,
        history: History,
        seed: Seed | None,
        settings: Tide,
        shape: RouterShape,
        budget: int,
        kinds: Kinds | None = None,
    ) -> None:
        self.history, self.seed, self.settings, self.shape = history, seed, settings, shape
        self.sensitivity = sensitivity_of(settings.sensitivity)
        self.floor = settings.floor_per_layer or shape.top_k
        self.plan_version = 0  # portions of plans that were applied
        self.prefill, self.decode = Picks(), Picks()  # what was missed while prompts, and while answers, were computed
        self._requests: dict[int, _Request] = {}  # by lane, those whose vote is not folded yet
        self._windows = Windows(
            settings.replan_decode_tokens,
            self.sensitivity.gate,
            settings.urgent_miss_rate,
            settings.urgent_gap_tokens,
        )
        self._residence = Residence()
        self._requests_since_plan = 0
        self._last = Picks()  # of the newest request that ended
        self._asked = LastRequests()
        self.kinds = kinds
        check_boot(shape, budget, self.floor)
        self._ties = tie_breaks(shape, seed, budget, self.floor, kinds)
        # What tells experts apart is the seed's and the history's; else what no request has shown is a guess.
        knows = seed is not None and not seed.layer_residents
        unseen = self._ties if knows else self._ties + guessed(history.demand, settings.prior_votes)
        self._residents = set(boot_residents(self.scores() + self._ties, unseen, budget, self.floor, kinds))
        log.info(
            "plan at boot: %d experts, of which a history of %d requests weighs %.2f",
            len(self._residents), history.demand.requests,
            float(observed_weight(history.demand, settings.prior_votes).mean()),
        )  # fmt: skip

    @property
    def residents(self) -> list[Pair]:
        """The pairs that are resident now, sorted."""
        return sorted(self._residents)

    def boot_pairs(self) -> list[Pair]:
        """The resident set to start with, sorted."""
        if self.plan_version:
            raise PairError("the boot set was asked for after plans had changed it")
        return self.residents

    def applied(self, swaps: Iterable[PairSwap], settled: bool = True) -> None:
        """These swaps are published on every rank. Raises PairError for swaps that no plan can hold. Not `settled`: of
        a plan made of `rest_scores`. Nobody has asked for what it exchanges, so any plan may undo it at once, whenever
        it was published."""
        for out, in_ in swaps:
            if out not in self._residents or in_ in self._residents:
                raise PairError(f"the pilot's resident set does not allow the swap of {out} for {in_}")
            self._residents.remove(out)
            self._residents.add(in_)
            self._residence.swapped(out, in_, settled)
        self.plan_version += 1

    def resized(self, evicted: Iterable[Pair], joined: Iterable[Pair]) -> None:
        """The budget of experts has changed, on every rank: these are residents no more, and these are now. Raises
        PairError for pairs of which that cannot be."""
        gone, new = set(evicted), set(joined)
        if not gone <= self._residents or new & self._residents:
            raise PairError("the pilot's resident set does not allow the change of the budget")
        self._residents = (self._residents - gone) | new
        self._residence.forget(gone | new)
        self.plan_version += 1

    def scores(self) -> Grid:
        """[layers, experts]: what a plan made now is made from, requests still running included. Writes nothing."""
        return blended(self._preview(), self.seed.prior if self.seed else None, self.settings.prior_votes)

    @property
    def max_swaps(self) -> int:
        """Of one plan."""
        return self.settings.max_swaps

    @property
    def rest_due(self) -> bool:
        """Whether a plan is to be made at rest: a request has ended since the last one."""
        return self._requests_since_plan > 0 and self.sensitivity.adapts

    def rested(self) -> None:
        """A plan was made of `rest_scores`: the next request tells whether it asks for more of the same."""
        self._requests_since_plan = 0
        self._asked.rested(self._likely(), len(self._residents), self.floor)

    def rest_scores(self) -> Grid:
        """[layers, experts]: what a set is made from that waits for a request of nobody knows which topic. Writes
        nothing."""
        return rest_scores(self._likely(), len(self._residents), self.floor)

    def _likely(self) -> Cases:
        """What the next request may ask for."""
        seed, settings, (layers, experts, _) = self.seed, self.settings, self.shape
        topics = [seed.topics[name] for name in sorted(seed.topics)] or [seed.prior] if seed else []
        return self._asked.cases(
            topics or [np.full((layers, experts), 1.0 / experts)],
            settings.prior_votes,
            self.history.demand.mass,
            self.sensitivity.decay,
        )

    def chunk_done(
        self, tokens: int, chunks_left: int, demand: Callable[[int], LaneDemand], *, lane: int
    ) -> list[PairSwap]:
        """`tokens` of a prompt are computed, `chunks_left` more chunks follow. Plans once the prompt is known well
        enough, and again each time that twice as much of it is known, if it misses enough by itself; what is read
        beside the last chunk serves the answer. `demand` gives what the lane asked for so far, and takes nothing."""
        first = self.settings.replan_chunk_tokens
        request = self._requests.setdefault(lane, _Request(next_chunk_tokens=first))
        self._residence.tokens += tokens - request.prompt_tokens
        request.prompt_tokens = tokens
        if not first or chunks_left < 1 or tokens < request.next_chunk_tokens:
            return []
        request.next_chunk_tokens = 2 * tokens
        counts, mass, totals = demand(lane)
        request.prompt = self._vote(counts, mass)
        missed = Picks().add(totals).miss_rate
        return self._plan("a chunk", missed) if missed >= self.sensitivity.gate else []

    def prompt_done(
        self, counts: npt.ArrayLike, mass: npt.ArrayLike, totals: npt.ArrayLike, tokens: int, *, lane: int
    ) -> list[PairSwap]:
        """A prompt's `tokens` newly computed tokens are through. Plans for it if it missed enough by itself."""
        picks, request = self.prefill.add(totals), self._requests.setdefault(lane, _Request())
        self._residence.tokens += tokens - request.prompt_tokens
        request.prompt, request.prompt_tokens, request.is_answering = self._vote(counts, mass), tokens, True
        self._windows.ended(lane)
        if tokens < self.settings.min_prefill_tokens or picks.miss_rate < self.sensitivity.gate:
            return []
        return self._plan("a prompt", picks.miss_rate)

    def step_done(
        self,
        answers: Mapping[int, tuple[int, npt.ArrayLike]],
        demand: Callable[[int], LaneDemand],
        moving: bool = False,
    ) -> Planned | None:
        """Tokens were drawn. answers: by lane, the tokens generated so far and their totals [4 or more] since
        `prompt_done`. `demand` gives what a lane asked for since then, and takes nothing; it is asked when a plan is
        due, and then of every one of these lanes: they share the residents, so the plan is for all of them. `moving`:
        an earlier plan is still being read, so what is missed badly may be on its way, and nothing is urgent."""
        for lane, (tokens, totals) in answers.items():
            picks, missed = np.asarray(totals, dtype=np.float64)[:2]
            try:
                self._residence.tokens += self._windows.advance(lane, tokens, float(picks), float(missed))
            except ValueError as e:
                raise PairError(f"the router's demand is not usable: {e}") from e
            self._request(lane).answer_tokens = tokens
        due = self._windows.due(moving) if self.sensitivity.adapts else None
        if due is None:
            return None
        reason, missed_rate = due
        for lane in answers:
            self._request(lane).answer = self._vote(*demand(lane)[:2])
        self._windows.attempted(reason)
        cap = self.settings.urgent_swaps if reason == "urgent" else self.settings.max_swaps
        return Planned(reason, self._plan(f"generated tokens ({reason})", missed_rate, cap))

    def request_done(
        self, counts: npt.ArrayLike, mass: npt.ArrayLike, totals: npt.ArrayLike, tokens: int, *, lane: int
    ) -> None:
        """A request ended, in whatever way. The demand is that since `prompt_done`, of `tokens` generated tokens; of a
        request that ended before, it is that of the part of its prompt that was computed."""
        vote, request = self._vote(counts, mass), self._requests.pop(lane, _Request())
        self._windows.ended(lane)
        self._last = (self.decode if request.is_answering else self.prefill).add(totals)
        self._residence.tokens += max(0, tokens - request.answer_tokens)
        if request.is_answering and request.prompt is not None:
            vote = joined(request.prompt, request.prompt_tokens, vote, tokens)
        if vote.empty:
            return
        self.history.fold(vote, self.sensitivity.decay)
        self._asked.came(vote.mass)
        self._requests_since_plan += 1

    def idle_plan(self) -> list[PairSwap]:
        """A plan from all that is known, once after each request. Never by growth of the history: in equilibrium a
        history does not grow, and adaptation would stop for good. Beside a ring `rest_scores` are planned from instead:
        hot reads have taken the set to where the newest tokens are, and nothing else takes it back before a request of
        another topic comes."""
        return self._plan("a request", self._last.miss_rate) if self._requests_since_plan else []

    def _plan(self, cause: str, miss_rate: float, cap: int | None = None) -> list[PairSwap]:
        self._requests_since_plan = 0
        if not self.sensitivity.adapts:
            return []
        scores = self.scores()
        least, most = MIN_GAIN * float(scores.mean()), self.settings.max_swaps if cap is None else cap
        plan = swap_plan(self.steadied(scores), self._residents, self.floor, most, least, self._kind_of())
        if plan:
            weight = float(observed_weight(self.history.demand, self.settings.prior_votes).mean())
            log.info(
                "plan after %s: %d swaps, %.2f %% of picks missed, history weighs %.2f",
                cause, len(plan), 100 * miss_rate, weight,
            )  # fmt: skip
        return plan

    def steadied(self, scores: Grid) -> Grid:
        """The scores that decide: of who has just come and left, too (`Residence`)."""
        return self._residence.steadied(scores + self._ties)

    def _preview(self) -> Demand:
        """History as it would be if the running requests ended now. Without them a plan for one lane would throw out
        what another lane's request just brought in."""
        demand = self.history.demand
        for lane in sorted(self._requests):
            if (vote := self._requests[lane].vote) is not None:
                demand = demand.folded(vote, self.sensitivity.decay)
        return demand

    def _request(self, lane: int) -> _Request:
        request = self._requests.get(lane)
        if request is None or not request.is_answering:
            raise PairError(f"lane {lane} answers, but its prompt was not told of")
        return request

    def _vote(self, counts: npt.ArrayLike, mass: npt.ArrayLike) -> Vote:
        try:
            return vote_of(counts, mass, self.shape)
        except ValueError as e:
            raise PairError(f"the router's demand is not usable: {e}") from e

    def _kind_of(self) -> Sizes | None:
        return None if self.kinds is None else self.kinds.of
