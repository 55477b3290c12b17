"""Experts of mixed record sizes: the budget is bytes, and a swap changes none of them."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import applied, counts, problems, total

from tided.tide.demand import per_layer
from tided.tide.planner import boot_set, boot_set_of_bytes, swap_plan

BITS = (2, 3, 4)


@st.composite
def sized(draw):
    """(scores, sizes, residents, floor)"""
    scores, residents, floor = draw(problems())
    cells = st.sampled_from([10, 15, 20])
    sizes = np.array([[draw(cells) for _ in row] for row in scores], dtype=np.int64)
    return scores, sizes, residents, floor


@settings(max_examples=200, deadline=None)
@given(sized(), st.integers(0, 6))
def test_a_swap_exchanges_records_of_one_size_keeps_the_floors_and_gains(problem, cap):
    scores, sizes, residents, floor = problem
    plan = swap_plan(scores, residents, floor, cap, 0.0, sizes)
    assert len(plan) <= cap
    now = set(residents)
    for out, in_ in plan:
        assert sizes[out] == sizes[in_]
        assert scores[in_] > scores[out]
        now = applied(now, [(out, in_)])
        assert min(counts(now, len(scores))) >= floor
    assert plan == swap_plan(scores, residents[::-1], floor, cap, 0.0, sizes)


def by_definition(scores, residents, floor, cap, min_gain, sizes):
    """The plan, looked for among all residents at each newcomer."""
    resident, flat = set(residents), lambda pair: float(scores[pair])
    kept = Counter(int(sizes[pair]) for pair in resident)
    best = set()
    if len(set(sizes.ravel().tolist())) == 1:
        best = set(boot_set(scores, len(resident), floor))
    else:
        ranked = sorted(np.ndindex(scores.shape), key=lambda pair: (-flat(pair), pair))
        for size, count in kept.items():
            best |= set([pair for pair in ranked if sizes[pair] == size][:count])
    plan, leavers = [], resident - best
    for in_ in sorted(best - resident, key=lambda pair: (-flat(pair), pair)):
        above = counts(resident, len(scores))
        may = [p for p in leavers if sizes[p] == sizes[in_] and (p[0] == in_[0] or above[p[0]] > floor)]
        out = min(may, key=lambda pair: (flat(pair), tuple(-part for part in pair)), default=None)
        if len(plan) < cap and out is not None and flat(in_) - flat(out) > min_gain:
            plan.append((out, in_))
            leavers.remove(out)
            resident = resident - {out} | {in_}
    return plan


@settings(max_examples=400, deadline=None)
@given(sized(), st.integers(0, 40), st.sampled_from([0.0, 0.02]), st.booleans())
def test_every_newcomer_takes_the_cheapest_that_may_leave_then(problem, cap, min_gain, of_one_size):
    scores, sizes, residents, floor = problem
    sizes = np.full_like(sizes, 7) if of_one_size else sizes
    plan = by_definition(scores, residents, floor, cap, min_gain, sizes)
    assert swap_plan(scores, residents, floor, cap, min_gain, sizes) == plan
    mask = np.zeros(scores.shape, dtype=bool)
    for pair in residents:
        mask[pair] = True
    before = mask.copy()
    assert swap_plan(scores, mask.ravel(), floor, cap, min_gain, sizes) == plan
    assert (mask == before).all()


def test_a_layer_that_somebody_came_to_may_give_from_then_on():
    scores = np.array([[0.05, 0.4, 0.5, 0.0], [0.01, 0.41, 0.42, 0.07], [0.001, 0.43, 0.06, 0.0]])
    residents = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]  # two of layers 0 and 2, which is their floor
    plan = [((1, 0), (0, 2)), ((0, 0), (1, 3)), ((2, 0), (2, 2))]
    assert swap_plan(scores, residents, 2, 9, 0.0) == plan
    assert by_definition(scores, residents, 2, 9, 0.0, np.ones(scores.shape)) == plan


def test_a_set_below_its_floors_is_refused():
    with pytest.raises(ValueError, match="fewer than 2 residents already"):
        swap_plan(np.full((2, 4), 0.25), [(0, 0), (0, 1), (0, 2), (1, 0)], 2, 5, 0.0)


@settings(max_examples=100, deadline=None)
@given(sized())
def test_of_each_size_the_most_wanted_stay_where_no_floor_holds_them(problem):
    scores, sizes, residents, _ = problem
    everywhere = [(layer, expert) for layer in range(len(scores)) for expert in range(scores.shape[1])]
    kept = Counter(int(sizes[pair]) for pair in residents)
    if min(counts(residents, len(scores))) < 2:
        return
    after = applied(residents, swap_plan(scores, residents, 1, 10_000, 0.0, sizes))
    if min(counts(after, len(scores))) == 1:
        return  # a floor may have held somebody
    best = 0.0
    for size, count in kept.items():
        best += sum(sorted((float(scores[p]) for p in everywhere if sizes[p] == size), reverse=True)[:count])
    assert total(scores, after) == pytest.approx(best)


@settings(max_examples=200, deadline=None)
@given(sized(), st.integers(0, 400))
def test_the_first_set_fits_its_bytes_and_leaves_less_than_any_record_outside(problem, more):
    scores, sizes, _, floor = problem
    least = int(np.sort(sizes, axis=1)[:, -floor:].sum())
    chosen = boot_set_of_bytes(scores, sizes, least + more, floor)
    used = sum(int(sizes[pair]) for pair in chosen)
    assert used <= least + more
    assert min(counts(chosen, len(scores))) >= floor
    outside = [int(size) for at, size in np.ndenumerate(sizes) if at not in set(chosen)]
    assert not outside or least + more - used < min(outside)


def test_mixed_sizes_leave_no_memory_unused_for_the_widest():
    """Records of 2, 3 and 4 bits: 97 % of the budget are used at least. A reservation by the widest uses 75 %."""
    rng = np.random.default_rng(3)
    scores, bits = per_layer(rng.gamma(0.5, size=(40, 256))), rng.choice(BITS, size=(40, 256))
    sizes = (bits * 1_000_000).astype(np.int64)
    budget = int(0.4 * sizes.sum())
    chosen = boot_set_of_bytes(scores, sizes, budget, 8)
    assert sum(int(sizes[pair]) for pair in chosen) >= 0.97 * budget
    assert total(scores, chosen) > total(scores, boot_set(scores, budget // int(sizes.max()), 8))


def test_what_a_byte_brings_decides_behind_the_floors():
    scores, sizes = np.array([[0.4, 0.25, 0.15, 0.1, 0.1]]), np.array([[10, 30, 10, 10, 10]], dtype=np.int64)
    assert boot_set_of_bytes(scores, sizes, 40, 1) == [(0, 0), (0, 2), (0, 3), (0, 4)]


def test_a_guess_prefers_no_size_and_what_was_observed_counts_a_byte():
    sizes = np.array([[30, 10, 30, 10, 30, 10, 20, 20]], dtype=np.int64)
    guess = np.full((1, 8), 1 / 8)
    assert boot_set_of_bytes(guess, sizes, 80, 1, guess) == [(0, 0), (0, 1), (0, 2), (0, 3)], "in their order"
    observed = np.array([[0, 0, 0, 0, 0.3, 0.12, 0, 0]])
    assert boot_set_of_bytes(guess / 2 + observed, sizes, 70, 1, guess / 2) == [(0, 0), (0, 4), (0, 5)], (
        "both seen first"
    )
    dear = np.array([[0, 0, 0, 0, 0.4, 0.12, 0.16, 0.18]])  # 0.013, 0.012, 0.008, 0.009 a byte
    assert boot_set_of_bytes(guess / 2 + dear, sizes, 40, 1, guess / 2) == [(0, 4), (0, 5)]


def test_sizes_that_do_not_fit_are_refused():
    scores, sizes = np.full((2, 4), 0.25), np.full((2, 4), 10, dtype=np.int64)
    with pytest.raises(ValueError, match="39 bytes are too few for 2 experts in each of 2 layers"):
        boot_set_of_bytes(scores, sizes, 39, 2)
    with pytest.raises(ValueError, match="record sizes"):
        boot_set_of_bytes(scores, sizes[:1], 100, 2)


def test_equal_sizes_are_planned_as_if_none_were_given():
    rng = np.random.default_rng(5)
    scores, before = per_layer(rng.gamma(0.5, size=(6, 32))), per_layer(rng.gamma(0.5, size=(6, 32)))
    residents = boot_set(before, 90, 4)
    sizes = np.full((6, 32), 7, dtype=np.int64)
    assert swap_plan(scores, residents, 4, 1000, 0.0, sizes) == swap_plan(scores, residents, 4, 1000, 0.0)
