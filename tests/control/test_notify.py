import os
import socket
import time

import pytest

from tided.control.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    """The service manager's end, and its address as the variable tells it."""
    shown = str(tmp_path / "notify") if request.param == "path" else f"@tide-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(shown.replace("@", "\0") if shown.startswith("@") else shown)
        receiver.settimeout(5)
        yield receiver, shown


def test_every_notification_is_one_datagram(manager):
    receiver, address = manager
    notifier = Notifier({"NOTIFY_SOCKET": address})
    notifier.status("loading experts: 3 of 8\nREADY=1")  # a text cannot smuggle a second assignment
    notifier.more_time(2.5)
    notifier.ready()
    notifier.alive()
    notifier.stopping()
    notifier.reloading()
    told = [receiver.recv(4096).decode() for _ in range(6)]
    assert told[:5] == [
        "STATUS=loading experts: 3 of 8",
        "EXTEND_TIMEOUT_USEC=2500000",
        "READY=1",
        "WATCHDOG=1",
        "STOPPING=1",
    ]
    reloading, at = told[5].splitlines()
    assert reloading == "RELOADING=1"
    assert 0 <= time.monotonic_ns() // 1000 - int(at.removeprefix("MONOTONIC_USEC=")) < 60_000_000


def test_without_a_manager_nothing_happens():
    Notifier({}).ready()


def test_a_manager_that_is_gone_is_no_error(tmp_path):
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()


def test_a_manager_that_does_not_read_does_not_hold_us_up(manager):
    _, address = manager
    notifier = Notifier({"NOTIFY_SOCKET": address})
    for _ in range(5000):
        notifier.alive()


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0.0),  # meant for another process
    ],
)
def test_the_watchdog_interval(environment, seconds):
    assert Notifier({"NOTIFY_SOCKET": "/x"} | environment).watchdog_s == seconds
