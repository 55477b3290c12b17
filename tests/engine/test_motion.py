"""What rank 0 decides about the routable set: reads begin, land on every rank, are published; nothing waits."""

import numpy as np
import pytest
import torch
from engine_fakes import EXPERTS, LAYERS, PAIRS, SWAPS, TOP_K

from tided.control.messages import Load, Swap
from tided.engine import motion as motion_module
from tided.engine.motion import LEFT_ALONE_STEPS, MOST_DAMAGED, TRIES, Motion
from tided.errors import PairError
from tided.experts.tables import DemandTap, Together
from tided.tide.budget import Budget
from tided.tide.demand import RouterShape
from tided.tide.hot import HotReads

SHAPE = RouterShape(LAYERS, EXPERTS, TOP_K)
ABSENT = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS - 3, EXPERTS)]


def motion(ranks: int = 1, spare: int = 2, ring: int = 0, look_rows: int = 4) -> Motion:
    return Motion(HotReads(SHAPE, PAIRS, ring, TOP_K, np.ones((LAYERS, EXPERTS))), ranks, spare, look_rows)


def wants(motion: Motion, *pairs, tokens: int = 8) -> None:
    """Steps of one row each, all of whose weight is on these pairs."""
    weights, rows = np.zeros((LAYERS, EXPERTS)), np.zeros(LAYERS)
    for _ in range(tokens):
        for pair in pairs:
            weights[pair] += 1.0
        rows += 1
        if motion.stepped(1):
            motion.observe(weights, rows)
            weights[:] = rows[:] = 0.0


def loads(change) -> list:
    return [(load.pair, load.out) for load in change.load]


def land(motion: Motion, change, ranks: int = 1) -> None:
    for _ in range(ranks):
        motion.landed([load.ticket for load in change.load])


# Plans


def test_a_plan_is_read_in_portions_and_published_as_it_lands():
    m = motion()
    m.take_plan(SWAPS, "prompt")
    first, moved = m.change()
    assert first.load == [Load(1, SWAPS[0][1], SWAPS[0][0]), Load(2, SWAPS[1][1], SWAPS[1][0])]
    assert (first.publish, moved.swaps) == ([], [])
    assert not m.change()[0]  # nothing has landed: no step is made of it
    m.landed([2])
    second, moved = m.change()
    assert (second.publish, moved.swaps, loads(second)) == ([2], [SWAPS[1]], [SWAPS[2][::-1]])
    assert [plan.reason for plan in moved.plans] == ["prompt"]
    m.landed([1, 3])
    third, moved = m.change()
    assert (third.publish, moved.swaps, m.reading) == ([1, 3], [SWAPS[0], SWAPS[2]], 0)


def test_a_read_that_is_late_on_one_rank_only_is_routable_on_none():
    m = motion(ranks=3)
    m.take_plan(SWAPS[:1], "prompt")
    m.change()
    for _ in range(2):
        m.landed([1])
        assert not m.change()[0]
    m.landed([1])
    assert m.change()[0].publish == [1]


def test_a_newer_plan_replaces_what_is_not_read_yet_and_an_empty_one_does_not():
    m = motion(spare=1)
    m.take_plan(SWAPS, "prompt")
    begun, _ = m.change()
    m.take_plan([], "idle")
    land(m, begun)
    second, _ = m.change()
    assert loads(second) == [SWAPS[1][::-1]]
    m.take_plan([((0, 1), (0, 6))], "idle")
    land(m, second)
    third, _ = m.change()
    assert (third.publish, loads(third)) == ([2], [((0, 6), (0, 1))])
    land(m, third)
    assert m.change()[1].plans[0].reason == "idle"
    assert not m.change()[0]


def test_a_step_begins_a_few_swaps_however_many_spare_slots_there_are():
    experts = 64
    pairs = [(0, expert) for expert in range(32)]
    m = Motion(HotReads(RouterShape(1, experts, 2), pairs, 0, 2, np.ones((1, experts))), 1, 100)
    m.take_plan([((0, expert), (0, 32 + expert)) for expert in range(20)], "prompt")
    assert [len(m.change()[0].load) for _ in range(4)] == [8, 8, 4, 0]


def test_a_swap_that_moves_have_overtaken_is_left_out():
    m = motion(spare=4)
    m.take_plan([SWAPS[0], SWAPS[0], ((0, 0), (0, 6)), ((0, 1), (0, 7)), SWAPS[1]], "prompt")
    assert loads(m.change()[0]) == [SWAPS[0][::-1], SWAPS[1][::-1]]


# Reads that fail


@pytest.mark.parametrize("tells_last", ["landed", "failed"])
def test_what_one_rank_cannot_read_is_given_up_on_all_once_it_has_ended_on_all(tells_last):
    m = motion(ranks=2)
    m.take_plan(SWAPS[:2], "prompt")
    m.change()
    (m.landed if tells_last == "failed" else m.failed)([1])
    assert not m.change()[0]  # the other rank still writes to its slot
    getattr(m, tells_last)([1])
    m.landed([2])
    m.landed([2])
    change, moved = m.change()
    assert (change.give_up, change.publish, moved.swaps) == ([1], [2], [SWAPS[1]])
    assert (m.reading, m.count.failed) == (0, 1)
    assert SWAPS[0][0] in m.hot.residents  # what should have left stays
    assert SWAPS[0][1] not in m.hot.residents


def steps(m: Motion, count: int) -> None:
    for _ in range(count):
        m.stepped(0)
        m.change()


def asked(m: Motion, swap, fails: bool = True) -> int:
    """Plans the swap before every step until its read begins, and ends it; how many steps that took."""
    for waited in range(100_000):
        m.take_plan([swap], "test")
        change, _ = m.change()
        if change.load:
            (m.failed if fails else m.landed)([load.ticket for load in change.load])
            m.change()
            return waited
        m.stepped(0)
    raise AssertionError(f"{swap} is never read")


def test_a_record_that_failed_is_left_alone_for_a_while_each_time_for_longer():
    m = motion()
    assert [asked(m, SWAPS[0]) for _ in range(4)] == [0, *(LEFT_ALONE_STEPS * 8**times for times in range(3))]
    asked(m, SWAPS[0], fails=False)
    back = SWAPS[0][::-1]
    assert asked(m, back, fails=False) == 0
    assert [asked(m, SWAPS[0]), asked(m, SWAPS[0])] == [0, LEFT_ALONE_STEPS]  # what was read since counts anew


def test_a_hot_read_that_failed_frees_its_place_and_others_are_read():
    m = motion(ring=1)
    wants(m, (0, 7))
    change, _ = m.change()
    m.failed([load.ticket for load in change.load])
    assert m.change()[0].give_up == [1]
    wants(m, (0, 7), (2, 6))
    assert loads(m.change()[0]) == [((2, 6), None)]
    assert (m.hot.ring, m.count.issued, m.count.failed) == ([], 2, 1)


def test_a_ring_looks_for_a_record_again_and_plans_leave_it_out_until_then():
    m = motion(ring=2)
    wants(m, (0, 7), tokens=40)
    m.change()
    m.failed([1])
    m.change()
    assert (0, 7) not in [in_ for _, in_ in m.hot.plan(99)]
    m.hot.ask_again((0, 7))
    assert (0, 7) in [in_ for _, in_ in m.hot.plan(99)]
    m.hot.leave_alone((0, 7))
    steps(m, LEFT_ALONE_STEPS)
    wants(m, (0, 7), tokens=40)
    assert ((0, 7), None) in loads(m.change()[0])


def test_a_disk_that_is_gone_ends_the_pair(monkeypatch):
    m = motion()
    monkeypatch.setattr(motion_module, "MOST_FAILED", 5)
    for swap in SWAPS:
        asked(m, swap)
    asked(m, ((0, 1), (0, 6)), fails=False)  # one landed: the disk is there
    for swap in (*SWAPS, ((0, 2), (0, 5))):
        asked(m, swap)
    with pytest.raises(PairError, match="experts cannot be read: the last 5 that were tried failed"):
        asked(m, ((1, 2), (1, 5)))


def of_a_topic(bad: set, absent: list, count: int) -> Motion:
    """`count` steps of one topic, beside a ring: of what is not resident, `bad` cannot be read, and is wanted most."""
    shape, rng = RouterShape(10, 48, 4), np.random.default_rng(0)
    base = rng.dirichlet(np.full(48, 0.3), 10)
    for pair in bad:
        base[pair] += 0.05
    base /= base.sum(axis=1, keepdims=True)
    residents = sorted(set(np.ndindex(10, 48)) - set(absent))
    m = Motion(HotReads(shape, residents, 16, 4, base), 1, 8)
    for _ in range(count):
        weights = np.zeros((10, 48))
        for layer in range(10):
            weights[layer, rng.choice(48, 4, replace=False, p=base[layer])] = 0.25
        assert m.stepped(1)
        m.observe(weights, np.ones(10))
        change, _ = m.change()
        m.landed([load.ticket for load in change.load if load.pair not in bad])
        m.failed([load.ticket for load in change.load if load.pair in bad])
    return m


def scattered(count: int) -> list:
    chosen = np.random.default_rng(1).permutation(480)[:count]
    return [divmod(int(index), 48) for index in chosen]


def test_a_few_damaged_records_end_nothing_though_nothing_else_is_there_to_be_read():
    """All that is not resident is damaged, and this topic wants it: failures follow one another for ever."""
    absent = scattered(24)
    m = of_a_topic(set(absent), absent, 3_000)
    assert m.count.failed > motion_module.MOST_FAILED, "too few failures: this test shows nothing"


def test_a_disk_that_fails_wholly_ends_the_pair():
    absent = scattered(168)
    with pytest.raises(PairError, match="experts cannot be read: the last 64 that were tried failed"):
        of_a_topic(set(absent), absent, 3_000)


def test_a_disk_on_which_many_records_fail_again_and_again_ends_the_pair():
    experts, good = 256, [((0, 0), (0, 9)), ((0, 9), (0, 0))]
    m = Motion(HotReads(RouterShape(1, experts, 2), [(0, e) for e in range(8)], 0, 2, np.ones((1, experts))), 1, 2)
    bad = [((0, 7), (0, 20 + number)) for number in range(MOST_DAMAGED + 1)]
    for turn, swap in enumerate((TRIES * bad)[:-1]):
        m._clock += 10_000  # all may be asked for again
        asked(m, good[turn % 2], fails=False)
        asked(m, swap)
    m._clock += 10_000
    with pytest.raises(PairError, match=f"{MOST_DAMAGED + 1} of all each time"):
        asked(m, bad[-1])


# Hot reads


def test_what_is_missed_badly_is_read_and_joins_the_ring_when_every_rank_has_it():
    m = motion(ranks=2, ring=4)
    wants(m, (0, 7), (2, 6))
    change, _ = m.change()
    assert sorted(loads(change)) == [((0, 7), None), ((2, 6), None)]
    assert not m.change()[0]
    land(m, change)
    assert not m.change()[0]  # the other rank has not told
    land(m, change)
    published, moved = m.change()
    assert (sorted(published.publish), moved.swaps) == ([1, 2], [])
    assert (m.hot.ring, m.count.issued) == ([(0, 7), (2, 6)], 2)
    wants(m, (0, 7), tokens=4)
    assert (m.count.used, m.count.used_weight) == (1, 4.0)


def test_the_ring_looks_once_a_few_rows_have_come_together():
    m = motion(ring=4)
    assert [m.stepped(1) for _ in range(4)] == [False, False, False, True]
    m.observe(np.ones((LAYERS, EXPERTS)), np.full(LAYERS, 4))
    assert [m.stepped(3), m.stepped(3)] == [False, True]
    m.observe(np.ones((LAYERS, EXPERTS)), np.full(LAYERS, 6))
    assert m.stepped(256), "a prompt's chunk is looked at at once"


def test_how_many_rows_that_is_is_a_setting():
    assert motion(ring=4, look_rows=1).stepped(1)
    m = motion(ring=4, look_rows=6)
    assert [m.stepped(5), m.stepped(1)] == [False, True]


@pytest.mark.parametrize("together", [False, True], ids=["by_layer", "captured"])
def test_layers_that_compute_only_the_last_rows_of_a_chunk_are_expected_to_be_wanted_as_much(together):
    """Bounded replay: behind the last KV source a chunk of 2,048 rows is one of 128."""
    m, tap = motion(ring=4), DemandTap(1, LAYERS, EXPERTS, torch.device("cpu"))
    counts = [2048, *[128] * (LAYERS - 1)]
    for _ in range(4):
        tap.begin_step()
        for layers in [[0], range(1, LAYERS)]:
            rows = counts[layers[0]]
            wanted = torch.arange(TOP_K).expand(len(layers), rows, TOP_K)
            weights = torch.full(wanted.shape, 1.0 / TOP_K)
            lanes = torch.zeros(rows, dtype=torch.int64)
            parts = (wanted, weights, weights, torch.zeros_like(wanted, dtype=torch.bool))
            if together:
                tap.record_step(Together(torch.tensor(layers), lanes, *parts, None))
            for at, layer in enumerate([] if together else layers):
                tap.record(layer, lanes, *(part[at] for part in parts))
        assert m.stepped(2048)
        weights, rows = tap.take_wanted()
        assert rows.tolist() == counts
        m.observe(weights.numpy(), rows.numpy())
    np.testing.assert_allclose(m.hot.scores().sum(axis=1), np.ones(LAYERS), rtol=1e-3)
    np.testing.assert_allclose(m.hot.scores(), np.broadcast_to(m.hot.scores()[:1], (LAYERS, EXPERTS)), rtol=1e-3)


def test_the_weight_that_an_entry_served_is_of_the_rows_that_its_layer_computed():
    m = motion(ring=2)
    filled(m, (1, 7))
    weights, rows = np.zeros((LAYERS, EXPERTS)), np.full(LAYERS, 2048)
    weights[1, 7], rows[1] = 32.0, 128
    assert m.stepped(2048)
    m.observe(weights, rows)
    assert m.count.used_weight == 32.0


def test_without_a_ring_nothing_is_read_by_itself():
    m = motion()
    assert not any(m.stepped(9) for _ in range(9))
    assert not m.change()[0]


def filled(m: Motion, *pairs) -> None:
    wants(m, *pairs)
    change, _ = m.change()
    assert {load.pair for load in change.load} == set(pairs)
    land(m, change)
    m.change()


def test_entries_that_the_last_look_saw_used_survive():
    m = motion(ring=4)
    ring = [(0, 7), (2, 6), (1, 5), (1, 6)]
    filled(m, *ring[:2])
    filled(m, *ring[2:])
    left = []
    for _ in range(6):
        wants(m, *ring, (2, 7), tokens=4)
        change, _ = m.change()
        left += change.withdraw
        land(m, change)
    assert set(left).isdisjoint(ring)
    assert left  # somebody made room for (2, 7): a resident that nobody wants


def test_an_entry_that_is_wanted_for_long_becomes_resident_without_a_read():
    """R13: roles are exchanged; the entry is no entry any more, and the resident that left is gone."""
    m = motion(ring=1)
    filled(m, (0, 7))
    wants(m, (0, 7), (0, 6), tokens=40)
    change, moved = m.change()
    (swap,) = change.promote
    assert swap.in_ == (0, 7)
    assert moved.swaps == [(swap.out, (0, 7))]
    assert change.withdraw == [swap.out]
    assert loads(change) == [((0, 6), None)]
    assert m.count.promoted == 1
    assert (0, 7) in m.hot.residents
    assert m.hot.ring == []


def test_an_entry_that_takes_a_free_place_moves_only_once_in_a_step():
    """By the pilot it is worth most, by the newest tokens nothing: the ring would give it away at once. On the ranks it
    is an entry until the step's last change, and cannot be a resident that leaves before."""
    shape, last = RouterShape(1, 24, 2), np.zeros((1, 24))
    hot = HotReads(shape, [(0, expert) for expert in range(4)], 8, 2, np.full((1, 24), 1 / 24))
    m = Motion(hot, 1, 2, look_rows=1)
    last[0, 4:12] = 1.0
    for _ in range(8):
        m.stepped(1)
        m.observe(last, np.ones(1))
        change, _ = m.change()
        land(m, change)
    m.change()
    assert hot.ring == [(0, expert) for expert in range(4, 12)]
    scores = np.full((1, 24), 1 / 24)
    scores[0, 4] = 0.5
    m.resize(Budget((5,), ()), scores)
    assert m.change()[0].resize is not None
    last[:] = 0.02
    last[0, 4], last[0, 12:18] = 0.0, 1.0
    for _ in range(60):
        m.stepped(1)
        m.observe(last, np.ones(1))
    adopting, _ = m.change()
    assert adopting.adopt == [(0, 4)]
    assert adopting.promote == adopting.withdraw == []
    looking, _ = m.change()
    assert looking.promote or looking.withdraw, "the look is made a step later"
    assert (0, 4) in looking.withdraw


def test_a_pair_that_a_plan_is_reading_is_not_read_for_the_ring_as_well():
    m = motion(ring=2)
    m.hot.swap_begun((0, 0), (0, 7))
    wants(m, (0, 7), (1, 7))
    assert (0, 7) not in [pair for pair, _ in loads(m.change()[0])]


def test_reads_at_once_follow_what_the_disk_manages():
    m = motion(ring=64)
    pace = []
    for late in [False] * 4 + [True] * 6:
        m._clock += 1
        m._pace([m._clock - 9] if late else [])
        pace.append(m._at_once)
    assert pace == [8, 16, 32, 32, 16, 8, 4, 2, 1, 1]


def test_a_read_that_comes_after_more_than_two_steps_counts_as_late():
    m = motion(ring=2)
    wants(m, (0, 7))
    change, _ = m.change()
    for _ in range(4):
        wants(m, (0, 0), tokens=1)
        m.change()
    land(m, change)
    m.change()
    assert m.count.late == 1


@pytest.mark.parametrize("seed", range(5))
def test_any_traffic_leaves_books_that_agree(seed):
    """Every change is one that the ranks' books allow: what leaves is there, what comes is not."""
    random, m = np.random.default_rng(seed), motion(spare=3, ring=3)
    resident, ring, reading = set(PAIRS), set(), {}
    for _ in range(300):
        weights = random.random((LAYERS, EXPERTS)) ** 6
        if m.stepped(count := int(random.integers(1, 6))):
            m.observe(weights, np.full(LAYERS, count))
        if random.random() < 0.1:
            m.take_plan([(out, in_) for out, in_ in zip(sorted(resident), ABSENT, strict=False)], "test")
        told = [ticket for ticket in reading if random.random() < 0.4]
        bad = {ticket for ticket in told if random.random() < 0.2}
        m.landed([ticket for ticket in told if ticket not in bad])
        m.failed(sorted(bad))
        change, _ = m.change()
        assert set(change.publish) == set(told) - bad
        assert set(change.give_up) == bad
        for ticket in bad:
            del reading[ticket]
        for ticket in change.publish:
            load = reading.pop(ticket)
            if load.out is None:
                ring.add(load.pair)
            else:
                resident.remove(load.out)
                resident.add(load.pair)
        for swap in change.promote:
            assert isinstance(swap, Swap)
            ring.remove(swap.in_)
            resident.remove(swap.out)
            ring.add(swap.out)
            resident.add(swap.in_)
        for pair in change.withdraw:
            ring.remove(pair)
        for load in change.load:
            assert load.pair not in resident | ring | {other.pair for other in reading.values()}
            reading[load.ticket] = load
        swaps = [load for load in reading.values() if load.out]
        assert len(swaps) <= 3
        assert len(ring) + len(reading) - len(swaps) <= 3
        assert all(sum(layer == pair[0] for pair in resident) >= TOP_K for layer in range(LAYERS))
        assert resident == set(m.hot.residents)
        assert ring == set(m.hot.ring)
        m.hot.check(resident, ring)
