"""The GPU's forms of a prompt chunk's operations: in Triton's interpreter on a CPU, and on a GPU where there is one."""

import pytest

from tests.kernels.cases import PATIENT, run

pytestmark = PATIENT


def test_in_the_interpreter_they_are_the_reference():
    assert run("chunk_cases.py", "cpu", TRITON_INTERPRET="1").endswith("ok\n")


@pytest.mark.gpu
def test_on_a_gpu_they_are_the_reference_at_the_sizes_of_the_large_model():
    assert run("chunk_cases.py", "cuda").endswith("ok\n")
