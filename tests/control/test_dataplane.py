import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from tests.control.conftest import free_ports, make_settings
from tests.control.group_rank import awkward
from tided.engine.dataplane import TorchGroup, _choose_adapters, _interface_of
from tided.errors import ConfigError, PairError, UnavailableError
from tided.settings import Parallel


@contextmanager
def started(settings, mode, tmp_path):
    command = [sys.executable, "-m", "tests.control.group_rank"]
    text = msgspec.json.encode(settings).decode()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), text, mode, str(tmp_path / f"{rank}.safetensors")],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(settings.parallel.ranks)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=10)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_the_same_bits_added_in_rank_order(tmp_path, ranks):
    with started(make_settings(ranks), "results", tmp_path) as processes:
        assert [process.wait(60) for process in processes] == [0] * ranks
        assert all("sums of 40 KB in " in process.stdout.read() for process in processes)
    found = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(ranks)]
    for name in found[0].keys() - {"part_small"}:
        assert all(torch.equal(found[0][name], other[name]) for other in found), name
    for name, shape in (("small", (1, 256)), ("large", (2000, 300))):
        expected = awkward(0, shape)
        for rank in range(1, ranks):
            expected = expected + awkward(rank, shape)
        assert torch.equal(found[0][f"sum_{name}"], expected)
    assert torch.equal(found[1]["part_small"], awkward(1, (1, 256)))  # what was given in is left alone
    columns = torch.cat([torch.arange(6).reshape(2, 3) + 10 * rank for rank in range(ranks)], dim=-1)
    assert torch.equal(found[0]["concat"], columns)
    assert torch.equal(found[0]["concat_half"], columns.to(torch.bfloat16))
    assert torch.equal(found[0]["bytes"], columns.to(torch.uint8)[:, ::3])
    assert torch.equal(found[0]["gathered"], torch.stack([awkward(rank, (1, 256)) for rank in range(ranks)]))
    assert found[0]["calls"].item() == 7


def test_the_order_matters_for_these_values():
    """Otherwise the test above would prove nothing."""
    parts = [awkward(rank, (1, 256)) for rank in range(4)]
    forward, backward = sum(parts[1:], parts[0]), sum(parts[-2::-1], parts[-1])
    assert not torch.equal(forward, backward)


@pytest.mark.parametrize(("count", "victim"), [(3, 0), (2, 1)])
def test_a_dead_peer_ends_a_collective_at_once(tmp_path, count, victim):
    with started(make_settings(count), "hang", tmp_path) as ranks:
        assert [rank.stdout.readline().strip() for rank in ranks] == ["up"] * count
        ranks[victim].send_signal(signal.SIGKILL)
        for number, rank in enumerate(ranks):
            if number != victim:
                assert "PairError: rank" in rank.stdout.readline()
                assert rank.stdout.readline() == "closed\n"
                assert rank.wait(20) == 0


def test_the_rendezvous_listens_on_one_address_only(tmp_path):
    settings = make_settings(2)
    with started(settings, "hang", tmp_path) as ranks:
        assert ranks[0].stdout.readline() == "up\n"
        listening = _listening_addresses({rank.pid for rank in ranks})
    assert f"127.0.0.1:{settings.parallel.data_port}" in listening
    assert all(address.startswith("127.0.0.1:") for address in listening), listening


def _listening_addresses(pids):
    """Local addresses of the TCP sockets on which these processes listen, as /proc says."""
    inodes = set()
    for link in [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]:
        with suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(str(link.readlink()))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for fields in (line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                raw = b"".join(bytes.fromhex(host)[n : n + 4][::-1] for n in range(0, len(host) // 2, 4))
                found.append(f"{socket.inet_ntop(family, raw)}:{int(port, 16)}")
    return found


def test_adapters_are_nccl_s_and_its_alone(monkeypatch):
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_9")
    monkeypatch.setenv("NCCL_IB_GID_INDEX", "1")
    _choose_adapters(Parallel(), True)
    assert (os.environ["NCCL_IB_HCA"], os.environ["NCCL_IB_GID_INDEX"]) == ("mlx5_9", "1")
    _choose_adapters(Parallel(hca="rocep1s0f0,roceP2p1s0f0", gid_index=0), True)
    assert (os.environ["NCCL_IB_HCA"], os.environ["NCCL_IB_GID_INDEX"]) == ("rocep1s0f0,roceP2p1s0f0", "0")
    with pytest.raises(ConfigError, match="only CUDA ranks use"):
        _choose_adapters(Parallel(gid_index=0), False)
    monkeypatch.setenv("NCCL_IB_GID_INDEX", "")  # NCCL would take it for index 0
    _choose_adapters(Parallel(), True)
    assert "NCCL_IB_GID_INDEX" not in os.environ


def test_a_group_on_a_cpu_refuses_adapters():
    with pytest.raises(ConfigError, match="only CUDA ranks use"):
        TorchGroup(make_settings(2, gid_index=0), 0)


def test_who_does_not_come_to_a_meeting_is_not_waited_for_longer():
    group = TorchGroup.__new__(TorchGroup)
    group.rank, group.ranks = 0, 2
    group._store = TCPStore("127.0.0.1", free_ports(1), 2, is_master=True, wait_for_workers=False)
    with pytest.raises(UnavailableError, match=r"not every rank has loaded within 0\.2 s"):
        group.meet("loaded", 0.2, lambda: None)
    with pytest.raises(PairError, match="refused"):
        group.meet("loaded", 20.0, refused)
    group._store.set("loaded-1", "here")
    group.meet("loaded", 20.0, refused)


def refused():
    raise PairError("refused")


def test_where_no_thread_can_begin_any_more_a_group_is_left_behind(monkeypatch):
    """What brought the rank there is its error, and not that."""

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    TorchGroup.__new__(TorchGroup).close()


def test_a_busy_port_is_named():
    settings = make_settings(2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", settings.parallel.data_port))
        other.listen()
        with pytest.raises(UnavailableError, match=str(settings.parallel.data_port)):
            TorchGroup(settings, 0)


def test_a_missing_rank_0_is_said():
    settings = make_settings(2, start_timeout_s=1)
    with ThreadPoolExecutor(1) as pool, pytest.raises(UnavailableError, match="finds nobody"):
        pool.submit(TorchGroup, settings, 1).result(30)


def test_the_interface_is_chosen_by_address():
    assert _interface_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        _interface_of("192.0.2.1")
