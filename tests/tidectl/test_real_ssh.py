"""The other node behind a real sshd on this machine. Needs openssh's client and server, and root (`make test-ssh`)."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidectl.canned import Tidectl
from tests.tidectl.test_lifecycle import free_ports
from tests.tidectl.test_nodes import PEER, hosts, profile, there  # noqa: F401  # fixtures
from tidectl import supervisor

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="no openssh-server here"),
    pytest.mark.skipif(os.geteuid() != 0, reason="sshd must be able to become its user: needs root"),
]


@pytest.fixture
def sshd(hosts: Path, there: Path, tmp_path: Path) -> Iterator[Path]:  # noqa: F811
    """In place of the stand-in. Gives the client's configuration; what a login finds there is set by the server."""
    folder, port = tmp_path / "sshd", free_ports(1)
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        key = str(folder / name)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=30)
    shutil.copy(folder / "user.pub", folder / "authorized")
    variables = {"TIDE_STATE_DIR": there, "FAKE_RANKS": "1", "PYTHONPATH": os.environ["PYTHONPATH"]}
    (folder / "sshd_config").write_text(
        f"ListenAddress {PEER}:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"PidFile {folder}/pid\nUsePAM no\nStrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\n"
        f"SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}\n"
    )
    known = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text(f"[{PEER}]:{port} {known}\n")
    config = folder / "ssh_config"
    config.write_text(f"Host {PEER}\nPort {port}\nIdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\n")
    client = tmp_path / "bin" / "ssh"
    client.write_text(f'#!/bin/bash\nexec {shutil.which("ssh", path="/usr/bin:/bin")} -F {config} "$@"\n')
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    assert SSHD is not None
    with subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL) as server:
        deadline = time.monotonic() + 20
        while not (folder / "pid").exists():
            assert time.monotonic() < deadline
            assert server.poll() is None
            time.sleep(0.05)
        yield config
        server.terminate()


def test_two_nodes_by_a_real_ssh(tidectl: Tidectl, profile: Path, sshd: Path, there: Path, state: Path) -> None:  # noqa: F811
    started = tidectl("start", str(profile))
    assert started.exit_code == 0, started.stderr
    run = supervisor.status(there).run
    assert run is not None
    assert [child.rank for child in run.ranks] == [1]
    found = json.loads(tidectl("status", "--json").stdout)
    assert [(rank["rank"], rank["host"], rank["phase"]) for rank in found["ranks"]] == [
        (0, "127.0.0.1", "ready"),
        (1, PEER, "ready"),
    ]
    assert tidectl("logs", "--rank", "1").stdout == "rank 1 loads\n"
    assert tidectl("stop").exit_code == 0
    assert not supervisor.is_locked(there)


def test_a_host_key_that_is_not_known_is_named(tidectl: Tidectl, profile: Path, sshd: Path) -> None:  # noqa: F811
    (sshd.parent / "known").write_text("")
    ran = tidectl("start", str(profile))
    assert ran.exit_code == 69
    assert f"{PEER}: ssh does not get there: " in ran.stderr
    assert "Host key verification failed" in ran.stderr


def test_a_key_that_is_refused_is_named(tidectl: Tidectl, profile: Path, sshd: Path) -> None:  # noqa: F811
    (sshd.parent / "authorized").write_text("")
    ran = tidectl("start", str(profile))
    assert (ran.exit_code, "Permission denied (publickey" in ran.stderr) == (69, True)
