"""The GPU's form of EXL3 experts: in Triton's interpreter on a CPU, and on a GPU where there is one."""

import pytest

from tests.kernels.cases import PATIENT, run

pytestmark = PATIENT


def test_in_the_interpreter_it_is_the_reference():
    assert run("exl3_cases.py", "cpu", TRITON_INTERPRET="1").endswith("ok\n")


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["widths", "large widths", "others"])
def test_on_a_gpu_it_is_the_reference_at_the_sizes_of_the_large_model(part):
    assert run("exl3_cases.py", "cuda", part).endswith("ok\n")
