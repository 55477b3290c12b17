"""Prompt chunks by kernels: in Triton's interpreter on a CPU, and on a GPU where there is one."""

from pathlib import Path

import pytest

from tests.kernels.cases import PATIENT, run

HERE = Path(__file__).parent
pytestmark = PATIENT


def test_in_the_interpreter_they_are_the_cpu_s():
    assert run("chunk_cases.py", "cpu", "chunks", "paused", where=HERE, TRITON_INTERPRET="1").endswith("ok\n")


def test_rows_that_wait_for_experts_have_the_bits_of_rows_that_need_not():
    assert run("chunk_cases.py", "cpu", "layer", where=HERE, TRITON_INTERPRET="1").endswith("ok\n")


@pytest.mark.gpu
def test_on_a_gpu_they_are_the_cpu_s():
    assert run("chunk_cases.py", "cuda", where=HERE).endswith("ok\n")
