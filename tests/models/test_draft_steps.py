"""Proposals of fixed shape, captured and not: in Triton's interpreter on a CPU, and on a GPU where there is one."""

from pathlib import Path

import pytest

from tests.kernels.cases import PATIENT, run

HERE = Path(__file__).parent
pytestmark = PATIENT


def test_in_the_interpreter_a_block_is_the_cpu_s():
    assert run("draft_cases.py", "cpu", "block", where=HERE, TRITON_INTERPRET="1").endswith("ok\n")


def test_in_the_interpreter_a_chain_is_the_cpu_s():
    assert run("draft_cases.py", "cpu", "chain", where=HERE, TRITON_INTERPRET="1").endswith("ok\n")


@pytest.mark.gpu
def test_on_a_gpu_they_are_the_cpu_s_captured_or_not():
    assert run("draft_cases.py", "cuda", where=HERE).endswith("ok\n")


@pytest.mark.gpu
def test_nothing_is_compiled_for_a_request_s_lengths():
    assert run("variant_cases.py", "cuda", where=HERE).endswith("ok\n")
