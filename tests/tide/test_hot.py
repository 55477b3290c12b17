"""Hot reads as a function: what is read, what it overwrites, and what never happens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tided.tide.demand import RouterShape
from tided.tide.hot import HotReads

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


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4))
def test_any_traffic_keeps_ring_floor_and_count(seed, ring_slots, reads):
    rng, policy = np.random.default_rng(seed), hot(ring_slots=ring_slots)
    residents = {(layer, expert) for layer in range(SHAPE.layers) for expert in range(6)}
    ring, loading = set(), []
    for _ in range(60):
        weights = rng.dirichlet(np.full(PAIRS, 0.05))
        policy.observe(np.flatnonzero(weights > 0.01), weights[weights > 0.01], 1)
        moves = policy.moves(reads)
        for out, in_ in moves.promote:
            assert out in residents
            assert in_ in ring
            residents, ring = residents - {out} | {in_}, ring - {in_} | {out}
        for pair in moves.withdraw:
            assert pair in ring
            ring.remove(pair)
        assert not set(moves.load) & (residents | ring | set(loading))
        loading += moves.load
        assert len(moves.load) <= reads
        assert len(ring) + len(loading) <= ring_slots
        assert len(residents) == 18
        assert min(sum(layer == at for at, _ in residents) for layer in range(SHAPE.layers)) >= 2
        for _ in range(int(rng.integers(0, len(loading) + 1))):
            pair = loading.pop(int(rng.integers(len(loading))))
            if rng.random() < 0.8:
                policy.published(pair)
                ring.add(pair)
            else:
                policy.failed(pair)
        assert policy.ring == sorted(ring)
        assert policy.loading == sorted(loading)


def test_weights_that_no_router_gives_are_refused():
    with pytest.raises(ValueError, match="finite"):
        hot().observe([1], [float("nan")], 1)
