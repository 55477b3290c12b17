"""Policies side by side: each does what it is named for, ours misses less, and none gains where nothing can be had."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tided.sim import study
from tided.sim.compare import BOUND, OURS, POLICIES, RIVALS, compare, outcome
from tided.sim.machine import Machine
from tided.sim.policies import DEMANDED, Demanded
from tided.sim.trace import load, shuffled
from tided.sim.traffic import SWITCHING, Mix, traffic
from tided.tide.demand import RouterShape

SHAPE = RouterShape(1, 8, 2)
RECORDED = Path(__file__).parents[2] / "bench/data/mini-routing.safetensors"


def victim(name, *steps, newcomer=7, slots=4):
    """Which of the experts 0 to 3, the first residents, makes room for the newcomer after these picks."""
    base = np.zeros((1, 8))
    base[0, :4] = 1e-9
    policy = Demanded(SHAPE, slots, base, DEMANDED[name])
    for step in (*steps, (newcomer,)):
        policy.observe(np.array([step], dtype=np.int64), np.full((1, len(step)), 0.5), None)
    moves = policy.moves(1)
    assert moves.load == [(0, newcomer)]
    return moves.withdraw[0][1]


def test_lru_throws_out_what_was_used_longest_ago():
    assert victim("LRU", (2, 3), (0, 1), (1, 2), (3,), (0,)) == 1


def test_lfu_throws_out_what_was_used_least_often():
    assert victim("LFU", *[(0, 1)] * 3, *[(2, 3)] * 2, (2, 0)) == 3


def test_lfru_keeps_the_recent_half_and_throws_out_the_least_used_of_the_others():
    assert victim("LFRU", *[(2, 3)] * 3, (1,), (0,), (1,), (0,), (3,)) == 1


def test_age_over_uses_forgives_age_to_what_was_used_often():
    assert victim("age/(1+uses)", *[(0,)] * 9, (1,), (2, 3), (2, 3)) == 1


def test_what_the_last_step_used_is_never_thrown_out():
    for name in DEMANDED:
        base = np.zeros((1, 8))
        base[0, :4] = 1e-9
        policy = Demanded(SHAPE, 4, base, DEMANDED[name])
        policy.observe(np.array([[0, 1, 7]]), np.full((1, 3), 0.3), None)
        assert policy.moves(1).withdraw[0][1] in (2, 3)


def test_the_heaviest_miss_is_read_first():
    policy = Demanded(SHAPE, 4, np.eye(1, 8) + 1e-9, DEMANDED["LRU"])
    policy.observe(np.array([[5, 6, 7]]), np.array([[0.2, 0.5, 0.3]]), None)
    assert policy.moves(2).load == [(0, 6), (0, 7)]


@pytest.mark.parametrize(
    ("mix", "share"),
    [(Mix("mixed", 12, 1), 0.25), (Mix("mixed", 12, 1), 0.65), (Mix("switching", 12, 4), 0.4)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_at_no_more_bytes_ours_misses_less_than_every_rival(mix, share):
    table = compare(mix.name, [(5, traffic(mix, 3, 5, seed=5))], share, Machine())
    assert table.beaten == list(RIVALS)
    assert table.row(BOUND).missed < table.row(OURS).missed
    assert table.regret_of_lfu < 0.55
    assert table.row(OURS).covered + table.row(OURS).missed == pytest.approx(1)


def test_where_lru_is_at_its_best_ours_reads_less_and_misses_less():
    """Long on one topic, most of the model in memory: the margin is smallest, so the whole trace is served."""
    trace = traffic(SWITCHING, seed=0)
    ours, lru = (outcome(policy, trace, 0.65, Machine(), 0) for policy in (OURS, "LRU"))
    assert ours.bytes_read < lru.bytes_read
    assert ours.missed_share < lru.missed_share


@pytest.mark.parametrize("share", [0.4, 0.65])
def test_it_does_on_what_the_mini_really_asked_for(share):
    table = compare("recorded", [(0, load(RECORDED))], share, Machine())
    assert table.beaten == list(RIVALS)
    assert table.regret_of_lfu < 0.5


def test_in_the_shuffled_control_nobody_gains():
    trace = shuffled(traffic(Mix("mixed", 8, 1), 4, 5, seed=5), 1)
    missed = {policy: outcome(policy, trace, 0.4, Machine(), 0).missed_share for policy in (*RIVALS, OURS)}
    assert list(missed.values()) == pytest.approx([0.6] * len(missed), abs=0.01)


def test_a_rival_that_reads_less_or_misses_less_on_one_seed_is_not_beaten():
    trace = traffic(Mix("brief", 3, 1, (20, 30), (20, 30)), 1, 3, seed=0)
    table = compare("brief", [(0, trace), (1, trace)], 0.4, Machine())
    rows = {row.policy: row for row in table.rows}
    assert set(rows) == set(POLICIES)
    ours, lru = rows[OURS], rows["LRU"]

    def beats(**of_lru):
        changed = replace(lru, **({"missed_of_seed": [1.0, 1.0], "bytes_per_token": 1e12} | of_lru))
        return "LRU" in replace(table, rows=[ours, changed, *(rows[n] for n in RIVALS if n != "LRU")]).beaten

    assert beats()
    assert not beats(missed_of_seed=[1.0, 0.0])
    assert not beats(bytes_per_token=0.0)


def test_a_policy_or_traffic_that_is_none_is_named():
    with pytest.raises(ValueError, match="'MRU'"):
        outcome("MRU", traffic(Mix("brief", 2, 1, (20, 30), (20, 30)), 1, 3, seed=0), 0.4, Machine(), 0)
    with pytest.raises(ValueError, match="'calm'"):
        study.synthetic(["calm"], [0.4], [0], 1, False, Machine(), lambda words: None)
