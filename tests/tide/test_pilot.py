"""The pilot over simulated traffic: it follows, it does not fidget, and it never stops."""

import json
import logging

import numpy as np
import pytest

from tided.errors import ConfigError, PairError
from tided.settings import Tide
from tided.tide.demand import RouterShape
from tided.tide.history import History
from tided.tide.pilot import Pilot
from tided.tide.planner import boot_set, first_set
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


def test_adaptation_goes_on_after_two_hundred_identical_requests(tmp_path):
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


def test_the_plan_after_a_prompt_knows_that_prompt(tmp_path):
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


def test_steady_traffic_is_not_answered_by_a_hundred_swaps_a_request(tmp_path):
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


def test_switched_off_the_set_stands_and_demand_is_still_recorded(tmp_path):
    tide = pilot(tmp_path, sensitivity="off")
    before = tide.residents
    assert [request(tide, Domain(2)) for _ in range(20)] == [(0, 0)] * 20
    assert tide.residents == before
    assert tide.history.demand.requests == 20


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


def test_test_traffic_leaves_the_production_history_as_it_was(tmp_path):
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
    assert "swaps" in caplog.text
    assert "history weighs" in caplog.text
