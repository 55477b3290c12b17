"""What a GPU is told to do with the codes of a prompt chunk's experts, without one."""

import numpy as np
import pytest

from bench.instructions import chunk_code, listing, loop
from kernels.experts_chunk_triton import DECODING, tiling_of
from tests.kernels.instructions import Words, brains, carried_out

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def test_the_instructions_give_each_codes_value_times_its_scale():
    draw = np.random.default_rng(1)
    both = np.arange(1 << 16, dtype=np.uint64), draw.permutation(np.arange(1 << 16, dtype=np.uint64))
    scales = draw.integers(59, 193, (2, 1 << 16), dtype=np.uint64)
    powers = (scales + np.uint64(62)) << np.uint64(7)
    none: list[Words] = [None] * 4  # type: ignore[list-item]
    inputs = [word[0] | word[1] << np.uint64(16) for word in (both, powers)]
    found = carried_out(DECODING.value, [*none, *inputs])
    for nibble in range(4):
        got = brains(found[f"${nibble}"])
        for half in range(2):
            code = both[half] >> np.uint64(4 * nibble) & np.uint64(15)
            assert np.array_equal(got[:, half], VALUES[code] * 2.0 ** (scales[half].astype(float) - 127 - 64))


@pytest.mark.parametrize("kernel", [0, 1], ids=["gate and up", "down"])
@pytest.mark.parametrize("rows", [512, 8192])
def test_the_matrix_unit_of_a_hopper_is_waited_for_once_a_block(rows: int, kernel: int):
    """Its instructions follow each other, with operands straight from registers; scales are fetched ahead like codes,
    and no register is kept in memory meanwhile."""
    counts = loop(listing(chunk_code(90, rows)[kernel]))
    assert counts["HGMMA"] == 16
    assert counts["WARPGROUP"] == 2, "an arrival and a wait"
    assert not {"LDG", "LDL", "STL"} & counts.keys()
    assert "STS" not in counts, "an operand goes through shared memory"


@pytest.mark.parametrize("capability", [80, 120])
def test_elsewhere_no_loop_keeps_a_register_in_memory(capability: int):
    for made in chunk_code(capability, 512):
        counts = loop(listing(made))
        assert counts["HMMA"] == 32
        assert not {"LDL", "STL"} & counts.keys()


def test_a_hopper_has_room_for_a_block_more_of_fewer_rows():
    for rows, blocks in ((512, 4), (2048, 3)):
        tiling = tiling_of(rows, wide=True)
        for kernel in (tiling.gate_up, tiling.down):
            assert 65_536 // (32 * kernel["num_warps"] * kernel["maxnreg"]) == blocks
