"""`tidectl tide simulate`: tables for people, one object for programs, and an exit code that tells who won."""

import json

import pytest
from typer.testing import CliRunner

from tidectl import simulate
from tidectl.main import app
from tided.sim import study
from tided.sim.compare import POLICIES
from tided.sim.trace import save
from tided.sim.traffic import Mix, traffic

BRIEF = Mix("mixed", 3, 1, (30, 40), (30, 40))


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(study, "TRAFFICS", {"mixed": BRIEF})
    monkeypatch.setattr(study, "_many_topics", lambda layers: traffic(BRIEF, 1, 3, seed=1))


def call(*options):
    return CliRunner().invoke(app, ["tide", "simulate", "--seeds", "1", "--layers", "1", *options])


def test_one_json_object_holds_every_policy_the_control_and_the_likeness():
    result = call("--json", "--share", "0.4")
    found = json.loads(result.stdout)
    assert found["schema"] == "tidectl.tide.simulate/1"
    (table,) = found["study"]["tables"]
    assert [row["policy"] for row in table["rows"]] == list(POLICIES)
    assert found["study"]["control"]["traffic"] == "shuffled"
    assert len(found["study"]["likeness"]) == 3
    assert result.exit_code in (0, 1)


def test_a_person_gets_a_table_for_each_budget_and_words_about_what_was_beaten():
    result = call("--no-control", "--share", "0.25", "--share", "0.65")
    assert "mixed traffic, 25% resident" in result.stdout
    assert "mixed traffic, 65% resident" in result.stdout
    assert "clairvoyant" in result.stdout
    assert "shuffled" not in result.stdout
    assert "beaten:" in result.stderr
    assert result.stderr.startswith("simulating"), "whoever waits minutes is told that something is done"


def test_a_recorded_trace_is_compared_too(tmp_path):
    save(traffic(BRIEF, 1, 3, seed=1), tmp_path / "a.safetensors")
    result = call("--trace", str(tmp_path / "a.safetensors"), "--share", "0.4")
    assert "recorded traffic, 40% resident" in result.stdout


def test_with_rests_ours_reads_what_a_rest_plans():
    def reads(*options):
        (table,) = json.loads(call("--json", "--no-control", "--share", "0.4", *options).stdout)["study"]["tables"]
        return {row["policy"]: row["swaps"] for row in table["rows"]}

    hasty, rested = reads(), reads("--rest", "5")
    assert rested["ours"] > hasty["ours"]
    assert rested["LRU"] == pytest.approx(hasty["LRU"], rel=0.1)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--traffic", "calm"], 2, "'calm'"),
        (["--trace", "missing.safetensors"], 65, "missing.safetensors"),
    ],
)
def test_a_mistake_is_named(options, code, words):
    result = call(*options)
    assert result.exit_code == code
    assert words in result.stderr


def test_the_exit_code_tells_that_a_rival_was_not_beaten_or_that_the_control_gained(monkeypatch):
    options = simulate.Options([], [0.4], 1, 1, False, None)
    for unbeaten, gain, code in ((["LRU"], 0.0, 1), ([], 0.5, 1), ([], 0.0, 0)):
        monkeypatch.setattr(study.Study, "unbeaten", unbeaten)
        monkeypatch.setattr(study.Study, "control_gain", gain)
        assert simulate.run(options, json=True) == code
