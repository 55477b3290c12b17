"""The benchmark of HTTP runs, and fails over each of its limits."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def loaded():
    spec = importlib.util.spec_from_file_location("http_overhead", ROOT / "bench" / "http_overhead.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_ends_as_its_figures_say():
    """Whether this machine is at rest or not."""
    command = [sys.executable, "bench/http_overhead.py", "2", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    patterns = (r"lost (\S+) %", r"loop thread (\S+) %", r"latency: median (\S+) ms")
    figures = [float(re.search(pattern, done.stdout).group(1)) for pattern in patterns]
    above = [figure >= limit for figure, limit in zip(figures, (2, 25, 1), strict=True)]
    assert done.returncode == int(any(above)), done.stderr
    assert done.stderr.count("to be below") == sum(above)


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ((1.99, 24.9, 0.99), []),
        ((-0.1, 0.0, 0.0), []),
        ((2.0, 0.0, 0.0), ["lost_percent"]),
        ((0.0, 25.0, 0.0), ["loop_percent"]),
        ((0.0, 0.0, 1.0), ["median_ms"]),
        ((9.0, float("nan"), 9.0), ["lost_percent", "loop_percent", "median_ms"]),
    ],
)
def test_each_figure_has_its_limit(figures, missed):
    bench = loaded()
    assert [words.split()[0] for words in bench.over(bench.Figures(*figures))] == missed
