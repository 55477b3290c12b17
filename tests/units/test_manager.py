"""The real daemon under a service manager that is this test: what it tells, when, and how it ends.

(Under a real one: `test_real_systemd.py`.)
"""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.control.conftest import free_ports
from tests.daemon.tiny import make_checkpoint, profile_text

WATCHDOG_S = 0.9


class Manager:
    """Its end of the socket, and the daemon that it started."""

    def __init__(self, directory, instance, program=("-m", "tided.daemon")):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(directory / "notify"))
        environment = os.environ | {
            "NOTIFY_SOCKET": str(directory / "notify"),
            "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
            "STATE_DIRECTORY": str(directory / "state"),
            "CONFIGURATION_DIRECTORY": str(directory),
        }
        self.log = (directory / "log").open("w+")
        command = [sys.executable, *program, "--instance", instance]
        self.daemon = subprocess.Popen(command, env=environment, stderr=self.log)

    def hears(self, timeout_s=60.0):
        """The next datagram; fails when none comes."""
        self.socket.settimeout(timeout_s)
        try:
            return self.socket.recv(4096).decode()
        except TimeoutError:
            pytest.fail(f"the daemon says nothing\n{self.said()}")

    def until(self, words, timeout_s=60.0):
        """All that is heard up to the datagram that begins so."""
        heard, end_s = [self.hears()], time.monotonic() + timeout_s
        while not heard[-1].startswith(words):
            assert time.monotonic() < end_s, f"{words} did not come\n{heard[-9:]}\n{self.said()}"
            heard.append(self.hears())
        return heard

    def silent_for(self, seconds):
        """Drops what was on its way, then listens: whether nothing comes."""
        self.socket.settimeout(seconds)
        end_s = time.monotonic() + 3 * seconds
        while time.monotonic() < end_s:
            try:
                self.socket.recv(4096)
            except TimeoutError:
                return True
        return False

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def close(self):
        self.daemon.kill()
        self.daemon.wait(10)
        self.socket.close()
        self.log.close()


@pytest.fixture
def managed(tmp_path):
    """`managed()`: a manager that has started the tiny model on one rank."""
    started = []
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    server = f"[server]\nport = {free_ports(1)}\napi_keys_file = '{tmp_path}/keys'\n"
    (tmp_path / "keys").write_text("one\n")
    (tmp_path / "solo.toml").write_text(f"{profile_text(checkpoint)}\n[parallel]\nstep_timeout_s = 1\n{server}")

    def start(*program):
        started.append(Manager(tmp_path, "solo", *program))
        return started[-1]

    yield start
    for manager in started:
        manager.close()


def test_a_life_as_the_manager_hears_it(managed):
    manager = managed()
    start = manager.until("READY=1")
    assert start[-2].startswith("STATUS=ready http://127.0.0.1:")
    assert any(line.startswith("STATUS=loading") for line in start)
    assert "EXTEND_TIMEOUT_USEC=180000000" in start  # 120 s for other ranks, 60 beside
    for _ in range(4):
        assert manager.hears() == "WATCHDOG=1"

    manager.daemon.send_signal(signal.SIGHUP)
    reload = manager.until("READY=1")
    assert reload[-2].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert "1 API keys are read again" in manager.said()

    manager.daemon.send_signal(signal.SIGSTOP)
    assert manager.silent_for(2 * WATCHDOG_S)
    manager.daemon.send_signal(signal.SIGCONT)
    assert manager.until("WATCHDOG=1")

    manager.daemon.send_signal(signal.SIGTERM)
    end = manager.until("STATUS=draining")
    assert end.index("STOPPING=1") < end.index("EXTEND_TIMEOUT_USEC=54000000") < len(end) - 1  # 30 s for answers
    assert manager.daemon.wait(30) == 0


STANDS = """
import sys, time
from tided import boot, daemon
from tided.engine.leader import LeaderEngine
LeaderEngine._loop = lambda self: time.sleep(600)  # no request, no step, no turn
sys.exit(daemon.main())
"""


def test_the_watchdog_is_not_fed_for_an_engine_that_stands_still(managed):
    manager = managed(("-c", STANDS))
    manager.until("READY=1")
    rest = manager.until("STATUS=failed: rank 0's engine makes no step")
    assert set(rest[:-1]) == {"WATCHDOG=1"}
    assert manager.daemon.wait(30) == 70
    assert "in <lambda>" in manager.said()  # where it stood
