"""The arena of records of one size: a block of slots, each in one state."""

import pytest
from expert_fakes import CPU, RECORD

from kernels.formats import fp4_rows
from tided.errors import PairError
from tided.experts.arena import Arena


def test_the_arena_is_one_aligned_block_with_a_null_slot_of_zeros():
    arena = Arena(RECORD, 5, 2, CPU)
    assert arena.data.shape == (8, RECORD.slot_bytes)
    assert arena.data.is_contiguous()
    assert arena.data.data_ptr() % 4096 == 0
    assert RECORD.slot_bytes % 4096 == 0
    assert arena.null == 7
    taken = {arena.take() for _ in range(7)}
    assert taken == set(range(7))  # the null slot is never given away
    with pytest.raises(PairError, match="no free expert slot"):
        arena.take()
    assert not arena.data[arena.null].any()


def test_the_null_slot_decodes_to_zero_weights():
    """Zero bytes are not zero in every format: here a code 0 is 0.0, and its scale 2^-127 keeps it so."""
    arena = Arena(RECORD, 1, 1, CPU)
    for codes, scale in zip(RECORD.parts[:3], RECORD.parts[3:], strict=True):
        cut = [
            arena.data[arena.null, part.offset : part.offset + part.nbytes].view(part.rows, part.row_bytes)
            for part in (codes, scale)
        ]
        weights = fp4_rows(*cut)
        assert weights.shape == (codes.rows, 2 * codes.row_bytes)
        assert not weights.any()


def test_a_slot_is_used_only_as_its_state_allows():
    arena = Arena(RECORD, 2, 1, CPU)
    slot, other = arena.take(), arena.take()
    arena.hold({(0, 0): slot})
    for wrong in (
        lambda: arena.hold({(0, 1): slot}),
        lambda: arena.load(slot, lambda out: None),
        lambda: arena.drop((0, 1)),
        lambda: arena.hold({(0, 0): other}),
        lambda: arena.hold({(0, 2): other, (0, 3): other}),
        lambda: arena.hold({(0, 2): other, (0, 3): slot}),
    ):
        with pytest.raises(PairError):
            wrong()
        assert arena.directory == {(0, 0): slot}
        arena.check()
    with pytest.raises(ValueError, match="spare"):
        Arena(RECORD, 2, 0, CPU)


@pytest.mark.parametrize("damage", ["directory", "leak", "double"])
def test_the_arenas_check_can_fail(damage):
    arena = Arena(RECORD, 2, 2, CPU)
    slots = [arena.take(), arena.take()]
    arena.hold({(0, 0): slots[0]})
    arena.hold({(0, 1): slots[1]})
    arena.check()
    if damage == "directory":
        arena._slot_of[0, 0] = slots[1]
    elif damage == "leak":
        arena._free[0].pop()
    else:
        arena._free[0].append(slots[0])
    with pytest.raises(PairError):
        arena.check()
