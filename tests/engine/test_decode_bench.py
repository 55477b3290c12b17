"""The decode benchmark runs on two ranks and its parts add up."""

import json
import subprocess
import sys

import pytest
from real_pair import GOLDEN

ROOT = GOLDEN.parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/decode_step.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_two_ranks_are_measured():
    done = bench(str(GOLDEN), "--ranks", "2", "--lanes", "2", "--resident", "52", "--steps", "5", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("starting the ranks\n")
    assert "steps\n" in done.stderr
    figures = json.loads(done.stdout)
    assert (figures["ranks"], figures["lanes"], figures["steps"], figures["resident_share"]) == (2, 2, 5, 0.65)
    assert figures["collectives_a_step"] >= 20  # two a layer, and the vocabulary
    parts = [figures[part]["median_ms"] for part in ("model", "collectives", "sampler", "host")]
    assert all(part > 0 for part in parts)
    assert (figures["sampler_at"]["vocabulary"], figures["sampler_at"]["median_ms"] > 0) == (129_280, True)
    assert sum(parts) == pytest.approx(figures["step"]["median_ms"], rel=0.5)


def test_a_budget_that_cannot_be_is_refused_with_its_exit_code():
    done = bench(str(GOLDEN), "--ranks", "1", "--resident", "7", "--steps", "5")
    assert (done.returncode, "experts.resident = 7: this model needs 30 to 80" in done.stderr) == (78, True)


def test_one_step_has_no_spread():
    done = bench(str(GOLDEN), "--ranks", "1", "--steps", "1")
    assert (done.returncode, "at least 2 steps" in done.stderr, "Traceback" in done.stderr) == (2, True, False)


def test_steps_are_measured_while_experts_are_exchanged():
    done = bench(str(GOLDEN), "--ranks", "2", "--resident", "50", "--steps", "40", "--swaps", "20", "--json")
    assert done.returncode == 0, done.stderr
    swaps = json.loads(done.stdout)["swaps"]
    assert swaps["swapped"] == 20
    assert 0 < swaps["steps"] < 40
    assert swaps["worst_ms"] >= swaps["median_ms"] > 0


def test_more_swaps_than_there_are_experts_for_are_refused():
    done = bench(str(GOLDEN), "--ranks", "1", "--resident", "79", "--steps", "5", "--swaps", "2")
    assert (done.returncode, "only 1 experts can be exchanged" in done.stderr) == (78, True)


def test_a_ring_is_compared_with_none():
    arguments = ("--ranks", "1", "--resident", "40", "--steps", "10", "--ring", "8", "--rounds", "1", "--json")
    done = bench(str(GOLDEN), *arguments)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["hot_reads"] > 0
    assert figures["with_over_without"] == pytest.approx(figures["with_tok_s"][0] / figures["without_tok_s"][0])
