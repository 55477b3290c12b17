"""The units under a real systemd: the mini pair as two instances on one node, and as one on each of two nodes.

The installation is that of `make install`, the files are those of `tidectl service install`, only times are shorter.
"""

import json
import time

import pytest

from tests.units.box import box, curl, join, missing
from tests.units.serving import KEY, PORT, RANKS, TIDECTL, asked, facts, prepare, restarted

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing"),
]

CAP_SYS_RESOURCE = 1 << 24

# Started in place of the daemon. In the next step of its rank it does what a file says, once: `hang` sleeps and lets
# the loop run, `hold` sleeps and holds the interpreter, so that nothing of the process runs any more.
FAULTY = """
import ctypes, sys, time
from pathlib import Path
from tided import daemon
from tided.engine.executor import Executor

file = Path("/var/lib/tidelm") / f"fault-{sys.argv[-1].rpartition(':')[2]}"
execute = Executor.execute

def faulty(self, step):
    if file.exists():
        verb = file.read_text()
        file.unlink()
        time.sleep(600) if verb == "hang" else ctypes.PyDLL(None).sleep(600)
    return execute(self, step)

Executor.execute = faulty
sys.exit(daemon.main())
"""

FAULTY_START = """
[Service]
ExecStart=
ExecStart=/opt/tidelm/venv/bin/python /srv/faulty.py --instance %i
"""


def status_of(inside, pid, *names):
    rows = dict(line.split(":", 1) for line in inside("cat", f"/proc/{pid}/status").splitlines())
    return [rows[name].split() for name in names]


def limits(inside, pid):
    """(soft, hard) by name."""
    lines = inside("cat", f"/proc/{pid}/limits").splitlines()
    return {line[:26].strip(): line[26:].split()[:2] for line in lines}


def test_installing_made_the_user_and_its_directories(node):
    assert node("stat", "-c", "%a %U", "/var/lib/tidelm", "/etc/tidelm").split("\n") == ["700 tidelm", "755 root"]
    assert {"video", "render"} <= set(node("id", "-nG", "tidelm").split())
    again = node.run(TIDECTL, "service", "install", "--prefix", "/opt/tidelm")
    assert (again.returncode, again.stdout) == (0, "")
    assert "as it would be written" in again.stderr


def test_a_pair_starts_by_the_target_and_says_when_it_is_ready(node):
    node("systemctl", "enable", *RANKS)
    node("systemctl", "start", "tided.target")
    for unit in RANKS:
        node.until(unit, ActiveState="active", SubState="running", Type="notify", NRestarts="0")
    assert node.value(RANKS[0], "StatusText") == f"ready http://127.0.0.1:{PORT}"
    assert "Oslo" in asked(node)
    journal = node.journal(RANKS[0])
    assert journal.index("experts") < journal.index("ready http://") < journal.index("Started tided@pair:0.service")
    assert node.run("curl", "-s", *curl(PORT, {"messages": []}, "no-such-key")[1:]).stdout.count("invalid_api_key") == 1


def test_what_it_may_and_may_not(pair):
    pid = pair.value(RANKS[1], "MainPID")
    flags = status_of(pair, pid, "NoNewPrivs", "Seccomp", "CapEff", "CapBnd")
    assert flags == [["1"], ["2"], ["0" * 16], ["0" * 16]]
    assert pair("cat", f"/proc/{pid}/oom_score_adj") == "1000"
    assert limits(pair, pid)["Max core file size"] == ["0", "0"]
    [[held]] = status_of(pair, "1", "CapEff")
    may_raise = bool(int(held, 16) & CAP_SYS_RESOURCE)  # a container's root may not
    most = "unlimited" if may_raise else limits(pair, "1")["Max locked memory"][1]
    assert limits(pair, pid)["Max locked memory"] == [most, most]
    assert pair("ps", "-o", "user=", "-p", pid) == "tidelm"
    theirs = ("find", "/var/lib/tidelm", "-not", "-user", "tidelm", "-o", "-type", "f", "-not", "-perm", "600")
    assert pair(*theirs) == ""


def test_a_killed_rank_takes_the_other_along_and_both_serve_again(pair):
    before = facts(pair)
    pair("kill", "-KILL", before[RANKS[1]]["MainPID"])
    assert restarted(pair, before) == [1, 1]
    assert "status=9/KILL" in pair.journal(RANKS[1])
    pair.says(RANKS[0], "status=70/SOFTWARE")
    assert "Oslo" in asked(pair)
    errors = pair.journal(RANKS[0], "--priority=err")
    assert "ERROR daemon rank 1 hung up" in errors  # the daemon's own lines have their priorities
    assert "INFO" not in errors


def test_a_stopped_rank_is_found_by_the_watchdog(pair):
    before = facts(pair)
    pair("kill", "-STOP", before[RANKS[0]]["MainPID"])
    assert restarted(pair, before) == [1, 1]
    journal = pair.journal(RANKS[0])
    assert "Watchdog timeout (limit 12s)" in journal
    assert "Failed with result 'watchdog'" in journal
    assert "Oslo" in asked(pair)


@pytest.fixture
def faulty(node):
    """The pair, started by a daemon that does what it is told."""
    node("systemctl", "stop", *RANKS)
    node.write("/srv/faulty.py", FAULTY)
    node.write("/etc/systemd/system/tided@pair:0.service.d/faulty.conf", FAULTY_START)
    node.write("/etc/systemd/system/tided@pair:1.service.d/faulty.conf", FAULTY_START)
    node("systemctl", "daemon-reload")
    node("systemctl", "reset-failed")
    node("systemctl", "start", *RANKS)
    yield node
    node("systemctl", "stop", *RANKS)
    node("rm", "-r", *(f"/etc/systemd/system/{unit}.d" for unit in RANKS))
    node("systemctl", "daemon-reload")


def test_an_engine_that_hangs_ends_its_rank_before_the_watchdog_has_to(faulty):
    before = facts(faulty)
    faulty("sh", "-c", "printf hang > /var/lib/tidelm/fault-1; chown tidelm: /var/lib/tidelm/fault-1")
    asking = faulty.begin("curl", *curl(PORT, {"messages": [{"role": "user", "content": "Hello"}]}, KEY))
    assert restarted(faulty, before) == [1, 1]
    asking.communicate(timeout=60)
    journals = [faulty.journal(unit) for unit in RANKS]
    assert any("engine makes no step since 2" in journal for journal in journals)
    assert all("status=70/SOFTWARE" in journal for journal in journals)
    assert "in faulty" in journals[1]  # where its threads stood
    assert "Oslo" in asked(faulty)


def test_a_process_in_which_nothing_runs_is_found_by_the_watchdog_and_leaves_a_trace(faulty):
    before = facts(faulty)
    since = faulty("date", "+%Y-%m-%d %H:%M:%S")
    faulty("sh", "-c", "printf hold > /var/lib/tidelm/fault-1; chown tidelm: /var/lib/tidelm/fault-1")
    asking = faulty.begin("curl", *curl(PORT, {"messages": [{"role": "user", "content": "Hello"}]}, KEY))
    assert restarted(faulty, before) == [1, 1]
    asking.communicate(timeout=60)
    journal = faulty.journal(RANKS[1], f"--since={since}")
    assert "Watchdog timeout (limit 12s)" in journal
    assert "Fatal Python error: Aborted" in journal
    assert "in faulty" in journal
    assert "Oslo" in asked(faulty)


def test_keys_are_read_again_without_an_end(pair):
    before = facts(pair)
    pair("systemctl", "reload", *RANKS)
    for unit in RANKS:
        pair.says(unit, "reloaded; a changed profile counts from the next start on")
        pair.until(unit, ActiveState="active", SubState="running")
    assert "1 API keys are read again from /run/credentials/" in pair.journal(RANKS[0])
    assert facts(pair) == before
    assert "Oslo" in asked(pair)


def test_a_stop_lets_a_running_answer_end(pair):
    body = {"max_tokens": 40, "min_tokens": 40, "temperature": 0, "loop_break": 0}
    body |= {"messages": [{"role": "user", "content": "Tell me about Japan."}]}
    asking = pair.begin("curl", *curl(PORT, body, KEY))
    deadline_s = time.monotonic() + 60
    while json.loads(pair("curl", "-sS", f"http://127.0.0.1:{PORT}/health"))["lanes"]["busy"] == 0:
        assert time.monotonic() < deadline_s
        assert asking.poll() is None, asking.communicate()
    pair("systemctl", "stop", "tided.target")
    answer = json.loads(asking.communicate(timeout=60)[0])
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 40
    for unit in RANKS:
        pair.until(unit, ActiveState="inactive", SubState="dead", Result="success", ExecMainStatus="0")
    assert "draining" in pair.journal(RANKS[0])


def test_a_wrong_profile_is_not_started_again(node):
    node.write("/etc/tidelm/bad.toml", "[model]\npaht = 1\n")
    unit = "tided@bad:0.service"
    assert node.run("systemctl", "start", unit).returncode != 0
    node.until(unit, ActiveState="failed", SubState="failed", ExecMainStatus="78", NRestarts="0")
    time.sleep(3)  # of which a restart would take one
    node.until(unit, timeout_s=1, ActiveState="failed", ExecMainStatus="78", NRestarts="0")
    journal = node.journal(unit, "--priority=err")
    assert "/etc/tidelm/bad.toml:2:1: error" in journal  # all of a message, not its first line alone
    assert "did you mean 'path'" in journal
    assert node.value(unit, "StatusText").startswith("failed: /etc/tidelm/bad.toml:1:2")


def test_what_may_come_is_tried_again_and_given_up_in_the_end(node):
    far = 'hosts = ["203.0.113.1", "203.0.113.2"]'
    node.write("/etc/tidelm/far.toml", node("cat", "/etc/tidelm/pair.toml").replace("ranks = 2", f"ranks = 2\n{far}"))
    unit = "tided@far.service"
    assert node.run("systemctl", "start", unit).returncode != 0
    node.until(unit, ActiveState="failed", Result="exit-code", ExecMainStatus="69", NRestarts="4")
    node.says(unit, "Start request repeated too quickly")
    assert node.journal(unit).count("none of parallel.hosts is an address of this node") == 4
    assert node.run("systemctl", "start", unit).returncode != 0  # until somebody says so
    node("systemctl", "reset-failed", unit)


def test_units_that_run_are_not_taken_away_and_others_are(pair):
    command = (TIDECTL, "service", "uninstall")
    refused = pair.run(*command)
    assert refused.returncode == 1
    assert "running: tided@pair:0.service, tided@pair:1.service" in refused.stderr
    pair("systemctl", "stop", "tided@*")
    pair(*command)
    assert pair.run("systemctl", "cat", "tided@pair:0.service").returncode != 0
    assert pair("ls", "/etc/tidelm", "/var/lib/tidelm").count("history") == 1
    prepare(pair)


def test_two_nodes_start_the_same_unit_and_find_their_ranks(installed, tmp_path):
    parallel = 'hosts = ["10.77.0.1", "10.77.0.2"]\ninterface = "cable"'
    unit = "tided@pair.service"
    with box(tmp_path / "head", installed) as head, box(tmp_path / "peer", installed) as peer:
        join(head, peer)
        for inside in (head, peer):
            prepare(inside, parallel)
        head("systemctl", "start", "--no-block", unit)
        head.says(unit, "handshake")
        # The head made the keys; the peer gets them as a credential, which root alone can read.
        peer.write("/etc/tidelm/curve.key", head("cat", "/var/lib/tidelm/curve.key"), mode=0o600)
        peer("systemctl", "start", unit)
        head.until(unit, ActiveState="active")
        assert "keys of the control plane come from the service manager" in peer.journal(unit)
        assert peer.run("test", "-e", "/var/lib/tidelm/curve.key").returncode != 0
        assert "Oslo" in asked(head)
        assert [inside.run("test", "-e", "/var/lib/tidelm/rank-1.json").returncode for inside in (head, peer)] == [1, 0]

        pids = [inside.value(unit, "MainPID") for inside in (head, peer)]
        peer("kill", "-KILL", pids[1])
        for inside in (head, peer):
            inside.until(unit, ActiveState="active", NRestarts="1")
        assert "Oslo" in asked(head)

        ending = [inside.begin("systemctl", "stop", unit) for inside in (peer, head)]
        assert [process.wait(60) for process in ending] == [0, 0]
        for inside in (head, peer):
            inside.until(unit, ActiveState="inactive", Result="success", ExecMainStatus="0")
