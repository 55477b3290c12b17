"""The GPU's forms of the experts: in Triton's interpreter on a CPU, and on a GPU where there is one."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

CASES, ROOT = Path(__file__).with_name("experts_cases.py"), Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(device: str, cases: Path = CASES, **environment: str) -> str:
    """A process of its own: the interpreter is chosen when Triton is imported."""
    ran = subprocess.run(
        [sys.executable, str(cases), device],
        env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_in_the_interpreter_it_is_the_reference():
    assert run("cpu", TRITON_INTERPRET="1").endswith("ok\n")


def test_a_pipeline_is_as_deep_as_leaves_all_blocks_a_place(monkeypatch):
    from kernels import experts_triton

    device = torch.device("cuda")
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for capability, wanted in (((9, 0), [4, 4, 3, 4, 3]), ((12, 1), [3] * 5)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        found = [experts_triton._stages(6 * rows, 8 * -(-rows // 8), 36, device) for rows in (1, 4, 6, 8, 16)]
        assert found == wanted
    assert experts_triton._stages(6, 8, 36, torch.device("cpu")) == 3


def test_sixteen_columns_are_not_given_to_the_unit_that_sums_otherwise():
    """Of the machine code, which needs no GPU."""
    from bench.instructions import compiled, listing
    from kernels import experts_triton

    for columns in (8, 16):
        fixed = {"PICKS": 64, "M": columns, "WHOLE": True, "ASM": True, "CHAINED": True, "STAGES": 3}
        warps = experts_triton._warps(columns)
        code = listing(compiled(experts_triton._gate_up, 32, "fp16", 90, warps, **experts_triton.GATE_UP, **fixed))
        assert any(line.startswith("HMMA") for line in code)
        assert not any("GMMA" in line for line in code)


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_reference_at_the_sizes_of_the_large_model():
    assert run("cuda").endswith("ok\n")
