"""Hot reads as a function: what is read, what it overwrites, and what never happens."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tided.errors import PairError
from tided.tide.demand import RouterShape
from tided.tide.hot import HotReads
from tided.tide.kin import REQUESTS

SHAPE = RouterShape(layers=3, experts=16, top_k=2)
PAIRS = SHAPE.layers * SHAPE.experts
EVEN = np.ones((SHAPE.layers, SHAPE.experts))


def hot(resident_experts=range(6), ring_slots=4, floor=2):
    residents = [(layer, expert) for layer in range(SHAPE.layers) for expert in resident_experts]
    return HotReads(SHAPE, residents, ring_slots, floor, EVEN)


def see(policy, *pairs, weight=0.5, tokens=1):
    policy.observe([layer * SHAPE.experts + expert for layer, expert in pairs], [weight] * len(pairs), tokens)


def land(policy, moves):
    for pair in moves.load:
        policy.published(pair)


def test_the_heaviest_misses_are_read_first_and_no_more_than_the_step_is_worth():
    policy = hot()
    policy.observe([10, 11, 12, 26], [0.1, 0.3, 0.2, 0.4], 1)
    assert policy.moves(3).load == [(1, 10), (0, 11), (0, 12)]
    assert policy.moves(0).load == []


def test_an_entry_used_in_the_last_step_survives_and_goes_when_it_is_not():
    policy, served = hot(), [(layer, expert) for layer in range(SHAPE.layers) for expert in range(6)]
    see(policy, (0, 10), (1, 10), (2, 10), (2, 11))
    land(policy, policy.moves(4))
    full = set(policy.ring)
    assert len(full) == policy.ring_slots
    for _ in range(100):  # residents are in use, the ring is forgotten
        see(policy, *served, (2, 14), (2, 15))
    see(policy, *full, *served, weight=0.001)
    assert policy.moves(2).load == []
    see(policy, *served, weight=0.001)
    moves = policy.moves(2)
    assert set(moves.load) == {(2, 14), (2, 15)}
    assert set(moves.withdraw) < full


def test_a_resident_that_is_needed_less_than_the_ring_changes_roles_with_an_entry_and_is_overwritten():
    policy = hot(ring_slots=2)
    for _ in range(40):
        see(policy, (0, 10), (0, 11), (0, 12), (1, 1), (2, 1))
        land(policy, policy.moves(2))
    assert {(0, 10), (0, 11), (0, 12)} <= {*policy.residents, *policy.ring}
    assert len(policy.residents) == 18
    see(policy, (1, 1))
    for _ in range(40):
        see(policy, (0, 10), (0, 11), (0, 12), (0, 13))
    moves = policy.moves(1)
    ((out, entry),) = moves.promote
    assert moves.load == [(0, 13)]
    assert moves.withdraw == [out]
    assert entry[0] == 0
    assert entry in policy.residents


def test_a_plan_leaves_alone_what_is_in_the_ring_or_on_its_way():
    policy = hot(ring_slots=1)
    for _ in range(30):
        see(policy, (0, 10), (1, 11), (1, 12), (2, 13))
    first = policy.plan(1)
    for swap in first:
        policy.swap_begun(*swap)
    policy.published(policy.moves(1).load[0])
    second = policy.plan(10)
    assert {in_ for _, in_ in first + second}.isdisjoint(policy.ring)
    assert {pair for swap in first for pair in swap}.isdisjoint(pair for swap in second for pair in swap)
    assert {in_ for _, in_ in first + second} | set(policy.ring) == {(0, 10), (1, 11), (1, 12), (2, 13)}


def test_a_plan_hears_of_pairs_that_have_just_come():
    policy = hot()
    for _ in range(30):
        see(policy, (0, 10), (1, 11))
    leaves = {out for out, _ in policy.plan(10)}
    assert leaves
    kept = next(iter(leaves))

    def steadied(scores):
        scores = scores.copy()
        scores[kept] = 1.0
        return scores

    assert kept not in {out for out, _ in policy.plan(10, steadied)}


def test_at_rest_the_set_goes_where_it_is_told_and_not_where_the_newest_tokens_were():
    policy = hot()
    for _ in range(60):
        see(policy, (0, 10), (1, 10), (2, 10))
        land(policy, policy.moves(3))
    wanted = EVEN / 1000
    wanted[:, 12] = 0.5
    assert {in_ for _, in_ in policy.rest_plan(10, wanted)} == {(0, 12), (1, 12), (2, 12)}
    assert policy.rest_plan(10, EVEN / SHAPE.experts) == []


def test_a_swap_that_moves_have_overtaken_is_refused():
    policy = hot(ring_slots=1)
    for _ in range(30):
        see(policy, (0, 10), (1, 11))
    swaps = policy.plan(10)
    taken = policy.moves(1).load[0]
    stale = next(swap for swap in swaps if swap[1] == taken)
    with pytest.raises(ValueError, match="out of date"):
        policy.swap_begun(*stale)


def test_a_topic_that_comes_back_is_known_from_its_prompt_on():
    policy = hot()
    grids = [np.zeros((SHAPE.layers, SHAPE.experts)) for _ in range(2)]
    grids[0][:, 8:11], grids[1][:, 12:15] = 1.0, 1.0
    for grid in grids:
        policy.request_done(grid, lane=0)
    part = np.zeros_like(grids[0])
    part[:, 12] = 1.0  # one expert of the second topic
    policy.prompt_done(part, lane=0)
    scores = policy.scores()
    assert scores[:, 12:15].min() > 2 * scores[:, 8:11].max()


def test_requests_without_picks_neither_wipe_the_memory_nor_change_what_is_expected():
    """Cancelled before the first chunk, or a whole prompt from the cache and one token."""
    policy, topic, nothing = hot(), np.zeros((SHAPE.layers, SHAPE.experts)), np.zeros((SHAPE.layers, SHAPE.experts))
    topic[:, 8:11] = 1.0
    policy.request_done(topic, lane=0)
    policy.prompt_done(topic, lane=1)
    before, expected = policy.kin.like(topic), policy.scores().copy()
    for _ in range(REQUESTS):
        policy.prompt_done(nothing, lane=0)
        np.testing.assert_array_equal(policy.scores(), expected)
        policy.request_done(nothing, lane=0)
    np.testing.assert_array_equal(policy.kin.like(topic), before)
    assert before[:, 8:11].sum() == pytest.approx(SHAPE.layers, rel=0.01)


class Book:
    """What the engine would hold, kept apart from the policy: every change is checked against it."""

    def __init__(self, policy, floor):
        self.policy, self.floor = policy, floor
        self.residents, self.ring, self.loading, self.swaps = set(policy.residents), set(), [], []

    def apply(self, moves):
        leaving = {out for out, _ in self.swaps}
        for out, in_ in moves.promote:
            assert out in self.residents - leaving
            assert in_ in self.ring
            self.residents, self.ring = self.residents - {out} | {in_}, self.ring - {in_} | {out}
        for pair in moves.withdraw:
            assert pair in self.ring
            self.ring.remove(pair)
        assert not set(moves.load) & (self.residents | self.ring | set(self.loading) | {in_ for _, in_ in self.swaps})
        self.loading += moves.load

    def begin(self, swaps):
        """As `Motion` does: what would leave a layer too few, were other swaps given up, is left out."""
        for swap in swaps:
            with suppress(ValueError):
                self.policy.swap_begun(*swap)
                self.swaps.append(swap)

    def end(self, rng):
        """Some of what is being read lands, or fails."""
        for _ in range(int(rng.integers(0, len(self.loading) + 1))):
            pair = self.loading.pop(int(rng.integers(len(self.loading))))
            if rng.random() < 0.8:
                self.policy.published(pair)
                self.ring.add(pair)
            else:
                self.policy.failed(pair)
        if self.swaps and rng.random() < 0.5:
            out, in_ = self.swaps.pop(int(rng.integers(len(self.swaps))))
            if rng.random() < 0.8:
                self.policy.swapped(out, in_)
                self.residents = self.residents - {out} | {in_}
            else:
                self.policy.swap_dropped(out, in_)

    def check(self, count):
        assert self.policy.residents == sorted(self.residents)
        assert self.policy.ring == sorted(self.ring)
        assert self.policy.loading == sorted(self.loading)
        self.policy.check(self.residents, self.ring)
        assert len(self.residents) == count
        assert len(self.ring) + len(self.loading) <= self.policy.ring_slots
        for layer in range(SHAPE.layers):
            assert sum(layer == at for at, _ in self.residents) >= self.floor


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4), st.sampled_from([2, 5, 6]))
def test_any_traffic_keeps_ring_floor_and_count_beside_plans(seed, ring_slots, reads, floor):
    rng, policy = np.random.default_rng(seed), hot(ring_slots=ring_slots, floor=floor)
    book = Book(policy, floor)
    for step in range(90):
        if step % 30 == 0:  # another topic
            popular = rng.dirichlet(np.full(PAIRS, 0.3))
        pairs = rng.choice(PAIRS, 6, p=popular)
        policy.observe(pairs, np.full(6, 0.5), 8)
        moves = policy.moves(reads)
        assert len(moves.load) <= reads
        book.apply(moves)
        if rng.random() < 0.2:
            book.begin(policy.plan(2) or policy.rest_plan(2, rng.dirichlet(np.full(SHAPE.experts, 0.1), SHAPE.layers)))
        book.end(rng)
        book.check(18)


DAMAGES = {
    "a resident that the rank lacks": (lambda policy: policy._promote(0, 9), "for residents"),
    "an entry that the rank lacks": (lambda policy: policy._ring.add(11), "for entries of the ring"),
    "what is read twice": (lambda policy: policy._arriving.add(10), "in two books"),
    "a swap that nobody counts": (lambda policy: (policy._leaving.add(1), policy._arriving.add(12)), "that stay"),
    "one too many that stays": (lambda policy: policy._sure.__setitem__(0, 7), "that stay"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_check_can_fail(damage):
    policy = hot()
    see(policy, (0, 9), (0, 10))
    assert policy.moves(2).load == [(0, 9), (0, 10)]
    policy.published((0, 9))
    policy.check(policy.residents, policy.ring)
    residents, ring = policy.residents, policy.ring
    spoil, message = DAMAGES[damage]
    spoil(policy)
    with pytest.raises(PairError, match=message):
        policy.check(residents, ring)


def test_a_swap_that_was_given_up_leaves_its_layer_as_many_that_stay():
    policy = hot(floor=5)
    for _ in range(3):
        policy.swap_begun((0, 0), (1, 12))
        with pytest.raises(ValueError, match="out of date"):  # the floor of the layer
            policy.swap_begun((0, 1), (1, 13))
        policy.swap_dropped((0, 0), (1, 12))
        policy.check(policy.residents, policy.ring)


def test_weights_that_no_router_gives_are_refused():
    with pytest.raises(ValueError, match="finite"):
        hot().observe([1], [float("nan")], 1)
