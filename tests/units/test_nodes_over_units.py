"""`tidectl` over two nodes whose ranks the service manager runs: a systemd and an sshd of its own on each."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.units.box import Box, box, join, missing
from tests.units.serving import RANKS, TIDECTL, install_service, write_profile

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing"),
    pytest.mark.skipif(not shutil.which("sshd", path="/usr/sbin:/usr/bin"), reason="needs openssh-server"),
]

HEAD, PEER = "10.77.0.1", "10.77.0.2"


class Pair(NamedTuple):
    head: Box
    peer: Box


@pytest.fixture(scope="module")
def pair(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes with the service, which ssh leads from the first to the second."""
    folder = tmp_path_factory.mktemp("nodes")
    key = str(folder / "key")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=30)
    with box(folder / "head", installed) as head, box(folder / "peer", installed) as peer:
        join(head, peer)
        for one in (head, peer):
            install_service(one)
        peer.write("/root/.ssh/authorized_keys", (folder / "key.pub").read_text(), 0o600)
        peer("mkdir", "-p", "/run/sshd")
        peer("/usr/sbin/sshd", "-o", "UsePAM=no", "-o", f"ListenAddress={PEER}", "-o", "StrictModes=no")
        head.write("/root/.ssh/id_ed25519", (folder / "key").read_text(), 0o600)
        head.write("/root/.ssh/config", "StrictHostKeyChecking accept-new\n", 0o600)
        write_profile(head, f'hosts = ["{HEAD}", "{PEER}"]\n')
        yield Pair(head, peer)


def test_start_status_logs_guard_restart_stop(pair: Pair) -> None:
    head, peer = pair
    head(TIDECTL, "guard", "pair")
    words = head.run(TIDECTL, "start", "pair", "--timeout", "240")
    assert words.returncode == 0, words.stderr + head.journal(RANKS[0]) + peer.journal(RANKS[1])
    assert (head.value(RANKS[0], "ActiveState"), peer.value(RANKS[1], "ActiveState")) == (
        "active",
        "active",
    )
    assert peer("stat", "-c", "%U %a", "/etc/tidelm/pair.toml", "/etc/tidelm/curve.key") == "root 644\nroot 600"
    found = json.loads(head(TIDECTL, "status", "--json"))
    assert (found["state"], found["trouble"]) == ("serving", [])
    assert [(rank["rank"], rank["host"], rank["phase"]) for rank in found["ranks"]] == [
        (0, HEAD, "ready"),
        (1, PEER, "ready"),
    ]
    lines = head(TIDECTL, "logs").splitlines()
    assert {line[:7] for line in lines} == {"rank 0 ", "rank 1 "}
    assert any("ready" in line for line in lines)
    assert "Oslo" in head(TIDECTL, "chat", "--temperature", "0", "--no-thinking", "What is the capital of Norway?")

    before = [one.value(RANKS[rank], "MainPID") for rank, one in enumerate(pair)]
    head(TIDECTL, "restart", "--timeout", "240")
    after = [one.value(RANKS[rank], "MainPID") for rank, one in enumerate(pair)]
    assert all(old != new for old, new in zip(before, after, strict=True))
    head(TIDECTL, "stop")
    assert (head.value(RANKS[0], "ActiveState"), peer.value(RANKS[1], "ActiveState")) == (
        "inactive",
        "inactive",
    )
    assert head.run(TIDECTL, "status").returncode == 3


def test_a_rank_that_cannot_start_is_told_with_its_journal_and_the_other_is_ended(pair: Pair) -> None:
    head, peer = pair
    peer.write("/var/lib/tidelm/node.toml", '[parallel]\ninterface = "nowhere0"\n')
    ran = head.run(TIDECTL, "start", "pair", "--timeout", "240")
    peer("rm", "/var/lib/tidelm/node.toml")
    assert ran.returncode not in (0, 1), ran.stderr
    assert f"rank 1 on {PEER}" in ran.stderr
    assert "the last lines of rank 1's log:" in ran.stderr
    for rank, one in enumerate(pair):
        assert one.value(RANKS[rank], "ActiveState") in ("inactive", "failed")
        assert one.value(RANKS[rank], "SubState") != "auto-restart"


def test_both_ranks_of_one_node(pair: Pair) -> None:
    """A bundled profile: nothing is sent, and nothing written for the service."""
    head = pair.head
    head(TIDECTL, "start", "mini-deepseek", "--timeout", "240")
    units = [f"tided@mini-deepseek:{rank}.service" for rank in (0, 1)]
    assert [head.value(unit, "ActiveState") for unit in units] == ["active", "active"]
    assert head.run("test", "-e", "/etc/tidelm/mini-deepseek.toml").returncode == 1
    again = head.run(TIDECTL, "start", "mini-deepseek")
    assert (again.returncode, "runs already" in again.stderr) == (69, True)
    following = head.begin(TIDECTL, "logs", "-f", "--lines", "1")
    assert following.stdout is not None
    assert following.stdout.readline().startswith("rank ")
    head(TIDECTL, "stop")
    lines, words = following.communicate(timeout=60)
    assert "stopped" in lines
    assert (following.returncode, words.strip()) == (0, "the ranks have ended")
    assert head.run(TIDECTL, "status").returncode == 3
