"""`tidectl budget` on a running pair: shown first, then changed on both ranks while an answer streams."""

import json
from itertools import islice

import pytest
from typer.testing import CliRunner

from tests.daemon.helpers import Stream, health, running, until
from tests.daemon.tiny import profile_text
from tidectl.main import app
from tided.control.operator import NAME


@pytest.fixture
def tidectl(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_a_running_pair_gets_another_budget_and_a_start_the_profiles(checkpoint, tmp_path, tidectl):
    with running(profile_text(checkpoint), tmp_path) as pair:
        now = json.loads(tidectl("budget", "--json").stdout)
        assert (now["resident_now"], now["resident_of_profile"], now["least"], now["experts"]) == (52, 52, 30, 80)
        record = now["bytes_now"] // 52

        stream = Stream(pair.url, max_tokens=900)
        stream.first_words()
        done = tidectl("budget", f"{40 * record}B", "--yes")
        assert done.exit_code == 0, done.output
        assert "52 -> 40 of 80: 12 leave at once" in done.stderr
        assert "done: 40 experts" in done.stderr
        assert "a start begins with the profile's 52" in done.stderr
        body = until(lambda: (health(pair.url)[1]["residents"] == 40 and health(pair.url)[1]) or None)
        assert body["budget"] == {"resident": 40, "resident_of_profile": 52}

        grown = tidectl("budget", "+20", "experts", "--yes", "--json")
        assert grown.exit_code == 0, grown.output
        told = json.loads(grown.stdout)
        assert (told["resident"], told["come"], told["bytes_after"]) == (60, 20, 60 * record)
        assert sum(health(pair.url)[1]["residents_by_layer"]) == 60
        at = health(pair.url)[1]["engine_seq"]
        until(lambda: health(pair.url)[1]["engine_seq"] > at + 3)
        assert all("error" not in event for event in islice(stream.events(), 20)), "the answer goes on"

        for amount, why in (("29", "30 to 80"), ("900G", "30 to 80"), ("81 experts", "30 to 80")):
            refused = tidectl("budget", amount, "--yes")
            assert refused.exit_code == 1
            assert why in refused.output
        assert tidectl("budget", "50", "--json").exit_code == 2, "off a terminal it must be told yes"
        assert tidectl("budget", "a lot").exit_code == 2
        assert json.loads(tidectl("budget", "--json").stdout)["resident_now"] == 60
        assert all(pair.state(rank).phase == "ready" for rank in (0, 1))
    assert not (pair.state_dir / NAME).exists()
    assert tidectl("budget").exit_code == 3
