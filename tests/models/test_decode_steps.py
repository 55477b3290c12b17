"""Decode steps of fixed shape, captured and not: in Triton's interpreter on a CPU, and on a GPU where there is one."""

from pathlib import Path

import pytest

from tests.kernels.cases import PATIENT, run

HERE = Path(__file__).parent
pytestmark = PATIENT


def test_in_the_interpreter_they_are_the_cpu_s():
    assert run("decode_cases.py", "cpu", "blocks", where=HERE, TRITON_INTERPRET="1").endswith("ok\n")


def test_runs_of_a_step_that_may_wait_for_experts_have_demand_of_their_own():
    assert run("decode_cases.py", "cpu", "waiting", where=HERE, TRITON_INTERPRET="1").endswith("ok\n")


def test_a_row_has_the_same_bits_beside_one_that_waits_for_experts_and_waiting_itself():
    assert run("decode_cases.py", "cpu", "layer", where=HERE, TRITON_INTERPRET="1").endswith("ok\n")


@pytest.mark.gpu
def test_on_a_gpu_they_are_the_cpu_s_captured_or_not():
    assert run("decode_cases.py", "cuda", where=HERE).endswith("ok\n")
