"""The resident set: what is routable is what was read, all of a plan or nothing of it."""

import threading

import numpy as np
import pytest
import torch
from expert_fakes import (
    CPU,
    EXPERTS,
    LAYERS,
    RECORD,
    TOP_K,
    FakeSource,
    apply,
    begin,
    bytes_of,
    ended,
    expert_names,
    fake_residents,
    first,
    golden,
    golden_record,
    quiet,
    record_of,
    wait,
)

from tided.errors import DataError, PairError
from tided.experts import first_set, under_way
from tided.experts.arena import Arena
from tided.experts.io import Depths, IoScheduler, Ticket
from tided.experts.mask_hash import mask_hash
from tided.experts.residents import Residents
from tided.experts.source import CheckpointSource
from tided.experts.tables import RoutingTables

SWAPS = [((0, 0), (0, 5)), ((1, 1), (2, 5)), ((2, 0), (2, 6))]


def filled(spare: int = 4, source: FakeSource | None = None, read_threads: int = 1) -> Residents:
    """3 layers of 8 experts, top 2; the first 4 of each layer resident."""
    made = fake_residents(3, 8, 2, 12, spare, source or FakeSource(), read_threads)
    made.fill(first(3, 4), quiet)
    return made


def state(residents: Residents) -> tuple[object, ...]:
    tables = residents.tables
    return (
        residents.pairs, residents.generation, residents.mask_hash,
        tables.slot_of.clone().tolist(), tables.routable.clone().tolist(),
        [bytes_of(residents, pair) for pair in residents.pairs],
    )  # fmt: skip


def test_boot_fill_publishes_every_record_and_says_how_far_it_is():
    residents = fake_residents(3, 8, 2, 12, 1, FakeSource(), read_threads=3)
    told = []
    residents.fill(first(3, 4), lambda done, total: told.append((done, total)))
    assert told == [(n, 12) for n in range(1, 13)]
    assert residents.pairs == first(3, 4)
    for pair in residents.pairs:
        assert bytes_of(residents, pair) == record_of(*pair)
    residents.check_integrity()


def test_a_budget_that_the_arena_cannot_have_evicts_nobody():
    """One place more than there are addresses for, and somebody who would make room."""
    arena, io = Arena(RECORD, 12, 4, CPU, most=12), IoScheduler(FakeSource(), Depths(1, 1))
    residents = Residents(arena, RoutingTables(3, 8, CPU), io, 3, 8, 2)
    residents.fill(first(3, 4), quiet)
    before = state(residents)
    with pytest.raises(PairError, match="at most"):
        residents.resize([13], [(0, 3)])
    assert state(residents) == before
    residents.check_integrity()


def test_a_checkpoints_experts_lie_in_their_slots_on_both_ranks():
    pairs = first(LAYERS, 4)
    digests = set()
    for rank in range(2):
        record = golden_record(2)
        source = CheckpointSource(golden(), expert_names, record, rank)
        tables = RoutingTables(LAYERS, EXPERTS, CPU)
        io = IoScheduler(source, Depths(2, 1))
        residents = Residents(Arena(record, 40, 2, CPU), tables, io, LAYERS, EXPERTS, TOP_K)
        residents.fill(pairs, quiet)
        apply(residents, [((9, 0), (9, 7)), ((0, 3), (5, 4))])
        residents.check_integrity()
        for pair in residents.pairs:
            expected = bytearray(record.slot_bytes)
            source.read(*pair, memoryview(expected))
            assert bytes_of(residents, pair) == expected
        digests.add(residents.digest())
    assert len(digests) == 1


def test_promoted_experts_contribute_and_removed_ones_do_not():
    residents = filled()
    apply(residents, SWAPS)
    for out, in_ in SWAPS:
        assert bytes_of(residents, in_) == record_of(*in_)
        assert bool(residents.tables.routable[in_])
        assert int(residents.tables.slot_of[out]) == -1
        assert not bool(residents.tables.routable[out])
    residents.check_integrity()
    assert residents.generation == 1
    assert residents.arena.free == 4


def test_tables_are_changed_in_place_so_captured_graphs_see_the_new_set():
    residents = filled()
    tables, data = residents.tables, residents.arena.data
    addresses = (tables.slot_of.data_ptr(), tables.routable.data_ptr(), data.data_ptr())
    apply(residents, SWAPS)
    assert (tables.slot_of.data_ptr(), tables.routable.data_ptr(), residents.arena.data.data_ptr()) == addresses


def test_a_landing_newcomer_never_overwrites_a_slot_that_is_still_routable():
    """Every read of a plan goes to a slot that no resident has: until publication the old set can be computed with."""
    source = FakeSource()
    residents = filled(source=source)
    before, source.holds = state(residents), threading.Event()
    numbers = begin(residents, SWAPS)
    assert residents.landed() == []
    assert state(residents) == before
    source.holds.set()
    wait(residents, numbers)
    assert state(residents) == before  # landed, and not told of yet: nothing of it can be seen
    residents.publish(numbers)
    assert state(residents) != before


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("read_threads", [1, 3])
def test_a_failed_read_of_a_plan_is_told_and_given_up_and_nothing_of_it_was_ever_routable(k, read_threads, caplog):
    source = FakeSource()
    residents = filled(source=source, read_threads=read_threads)
    before, free = state(residents), residents.arena.free
    source.fails_at = source.reads + k
    numbers = begin(residents, SWAPS)
    failed, landed = ended(residents, numbers)
    assert (len(failed), sorted([*failed, *landed])) == (1, numbers)
    assert "Input/output error" in caplog.text
    assert residents.failed() == []  # told once
    assert state(residents) == before
    with pytest.raises(PairError, match="before this rank had it"):
        residents.publish(failed)
    residents.give_up(failed)
    residents.publish(landed)
    residents.check_integrity()
    assert residents.arena.free == free
    apply(residents, [swap for swap, number in zip(SWAPS, numbers, strict=True) if number in failed])
    assert {in_ for _, in_ in SWAPS} <= set(residents.pairs)
    residents.check_integrity()


def test_a_read_that_has_not_ended_here_cannot_be_given_up():
    source = FakeSource()
    residents = filled(source=source)
    source.holds = threading.Event()
    numbers = begin(residents, SWAPS[:1])
    with pytest.raises(PairError, match="before it had ended on this rank"):
        residents.give_up(numbers)
    source.holds.set()
    wait(residents, numbers)
    residents.give_up(numbers)  # another rank has not got it
    residents.check_integrity()
    assert residents.reading == 0


def test_a_read_is_told_as_failed_only_when_nothing_of_it_writes_any_more():
    """Its thread notes the error first, and is done a moment later. Rank 0 may answer at once with `give_up`."""
    source = FakeSource()
    residents = filled(source=source)
    source.fails_at, source.holds = source.reads + 1, threading.Event()
    number, may_end, told = *begin(residents, SWAPS[:1]), threading.Event(), threading.Event()
    ticket = residents._reading[number].ticket

    class Late(Ticket):
        __slots__ = ()

        @property
        def done(self):
            return Ticket.done.__get__(self)

        @done.setter
        def done(self, value):
            told.set()
            assert may_end.wait(30)
            Ticket.done.__set__(self, value)

    ticket.__class__ = Late
    source.holds.set()
    assert told.wait(30)
    assert ticket.error is not None
    assert (residents.failed(), residents.landed()) == ([], [])
    may_end.set()
    with pytest.raises(DataError):
        ticket.wait(30)
    assert residents.failed() == [number]
    residents.give_up([number])
    residents.check_integrity()


def test_what_goes_wrong_in_a_read_beside_its_record_ends_the_rank():
    source = FakeSource()
    residents = filled(source=source)
    before = state(residents)
    source.read = lambda layer, expert, out: out.release()  # a fault of ours, not of the disk
    residents.arena.load = lambda slot, read: (_ for _ in ()).throw(RuntimeError("out of pinned memory"))
    numbers = begin(residents, SWAPS[:1])
    with pytest.raises(RuntimeError, match="out of pinned memory"):
        ended(residents, numbers)
    assert state(residents) == before
    for use in (lambda: apply(residents, SWAPS), residents.digest, residents.check_integrity):
        with pytest.raises(PairError, match="unusable"):
            use()


def test_a_failed_boot_read_publishes_nothing():
    residents = fake_residents(3, 8, 2, 12, 1, FakeSource(fails_at=7))
    with pytest.raises(DataError):
        residents.fill(first(3, 4), quiet)
    assert not residents.pairs
    assert not residents.tables.routable.any()


def test_a_disk_that_never_answers_is_an_error_not_a_hang(monkeypatch):
    monkeypatch.setattr(under_way, "HUNG_S", 0.05)
    source = FakeSource()
    residents = filled(source=source)
    before, source.holds = state(residents), threading.Event()
    try:
        numbers = begin(residents, SWAPS[:1])
        with pytest.raises(PairError, match=r"read of \(0, 5\) hangs"):
            wait(residents, numbers)
        assert state(residents) == before
    finally:
        source.holds.set()


def test_a_first_set_from_a_disk_that_never_answers_is_an_error(monkeypatch):
    monkeypatch.setattr(first_set, "READ_TIMEOUT_S", 0.05)
    holds = threading.Event()
    residents = fake_residents(3, 8, 2, 12, 1, FakeSource(holds=holds))
    try:
        with pytest.raises(PairError, match="was not read within"):
            residents.fill(first(3, 4), quiet)
    finally:
        holds.set()


WRONG_PLANS = {
    "removes an absent expert": ([((0, 5), (0, 6))], "not resident"),
    "loads a resident expert": ([((0, 0), (0, 1))], "is here"),
    "removes one twice": ([((0, 0), (0, 5)), ((0, 0), (0, 6))], "twice"),
    "loads one twice": ([((0, 0), (0, 5)), ((0, 1), (0, 5))], "being read already"),
    "goes in a circle": ([((0, 0), (0, 5)), ((0, 5), (0, 0))], "is here"),
    "unknown layer": ([((0, 0), (3, 0))], "no expert"),
    "unknown expert": ([((0, 0), (0, 8))], "no expert"),
    "negative": ([((0, 0), (-1, 5))], "no expert"),
    "breaks the floor": ([((0, e), (1, 4 + e)) for e in range(3)], "layer 0 would keep 1"),
    "more than can land": ([((0, e), (0, 4 + e)) for e in range(4)] + [((1, 0), (1, 4))], "more than 4 swaps"),
}


@pytest.mark.parametrize(("swaps", "message"), WRONG_PLANS.values(), ids=WRONG_PLANS.keys())
def test_a_wrong_plan_is_refused_and_nothing_of_it_is_routable(swaps, message):
    residents = filled()
    before = state(residents)
    with pytest.raises(PairError, match=message):
        apply(residents, [((2, 0), (2, 7)), *swaps] if len(swaps) < 4 else swaps)
    assert state(residents) == before
    residents.check_integrity()


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (first(3, 5), "15 experts for 12 places"),  # more than was promised to the residents would take the spare slots
        ([*first(3, 3), (0, 0)], "given twice"),
        ([*first(3, 3), (3, 0)], "no expert"),
        (first(2, 4), "layer 2 would keep 0"),
    ],
)
def test_a_first_set_that_cannot_be_is_refused_before_anything_is_read(pairs, message):
    source = FakeSource()
    residents = fake_residents(3, 8, 2, 12, 4, source)
    with pytest.raises(PairError, match=message):
        residents.fill(pairs, quiet)
    assert source.reads == 0


def test_filling_twice_is_refused():
    residents = filled()
    with pytest.raises(PairError, match="first set"):
        residents.fill(first(3, 4), quiet)


def test_the_digest_names_the_ids_not_how_many_a_layer_has():
    one, other = filled(), filled()
    assert one.digest() == other.digest()
    apply(one, [((0, 0), (0, 5))])
    apply(other, [((0, 1), (0, 5))])
    assert one.digest() != other.digest()
    assert one.mask_hash != other.mask_hash


def test_the_same_set_has_the_same_digest_whatever_way_led_to_it():
    one, other = filled(), filled()
    apply(one, [((0, 0), (0, 5)), ((1, 0), (1, 5))])
    apply(other, [((1, 0), (0, 5))])
    apply(other, [((0, 0), (1, 6))])
    apply(other, [((1, 6), (1, 5))])
    assert one.pairs == other.pairs
    assert (one.digest(), one.mask_hash) == (other.digest(), other.mask_hash)
    assert one.mask_hash == mask_hash(reversed(one.pairs), 8)


def test_the_digest_sees_a_mask_that_changed_behind_the_directorys_back():
    residents = filled()
    before = residents.digest()
    residents.tables.withdraw(0, 0)
    assert residents.digest() != before
    with pytest.raises(PairError, match="routing table"):
        residents.check_integrity()


def test_integrity_sees_two_experts_in_one_slot_a_wrong_mask_and_a_written_null_slot():
    residents = filled()
    residents.tables.slot_of[0, 0] = residents.tables.slot_of[0, 1]
    with pytest.raises(PairError, match="routing table"):
        residents.check_integrity()
    residents = filled()
    residents.tables.routable[0, 7] = True
    with pytest.raises(PairError, match="mask"):
        residents.check_integrity()
    residents = filled()
    residents.arena.data[residents.arena.null, 5] = 1
    with pytest.raises(PairError, match="null"):
        residents.check_integrity()
    residents = filled()
    residents.mask_hash ^= 1
    with pytest.raises(PairError, match="hash"):
        residents.check_integrity()


DAMAGES = {
    "ring": "hot ring",
    "entries": "hot ring",
    "count": "count of a layer",
    "floor": "needs 5",
    "coming": "being read are wrong",
    "leaving": "being read are wrong",
    "swaps": "being read is wrong",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_integrity_sees_a_ring_entry_nobody_holds_wrong_counts_and_a_layer_below_its_floor(damage):
    residents = fake_residents(3, 8, 2, 12, 4, FakeSource(), ring=2)
    residents.fill(first(3, 4), quiet)
    numbers = begin(residents, [(None, (0, 6))])
    wait(residents, numbers)
    residents.publish(numbers)
    begin(residents, [((1, 0), (1, 6))], 2)
    residents.check_integrity()
    if damage == "ring":
        residents._roles.ring[0, 7] = residents._roles.ring.pop((0, 6))
    elif damage == "entries":
        residents._roles._in_ring[0] = 0
    elif damage == "count":
        residents._roles.by_layer[:2] = 5, 3
    elif damage == "floor":
        residents._roles._top_k = 5
    elif damage == "coming":
        residents._roles._coming.add((0, 7))
    elif damage == "leaving":
        residents._roles._leaving.clear()
    else:
        residents._roles._swaps[0] = 0
    with pytest.raises(PairError, match=DAMAGES[damage]):
        residents.check_integrity()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_records_reach_the_memory_of_the_gpu():
    device = torch.device("cuda")
    tables = RoutingTables(3, 8, device)
    residents = Residents(Arena(RECORD, 12, 4, device), tables, IoScheduler(FakeSource(), Depths(3, 1)), 3, 8, 2)
    residents.fill(first(3, 4), quiet)
    apply(residents, SWAPS)
    residents.check_integrity()
    for layer, expert in residents.pairs:
        slot = residents.arena.data[int(tables.slot_of[layer, expert])].cpu().numpy()
        assert np.array_equal(slot, np.frombuffer(record_of(layer, expert), np.uint8))


# The hot ring


def with_ring(ring: int = 2, source: FakeSource | None = None) -> Residents:
    made = fake_residents(3, 8, 2, 12, 4, source or FakeSource(), 2, ring)
    made.fill(first(3, 4), quiet)
    return made


def test_an_entry_of_the_ring_is_routable_beside_the_residents_until_it_leaves():
    residents = with_ring()
    apply(residents, [(None, (0, 5)), (None, (2, 7))])
    assert (residents.ring, residents.pairs, residents.count) == ([(0, 5), (2, 7)], first(3, 4), 12)
    assert bytes_of(residents, (0, 5)) == record_of(0, 5)
    assert residents.generation == 0
    residents.check_integrity()
    residents.withdraw([(0, 5)])
    assert residents.ring == [(2, 7)]
    assert not bool(residents.tables.routable[0, 5])
    residents.check_integrity()
    assert residents.mask_hash == mask_hash([*first(3, 4), (2, 7)], 8)


def test_promotion_exchanges_roles_and_reads_nothing():
    source = FakeSource()
    residents = with_ring(source=source)
    apply(residents, [(None, (0, 5))])
    slots, reads = dict(residents.arena.directory), source.reads
    residents.promote([((0, 0), (0, 5))])
    assert (residents.ring, (0, 5) in residents.pairs, (0, 0) in residents.pairs) == ([(0, 0)], True, False)
    assert (dict(residents.arena.directory), source.reads, residents.generation) == (slots, reads, 1)
    residents.check_integrity()


def test_r13_an_entry_whose_pair_became_resident_is_no_entry_and_keeps_one_slot():
    residents = with_ring()
    apply(residents, [(None, (0, 5))])
    with pytest.raises(PairError, match="is here"):  # nor could it be read a second time
        begin(residents, [((0, 0), (0, 5))], 2)
    residents.promote([((0, 0), (0, 5))])
    residents.withdraw([(0, 0)])
    with pytest.raises(PairError, match="not in it"):
        residents.withdraw([(0, 5)])
    assert residents.ring == []
    assert list(residents.arena.directory).count((0, 5)) == 1
    residents.check_integrity()


def test_the_ring_holds_no_more_than_its_slots_and_leaves_the_spare_ones_to_swaps():
    residents = with_ring(ring=2)
    begin(residents, [(None, (0, 5)), (None, (0, 6))])
    with pytest.raises(PairError, match="hot ring of 2 slots is full"):
        residents.read(3, (0, 7), None)
    begin(residents, [((1, e), (1, 4 + e)) for e in range(4)], 3)
    with pytest.raises(PairError, match="more than 4 swaps"):
        residents.read(7, (2, 7), (2, 0))


def test_r7_a_slot_that_is_freed_is_the_last_to_be_read_into():
    """Between the change that frees it and the next read into it, every other free slot comes first."""
    residents = with_ring()
    slot = residents.arena.slot_of((0, 0))
    apply(residents, [((0, 0), (0, 5))])
    taken = [residents.arena.take() for _ in range(residents.arena.free)]
    assert taken[-1] == slot


def test_r7_a_slot_that_is_freed_is_fenced_before_it_is_read_into(monkeypatch):
    """On a device, what was launched up to now may still read it: the next load waits for that (`Arena.fence`)."""
    residents = filled()
    fenced, arena = [], residents.arena
    left = arena.slot_of(SWAPS[0][0])
    monkeypatch.setattr(arena, "fence", fenced.append)
    apply(residents, SWAPS[:1])
    assert fenced == [left]


def test_r9_what_is_told_of_the_residents_is_what_the_tables_route_to():
    """No count of its own that could be half of the real one: after any change all three agree."""
    residents = fake_residents(3, 8, 2, 12, 4, FakeSource(), ring=2)
    residents.fill(first(3, 4), quiet)

    def agree():
        routable = residents.tables.routable.clone()
        for pair in residents.ring:
            assert bool(routable[pair])
            routable[pair] = False
        assert residents.by_layer == tuple(routable.sum(dim=1).tolist())
        assert residents.count == int(routable.sum()) == len(residents.pairs)
        return residents.count

    assert agree() == 12
    apply(residents, SWAPS)
    assert agree() == 12
    numbers = begin(residents, [(None, (0, 6)), (None, (1, 7))], 10)
    wait(residents, numbers)
    residents.publish(numbers)
    assert agree() == 12
    residents.promote([((0, 1), (0, 6))])
    residents.withdraw([(0, 1)])
    assert agree() == 12
    assert residents.by_layer == (4, 3, 5)


def test_r5_ring_and_swaps_change_the_tables_in_place():
    residents = with_ring()
    tables = residents.tables
    addresses = (tables.slot_of.data_ptr(), tables.routable.data_ptr(), residents.arena.data.data_ptr())
    apply(residents, [(None, (0, 5)), ((1, 0), (1, 5))])
    residents.promote([((0, 0), (0, 5))])
    residents.withdraw([(0, 0)])
    assert (tables.slot_of.data_ptr(), tables.routable.data_ptr(), residents.arena.data.data_ptr()) == addresses


def test_nothing_is_published_that_has_not_landed_here():
    source = FakeSource()
    residents = with_ring(source=source)
    source.holds = threading.Event()
    try:
        begin(residents, [(None, (0, 5))])
        assert residents.landed() == []
        with pytest.raises(PairError, match="before this rank had it"):
            residents.publish([1])
    finally:
        source.holds.set()


def test_the_state_tells_ring_slots_and_reads_under_way_apart():
    def state_after(change) -> str:
        residents = with_ring()
        change(residents)
        return residents.state()

    def promoted(residents):
        apply(residents, [(None, (0, 5))])
        residents.promote([((0, 0), (0, 5))])

    def other_slot(residents):
        apply(residents, [(None, (0, 6))])
        residents.withdraw([(0, 6)])
        apply(residents, [(None, (0, 5))])

    changes = [
        lambda residents: None,
        lambda residents: apply(residents, [(None, (0, 5))]),
        lambda residents: apply(residents, [((0, 0), (0, 5))]),
        lambda residents: begin(residents, [(None, (0, 5))]),
        promoted,  # the same routable set
        other_slot,  # and the same again, elsewhere
    ]
    assert len({state_after(change) for change in changes}) == len(changes)
    assert state_after(promoted) == state_after(promoted)
