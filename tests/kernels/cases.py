"""Runs a file of cases in a process of its own: Triton's interpreter is chosen when Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 840  # the interpreter takes a minute and a half at rest, and several beside others
PATIENT = pytest.mark.timeout(LIMIT_S + 60)
ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(file: str, device: str, *cases: str, where: Path = Path(__file__).parent, **environment: str) -> str:
    """Its output; fails where it fails."""
    ran = subprocess.run(
        [sys.executable, str(where / file), device, *cases],
        env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
