"""`tidectl` over the units, under a real systemd: what it says is what the service manager knows."""

import json
import time

import pytest

from tests.units.box import missing
from tests.units.serving import KEY, RANKS, TIDECTL, asked, facts, restarted

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing"),
]


def told(inside, *command, code=0):
    """The object of a command."""
    done = inside.run(TIDECTL, *command, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def strangers(inside):
    """Files of the service's that it could not write."""
    return inside("find", "/var/lib/tidelm", "-not", "-user", "tidelm")


@pytest.fixture
def started(node):
    node.run(TIDECTL, "stop")
    node(TIDECTL, "start", "pair")
    return node


def test_a_profile_is_started_told_of_and_stopped_by_its_name(node):
    node.run(TIDECTL, "stop")
    first = node.run(TIDECTL, "start", "pair")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "(profile pair)" in first.stdout + first.stderr
    for unit in RANKS:
        node.until(unit, ActiveState="active", NRestarts="0")
    status = told(node, "status")
    assert status["state"] == "serving"
    assert [str(rank["pid"]) for rank in status["ranks"]] == [node.value(unit, "MainPID") for unit in RANKS]
    again = node.run(TIDECTL, "start", "pair")
    assert again.returncode == 69
    assert "runs already (tided@pair:0.service)" in again.stderr
    assert "Oslo" in asked(node)
    node(TIDECTL, "stop")
    for unit in RANKS:
        node.until(unit, ActiveState="inactive", Result="success", ExecMainStatus="0")
    assert told(node, "status", code=3)["state"] == "stopped"
    assert strangers(node) == ""


def test_logs_are_the_journals(started):
    asked(started)
    lines = [line["line"] for line in told(started, "logs", "-n", "40")["lines"]]
    assert any("INFO boot handshake: " in line for line in lines)
    assert any("route=/v1/chat/completions status=200" in line for line in lines)
    assert not any(line.startswith("<6>") or "<6>" in line for line in lines)
    assert {line["rank"] for line in told(started, "logs", "--rank", "1")["lines"]} == {1}


def test_a_restart_by_the_service_manager_is_seen(started):
    before = facts(started)
    started("kill", "-KILL", before[RANKS[1]]["MainPID"])
    deadline_s = time.monotonic() + 30
    while json.loads(started.run(TIDECTL, "status", "--json").stdout)["state"] == "serving":
        assert time.monotonic() < deadline_s
    restarted(started, before)
    assert told(started, "status")["state"] == "serving"
    assert "Oslo" in asked(started)


def test_what_root_imports_the_service_can_write(started):
    asked(started)
    started(TIDECTL, "stop")
    started(TIDECTL, "tide", "export", "/root/learned.json", "pair")
    started(TIDECTL, "tide", "reset", "pair", "--yes")
    started(TIDECTL, "tide", "import", "/root/learned.json", "pair")
    assert strangers(started) == ""
    learned = told(started, "tide", "show", "pair")["requests"]
    started(TIDECTL, "start", "pair")
    assert "Oslo" in asked(started)
    started(TIDECTL, "stop")
    assert told(started, "tide", "show", "pair")["requests"] == learned + 1
    assert strangers(started) == ""


def test_a_start_that_fails_says_why_and_leaves_nothing(node):
    node.run(TIDECTL, "stop")
    profile = node("cat", "/etc/tidelm/pair.toml").replace('"api-keys"', '"no-such-credential"')
    node.write("/etc/tidelm/keyless.toml", profile)
    failed = node.run(TIDECTL, "start", "keyless")
    assert failed.returncode not in (0, 1)
    assert "no-such-credential" in failed.stderr
    assert KEY not in failed.stdout + failed.stderr
    for rank in (0, 1):
        node.until(f"tided@keyless:{rank}.service", timeout_s=60, MainPID="0")
