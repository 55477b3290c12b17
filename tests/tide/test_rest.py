"""The set that waits: what it does for topics that were not asked last."""

from itertools import combinations

import numpy as np
import pytest

from tided.tide.demand import per_layer
from tided.tide.planner import boot_set
from tided.tide.rest import HARM, Cases, Habit, _best, cases, rest_scores

LAYERS, EXPERTS, FLOOR, BUDGET = 4, 32, 2, 48


def topic(number: int) -> np.ndarray:
    """[layers, experts]: eight experts of its own in each layer, some more wanted than others, and a little of all."""
    wants = np.full((LAYERS, EXPERTS), 0.002)
    wants[:, 8 * number : 8 * number + 8] = 0.1 * 0.7 ** np.arange(8)
    return per_layer(wants)


def missed(scores: np.ndarray, wants: np.ndarray) -> float:
    return 1.0 - sum(float(wants[pair]) for pair in boot_set(scores, BUDGET, FLOOR)) / LAYERS


def after(requests: int, history: np.ndarray | None = None) -> Cases:
    """Four topics in a seed of 4 votes, and so many requests of the first."""
    asked, decay = [topic(0)] * requests, 0.93
    total = sum((decay**age * vote for age, vote in enumerate(asked)), np.zeros((LAYERS, EXPERTS)))
    return cases([topic(number) for number in range(4)], 4.0, asked, total if history is None else history, decay)


@pytest.mark.parametrize("requests", [3, 6, 12])
def test_topics_that_were_not_asked_for_a_while_find_more_than_a_mean_leaves_them(requests):
    likely = after(requests)
    mean, rest = np.tensordot(likely.weights, likely.wants, 1), rest_scores(likely, BUDGET, FLOOR)
    others = [topic(number) for number in range(1, 4)]
    assert sum(missed(rest, one) for one in others) < sum(missed(mean, one) for one in others) - 0.1
    assert missed(rest, topic(0)) < missed(mean, topic(0)) + 0.05, "what was asked last is served about as well"


def test_the_mean_is_what_a_harm_that_grows_evenly_would_give(monkeypatch):
    monkeypatch.setattr("tided.tide.rest.HARM", 1.0)
    likely = after(5)
    mean = per_layer(np.tensordot(likely.weights, likely.wants, 1))
    np.testing.assert_allclose(rest_scores(likely, BUDGET, FLOOR), mean)


def test_older_requests_count_by_what_the_history_has_left_of_them():
    old = 3.0 * topic(3)
    likely = after(2, history=old + topic(0) * (1 + 0.93))
    older = likely.wants[-2]
    np.testing.assert_allclose(older, topic(3))
    assert likely.weights[-2] == pytest.approx(3.0)
    assert likely.weights[-1] == pytest.approx(likely.weights[:-1].sum()), "what was asked last weighs as all together"


def test_nothing_known_is_the_seed_alone():
    likely = cases([topic(1)], 4.0, [], np.zeros((LAYERS, EXPERTS)), 0.93)
    np.testing.assert_allclose(rest_scores(likely, BUDGET, FLOOR), topic(1))


@pytest.mark.parametrize("budget", [8, 9, 48, 127, 128])
def test_the_sets_of_the_search_are_those_of_the_planner(budget):
    scores = np.random.default_rng(budget).gamma(0.3, size=(LAYERS, EXPERTS))
    found = np.argwhere(_best(scores.ravel(), LAYERS, budget, FLOOR).reshape(LAYERS, EXPERTS))
    assert [tuple(pair) for pair in found.tolist()] == boot_set(scores, budget, FLOOR)


def test_the_newest_request_counts_most_and_what_was_asked_last_is_mostly_it():
    asked = [topic(0), topic(0), topic(1)]
    likely = cases([topic(2)], 4.0, asked, np.zeros((LAYERS, EXPERTS)), 0.9)
    np.testing.assert_allclose(likely.wants[1], topic(1))
    np.testing.assert_allclose(likely.weights[1:4], [1.0, 0.9, 0.81])
    shares = 0.5 ** (np.arange(3) / 3.0)
    np.testing.assert_allclose(
        likely.wants[-1], (shares[0] * topic(1) + (shares[1] + shares[2]) * topic(0)) / shares.sum()
    )


def test_a_history_that_has_lost_more_than_the_last_requests_brought_is_nothing_older():
    likely = cases([topic(2)], 4.0, [topic(0)], 0.5 * topic(0), 0.9)
    assert likely.weights[-2] == 0.0
    assert not likely.wants[-2].any()


def test_the_search_comes_near_the_set_of_least_harm():
    """Against all sets of a small layer: five cases, four of ten experts."""
    found = best = mean = 0.0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        wants, weights = rng.dirichlet(np.full(10, 0.3), size=(5, 1)), rng.gamma(1.0, size=5)

        def harm(kept, wants=wants, weights=weights):
            return float(weights @ np.maximum(1.0 - wants[:, 0, list(kept)].sum(1), 0.0) ** HARM)

        scores = rest_scores(Cases(wants, weights), 4, 1)
        found += harm([expert for _, expert in boot_set(scores, 4, 1)])
        mean += harm([expert for _, expert in boot_set(np.tensordot(weights, wants, 1), 4, 1)])
        best += min(harm(kept) for kept in combinations(range(10), 4))
    assert found < 1.035 * best < mean


def habit_after(*asked: int, requests: int = 12) -> float:
    """Of requests of these topics, one after the other and again from the first, with a rest behind each."""
    habit, recent, decay = Habit(), [], 0.93
    for at in range(requests):
        vote = topic(asked[at % len(asked)])
        habit.came(vote)
        recent.append(vote)
        total = sum((decay**age * vote for age, vote in enumerate(reversed(recent))), np.zeros((LAYERS, EXPERTS)))
        likely = cases([topic(number) for number in range(4)], 4.0, recent, total, decay, habit.share)
        habit.await_next(likely, BUDGET, FLOOR)
    return habit.share


def test_who_stays_with_a_topic_is_expected_to_and_who_changes_it_each_time_is_not():
    assert Habit().share == 0.5
    assert habit_after(0) > 0.8
    assert habit_after(0, 1, 2, 3) < 0.2
    assert 0.4 < habit_after(0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3) < 0.8


def test_a_habit_that_ends_is_forgotten():
    habit, stays = Habit(), cases([topic(1)], 4.0, [topic(0)], topic(0), 0.93)
    shares = []
    for number in [0] * 20 + [1] * 20:
        habit.await_next(stays, BUDGET, FLOOR)
        habit.came(topic(number))
        shares.append(habit.share)
    assert shares[19] > 0.9
    assert shares[39] < 0.4


def test_however_long_it_lasts_a_change_stays_possible():
    habit, stays = Habit(), cases([topic(1)], 4.0, [topic(0)], topic(0), 0.93)
    for _ in range(1500):
        habit.await_next(stays, BUDGET, FLOOR)
        habit.came(topic(0))
    assert 0.95 < habit.share < 0.99
    scores = rest_scores(cases([topic(1)], 4.0, [topic(0)], topic(0), 0.93, habit.share), BUDGET, FLOOR)
    assert np.isfinite(scores).all()


def test_of_many_requests_behind_a_rest_the_first_is_asked():
    habit = Habit()
    habit.await_next(cases([topic(1)], 4.0, [topic(0)], topic(0), 0.93), BUDGET, FLOOR)
    habit.came(topic(0))
    after_one = habit.share
    habit.came(topic(1))
    assert habit.share == after_one > 0.5


def test_a_request_behind_no_rest_says_nothing_about_the_habit():
    habit = Habit()
    habit.came(topic(0))
    assert habit.share == 0.5


@pytest.mark.parametrize("budget", [24, 48])
def test_the_likelier_more_of_the_same_is_the_less_is_given_up_for_others(budget):
    asked = [topic(0)] * 4
    total = sum((0.93**age * vote for age, vote in enumerate(asked)), np.zeros((LAYERS, EXPERTS)))
    seeds = [topic(number) for number in range(4)]
    sets = [boot_set(rest_scores(cases(seeds, 4.0, asked, total, 0.93, more), budget, FLOOR), budget, FLOOR)
            for more in (0.2, 0.5, 0.9)]  # fmt: skip
    served = [sum(float(topic(0)[pair]) for pair in one) for one in sets]
    assert served[0] <= served[1] <= served[2]
    assert served[0] < served[2]
