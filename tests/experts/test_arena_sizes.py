"""Slots of several sizes: nothing is lost to them, and nobody gets one of another size."""

from collections import Counter

import numpy as np
import pytest
import torch
from expert_fakes import CPU, begin, quiet, wait
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.exl3_record import Exl3Record, Stored
from kernels.record import PAGE_BYTES, ExpertRecord
from tided.errors import DataError, PairError
from tided.experts.arena import Arena
from tided.experts.io import Depths, IoScheduler
from tided.experts.residents import Residents
from tided.experts.slot_classes import SlotClass
from tided.experts.tables import RoutingTables
from tided.tide.kinds import first_order, kinds_of
from tided.tide.planner import boot_set_of_bytes, first_set

LAYERS, EXPERTS, TOP_K = 3, 6, 2
KINDS = np.array([[0, 1, 2, 0, 1, 2], [2, 1, 0, 2, 1, 0], [0, 0, 1, 1, 2, 2]])
NBYTES = (PAGE_BYTES, 3 * PAGE_BYTES, 4 * PAGE_BYTES)


def bytes_of(pair) -> bytes:
    draw = np.random.default_rng(pair)
    return draw.integers(0, 256, NBYTES[KINDS[pair]], dtype=np.uint8).tobytes()


class Source:
    def __init__(self, fails=()):
        self.fails = set(fails)

    def read(self, layer, expert, out):
        if (layer, expert) in self.fails:
            raise DataError("cannot be read", where="x")
        data = bytes_of((layer, expert))
        assert len(out) == len(data), "the slot has the size of its record"
        out[:] = data


def arena(spare=1, ring=1, urgent=2) -> Arena:
    """Half of each kind's six pairs are resident."""
    return Arena.of_sizes([SlotClass(nbytes, 3, spare, ring) for nbytes in NBYTES], KINDS, CPU, urgent)


def residents(source=None, **how) -> Residents:
    io = IoScheduler(source or Source(), Depths(2, 1))
    made = Residents(arena(**how), RoutingTables(LAYERS, EXPERTS, CPU), io, LAYERS, EXPERTS, TOP_K)
    made.fill(FIRST, quiet)
    return made


FIRST = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 2), (2, 4)]


def check_bytes(made: Residents) -> None:
    made.check_integrity()
    for pair in made.arena.pairs:
        begins = made.arena.slot_of(pair) * PAGE_BYTES
        held = made.arena.data.view(-1)[begins : begins + len(bytes_of(pair))]
        assert held.numpy().tobytes() == bytes_of(pair), pair


def test_slots_lie_side_by_side_and_the_last_are_of_the_largest_size():
    one = arena()
    pages = [1, 3, 4]
    assert one.data.shape == (5 * sum(pages) + 2 * 4 + 4, PAGE_BYTES)
    assert list(one.urgent) == [40, 44]
    assert (one.null, one.pool, one.slots, one.ring) == (48, 15, 17, 3)
    begins = [one.take(kind) for kind in (0, 0, 1, 2)]
    assert begins == [0, 1, 5, 20]
    one.check()


def test_residents_of_all_sizes_hold_their_bytes():
    made = residents()
    check_bytes(made)
    assert made.slots == 17


def test_a_swap_is_for_a_record_of_its_size():
    made = residents()
    wait(made, begin(made, [((0, 0), (0, 3)), ((1, 1), (1, 4))]))
    made.publish([1, 2])
    check_bytes(made)
    with pytest.raises(PairError, match="differ in size"):
        begin(made, [((0, 1), (0, 5))], 3)
    check_bytes(made)


def test_spare_slots_and_ring_are_counted_by_size():
    made = residents()
    begin(made, [((0, 0), (0, 3)), ((1, 1), (1, 4)), (None, (1, 3)), (None, (2, 3))])
    for number, (out, pair) in enumerate([((2, 0), (2, 1)), (None, (2, 5))], 10):
        with pytest.raises(PairError, match=r"more than 1 swaps|ring of 1 slots is full"):
            made.read(number, pair, out)
    wait(made, [1, 2, 3, 4])
    made.publish([1, 2, 3, 4])
    check_bytes(made)


def test_roles_are_exchanged_within_a_size():
    made = residents()
    wait(made, begin(made, [(None, (0, 5))]))
    made.publish([1])
    with pytest.raises(PairError, match="differ in size"):
        made.promote([((0, 0), (0, 5))])
    made.promote([((0, 2), (0, 5))])
    assert made.ring == [(0, 2)]
    check_bytes(made)


def test_a_first_set_needs_places_of_its_sizes():
    made = Residents(
        arena(), RoutingTables(LAYERS, EXPERTS, CPU), IoScheduler(Source(), Depths(1, 1)), LAYERS, EXPERTS, TOP_K
    )
    with pytest.raises(PairError, match="9 places"):
        made.fill([(0, 0), (0, 3), (1, 2), (1, 5), (2, 0), (2, 2)], quiet)


@pytest.mark.parametrize("damage", ["free", "held"])
def test_the_check_sees_a_slot_of_a_wrong_size(damage):
    one = arena()
    slot = one.take(0)
    one.hold({(0, 0): slot})
    one.check()
    if damage == "free":
        one._free[1].append(one._free[0].pop())
    else:
        one._kinds = np.ones_like(KINDS).tolist()
    with pytest.raises(PairError, match="size"):
        one.check()


def test_sizes_are_whole_pages():
    with pytest.raises(ValueError, match="whole pages"):
        Arena.of_sizes([SlotClass(PAGE_BYTES + 1, 1, 1, 0)], KINDS, CPU)
    one = arena()
    slot = one.take(1)
    with pytest.raises(PairError, match="another size"):
        one.hold({(0, 0): slot})


def test_one_size_is_laid_out_as_ever():
    record = ExpertRecord(32, 32, 1)
    plain, sized = (
        Arena(record, 4, 2, CPU, 1, 1),
        Arena.of_sizes([SlotClass(record.slot_bytes, 4, 2, 1)], np.zeros((2, 4), np.int64), CPU, 1),
    )
    assert plain.data.shape == sized.data.shape
    assert [plain.take() for _ in range(7)] == [sized.take() for _ in range(7)]


WIDTHS = [(4, 4, 4), (4, 4, 6), (6, 6, 6), (6, 6, 8), (8, 8, 8)]
MIXES = {
    "a width an expert and matrix, 2 to 4 bits": (WIDTHS, [0.2, 0.25, 0.3, 0.15, 0.1]),
    "a width an expert": (WIDTHS[::2], [81 / 256, 158 / 256, 17 / 256]),
    "half widths too": ([*WIDTHS, (5, 5, 5), (4, 5, 7), (7, 7, 8), (3, 4, 6)], [1 / 9] * 9),
    "two widths": ([(6, 6, 6), (8, 8, 8)], [0.75, 0.25]),
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("share", [0.4, 0.67])
def test_a_budget_of_bytes_is_used_to_97_percent(name, share):
    """All of GLM-5.3 on two ranks: 19,200 experts, slots for swaps, hot reads and reads before use included. The arena
    is planned, not allocated."""
    widths, shares = MIXES[name]
    record, draw = Exl3Record(6144, 2048, 2), np.random.default_rng(1)
    drawn = draw.choice(len(widths), (75, 256), p=shares)
    sizes = np.array([record.slot_bytes(Stored(one, ("mul1",) * 3)) for one in widths])[drawn]
    used = np.array([record.nbytes(Stored(one, ("mul1",) * 3)) for one in widths])[drawn]
    kinds, resident = kinds_of(sizes, spare_slots=32, ring_slots=128), round(share * sizes.size)
    scores = draw.dirichlet(np.full(256, 0.3), 75)
    pairs = boot_set_of_bytes(scores, sizes, kinds.budget_bytes(resident), 8)
    of_kind = Counter(int(kinds.of[pair]) for pair in pairs)
    slots = [(of_kind[kind] + kinds.spare[kind] + kinds.ring[kind], nbytes) for kind, nbytes in enumerate(kinds.nbytes)]
    arena_bytes = sum(count * nbytes for count, nbytes in slots)
    budget = kinds.budget_bytes(resident) + sum(
        (spare + ring) * nbytes for spare, ring, nbytes in zip(kinds.spare, kinds.ring, kinds.nbytes, strict=True)
    )
    held = sum(int(used[pair]) for pair in pairs)
    assert 0.999 * budget < arena_bytes <= budget, "nothing is left over"
    assert held > 0.97 * kinds.budget_bytes(resident)
    assert held + 128 * used.mean() > 0.97 * arena_bytes, "what serves, of all that is taken"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=12, max_size=12), st.integers(5, 12), st.integers(0, 9), st.integers(0, 9))
def test_every_set_of_sizes_has_its_slots(pages, resident, spare, ring):
    """No size is without a slot to read into, and shares add up."""
    sizes = PAGE_BYTES * np.array(pages).reshape(2, 6)
    kinds = kinds_of(sizes, spare, ring)
    assert np.array_equal(kinds.sizes, sizes)
    for slots, shares in ((spare, kinds.spare), (ring, kinds.ring)):
        assert len(shares) == len(kinds.nbytes)
        assert all(share >= min(slots, 1) for share in shares)
        assert slots <= sum(shares) <= slots + len(shares) * min(slots, 1)
    try:
        pairs = boot_set_of_bytes(first_order(kinds.of, first_set(2, 6, 12, 2)), sizes, kinds.budget_bytes(resident), 2)
    except ValueError:
        return
    assert sum(int(sizes[pair]) for pair in pairs) <= sizes.sum() * resident // 12


def test_device_rooms_are_cut_from_memory_for_the_largest():
    """The staging of a thread is made once, whatever comes first."""
    assert arena()._largest_bytes == NBYTES[-1]
    assert torch.equal(arena()._room(arena().null), torch.zeros(NBYTES[-1], dtype=torch.uint8))
