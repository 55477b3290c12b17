"""Votes: one a request, aged by requests, blended with the prior layer by layer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tided.tide.demand import (
    PROMPT_CAP_TOKENS,
    SENSITIVITY,
    Demand,
    RouterShape,
    blended,
    joined,
    observed_weight,
    sensitivity_of,
    vote_of,
)

SHAPE = RouterShape(2, 4, 2)
grids = arrays(np.float64, (2, 4), elements=st.one_of(st.just(0.0), st.floats(1e-3, 1e6)))


def vote(*counts: list[float]):
    return vote_of(list(counts), list(counts), SHAPE)


@settings(max_examples=100, deadline=None)
@given(grids, grids, st.integers(0, 10**6), st.integers(0, 10**6))
def test_prompt_and_answer_together_are_one_vote(prompt, answer, prompt_tokens, answer_tokens):
    one = joined(vote_of(prompt, prompt, SHAPE), prompt_tokens, vote_of(answer, answer, SHAPE), answer_tokens)
    for grid in (one.counts, one.mass):
        for layer in range(2):
            heard = (prompt_tokens and prompt[layer].any()) or (answer_tokens and answer[layer].any())
            assert grid[layer].sum() == pytest.approx(1.0 if heard else 0.0)


def test_parts_weigh_by_their_tokens_up_to_the_cap():
    prompt, answer = vote([1, 0, 0, 0], [1, 0, 0, 0]), vote([0, 1, 0, 0], [0, 1, 0, 0])
    assert joined(prompt, 300, answer, 100).counts[0, 0] == 0.75
    long = joined(prompt, 50_000, answer, PROMPT_CAP_TOKENS)
    assert long.counts[0, 0] == long.counts[0, 1] == 0.5


def test_a4_a_fifty_thousand_token_prompt_does_not_erase_what_short_ones_taught():
    """Raw sums would: 50,000 tokens against 32 is a factor of 1,500."""
    demand = Demand.none(SHAPE)
    decay = SENSITIVITY["high"].decay
    for _ in range(20):
        demand = demand.folded(vote([30, 2, 0, 0], [16, 16, 0, 0]), decay)
    before = demand
    demand = demand.folded(vote([0, 0, 50_000, 50_000], [0, 0, 0, 100_000]), decay)
    assert before.requests + 1 == demand.requests
    kept = demand.mass[0, :2].sum() / demand.mass[0].sum()
    assert kept > 0.9
    assert np.argsort(-demand.mass[0])[0] == 0
    for _ in range(3):
        demand = demand.folded(vote([30, 2, 0, 0], [16, 16, 0, 0]), decay)
    assert demand.mass[1, :2].sum() / demand.mass[1].sum() > 0.9


@pytest.mark.parametrize(("level", "half_life"), [("low", 40), ("medium", 20), ("high", 10), ("max", 5)])
def test_half_life_is_counted_in_requests(level, half_life):
    demand = Demand.none(SHAPE).folded(vote([1, 0, 0, 0], [1, 0, 0, 0]), 1.0)
    for _ in range(half_life):
        demand = demand.folded(vote([0, 1, 0, 0], [0, 1, 0, 0]), SENSITIVITY[level].decay)
    assert demand.mass[0, 0] == pytest.approx(0.5)
    share = 1 - SENSITIVITY[level].decay
    for _ in range(2000):
        demand = demand.folded(vote([0, 1, 0, 0], [0, 1, 0, 0]), SENSITIVITY[level].decay)
    assert demand.mass[0].sum() == pytest.approx(1 / share)


def test_switched_off_nothing_ages():
    assert SENSITIVITY["off"].decay == 1.0
    assert SENSITIVITY["off"].gate > 1.0


def test_a_preview_changes_nothing():
    demand = Demand.none(SHAPE).folded(vote([1, 1, 0, 0], [1, 0, 1, 0]), 0.5)
    before = demand.mass.copy(), demand.counts.copy()
    demand.folded(vote([0, 0, 0, 9], [0, 0, 0, 9]), 0.5)
    assert np.array_equal(demand.mass, before[0])
    assert np.array_equal(demand.counts, before[1])


def test_a7_the_prior_weighs_in_each_layer_by_the_votes_of_that_layer():
    """Taken over all layers at once the prior would weigh a layer-count too little, with nothing to see it by."""
    demand = Demand.none(SHAPE)
    for _ in range(4):
        demand = demand.folded(vote([8, 0, 0, 0], [0, 0, 0, 0]), 1.0)
    prior = np.array([[0, 1, 0, 0], [0, 0, 3, 1]], dtype=float)
    assert observed_weight(demand, 4.0).tolist() == [0.5, 0.0]
    scores = blended(demand, prior, 4.0)
    assert scores.tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0.75, 0.25]]


def test_with_four_prior_votes_and_high_the_history_tops_out_near_four_fifths():
    demand = Demand.none(SHAPE)
    for _ in range(1000):
        demand = demand.folded(vote([1, 0, 0, 0], [1, 0, 0, 0]), SENSITIVITY["high"].decay)
    assert observed_weight(demand, 4.0) == pytest.approx([0.79, 0.79], abs=0.005)


@settings(max_examples=100, deadline=None)
@given(grids, st.floats(0, 100))
def test_scores_of_every_layer_sum_to_one_whatever_is_known(grid, prior_votes):
    demand = Demand.none(SHAPE).folded(vote_of(grid, grid, SHAPE), 1.0)
    assert blended(demand, None, prior_votes).sum(axis=1) == pytest.approx([1, 1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_values_that_are_no_demand_are_refused(bad):
    right, wrong = np.ones((2, 4)), np.ones((2, 4))
    wrong[1, 2] = bad
    for counts, mass, name in ((wrong, right, "counts"), (right, wrong, "mass")):
        with pytest.raises(ValueError, match=f"{name} holds NaN, infinite or negative"):
            vote_of(counts, mass, SHAPE)
    with pytest.raises(ValueError, match=r"counts is \[4, 2\], must be \[2, 4\]"):
        vote_of(right.T, right, SHAPE)


@pytest.mark.parametrize("level", ["low", "medium", "high", "max"])
def test_a_share_is_the_level_whose_newest_vote_has_it(level):
    known = SENSITIVITY[level]
    share = sensitivity_of(1.0 - known.decay)
    assert share.half_life == pytest.approx(known.half_life)
    assert share.gate == pytest.approx(known.gate, rel=0.06)
    assert sensitivity_of(level) is known


def test_the_gate_of_a_share_has_limits_and_no_share_is_off():
    assert sensitivity_of(0.4).gate == 0.005
    assert sensitivity_of(0.0001).gate == 0.2
    assert sensitivity_of(0.25).decay == pytest.approx(0.75)
    assert sensitivity_of(0.0) == SENSITIVITY["off"]
    assert not sensitivity_of(0.0).adapts
    for wrong in (0.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match="share"):
            sensitivity_of(wrong)
