"""Latent attention's decode kernels: in Triton's interpreter on a CPU, and on a GPU where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES, ROOT = Path(__file__).with_name("latent_cases.py"), Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(device: str, **environment: str) -> str:
    """A process of its own: the interpreter is chosen when Triton is imported."""
    ran = subprocess.run(
        [sys.executable, str(CASES), device],
        env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_in_the_interpreter_they_are_the_references():
    assert run("cpu", TRITON_INTERPRET="1").endswith("ok\n")


@pytest.mark.gpu
def test_on_a_gpu_they_are_the_references():
    assert run("cuda").endswith("ok\n")
