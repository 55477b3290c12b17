"""The GPU's forms of the experts: in Triton's interpreter on a CPU, and on a GPU where there is one."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.cases import PATIENT, run

pytestmark = PATIENT


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
    from bench.instructions import gate_up, listing, loop
    from kernels.experts_triton import Tiles, tiles_of

    for rows, tiles in ((8, Tiles()), (16, Tiles()), (16, tiles_of(16, torch.device("cpu")))):
        code = loop(listing(gate_up(90, rows, tiles)))
        assert code["HMMA"] > 0
        assert code["HGMMA"] + code["STS"] == 0
    code = loop(listing(gate_up(90, 16, Tiles(eight=True, half=64))))
    assert code["QGMMA"] == 16
    assert code["HMMA"] + code["STS"] == 0


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_reference_at_the_sizes_of_the_large_model():
    assert run("experts_cases.py", "cuda").endswith("ok\n")
