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


def test_an_entry_used_in_the_last_step_survives():
    policy = hot()
    see(policy, (0, 10), (1, 10))
    land(policy, policy.moves(4))
    full = policy.ring
    assert len(full) == policy.ring_slots
    see(policy, *full, (2, 15), weight=0.01)
    see(policy, (2, 15), *full, weight=0.5)
    moves = policy.moves(1)
    assert moves.load == [(2, 15)]
    assert not set(moves.withdraw) & set(full)


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
