"""The planner as a function: budget, floors, order, optimum, fixed point."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tided.tide.demand import per_layer
from tided.tide.planner import boot_set, first_set, swap_plan


@st.composite
def problems(draw):
    """(scores, residents, floor): scores with many ties, residents that keep the floor."""
    layers, experts = draw(st.integers(1, 5)), draw(st.integers(2, 8))
    floor = draw(st.integers(1, experts))
    values = st.one_of(st.sampled_from([0.0, 0.25, 0.5]), st.floats(0, 1, width=16))
    scores = draw(arrays(np.float64, (layers, experts), elements=values))
    orders = [draw(st.permutations(range(experts))) for _ in range(layers)]
    kept = [draw(st.integers(floor, experts)) for _ in range(layers)]
    residents = [(layer, e) for layer in range(layers) for e in orders[layer][: kept[layer]]]
    return scores, residents, floor


def counts(pairs, layers):
    found = Counter(layer for layer, _ in pairs)
    return [found[layer] for layer in range(layers)]


def applied(residents, plan):
    """Applies swap after swap, as a portion of a plan might be."""
    now = set(residents)
    for out, in_ in plan:
        assert out in now, f"{out} leaves but is not there"
        assert in_ not in now, f"{in_} comes but is there"
        now.remove(out)
        now.add(in_)
    return now


def total(scores, pairs):
    return sum(float(scores[pair]) for pair in pairs)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_boot_keeps_the_budget_the_floors_and_an_order_without_chance(problem):
    scores, residents, floor = problem
    chosen = boot_set(scores, len(residents), floor)
    assert len(set(chosen)) == len(chosen) == len(residents)
    assert min(counts(chosen, len(scores))) >= floor
    assert chosen == sorted(chosen) == boot_set(scores.copy(order="F"), len(residents), floor)
    for layer, kept in enumerate(counts(chosen, len(scores))):  # of a layer the best are kept, ties to the lower expert
        best = sorted(range(scores.shape[1]), key=lambda e, layer=layer: (-scores[layer, e], e))[:kept]
        assert sorted(best) == [e for at, e in chosen if at == layer]


@settings(max_examples=60, deadline=None)
@given(arrays(np.float64, (2, 4), elements=st.floats(0, 1, width=16)), st.integers(1, 2), st.data())
def test_no_other_set_of_the_budget_and_the_floors_scores_more(scores, floor, data):
    budget = data.draw(st.integers(2 * floor, 8))
    everything = [(layer, expert) for layer in range(2) for expert in range(4)]
    best = max(total(scores, some) for some in combinations(everything, budget) if min(counts(some, 2)) >= floor)
    assert total(scores, boot_set(scores, budget, floor)) == pytest.approx(best, abs=1e-12)


@settings(max_examples=300, deadline=None)
@given(problems(), st.sampled_from([0.0, 0.01, 0.3]), st.integers(0, 40))
def test_a_plan_keeps_budget_floors_cap_and_gain_and_goes_in_no_circle(problem, min_gain, cap):
    scores, residents, floor = problem
    plan = swap_plan(scores, residents, floor, cap, min_gain)
    assert len(plan) <= cap
    assert all(scores[in_] - scores[out] > min_gain for out, in_ in plan)
    outs, ins = {out for out, _ in plan}, {in_ for _, in_ in plan}
    assert len(outs) == len(ins) == len(plan)
    assert not outs & ins
    for portion in range(len(plan) + 1):
        now = applied(residents, plan[:portion])
        assert len(now) == len(residents)
        assert min(counts(now, len(scores))) >= floor


@settings(max_examples=300, deadline=None)
@given(problems(), st.sampled_from([0.0, 0.01, 0.3]))
def test_after_a_plan_there_is_nothing_left_to_plan(problem, min_gain):
    scores, residents, floor = problem
    now = applied(residents, swap_plan(scores, residents, floor, 1000, min_gain))
    assert swap_plan(scores, now, floor, 1000, min_gain) == []


@settings(max_examples=200, deadline=None)
@given(problems())
def test_without_a_gain_to_ask_for_a_plan_reaches_the_best_set(problem):
    scores, residents, floor = problem
    now = applied(residents, swap_plan(scores, residents, floor, 1000, 0.0))
    assert total(scores, now) == pytest.approx(total(scores, boot_set(scores, len(residents), floor)), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(problems(), st.randoms())
def test_a_plan_does_not_depend_on_the_order_of_the_residents(problem, random):
    scores, residents, floor = problem
    plan = swap_plan(scores, residents, floor, 40, 0.01)
    random.shuffle(residents)
    assert swap_plan(scores, residents, floor, 40, 0.01) == plan == swap_plan(scores, set(residents), floor, 40, 0.01)


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 5))
def test_a_cut_plan_is_the_beginning_of_the_whole_one(problem, cap):
    scores, residents, floor = problem
    assert swap_plan(scores, residents, floor, cap, 0.01) == swap_plan(scores, residents, floor, 1000, 0.01)[:cap]


def test_the_most_wanted_comes_first_against_the_least_wanted():
    scores = np.array([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.6, 0.1]])
    residents = [(0, 2), (0, 3), (1, 0), (1, 1)]
    assert swap_plan(scores, residents, 1, 9, 0.0) == [((0, 3), (1, 2)), ((1, 0), (0, 0)), ((0, 2), (0, 1))]


def test_a_layer_at_its_floor_gives_only_to_itself():
    scores = np.array([[0.02, 0.01, 0.97], [0.4, 0.3, 0.3]])
    plan = swap_plan(scores, [(0, 0), (0, 1), (1, 0), (1, 1)], 2, 9, 0.0)
    assert plan == [((0, 1), (0, 2))]


def test_a_layer_that_grew_past_its_floor_gives_to_the_next_newcomer():
    scores = np.array([[0.50, 0.45, 0.02, 0.00], [0.60, 0.42, 0.01, 0.00]])
    residents = [(0, 0), (0, 2), (0, 3), (1, 2)]
    plan = swap_plan(scores, residents, 1, 9, 0.0)
    assert plan == [((0, 3), (1, 0)), ((1, 2), (0, 1)), ((0, 2), (1, 1))]
    assert applied(residents, plan) == set(boot_set(scores, 4, 1))


def test_ties_fall_to_the_lower_layer_and_expert():
    assert boot_set(np.ones((2, 3)), 3, 1) == [(0, 0), (0, 1), (1, 0)]
    assert swap_plan(np.ones((2, 3)), [(0, 2), (1, 2)], 1, 9, 0.0) == []


@pytest.mark.parametrize(
    ("budget", "floor", "message"),
    [
        (5, 2, "too few: 3 layers need 2 each, 6 in all"),
        (13, 2, "more than the model has"),
        (6, 0, "floor of 0"),
        (12, 5, "floor of 5"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(budget, floor, message):
    for make in (lambda: boot_set(np.ones((3, 4)), budget, floor), lambda: first_set(3, 4, budget, floor)):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.1])
def test_scores_that_are_no_scores_are_refused(bad):
    with pytest.raises(ValueError, match="scores"):
        boot_set(np.array([[0.5, bad], [0.5, 0.5]]), 2, 1)


def test_residents_below_the_floor_are_refused():
    with pytest.raises(ValueError, match="fewer than 2"):
        swap_plan(np.ones((2, 3)), [(0, 0), (0, 1), (0, 2), (1, 0)], 2, 9, 0.0)


def test_knowing_nothing_every_layer_keeps_as_many_of_its_first_experts():
    assert first_set(3, 4, 8, 2) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]


def test_a_model_of_fifteen_thousand_experts_is_planned_whole():
    rng = np.random.default_rng(7)
    scores = per_layer(rng.gamma(0.5, size=(40, 384)))
    start = boot_set(per_layer(rng.gamma(0.5, size=(40, 384))), 10_000, 6)
    plan = swap_plan(scores, start, 6, 100_000, 0.0)
    assert len(plan) > 1000
    assert applied(start, plan) == set(boot_set(scores, 10_000, 6))
