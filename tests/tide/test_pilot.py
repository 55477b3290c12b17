"""The pilot over simulated traffic: it follows, it does not fidget, and it never stops."""

import json
import logging

import numpy as np
import pytest

from tided.errors import ConfigError, PairError
from tided.settings import Tide
from tided.tide.demand import RouterShape, blended
from tided.tide.history import History
from tided.tide.hot import HotReads
from tided.tide.pilot import Pilot, Planned
from tided.tide.planner import boot_set, first_set, swap_plan
from tided.tide.seed import Seed, load_seed

SHAPE = RouterShape(6, 48, 4)
BUDGET = 6 * 30


class Domain:
    """A topic: how likely each expert of each layer is picked by a token of it."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        popularity = rng.gamma(0.25, size=(SHAPE.layers, SHAPE.experts)) + 1e-9
        self.likely = popularity / popularity.sum(axis=1, keepdims=True)
        self.rng = np.random.default_rng(seed + 1000)

    def demand(self, tokens: int, resident) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """counts, mass [layers, experts] and totals [4] of so many tokens, as a DemandTap would hand them over."""
        picks = tokens * SHAPE.top_k
        counts = np.stack([self.rng.multinomial(picks, self.likely[layer]) for layer in range(SHAPE.layers)])
        mass = counts * self.rng.uniform(0.5, 1.5, size=counts.shape)
        absent = np.ones(counts.shape, dtype=bool)
        absent[tuple(np.array(sorted(resident)).T)] = False
        totals = [counts.sum(), counts[absent].sum(), mass.sum(), mass[absent].sum()]
        return counts.astype(np.float32), mass.astype(np.float32), np.array(totals, dtype=np.float64)


def pilot(tmp_path, seed: Seed | None = None, budget: int = BUDGET, name: str = "state", **settings) -> Pilot:
    tide = Tide(**settings)
    history = History.open(tmp_path / name, "ab" * 32, SHAPE, tide.record)
    return Pilot(history, seed, tide, SHAPE, budget)


def request(pilot: Pilot, domain: Domain, prompt: int = 200, answer: int = 100, lane: int = 0) -> tuple[int, int]:
    """A request from prompt to idle; how many swaps each of the two plans had."""
    first = pilot.prompt_done(*domain.demand(prompt, pilot.residents), prompt, lane=lane)
    if first:
        pilot.applied(first)
    pilot.request_done(*domain.demand(answer, pilot.residents), answer, lane=lane)
    second = pilot.idle_plan()
    if second:
        pilot.applied(second)
    return len(first), len(second)


def coverage(pilot: Pilot, domain: Domain) -> float:
    return float(np.mean([domain.likely[pair] for pair in pilot.residents]) * BUDGET / SHAPE.layers)


def test_a2_adaptation_goes_on_after_two_hundred_identical_requests(tmp_path):
    """A trigger on growth of the history would stop here for ever: in equilibrium a history does not grow."""
    tide = pilot(tmp_path)
    old, new = Domain(1), Domain(2)
    for _ in range(200):
        request(tide, old)
    before = coverage(tide, new)
    swaps = request(tide, new)
    assert swaps[0] > 0
    assert coverage(tide, new) > before
    after = [request(tide, new) for _ in range(30)]
    assert sum(map(sum, after)) > 0
    assert coverage(tide, new) > 0.97


def test_a_new_domain_without_long_prompts_is_followed_when_idle(tmp_path):
    tide = pilot(tmp_path)
    for _ in range(200):
        request(tide, Domain(1))
    prompt, idle = request(tide, Domain(2), prompt=8)
    assert prompt == 0
    assert idle > 0


def test_a6_the_plan_after_a_prompt_knows_that_prompt(tmp_path):
    """Planned before the fold, the plan would hold the last prompt's experts and not this one's."""
    tide = pilot(tmp_path)
    for _ in range(50):
        request(tide, Domain(1))
    new = Domain(2)
    counts, mass, totals = new.demand(3000, tide.residents)
    plan = tide.prompt_done(counts, mass, totals, 3000, lane=0)
    assert plan
    wanted = [float(mass[in_]) for _, in_ in plan]
    thrown_out = [float(mass[out]) for out, _ in plan]
    assert min(wanted) > max(thrown_out)
    absent_best = max(
        (pair for pair in np.ndindex(counts.shape) if pair not in set(tide.residents)), key=lambda p: mass[p]
    )
    assert absent_best in {in_ for _, in_ in plan}


def test_the_prompts_demand_is_a_preview_until_the_request_ends(tmp_path):
    tide = pilot(tmp_path)
    tide.prompt_done(*Domain(2).demand(300, tide.residents), 300, lane=0)
    assert tide.history.demand.requests == 0
    tide.request_done(*Domain(2).demand(100, tide.residents), 100, lane=0)
    assert tide.history.demand.requests == 1
    assert tide.history.demand.mass.sum(axis=1) == pytest.approx(np.ones(SHAPE.layers))


def test_a1_steady_traffic_is_not_answered_by_a_hundred_swaps_a_request(tmp_path):
    tide = pilot(tmp_path)
    domain = Domain(1)
    for _ in range(60):
        request(tide, domain, prompt=4500)
    swaps = [sum(request(tide, domain, prompt=4500)) for _ in range(40)]
    _, _, totals = domain.demand(4500, tide.residents)
    assert totals[1] / totals[0] < 0.01
    assert np.mean(swaps) < 3


def test_prompts_that_missed_little_or_are_short_cause_no_plan(tmp_path):
    domain = Domain(1)
    tide = pilot(tmp_path, sensitivity="high", min_prefill_tokens=32)
    counts, mass, totals = domain.demand(200, tide.residents)
    totals[1] = 0.0099 * totals[0]
    assert tide.prompt_done(counts, mass, totals, 200, lane=0) == []
    totals[1] = 0.0101 * totals[0]
    assert tide.prompt_done(counts, mass, totals, 31, lane=0) == []
    assert tide.prompt_done(counts, mass, totals, 32, lane=0)


@pytest.mark.parametrize(("level", "gate"), [("low", 0.04), ("medium", 0.02), ("high", 0.01), ("max", 0.005)])
def test_sensitivity_sets_the_gate(tmp_path, level, gate):
    tide = pilot(tmp_path, sensitivity=level)
    counts, mass, totals = Domain(1).demand(200, tide.residents)
    totals[1] = 0.99 * gate * totals[0]
    assert not tide.prompt_done(counts, mass, totals, 200, lane=0)
    totals[1] = 1.01 * gate * totals[0]
    assert tide.prompt_done(counts, mass, totals, 200, lane=0)


@pytest.mark.parametrize(("more", "swaps"), [(1.004, 0), (1.006, 1)])
def test_gains_below_half_a_percent_of_the_mean_are_noise(tmp_path, more, swaps):
    tide = pilot(tmp_path, prior_votes=0.0)
    mass = np.ones((SHAPE.layers, SHAPE.experts))
    mass[3, 47] = more
    tide.request_done(mass, mass, np.zeros(4), 9, lane=0)
    assert len(tide.idle_plan()) == swaps


def test_a9_switched_off_the_set_stands_and_demand_is_still_recorded(tmp_path):
    tide = pilot(tmp_path, sensitivity="off")
    before = tide.residents
    assert [request(tide, Domain(2)) for _ in range(20)] == [(0, 0)] * 20
    assert tide.residents == before
    assert tide.history.demand.requests == 20


def test_switched_off_a_ring_still_exchanges_residents_for_what_it_read(tmp_path):
    """Without a ring the set stands (above)."""
    tide = pilot(tmp_path, sensitivity="off")
    before, wanted = set(tide.residents), [(0, 44), (0, 45), (0, 46), (0, 47)]
    hot = HotReads(SHAPE, tide.residents, 2, tide.floor, tide.scores())
    assert before.isdisjoint(wanted)
    for _ in range(100):
        hot.observe([layer * SHAPE.experts + expert for layer, expert in wanted], [0.25] * 4, 1)
        moves = hot.moves(2)
        tide.applied(moves.promote)
        for pair in moves.load:
            hot.published(pair)
    assert set(tide.residents) - before <= set(wanted)
    assert len(set(tide.residents) - before) >= 2


def test_one_plan_a_request_when_idle(tmp_path):
    tide = pilot(tmp_path)
    assert tide.idle_plan() == []
    tide.request_done(*Domain(1).demand(100, tide.residents), 100, lane=0)
    assert tide.idle_plan()
    assert tide.idle_plan() == []


def test_a_plan_for_one_lane_keeps_what_another_lanes_prompt_brought_in(tmp_path):
    tide = pilot(tmp_path)
    for _ in range(30):
        request(tide, Domain(1))
    first = tide.prompt_done(*Domain(2).demand(3000, tide.residents), 3000, lane=0)
    tide.applied(first)
    brought = {in_ for _, in_ in first}
    second = tide.prompt_done(*Domain(1).demand(3000, tide.residents), 3000, lane=1)
    assert len({out for out, _ in second} & brought) <= 0.1 * len(brought)


def test_a_request_that_ends_in_its_prompt_votes_with_what_was_computed(tmp_path):
    tide = pilot(tmp_path)
    tide.request_done(*Domain(2).demand(50, tide.residents), 0, lane=0)
    assert tide.history.demand.requests == 1
    assert tide.prefill.picks > 0
    assert tide.decode.picks == 0


def test_a_request_that_never_began_does_not_vote_or_age(tmp_path):
    tide = pilot(tmp_path)
    request(tide, Domain(1))
    before = tide.history.demand
    nothing = np.zeros((SHAPE.layers, SHAPE.experts))
    tide.request_done(nothing, nothing, np.zeros(4), 0, lane=0)
    assert tide.history.demand is before
    assert tide.idle_plan() == []


def test_misses_of_prompts_and_answers_are_counted_apart(tmp_path):
    tide = pilot(tmp_path, sensitivity="off")
    nothing = np.ones((SHAPE.layers, SHAPE.experts))
    tide.prompt_done(nothing, nothing, [100, 10, 50, 2], 9, lane=0)
    tide.request_done(nothing, nothing, [10, 5, 4, 3], 9, lane=0)
    assert (tide.prefill.miss_rate, tide.decode.miss_rate) == (0.1, 0.5)
    assert (tide.prefill.missed_weight, tide.decode.missed_weight) == (2, 3)


def test_the_same_traffic_gives_the_same_plans(tmp_path):
    def run(name):
        tide, domains, plans = pilot(tmp_path, name=name), [Domain(1), Domain(2)], []
        for i in range(20):
            demand = domains[i // 5 % 2].demand(200, tide.residents)
            plans.append(tide.prompt_done(*demand, 200, lane=i % 3))
            tide.applied(plans[-1])
            tide.request_done(*domains[i // 5 % 2].demand(100, tide.residents), 100, lane=i % 3)
        return plans

    first = run("a")
    assert first == run("b")
    assert any(first)


def test_a_plan_applied_in_part_and_dropped_is_planned_again(tmp_path):
    tide = pilot(tmp_path)
    demand = Domain(2).demand(3000, tide.residents)
    plan = tide.prompt_done(*demand, 3000, lane=0)
    tide.applied(plan[:5])
    assert tide.plan_version == 1
    tide.request_done(*demand, 10, lane=0)
    again = tide.idle_plan()
    assert again == plan[5:]
    tide.applied(again)
    assert tide.plan_version == 2
    with pytest.raises(PairError, match="does not allow"):
        tide.applied(plan[:1])
    with pytest.raises(PairError, match="boot set"):
        tide.boot_pairs()


# Moments inside a request


class Talk:
    """One request of a lane, whose demand grows as a tap's does until it is taken."""

    def __init__(self, pilot: Pilot, lane: int = 0) -> None:
        self.pilot, self.lane, self.tokens = pilot, lane, 0
        self.sums = [np.zeros((SHAPE.layers, SHAPE.experts)), np.zeros((SHAPE.layers, SHAPE.experts)), np.zeros(4)]

    def add(self, domain: Domain, tokens: int) -> None:
        for total, more in zip(self.sums, domain.demand(tokens, self.pilot.residents), strict=True):
            total += more
        self.tokens += tokens

    def demand(self, lane: int) -> list[np.ndarray]:
        assert lane == self.lane
        return self.sums

    def chunk(self, domain: Domain, tokens: int, left: int) -> list:
        self.add(domain, tokens)
        return self.pilot.chunk_done(self.tokens, left, self.demand, lane=self.lane)

    def end_prompt(self, domain: Domain, tokens: int) -> list:
        self.add(domain, tokens)
        plan = self.pilot.prompt_done(*self.sums, self.tokens, lane=self.lane)
        self.__init__(self.pilot, self.lane)
        return plan

    def say(self, domain: Domain, tokens: int = 1) -> Planned | None:
        self.add(domain, tokens)
        return self.pilot.step_done({self.lane: (self.tokens, self.sums[2])}, self.demand)

    def end(self) -> None:
        self.pilot.request_done(*self.sums, self.tokens, lane=self.lane)


def settled(tmp_path, domain: Domain, **settings) -> Pilot:
    tide = pilot(tmp_path, **settings)
    for _ in range(50):
        request(tide, domain)
    return tide


def test_a6_a_long_prompt_is_planned_for_between_its_chunks(tmp_path):
    """In the middle of it: the plan holds what this prompt wants, and the rest of it misses less."""
    tide, new = settled(tmp_path, Domain(1)), Domain(2)
    talk = Talk(tide)
    plan = talk.chunk(new, 512, left=7)
    wanted = np.where(np.isin(range(48), [e for (layer, e) in tide.residents if layer == 0]), 0, new.likely[0])
    assert (0, int(np.argmax(wanted))) in {in_ for _, in_ in plan}
    before = coverage(tide, new)
    tide.applied(plan)
    assert coverage(tide, new) > before + 0.1
    assert tide.history.demand.requests == 50, "a preview until the request ends"


def test_a_prompt_is_planned_for_again_when_twice_as_much_of_it_is_known(tmp_path):
    talk = Talk(settled(tmp_path, Domain(1), replan_chunk_tokens=256))
    asked = [bool(talk.chunk(Domain(2), 128, left=40 - i)) for i in range(33)]
    assert [128 * (i + 1) for i, was in enumerate(asked) if was] == [256, 512, 1024, 2048, 4096]


@pytest.mark.parametrize(("left", "tokens", "every"), [(0, 512, 256), (7, 255, 256), (7, 512, 0)])
def test_a_prompt_that_is_over_or_hardly_begun_is_not_planned_for(tmp_path, left, tokens, every):
    tide = settled(tmp_path, Domain(1), replan_chunk_tokens=every)

    def untouched(lane):
        raise AssertionError("the demand was asked for without need")

    assert tide.chunk_done(tokens, left, untouched, lane=0) == []


def test_a_prompt_of_two_chunks_is_planned_for_after_the_first(tmp_path):
    assert Talk(settled(tmp_path, Domain(1))).chunk(Domain(2), 256, left=1)


def test_a_long_prompt_of_a_known_topic_causes_no_plan(tmp_path):
    domain = Domain(1)
    tide = settled(tmp_path, domain)
    assert Talk(tide).chunk(domain, 2048, left=5) == []


@pytest.mark.parametrize(("missed", "plans"), [(19, False), (20, True)])
def test_a_prompt_that_misses_little_so_far_is_not_planned_for(tmp_path, missed, plans):
    """By its own misses, whatever there would be to gain: `medium` plans from 2 % on."""
    tide = settled(tmp_path, Domain(1), sensitivity="medium")
    counts, mass, _ = Domain(2).demand(512, tide.residents)
    plan = tide.chunk_done(512, 7, lambda lane: (counts, mass, [1000, missed, 1000.0, missed]), lane=0)
    assert bool(plan) == plans


def test_a_second_plan_follows_when_the_answer_goes_on_elsewhere(tmp_path):
    tide = settled(tmp_path, Domain(1), replan_decode_tokens=100, urgent_miss_rate=1.0)
    talk = Talk(tide)
    tide.applied(talk.end_prompt(Domain(1), 200))
    new, at = Domain(2), []
    before = coverage(tide, new)
    for i in range(300):
        planned = talk.say(new)
        if planned is not None:
            assert planned.reason == "decode"
            tide.applied(planned.swaps)
            at.append((i + 1, len(planned.swaps)))
    assert [token for token, _ in at] == [100, 200, 300][: len(at)]
    assert at[0][1] > 0
    assert coverage(tide, new) > before + 0.1


def test_urgent_plans_fire_and_are_bounded(tmp_path):
    tide = settled(tmp_path, Domain(1), urgent_swaps=5, replan_decode_tokens=0)
    talk, new, plans = Talk(tide), Domain(2), []
    talk.end_prompt(Domain(1), 200)
    for i in range(400):
        planned = talk.say(new)  # nothing is applied: it goes on missing
        if planned is not None:
            assert planned.reason == "urgent"
            plans.append((i + 1, len(planned.swaps)))
    assert plans == [(30, 5), (180, 5), (330, 5)]


def test_a3_urgent_plans_have_swaps_left_after_ordinary_ones_spent_theirs(tmp_path):
    tide = settled(tmp_path, Domain(1), max_swaps=3, urgent_swaps=9)
    talk = Talk(tide)
    plan = talk.end_prompt(Domain(2), 200)
    assert len(plan) == 3
    tide.applied(plan)
    planned = next(filter(None, (talk.say(Domain(2)) for _ in range(60))))
    assert (planned.reason, len(planned.swaps)) == ("urgent", 9)


def test_a_plan_that_is_due_sees_what_all_lanes_ask_for(tmp_path):
    tide = settled(tmp_path, Domain(1), replan_decode_tokens=64)
    one, other = Talk(tide, 0), Talk(tide, 1)
    for talk in (one, other):
        talk.end_prompt(Domain(1), 40)
    asked = []

    def demand(lane):
        asked.append(lane)
        return (one, other)[lane].sums

    news, planned = (Domain(2), Domain(3)), None
    while planned is None:
        one.add(news[0], 1)
        other.add(news[1], 1)
        planned = tide.step_done({talk.lane: (talk.tokens, talk.sums[2]) for talk in (one, other)}, demand)
    assert asked == [0, 1]
    came = {in_ for _, in_ in planned.swaps}
    for new, rival in (news, news[::-1]):
        liked = sorted(came, key=lambda pair: -new.likely[pair])[: len(came) // 4]
        assert any(new.likely[pair] > 10 * rival.likely[pair] for pair in liked)


def test_switched_off_no_moment_makes_a_plan(tmp_path):
    tide = pilot(tmp_path, sensitivity="off", replan_decode_tokens=50)
    talk = Talk(tide)
    assert talk.chunk(Domain(2), 512, left=7) == []
    assert talk.end_prompt(Domain(2), 100) == []
    assert [talk.say(Domain(2)) for _ in range(200)] == [None] * 200
    talk.end()
    assert tide.idle_plan() == []
    assert tide.history.demand.requests == 1


def test_a4_a_request_of_many_moments_is_one_vote(tmp_path):
    """Each of them folds nothing; the request ages the history once."""
    tide = pilot(tmp_path, replan_decode_tokens=20)
    talk = Talk(tide)
    talk.chunk(Domain(2), 512, left=5)
    talk.chunk(Domain(2), 512, left=4)
    talk.end_prompt(Domain(2), 100)
    for _ in range(100):
        talk.say(Domain(3))
    talk.end()
    assert tide.history.demand.requests == 1
    assert tide.history.demand.mass.sum(axis=1) == pytest.approx(np.ones(SHAPE.layers))


def test_a_prompt_cancelled_between_chunks_votes_once_and_is_forgotten(tmp_path):
    tide = pilot(tmp_path)
    talk = Talk(tide)
    talk.chunk(Domain(2), 512, left=5)
    talk.add(Domain(2), 100)
    tide.request_done(*talk.sums, 0, lane=0)
    assert tide.history.demand.requests == 1
    assert tide.decode.picks == 0
    np.testing.assert_allclose(tide.scores(), blended(tide.history.demand, None, tide.settings.prior_votes))


def test_an_answer_without_its_prompt_is_an_error(tmp_path):
    talk = Talk(pilot(tmp_path))
    with pytest.raises(PairError, match="its prompt was not told of"):
        talk.say(Domain(1))


def grids(*best: tuple[int, int]) -> np.ndarray:
    """Demand for each layer's first experts, and more for `best`, the earlier the more."""
    mass = np.ones((SHAPE.layers, SHAPE.experts))
    for rank, pair in enumerate(best):
        mass[pair] = 3.0 - 0.1 * rank
    return mass


def test_what_has_just_come_stays_a_while(tmp_path):
    tide = pilot(tmp_path, budget=24, prior_votes=0.0)
    came, rival = (0, 40), (0, 41)
    mass = grids(came)
    tide.request_done(mass, mass, np.zeros(4), 10, lane=0)
    (swap,) = tide.idle_plan()
    tide.applied([swap])
    mass = grids(*[pair for pair in tide.residents if pair[0] == 0 and pair != came], rival)
    mass[came] = 0.01
    for _ in range(20):
        tide.request_done(mass, mass, np.zeros(4), 3, lane=0)
    assert came not in {out for out, _ in tide.idle_plan()}
    tide.request_done(mass, mass, np.zeros(4), 4, lane=0)
    assert came in {out for out, _ in tide.idle_plan()}, "64 tokens later"


@pytest.mark.parametrize(("worth", "returns"), [(1.2, False), (1.3, True)])
def test_what_has_just_left_comes_back_only_when_it_is_clearly_wanted(tmp_path, worth, returns):
    tide = pilot(tmp_path, budget=24, prior_votes=0.0)
    tide.applied([((0, 3), (0, 40))])

    def plan(tokens):
        mass = np.full((SHAPE.layers, SHAPE.experts), 0.001)
        for pair in tide.residents:
            mass[pair] = 1.0
        mass[0, 3] = worth
        for _ in range(30):
            tide.request_done(mass, mass, np.zeros(4), 0, lane=0)
        tide.request_done(mass, mass, np.zeros(4), tokens, lane=0)
        return {in_ for _, in_ in tide.idle_plan()}

    assert ((0, 3) in plan(100)) == returns
    assert (0, 3) in plan(156), "256 tokens later it is a pair like any other"


def test_at_rest_what_hot_reads_have_taken_away_comes_back(tmp_path):
    """They follow the newest tokens, to the last expert of a topic if it takes long enough."""
    tide = pilot(tmp_path, seed_file(tmp_path, [Domain(1), Domain(2)]))
    before = coverage(tide, Domain(2))
    request(tide, Domain(1))
    likely = Domain(1).likely
    for _ in range(60):
        out = min((pair for pair in tide.residents if pair[0] == 0), key=lambda pair: likely[pair])
        in_ = max((pair for pair in np.ndindex(likely.shape) if pair[0] == 0 and pair not in set(tide.residents)),
                  key=lambda pair: likely[pair])  # fmt: skip
        if likely[in_] <= likely[out]:
            break
        tide.applied([(out, in_)])
    tide.request_done(*Domain(1).demand(50, tide.residents), 0, lane=0)
    drifted = coverage(tide, Domain(2))
    assert drifted < before
    assert tide.rest_due
    rest = swap_plan(tide.rest_scores(), tide.residents, tide.floor, 512, 0.0)
    tide.rested()
    tide.applied(rest, settled=False)
    assert coverage(tide, Domain(2)) > drifted
    assert not tide.rest_due, "once a request"


@pytest.mark.parametrize("late", [False, True], ids=["before the next request", "after it began"])
@pytest.mark.parametrize("rests", [True, False])
def test_what_a_rest_took_away_the_next_request_may_have_back_at_once(tmp_path, rests, late):
    """Who has just come stays and who has just left is worth less, so that plans for what is asked do not undo each
    other; a plan for nobody's tokens is to be undone, whenever its last swap has landed."""
    tide = pilot(tmp_path, seed_file(tmp_path, [Domain(1), Domain(2)]))
    tide.request_done(*Domain(3).demand(50, tide.residents), 0, lane=0)
    if rests:
        rest = swap_plan(tide.rest_scores(), tide.residents, tide.floor, 512, 0.0)
        tide.rested()
    else:
        rest = tide.idle_plan()
    assert len(rest) > 5
    back = grids()
    for at, (out, _) in enumerate(rest):
        back[out] = 100.0 + at
    scores = back / back.sum(axis=1, keepdims=True)
    landed = len(rest) // 2 if late else len(rest)
    tide.applied(rest[:landed], settled=not rests)
    tide.prompt_done(np.zeros_like(back), np.zeros_like(back), np.zeros(4), 1, lane=0)
    tide.applied(rest[landed:], settled=not rests)
    worth = tide.steadied(scores)
    assert all((worth[out] > 0.99 * scores[out]) == rests for out, _ in rest)
    assert all((worth[in_] == 1.0) != rests for _, in_ in rest)


def test_a_rest_that_was_not_finished_tells_nothing_about_the_next_request(tmp_path):
    """Its scores are computed in a piece before the plan, and a request may come between."""
    tide = pilot(tmp_path, seed_file(tmp_path, [Domain(1), Domain(2)]))
    tide.request_done(*Domain(1).demand(50, tide.residents), 0, lane=0)
    before, scores = tide._asked.habit.share, tide.rest_scores()
    np.testing.assert_array_equal(tide.rest_scores(), scores)
    tide.request_done(*Domain(1).demand(50, tide.residents), 0, lane=0)
    assert tide._asked.habit.share == before
    tide.rest_scores()
    tide.rested()
    tide.request_done(*Domain(1).demand(50, tide.residents), 0, lane=0)
    assert tide._asked.habit.share != before


# Start


def test_a_first_start_without_a_seed_keeps_the_first_experts_of_each_layer(tmp_path):
    assert pilot(tmp_path, budget=100).boot_pairs() == first_set(6, 48, 100, 4)


def seed_file(tmp_path, domains) -> Seed:
    path = tmp_path / "seed.json"
    content = {
        "model_type": "m", "layers": 6, "experts": 48, "top_k": 4,
        "domains": {
            str(i): {"tokens": 100, "counts": (d.likely * 400).tolist(), "mass": d.likely.tolist()}
            for i, d in enumerate(domains)
        },
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return load_seed(path, "m", SHAPE)


def test_a_first_start_with_a_seed_keeps_what_the_seed_asks_for(tmp_path):
    seed = seed_file(tmp_path, [Domain(1), Domain(2)])
    tide = pilot(tmp_path, seed)
    assert tide.boot_pairs() == boot_set(seed.prior, BUDGET, 4)
    assert coverage(tide, Domain(1)) > 0.95


def by_layer(pairs) -> list[int]:
    return [sum(layer == at for at, _ in pairs) for layer in range(SHAPE.layers)]


def test_a_seed_of_layers_shares_out_a_first_start_and_traffic_teaches_the_experts(tmp_path):
    seed = Seed(np.full((6, 48), 1 / 48), "", (), layer_residents=(40, 30, 30, 30, 25, 25))
    tide = pilot(tmp_path, seed)
    assert by_layer(tide.boot_pairs()) == [40, 30, 30, 30, 25, 25]
    for _ in range(30):
        request(tide, Domain(2))
    learned = tide.residents
    assert coverage(tide, Domain(2)) > 0.95
    tide.history.close()
    again = pilot(tmp_path, seed)
    assert len(set(again.boot_pairs()) ^ set(learned)) <= 0.1 * BUDGET


@pytest.mark.parametrize("seed", [None, Seed(np.full((6, 48), 1 / 48), "", (), layer_residents=(30,) * 6)])
def test_after_one_short_request_the_layers_are_still_served_alike(tmp_path, seed):
    """Most pairs are as likely as each other then: ranked all together, the first layers would get every one of them,
    and the last ones no more than the request asked for."""
    tide = pilot(tmp_path, seed)
    counts = np.zeros((SHAPE.layers, SHAPE.experts))
    counts[:, 40:44] = 1.0
    tide.request_done(counts, counts, np.zeros(4), 9, lane=0)
    tide.history.close()
    again = pilot(tmp_path, seed)
    assert by_layer(again.boot_pairs()) == [30] * 6
    assert {(layer, 43) for layer in range(6)} <= set(again.boot_pairs())


def test_a_restart_keeps_what_traffic_taught(tmp_path):
    seed = seed_file(tmp_path, [Domain(1)])
    tide = pilot(tmp_path, seed)
    for _ in range(30):
        request(tide, Domain(2))
    learned = tide.residents
    tide.history.close()
    assert coverage(tide, Domain(2)) > 0.95
    again = pilot(tmp_path, seed)
    assert len(set(again.boot_pairs()) ^ set(learned)) <= 0.05 * BUDGET


def test_a10_test_traffic_leaves_the_production_history_as_it_was(tmp_path):
    tide = pilot(tmp_path)
    for _ in range(5):
        request(tide, Domain(1))
    tide.history.close()
    before = tide.history.path.read_bytes()
    benchmark = pilot(tmp_path, record=False)
    assert sum(sum(request(benchmark, Domain(2))) for _ in range(100)) > 0
    benchmark.history.close()
    assert tide.history.path.read_bytes() == before
    assert [path.name for path in (tmp_path / "state").iterdir()] == [tide.history.path.name]


@pytest.mark.parametrize(
    ("budget", "settings", "message"),
    [
        (23, {}, "23 resident experts are too few: 6 layers need 4 each, 24 in all"),
        (289, {}, "289 resident experts are more than the model has"),
        (100, {"floor_per_layer": 3}, "floor_per_layer = 3"),
        (100, {"floor_per_layer": 20}, "6 layers need 20 each"),
        (100, {"floor_per_layer": 49}, "a layer has 48"),
    ],
)
def test_a_budget_or_floor_that_cannot_be_is_a_configuration_error(tmp_path, budget, settings, message):
    with pytest.raises(ConfigError, match=message):
        pilot(tmp_path, budget=budget, **settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sensitivity", "max"),
        ("prior_votes", 40.0),
        ("floor_per_layer", 26),
        ("max_swaps", 2),
        ("min_prefill_tokens", 500),
        ("sensitivity", 0.4),
    ],
)
def test_every_option_of_the_tide_changes_something_that_can_be_seen(tmp_path, name, value):
    def seen(where, **settings):
        seed = seed_file(tmp_path, [Domain(3)])
        tide, domains = pilot(tmp_path, seed, name=where, **settings), (Domain(1), Domain(2))
        return [request(tide, domains[i // 5 % 2]) for i in range(20)], tide.residents

    assert seen("default") != seen("other", **{name: value})


def test_demand_that_is_no_number_ends_the_rank_and_reaches_no_history(tmp_path):
    tide = pilot(tmp_path)
    counts, mass, totals = Domain(1).demand(100, tide.residents)
    mass[2, 3] = np.nan
    with pytest.raises(PairError, match="demand is not usable: mass holds NaN"):
        tide.prompt_done(counts, mass, totals, 100, lane=0)
    with pytest.raises(PairError, match="not usable"):
        tide.request_done(counts, mass, totals, 100, lane=0)
    assert tide.history.demand.requests == 0


def test_plans_are_logged_with_what_they_weighed(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="tided.tide")
    tide = pilot(tmp_path)
    request(tide, Domain(2))
    assert "plan at boot: 180 experts, of which a history of 0 requests weighs 0.00" in caplog.text
    assert "swaps" in caplog.text
    assert "history weighs" in caplog.text
