"""Settings of N local ranks on free ports, and keys in a directory of the test's own."""

import random
import socket

import pytest

from tided.control.keys import load_keys
from tided.settings import Cache, Experts, Model, Parallel, Settings


def free_ports(count):
    """`count` consecutive TCP ports of the loopback address that nobody listens on, below those that the system gives
    to outgoing connections and to other tests, so that nobody takes one before it is used."""
    for _ in range(100):
        first = random.randrange(12_000, 32_000 - count)
        if all(_is_free(first + n) for n in range(count)):
            return first
    raise AssertionError("no free ports")


def _is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def make_settings(ranks=2, **parallel):
    base = {"control_port": free_ports(3), "start_timeout_s": 20, "heartbeat_s": 0.1, "peer_timeout_s": 1.0}
    base["data_port"] = base["control_port"] + 2
    return Settings(
        model=Model(path="/nowhere", served_name="test"),
        experts=Experts(resident=8),
        cache=Cache(context_tokens=64, pool_tokens=64),
        parallel=Parallel(ranks=ranks, **(base | parallel)),
    )


@pytest.fixture
def keys(tmp_path):
    return load_keys(tmp_path / "state" / "curve.key", create=True)
