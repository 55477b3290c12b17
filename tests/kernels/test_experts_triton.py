"""The GPU's forms of the experts: in Triton's interpreter on a CPU, and on a GPU where there is one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.kernels.cases import PATIENT, run
from tests.kernels.instructions import Words, carried_out, halves

pytestmark = PATIENT

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def test_in_the_interpreter_it_is_the_reference():
    assert run("experts_cases.py", "cpu", TRITON_INTERPRET="1").endswith("ok\n")


def test_a_pipeline_is_as_deep_as_leaves_all_blocks_a_place(monkeypatch):
    from kernels import experts_triton

    device = torch.device("cuda")
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for capability, wanted in (((9, 0), [4, 4, 3, 4, 3]), ((12, 1), [3] * 5)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        tiles = {rows: experts_triton.tiles_of(rows, device) for rows in (1, 4, 6, 8, 16)}
        found = [experts_triton._stages(one, 6 * rows, 36, device) for rows, one in tiles.items()]
        assert found == wanted
        assert len({one.eight for one in tiles.values()}) == 1, "a row's bits would depend on its company"


def test_the_matrix_unit_of_sm_90_is_the_one_of_the_form():
    """Of the machine code, which needs no GPU. `wgmma` sums otherwise: in 16 bits no count of rows may come to it, in 8
    every one must, and its weights come from registers: through shared memory they would cost more than they spare."""
    from bench.instructions import down, gate_up, listing, loop
    from kernels.experts_triton import SM_90, Tiles

    sixteen = [*SM_90, (16, Tiles(down_warps=4)), (16, Tiles(half=64, warps=8, down_rows=128, down_warps=8))]
    eight = [(rows, Tiles(eight=True, half=half)) for rows in (8, 16) for half in (32, 64)]
    downs = {(rows, tiles.down_rows, tiles.down_warps): tiles for rows, tiles in sixteen + eight}
    made = [gate_up(90, rows, tiles) for rows, tiles in sixteen]
    for cubin in made + [down(90, rows, tiles) for (rows, *_), tiles in downs.items()]:
        code = loop(listing(cubin))
        assert code["HMMA"] > 0
        assert code["HGMMA"] + code["STS"] == 0
    for rows, tiles in eight:
        code = loop(listing(gate_up(90, rows, tiles)))
        assert code["QGMMA"] == 8 * tiles.half // 32, "an instruction is of 64 rows and a scale group"
        assert code["HMMA"] + code["STS"] == 0


def test_the_matrix_unit_of_8_bits_is_of_four_warps():
    from kernels.experts_triton import Tiles

    with pytest.raises(ValueError, match="by 2 warps"):
        Tiles(eight=True, warps=2)


def test_the_instructions_give_each_codes_value():
    from kernels.experts_product_triton import CODES, EIGHTS

    draw = np.random.default_rng(2)
    bytes_ = np.stack([draw.permutation(256) for _ in range(4)], 1).astype(np.uint64)
    word = sum(bytes_[:, at] << np.uint64(8 * at) for at in range(4))
    codes = [VALUES[bytes_ >> np.uint64(4 * upper) & np.uint64(15)] for upper in (0, 1)]
    none: list[Words] = [None] * 4  # type: ignore[list-item]
    found = carried_out(CODES.value, [*none, word])
    for upper in (0, 1):
        got = np.concatenate([halves(found[f"${2 * upper + pair}"]) for pair in (0, 1)], 1)
        assert np.array_equal(got, codes[upper] * 2.0**-14)
    found = carried_out(EIGHTS.value, [*none[:2], word])
    for upper in (0, 1):
        made = torch.from_numpy(found[f"${upper}"].astype(np.uint32).view(np.uint8).reshape(-1, 4))
        assert np.array_equal(made.view(torch.float8_e4m3fn).double().numpy(), codes[upper] * 2.0**-6)


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_reference_at_the_sizes_of_the_large_model():
    assert run("experts_cases.py", "cuda").endswith("ok\n")
