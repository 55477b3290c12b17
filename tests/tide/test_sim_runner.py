"""The simulated pair under faults: what is routable is whole on every rank, whatever the disks do."""

import numpy as np
import pytest

from tided.engine.core import REST_AFTER_S
from tided.engine.motion import Motion
from tided.errors import PairError
from tided.settings import Tide
from tided.sim import faults
from tided.sim.compare import OURS, PLANS, RIVALS, _made
from tided.sim.machine import Disk, Fault, Machine, Ranks
from tided.sim.ours import Engine
from tided.sim.policies import Static
from tided.sim.runner import QUIET_S, World, run
from tided.sim.traffic import Mix, traffic
from tided.tide.hot import Moves

BRIEF = Mix("brief", 4, 2, prompt=(40, 80), answer=(60, 90))
LAYERS, SHARE = 2, 0.4
FAST = Machine(pairs=15_360 // 8)  # more reads under way


@pytest.fixture(scope="module")
def trace():
    return traffic(BRIEF, LAYERS, 4, seed=3)


def slots_of(trace):
    return round(SHARE * trace.shape.layers * trace.shape.experts)


def served(trace, policy, scenario=faults.none, seed=0):
    ((made, residents),) = _made(policy, trace, slots_of(trace))
    return run(trace, made, residents, slots_of(trace), FAST, seed, scenario, check=True)


@pytest.mark.parametrize("scenario", faults.SCENARIOS)
@pytest.mark.parametrize("policy", [OURS, PLANS, "LRU"])
def test_under_every_fault_the_invariants_hold_and_every_token_is_served(trace, policy, scenario):
    outcome = served(trace, policy, faults.SCENARIOS[scenario])
    assert len(outcome.missed) == sum(span.answer for span in trace.requests)
    assert outcome.reads > 25
    assert (outcome.failed > 0) == (scenario == "failed reads")
    if policy == OURS:
        assert outcome.missed_share < 1.1 * served(trace, "static").missed_share


def reasons(trace, monkeypatch, machine, rest_s=0.0):
    """Of the plans that ours made which had something to exchange."""
    found, take_plan = set(), Motion.take_plan

    def noted(motion, swaps, reason):
        found.update([reason] if swaps else [])
        take_plan(motion, swaps, reason)

    monkeypatch.setattr(Motion, "take_plan", noted)
    ((made, residents),) = _made(OURS, trace, slots_of(trace))
    run(trace, made, residents, slots_of(trace), machine, 0, check=True, rest_s=rest_s)
    return found


def test_ours_plans_at_the_engines_moments(monkeypatch):
    trace = traffic(Mix("long", 3, 1, prompt=(500, 700), answer=(230, 260)), LAYERS, 4, seed=3)
    slow = reasons(trace, monkeypatch, Machine(bandwidth_bytes_s=1e9))
    assert {"chunk", "prompt", "decode"} <= slow <= {"chunk", "prompt", "decode", "urgent"}


def test_a_pause_is_a_rest_after_as_long_as_in_the_engine(trace, monkeypatch):
    assert QUIET_S == REST_AFTER_S
    assert "idle" not in reasons(trace, monkeypatch, FAST)
    assert "idle" not in reasons(trace, monkeypatch, FAST, rest_s=0.9)
    assert "idle" in reasons(trace, monkeypatch, FAST, rest_s=3.0)


def test_a_ring_that_looks_at_every_step_reads_more_and_misses_less(trace):
    every, fourth = (
        run(trace, one, one.residents, slots_of(trace), Machine(), 0)
        for one in (Engine(trace, slots_of(trace), settings=Tide(look_rows=rows)) for rows in (1, 4))
    )
    assert every.bytes_read > 1.1 * fourth.bytes_read
    assert every.missed_share < 0.98 * fourth.missed_share


def test_the_same_seed_gives_the_same_run_and_another_disk_another(trace):
    first, again, other = (served(trace, OURS, faults.reordered(0.1, 5), seed) for seed in (1, 1, 2))
    assert np.array_equal(first.missed, again.missed)
    assert first.bytes_read == again.bytes_read
    assert not np.array_equal(first.missed, other.missed)


def test_ours_still_gains_while_a_tenth_of_the_reads_fails(trace):
    assert served(trace, OURS, faults.failing(0.1, 1)).missed_share < 0.9 * served(trace, "static").missed_share


def test_a_read_that_one_rank_lacks_is_not_routable_and_the_check_sees_one_that_is(trace):
    ranks = Ranks(Machine(), 768, np.random.default_rng(0))
    world = World(trace, _Reads([(0, 5)]), [(layer, e) for layer in range(2) for e in range(10, 30)], 50, ranks)
    world.move(1, faults.stalled(1, 0, 10, 3.0))
    world.land(2.0)
    world.check()
    assert not world.routable[5]
    assert [len(whole) for whole in ranks.whole] == [1, 0]
    world.land(4.0)
    world.check()
    assert world.routable[5]
    ranks.whole[1].clear()
    with pytest.raises(PairError, match="not every rank"):
        world.check()


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        (Moves(load=[(0, 10)]), "there already"),
        (Moves(load=[(0, 1), (0, 1)]), "there already"),
        (Moves(withdraw=[(0, 1)]), "not routable"),
        (Moves(withdraw=[(0, 10 + at) for at in range(16)]), "the floor"),
        (Moves(load=[(1, at) for at in range(3)]), "the step is worth 2"),
    ],
)
def test_a_move_that_no_engine_could_make_is_refused(trace, moves, words):
    ranks = Ranks(Machine(), 768, np.random.default_rng(0))
    world = World(trace, _Says(moves), [(layer, e) for layer in range(2) for e in range(10, 30)], 42, ranks)
    with pytest.raises(PairError, match=words):
        world.move(2, faults.none)


def test_a_request_ends_behind_its_last_token_and_before_what_follows_is_read(trace):
    """As the ledger tells it: no plan is due behind a token that ends its answer, and the next change knows the end."""
    told, one = [], trace.requests[0]

    class Told(Static):
        def observe(self, picks, weights, chunks_left):
            told.append("prompt" if chunks_left is not None else "token")

        def token_done(self):
            told.append("goes on")

        def request_done(self):
            told.append("ends")

        def moves(self, reads):
            told.append("moves")
            return Moves()

    run(trace, Told(), [(layer, e) for layer in range(2) for e in range(10, 30)], 42, FAST, 0)
    answer = ["token", "goes on", "moves"] * (one.answer - 1) + ["token", "ends", "moves"]
    assert told[: 2 + len(answer)] == ["prompt", "moves", *answer]
    assert told.count("ends") == len(trace.requests)


def test_hot_reads_keep_the_floor_that_is_set(trace):
    assert Engine(trace, slots_of(trace), settings=Tide(floor_per_layer=20)).motion.hot.floor == 20


def test_more_loads_than_slots_are_refused(trace):
    ranks = Ranks(Machine(), 768, np.random.default_rng(0))
    residents = [(layer, e) for layer in range(2) for e in range(10, 30)]
    world = World(trace, _Reads([(0, 1), (0, 2)]), residents, 41, ranks)
    with pytest.raises(PairError, match="no slot"):
        world.move(2, faults.none)


def test_a_disk_shares_its_bandwidth_and_n_reads_take_n_times_as_long():
    machine = Machine(jitter=0.0)
    lengths = []
    for reads in (1, 4):
        disk = Disk(machine, machine.pairs, np.random.default_rng(0))
        for ticket in range(reads):
            disk.begin(ticket, Fault())
        at = next(ms for ms in range(1, 1000) if len(disk.advance(ms / 1000)) == reads)
        lengths.append(at)
    assert lengths[1] == pytest.approx(4 * lengths[0], rel=0.3)


def test_a_failed_read_on_one_rank_is_a_failed_read():
    ranks = Ranks(Machine(), 15_360, np.random.default_rng(0))
    ranks.read([Fault(), Fault(fails=True)])
    ranks.read([Fault(), Fault()])
    assert ranks.advance(1.0) == [(0, False), (1, True)]


def test_every_rival_keeps_the_rules_too(trace):
    for policy in RIVALS:
        assert served(trace, policy).missed_share <= served(trace, "static").missed_share


class _Reads(Static):
    def __init__(self, pairs):
        self._pairs = pairs

    def moves(self, reads):
        return Moves(load=self._pairs)

    def published(self, pair):
        return None


class _Says(_Reads):
    def __init__(self, moves):
        self._moves = moves

    def moves(self, reads):
        return self._moves
