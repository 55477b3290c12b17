"""What a prefill chunk takes in passing is foreseen: not less than it takes, and not many times as much."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["mini-deepseek", "mini-glm"])
def test_a_chunk_takes_what_was_foreseen(name):
    """In a process of its own: what other tests left would be counted too."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the kernel does not tell the most that was held")
    command = [sys.executable, "-m", "tests.engine.passing_case", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=True)
    taken, foreseen = map(int, done.stdout.split())
    assert 0.25 * foreseen < taken < foreseen
