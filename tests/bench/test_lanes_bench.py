"""The benchmark of lanes runs on two ranks, and its figures follow from each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/lanes.py", "profiles/mini-deepseek.toml", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def test_an_answer_is_measured_alone_and_beside_a_newcomer():
    done = bench("--ranks", "2", "--prompt", "256", "--repeats", "1", "--window", "4", "--share", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["ranks"], figures["prompt_tokens"], figures["prefill_share"]) == (2, 256, 0.5)
    medians = {name: value["median"] for name, value in figures.items() if isinstance(value, dict)}
    assert medians["share"] == pytest.approx(medians["beside_tok_s"] / medians["alone_tok_s"])
    assert medians["beside_tok_s"] == pytest.approx(medians["tokens_beside"] / medians["first_token_s"])
    assert medians["idle_first_token_s"] > 0
    assert medians["longest_gap_ms"] < 1000 * medians["first_token_s"]


def test_a_prompt_over_the_context_is_refused():
    done = bench("--prompt", "5000")
    assert (done.returncode, "does not fit the profile's context of 4096" in done.stderr) == (2, True)
