"""Experts that a layer waits for. The failures that other engines had here are tested by name."""

import threading
import time

import pytest
import torch
from expert_fakes import CPU, RECORD, FakeSource, record_of

import tided.experts.fetch as fetch
from kernels.router import route
from tided.errors import DataError, PairError
from tided.experts.arena import Arena
from tided.experts.fetch import SyncRules, UrgentReads
from tided.experts.io import Depths, IoScheduler
from tided.experts.tables import RoutingTables

LAYERS, EXPERTS = 4, 12


def urgent(slots: int = 3, source: FakeSource | None = None, reads: int = 4, weight: float = 0.2) -> UrgentReads:
    arena, tables = Arena(RECORD, 4, 1, CPU, urgent=slots), RoutingTables(LAYERS, EXPERTS, CPU)
    io = IoScheduler(source or FakeSource(), Depths(3, 1))
    made = UrgentReads(arena, tables, io, SyncRules(weight, reads), lanes=3)
    for lane, fidelity in enumerate(("fast", "balanced", "exact")):
        made.open(lane, fidelity)
    made.begin_step([0, 1, 2])
    return made


def computed(reads: UrgentReads, layer: int, experts: list[int]) -> list[int]:
    """Uses each batch as a layer does; the experts in the order they came."""
    order = []
    for batch in reads.serve(layer, experts):
        assert len(set(batch.values())) == len(batch)
        for expert, slot in batch.items():
            assert reads.arena.data[slot].numpy().tobytes() == record_of(layer, expert), "another expert's bytes"
            order.append(expert)
        reads.check()
    return order


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_r1_a_ring_that_wraps_inside_one_layer_computes_with_the_right_experts(slots):
    """More experts than slots: a slot is read into again only when what lay there was computed."""
    reads = urgent(slots)
    assert sorted(computed(reads, 1, list(range(9)))) == list(range(9))
    assert sorted(computed(reads, 2, list(range(3, 12)))) == list(range(3, 12))
    assert reads.waits.reads == 18


def test_r1_a_slot_in_use_is_not_read_into_while_its_reader_computes():
    source = FakeSource()
    reads = urgent(2, source)
    serving = iter(reads.serve(0, [0, 1, 2, 3]))
    batch = next(serving)
    deadline_s = time.monotonic() + 30
    while source.reads < 2 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    held = {expert: reads.arena.data[slot].clone() for expert, slot in batch.items()}
    assert source.reads == 2  # the others wait until this batch was computed
    for expert, slot in batch.items():
        assert torch.equal(reads.arena.data[slot], held[expert])
    assert sorted([*batch, *(expert for rest in serving for expert in rest)]) == [0, 1, 2, 3]


def test_r7_a_slot_is_fenced_before_it_is_read_into_again(monkeypatch):
    """A layer that was launched before may read the slot still."""
    source = FakeSource()
    reads, told = urgent(1, source), []
    monkeypatch.setattr(reads.arena, "fence", lambda slot: told.append(("fenced", slot)))
    submit = reads._io.submit

    def submitting(priority, layer, expert, into):
        told.append(("submitted", expert))
        return submit(priority, layer, expert, into)

    monkeypatch.setattr(reads._io, "submit", submitting)
    slot = reads.arena.urgent[0]
    assert sorted(computed(reads, 0, [3, 5])) == [3, 5]
    assert told == [("fenced", slot), ("submitted", 3), ("fenced", slot), ("submitted", 5)]


def test_r2_two_experts_never_share_a_slot_however_hits_and_reads_mix():
    """What lies there already is reserved before anything may be given away."""
    reads = urgent(3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        layer = int(torch.randint(LAYERS, (1,), generator=generator))
        count = int(torch.randint(1, EXPERTS, (1,), generator=generator))
        experts = sorted(torch.randperm(EXPERTS, generator=generator)[:count].tolist())
        assert sorted(computed(reads, layer, experts)) == experts
    assert reads.waits.kept > 0


def test_experts_stay_until_their_slots_are_needed_the_least_recently_used_first():
    reads = urgent(3)
    computed(reads, 0, [1, 2, 3])
    computed(reads, 0, [1, 3])
    assert (reads.waits.reads, reads.waits.kept) == (3, 2)
    computed(reads, 1, [5])  # in the place of (0, 2)
    computed(reads, 0, [1, 3])
    assert (reads.waits.reads, reads.waits.kept) == (4, 4)


def test_the_first_reads_run_while_nobody_waits_for_them_yet():
    source = FakeSource()
    reads = urgent(3, source)
    reads.serve(0, [0, 1, 2, 3])
    deadline_s = time.monotonic() + 30
    while source.reads < 3 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert source.reads == 3


def test_a_read_that_fails_is_tried_again():
    source = FakeSource(fails_at=2)
    reads = urgent(2, source)
    assert sorted(computed(reads, 0, [0, 1])) == [0, 1]
    assert source.reads == 3
    assert reads.missing_here() == [False, False]
    assert reads.settle([0, 0]) == {}


def damaged(*bad: int, slots: int = 2) -> tuple[FakeSource, UrgentReads]:
    """These experts of layer 0 cannot be read."""
    source = FakeSource()
    read = source.read

    def worn(layer, expert, out):
        read(layer, expert, out)
        if layer == 0 and expert in bad:
            raise DataError("checksum differs", where="pack-1-of-2:4096")

    source.read = worn
    return source, urgent(slots, source)


def test_what_cannot_be_read_at_the_third_try_has_no_slot_and_whoever_used_it_is_named():
    source, reads = damaged(1)
    users = torch.tensor([2, 1, 2, 0]), torch.tensor([[0, 2], [1, 2], [0, 0], [2, 0]])  # of lanes 2, 1, 2, 0
    found = {expert: slot for batch in reads.serve(0, [0, 1, 2], users) for expert, slot in batch.items()}
    assert source.reads == 5
    assert (found[1], min(found[0], found[2]) >= 0) == (-1, True)
    assert reads.missing_here() == [False, True, False]
    assert {lane: str(lost) for lane, lost in reads.settle([0, 0b10, 0]).items()} == {
        1: "expert 1 of layer 0 cannot be read on rank 1"
    }
    assert reads.unreadable == {(0, 1)}
    reads.check()
    reads.begin_step([1])
    assert (reads.asked, reads.missing_here()) == ([], [])


def test_what_another_rank_could_not_read_is_not_kept_here():
    reads, other = urgent(2), urgent(2)
    for one in (reads, other):
        list(one.serve(0, [0, 1], (torch.tensor([1]), torch.tensor([[0, 1]]))))
        one.settle([0, 0b101])
    assert reads.state() == other.state()
    assert reads._kept(0) == [0]
    before = reads.state()
    reads.told((0, 1), read=True)
    assert reads.state() != before  # the guard covers what nobody waits for
    computed(reads, 0, [1])
    assert reads.waits.reads == 3


def test_a_lost_record_that_nobody_was_told_of_is_never_passed_over():
    _, reads = damaged(1)
    list(reads.serve(0, [1]))
    with pytest.raises(PairError, match="nobody was told"):
        reads.begin_step([1])
    with pytest.raises(PairError, match="whose answer it was read for is not known"):
        reads.settle([1])


def test_so_many_in_a_row_are_a_disk_that_fails(monkeypatch):
    monkeypatch.setattr(fetch, "MOST_LOST", 3)
    reads, users = urgent(8), (torch.tensor([1]), torch.arange(12)[None])
    for experts, missing in (([0, 1, 2], [1, 1, 0]), ([3, 4], [1, 1]), ([4], [1])):
        list(reads.serve(0, experts, users))
        assert set(reads.settle(missing)) == {1}
    list(reads.serve(0, [9], users))
    with pytest.raises(PairError, match="the last 3 that requests waited for failed"):
        reads.settle([1])


def test_a_disk_that_never_answers_ends_the_step(monkeypatch):
    monkeypatch.setattr(fetch, "READ_TIMEOUT_S", 0.05)
    source = FakeSource(holds=threading.Event())
    try:
        with pytest.raises(PairError, match="was not read within"):
            computed(urgent(2, source), 0, [0])
    finally:
        source.holds.set()


# Who may use what


def routed(reads: UrgentReads, rows: list[list[float]]):
    """One row of scores for each of the lanes fast, balanced, exact; top-3 of 12, experts 0 to 5 routable."""
    reads._tables.change({(layer, expert): expert for layer in range(LAYERS) for expert in range(6)})
    return route(torch.tensor(rows), torch.zeros(EXPERTS), reads._tables.routable[0], 3, 1.0)


ROW = [0.1] * 6 + [0.9, 0.5, 0.2, 0.0, 0.0, 0.0]  # wants 6, 7, 8 with weights 0.56, 0.31, 0.12
HERE = list(range(6))


def test_a_row_may_use_what_its_class_allows():
    reads = urgent(8)
    allowed = reads.allowed(3, torch.tensor([0, 1, 2]), routed(reads, [ROW] * 3))
    assert allowed[0].nonzero().flatten().tolist() == HERE  # fast: the routable
    assert allowed[1].nonzero().flatten().tolist() == [*HERE, 6, 7]  # balanced: and what is heavy
    assert bool(allowed[2].all())  # exact: all of them


def test_no_balanced_row_waits_for_what_could_not_be_read_until_it_could():
    reads = urgent(8)
    routing = routed(reads, [ROW] * 3)
    reads.told((3, 6), read=False)
    allowed = reads.allowed(3, torch.tensor([0, 1, 2]), routing)
    assert allowed[1].nonzero().flatten().tolist() == [*HERE, 7]
    assert bool(allowed[2].all())  # an exact one tries: it may be there again
    reads.told((3, 6), read=True)
    assert reads.allowed(3, torch.tensor([0, 1, 2]), routing)[1].nonzero().flatten().tolist() == [*HERE, 6, 7]


def test_a_fast_row_never_sees_what_was_read_for_others():
    reads = urgent(8)
    computed(reads, 0, [6, 7, 8])
    routing = routed(reads, [ROW] * 3)
    allowed = reads.allowed(0, torch.tensor([0, 1, 2]), routing)
    assert allowed[0].nonzero().flatten().tolist() == HERE
    assert allowed[1].nonzero().flatten().tolist() == [*HERE, 6, 7, 8]  # kept: at no cost
    assert reads.allowed(0, torch.tensor([0, 0, 0]), routing) is None


def test_nothing_is_asked_when_nothing_is_missing():
    reads = urgent(8)
    assert reads.allowed(0, torch.tensor([0, 1, 2]), routed(reads, [[0.9, 0.5, 0.2] + [0.0] * 9] * 3)) is None


def test_balanced_spends_its_reads_over_the_layers():
    reads = urgent(8, reads=4, weight=0.0)
    routing, row = routed(reads, [ROW]), torch.tensor([1])
    read = []
    for layer in range(LAYERS):
        allowed = reads.allowed(layer, row, routing)
        read.append(sorted(set(allowed[0].nonzero().flatten().tolist()) - set(HERE)))
    assert read == [[6]] * 4  # one a layer, the heaviest, though each would take three
    reads.begin_step([1])
    assert reads.allowed(3, row, routing)[0].nonzero().flatten().tolist() == [*HERE, 6, 7, 8]  # what was left over


def test_a_read_is_not_spent_on_what_an_earlier_one_has_left_here():
    reads = urgent(8, reads=1, weight=0.0)
    computed(reads, 3, [6])
    allowed = reads.allowed(3, torch.tensor([1]), routed(reads, [ROW]))
    assert allowed[0].nonzero().flatten().tolist() == [*HERE, 6, 7]  # 6 is kept, and the one read is for 7


def test_the_heaviest_of_all_balanced_rows_together_are_read():
    reads = urgent(8, reads=4, weight=0.0)
    other = [0.1] * 6 + [0.0, 0.0, 0.0, 0.3, 0.6, 0.6]
    allowed = reads.allowed(0, torch.tensor([1, 1, 1]), routed(reads, [ROW, other, other]))
    assert sorted(set(allowed[0].nonzero().flatten().tolist()) - set(HERE)) == [10]  # 0.8, more than 6 with 0.56


def test_the_order_of_rows_decides_nothing():
    one, other = urgent(8, reads=4, weight=0.0), urgent(8, reads=4, weight=0.0)
    rows = torch.rand(40, EXPERTS, generator=torch.Generator().manual_seed(3))
    lanes = torch.ones(40, dtype=torch.int64)
    a = one.allowed(3, lanes, routed(one, rows.tolist()))
    b = other.allowed(3, lanes, routed(other, rows.flip(0).tolist()))
    assert torch.equal(a, b.flip(0))


def test_a_class_without_slots_is_refused():
    with pytest.raises(PairError, match="no slots"):
        urgent(0)


def test_ranks_that_decide_alike_have_the_same_state_and_others_do_not():
    one, other = urgent(3), urgent(3)
    for reads in (one, other):
        computed(reads, 0, [1, 2, 3, 4])
    assert one.state() == other.state()
    computed(one, 0, [3])
    computed(other, 0, [4])
    assert one.state() != other.state()


def test_a_broken_book_is_noticed():
    reads = urgent(3)
    computed(reads, 0, [1, 2])
    reads.check()
    reads._pair_in[next(iter(reads._by_use))] = (0, 2)  # two slots for one pair
    with pytest.raises(PairError, match="read before use is broken"):
        reads.check()
