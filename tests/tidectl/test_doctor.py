"""Every check of `tidectl doctor` against machines made of files, as users of such pairs met them; and all of it on
this one, with nothing running."""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from packers.manifest import Entry, Manifest, write_manifest
from tests.tidectl.canned import Tidectl
from tests.tidectl.fixture_machine import (
    IP,
    LINK_LOCAL,
    MAPPED,
    NOTHING,
    STOPPED,
    Scripted,
    Scripts,
    adapter,
    interface,
    running,
    settings,
    view_on,
)
from tests.tidectl.terminal import on_a_terminal
from tidectl import runner
from tidectl.doctor import disks, links, memory, nodes, served, software, weights
from tidectl.doctor.check import Check, View, fail, ok, skip, warn
from tidectl.doctor.engine import NO_PROFILE, Answer, Examined
from tidectl.doctor.examine import Result, examined, results
from tidectl.doctor.machine import Machine, Ran
from tidectl.doctor.remote import Remote
from tidectl.doctor.screen import draw
from tidectl.doctor.table import CHECKS
from tidectl.running import Snapshot
from tidectl.supervisor import Ended, EndedRank
from tided.errors import DataError, UnavailableError

ROOT = Path(__file__).parents[2]
MINI = ROOT / "profiles" / "mini-deepseek.toml"
CLASSES = {"experts": 94_000_000_000, "context": 5_000_000_000}
NEEDS: dict[str, Any] = {"ranks": {"0": CLASSES}, "missing": {}, "judged": True}


@pytest.fixture
def machine(tmp_path: Path) -> Scripted:
    made = Scripted(tmp_path / "root")
    made.memory()
    made.programs["ip"] = IP
    return made


@pytest.fixture
def view(machine: Scripted, tmp_path: Path) -> View:
    return view_on(machine, tmp_path)


# Memory


def test_files_in_the_page_cache_count_as_free(machine: Scripted, view: View) -> None:
    """A download leaves the cache full and little free; an arena sized by that would be a quarter of what fits."""
    view.engine = Scripts(needs=NEEDS)
    machine.memory(MemFree=2_000_000, Cached=118_000_000, MemAvailable=121_000_000)
    found = memory.available(view)
    assert found.verdict == "ok", found
    assert "123.9 GB of 133.8 GB are available, 1 rank here need 99.0 GB (experts 94.0 GB" in found.evidence
    assert memory.cache(view).evidence.startswith("120.8 GB of files")


def test_what_starts_and_dies_at_its_first_prompt_is_told_before(machine: Scripted, view: View) -> None:
    """All that stays fits, and a prompt's chunk on top does not."""
    machine.process(700, "comfyui", 25_000_000)
    view.engine = Scripts(needs={**NEEDS, "missing": {"serve": "3.1 GB more than the 101.1 GB that are free"}})
    found = memory.available(view)
    assert found.verdict == "fail"
    assert "gate 'serve' asks 3.1 GB more than the 101.1 GB that are free" in found.evidence
    assert "comfyui (pid 700) 25.6 GB" in found.evidence
    assert "`tidectl plan " in found.fix
    view.engine = Scripts(needs={**NEEDS, "judged": False})
    assert memory.available(view).verdict == "warn"


def test_who_holds_memory_is_named(machine: Scripted, view: View) -> None:
    machine.memory(MemAvailable=100_000, HugePages_Total=10_000, Hugepagesize=2048, Shmem=3_000_000)
    machine.put(
        "proc/meminfo",
        (machine.text("proc/meminfo") or "").replace("HugePages_Total: 10000 kB", "HugePages_Total: 10000"),
    )
    for pid, name, kilobytes in ((10, "small", 5), (11, "python3", 60_000_000), (12, "kernel thread", 0)):
        machine.process(pid, name, kilobytes)
    view.settings = None
    found = memory.available(view)
    assert found.verdict == "fail"
    assert "held by python3 (pid 11) 61.4 GB, huge pages (vm.nr_hugepages) 21.0 GB, files in memory" in found.evidence


def test_what_a_profile_needs_and_nobody_knows(machine: Scripted, view: View) -> None:
    view.engine = Scripts(needs=Answer("needs", what="there is no such directory", where="/models/here"))
    assert memory.available(view).verdict == "warn"
    (machine.root / "proc/meminfo").unlink()
    assert memory.available(view).verdict == "skip"


def test_beside_what_runs_only_the_floor_counts(machine: Scripted, view: View) -> None:
    view.settings = settings(memory={"exit_below_bytes": 2_500_000_000, "reserve_bytes": 6_000_000_000})
    for kilobytes, verdict in ((9_000_000, "ok"), (4_000_000, "warn"), (2_000_000, "fail")):
        machine.memory(MemAvailable=kilobytes)
        assert memory.available(running(view)).verdict == verdict


def test_pages_that_are_not_written_yet(machine: Scripted, view: View) -> None:
    machine.memory(Cached=40_000_000, Dirty=20_000_000)
    assert memory.cache(view).verdict == "warn"


@pytest.mark.parametrize(("free", "verdict"), [(0, "warn"), (8_000_000, "ok")])
def test_swap(machine: Scripted, view: View, free: int, verdict: str) -> None:
    assert memory.swap(view).verdict == "ok"
    machine.memory(SwapTotal=8_000_000, SwapFree=free)
    assert memory.swap(view).verdict == verdict


def test_memory_that_the_kernel_counts_twice(machine: Scripted, view: View) -> None:
    assert memory.cma(view).verdict == "skip"
    machine.memory(CmaTotal=524_288, CmaFree=500_000)
    assert memory.cma(view).verdict == "ok"
    machine.memory(CmaTotal=524_288, CmaFree=9_000_000)
    assert memory.cma(view).verdict == "warn"


@pytest.mark.parametrize(
    ("groups", "files", "verdict"),
    [
        ("0::/system.slice/x.service", {"sys/fs/cgroup/system.slice/memory.max": "max"}, "ok"),
        ("0::/system.slice/x.service", {"sys/fs/cgroup/system.slice/memory.max": "32000000000"}, "fail"),
        (
            "4:memory:/docker/1\n1:cpu:/x",
            {"sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "32000000000"},
            "fail",
        ),
        ("4:memory:/docker/1", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, "ok"),
    ],
)
def test_a_container_s_limit_counts_the_gpu_too(
    machine: Scripted, view: View, groups: str, files: dict[str, str], verdict: str
) -> None:
    machine.put("proc/self/cgroup", groups)
    for path, text in files.items():
        machine.put(path, text)
    found = memory.limit(view)
    assert found.verdict == verdict, found
    if verdict == "fail":
        assert "allows 32.0 GB of 133.8 GB" in found.evidence


@pytest.mark.parametrize(("soft", "verdict"), [("unlimited", "ok"), ("8388608", "fail"), ("", "skip")])
def test_memory_that_may_be_locked(machine: Scripted, view: View, soft: str, verdict: str) -> None:
    machine.put(
        "proc/self/limits",
        f"Max processes  1 1 processes\nMax locked memory     {soft}  {soft}  bytes\n" if soft else "",
    )
    assert memory.locked(view).verdict == verdict


def test_the_kernel_s_word_counts(machine: Scripted, view: View) -> None:
    assert memory.kernel_log(view).verdict == "skip"
    machine.programs["dmesg"] = Ran(1, "", "not permitted")
    assert memory.kernel_log(view).verdict == "skip"
    machine.programs["dmesg"] = "[1.0] all is well\n"
    assert memory.kernel_log(view).verdict == "ok"
    machine.programs["dmesg"] = (
        "[2.0] NVRM: nvCheckOkFailedNoLog: NV_ERR_NO_MEMORY\n[3.0] nvme nvme0: I/O timeout\n[4.0] fine\n"
    )
    found = memory.kernel_log(view)
    assert found.verdict == "warn"
    assert "2 lines of trouble, the last: [3.0] nvme" in found.evidence


# Links


def pair(machine: Scripted, place: int = 3) -> None:
    """Two halves of one adapter; RoCE v2 with the address at `place`."""
    for name, link, address in (("mlx5_0", "enp1s0f0np0", "c0a8:b10b"), ("mlx5_1", "enP2p1s0f0np0", "c0a8:b20b")):
        gids = [(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (MAPPED.format(address), "IB/RoCE v1")]
        gids += [(NOTHING, "")] * (place - 3) + [(MAPPED.format(address), "RoCE v2"), (NOTHING, "")]
        adapter(machine, name, link, gids)
        interface(machine, link)


def test_a_pair_as_it_should_be(machine: Scripted, view: View) -> None:
    pair(machine)
    machine.programs["ping"] = ""
    for check in (links.interface, links.halves, links.gid, links.mtu):
        assert check(view).verdict == "ok", check(view)
    assert links.interface(view).evidence == "enp1s0f0np0 is up, 200 Gb/s, 192.168.177.11"
    assert "mlx5_0: RoCE v2 at 3" in links.gid(view).evidence


@pytest.mark.parametrize("place", [3, 5])
def test_a_gid_that_moved_is_found_by_type_and_address(machine: Scripted, view: View, place: int) -> None:
    """It moves with a boot, and differs between nodes: a pinned one fails, none pinned does not."""
    pair(machine, place)
    view.settings = settings(parallel={"gid_index": -1})
    assert links.gid(view).verdict == "ok"
    view.settings = settings(parallel={"gid_index": 3})
    found = links.gid(view)
    assert found.verdict == ("ok" if place == 3 else "fail")
    assert place == 3 or "set parallel.gid_index to -1, or 5" in found.fix


def test_an_empty_variable_is_index_0(machine: Scripted, view: View) -> None:
    pair(machine)
    machine.environ = {"NCCL_IB_GID_INDEX": ""}
    found = links.gid(view)
    assert found.verdict == "fail"
    assert "counts as 0" in found.evidence


def test_a_link_without_its_address(machine: Scripted, view: View) -> None:
    pair(machine)
    machine.programs["ip"] = IP.splitlines()[0]
    assert links.gid(view).verdict == "fail"
    assert links.halves(view).verdict == "warn"
    assert "no IPv4 address" in links.interface(view).evidence


def test_half_of_the_link(machine: Scripted, view: View) -> None:
    pair(machine)
    view.settings = settings(parallel={"hca": "=mlx5_0:1"})
    found = links.halves(view)
    assert found.verdict == "warn"
    assert "name mlx5_1 in parallel.hca too" in found.fix
    view.settings = settings(parallel={"hca": "mlx5_0,mlx5_7"})
    assert links.halves(view).verdict == "fail"
    view.settings = settings(parallel={"hca": "^mlx5_9"})
    assert links.halves(view).verdict == "ok"
    machine.programs["ip"] = "\n".join(IP.splitlines()[:2])  # the second half has no address
    assert links.halves(view).verdict == "warn"


def test_no_adapter_and_a_pulled_cable(machine: Scripted, view: View) -> None:
    assert links.halves(view).verdict == "fail"
    assert links.gid(view).verdict == "skip"
    adapter(machine, "mlx5_0", "enp1s0f0np0", [], state="1: DOWN")
    assert links.halves(view).verdict == "fail"
    interface(machine, "enp1s0f0np0", state="down")
    assert "is the cable in" in links.interface(view).fix


def test_an_interface_that_is_another(machine: Scripted, view: View) -> None:
    interface(machine, "enP2p1s0f0np0")
    assert "there is no interface enp1s0f0np0; there are enP2p1s0f0np0" in links.interface(view).evidence
    view.settings = settings(parallel={"interface": "enP2p1s0f0np0"})
    assert "the profile says 192.168.177.11" in links.interface(view).evidence
    machine.address = {"spark-1": "192.168.178.11"}.get  # type: ignore[method-assign, assignment]
    view.settings = settings(parallel={"interface": "enP2p1s0f0np0", "hosts": ("spark-1", "spark-2")})
    assert links.interface(view).verdict == "ok"  # a name counts as its address
    view.__dict__["ranks_here"] = []
    assert "none of parallel.hosts" in links.interface(view).evidence


def test_frames_that_do_not_reach_the_other_node_whole(machine: Scripted, view: View) -> None:
    interface(machine, "enp1s0f0np0", mtu="1500")
    assert links.mtu(view).verdict == "warn"
    interface(machine, "enp1s0f0np0", mtu="9000")
    machine.programs["ping"] = Ran(1, "message too long", "")
    found = links.mtu(view)
    assert found.verdict == "fail"
    assert "does not reach 192.168.177.12" in found.evidence
    assert "-s8972" in machine.ran[-1]


def test_the_link_s_speed_as_a_start_measured_it(view: View) -> None:
    fast = {"sum_us": 60.0, "sum_bytes": 40_960, "large_sum_gb_s": 15.0}
    assert links.collective(running(view, data_plane=fast)).verdict == "ok"
    both = fast | {"one_shot": {"sum_us": 20.0, "large_sum_gb_s": 90.0}}
    assert links.collective(running(view, data_plane=both)).evidence.endswith("; by one launch 20 us, 90 GB/s")
    found = links.collective(running(view, data_plane={**fast, "sum_us": 2100.0, "large_sum_gb_s": 0.9}))
    assert found.verdict == "warn"
    assert "a sum of 40 KB takes 2100 us, a large one goes at 0.9 GB/s (measured when it was started)" in found.evidence


def test_the_link_s_speed_by_a_rank_on_each_node(machine: Scripted, view: View) -> None:
    said = json.dumps({"sum_us": 60.0, "sum_bytes": 40_960, "large_sum_gb_s": 15.0, "backend": "nccl"})
    machine.programs |= {sys.executable: said, "ssh": f"1764511200.5\n{said}"}
    view.__dict__["peers_asked"] = []
    found = links.collective(view)
    assert found.verdict == "ok"
    assert "2 ranks on 2 nodes" in found.evidence
    there = next(command for command in machine.ran if command[0] == "ssh")
    assert there[-2] == "192.168.177.12"
    assert there[-1].endswith("-m tided.engine.link_rank 1")
    machine.programs["ssh"] = Ran(69, "", "rank 1 finds nobody at 192.168.177.11:5720")
    found = links.collective(view)
    assert found.verdict == "fail"
    assert "rank 1 of a trial: rank 1 finds nobody" in found.evidence
    view.running = Snapshot("serving", "/another.toml", "", 1.0, [], {}, [], None)
    assert links.collective(view).verdict == "skip"


# Other nodes


def test_ssh_and_clocks(machine: Scripted, view: View) -> None:
    machine.programs["ssh"] = lambda command: Ran(0, f"Welcome!\n{time.time() + 0.2}\n", "")
    assert nodes.ssh(view).verdict == nodes.clock(view).verdict == "ok"
    del view.__dict__["peers_asked"]
    machine.programs["ssh"] = lambda command: Ran(0, f"{time.time() - 90}", "")
    found = nodes.clock(view)
    assert found.verdict == "warn"
    assert "192.168.177.12 -90" in found.evidence


@pytest.mark.parametrize(
    ("ran", "told"),
    [
        (Ran(255, "", "ssh: connect to host 192.168.177.12 port 22: No route to host\n"), "No route"),
        (Ran(None, "", ""), "no answer in 8 s"),
        (Ran(0, "what?", ""), "no time in its answer"),
        (None, "no ssh here"),
    ],
)
def test_a_node_that_does_not_answer(machine: Scripted, view: View, ran: Ran | None, told: str) -> None:
    if ran:
        machine.programs["ssh"] = ran
    found = nodes.ssh(view)
    assert found.verdict == "fail"
    assert told in found.evidence
    assert nodes.clock(view).verdict == "warn"
    assert links.collective(view).verdict == "skip"


# Disks


def test_a_file_system_without_direct_reads(machine: Scripted, view: View, tmp_path: Path) -> None:
    view.settings = settings(model={"path": str(tmp_path)})
    assert disks.direct(view).verdict == "skip"
    (tmp_path / "model.safetensors").write_bytes(b"x" * 5000)
    assert disks.direct(view).verdict == "ok"
    machine.not_direct = "Invalid argument"
    found = disks.direct(view)
    assert found.verdict == "fail"
    assert "in a container mount the directory itself" in found.fix


@pytest.mark.parametrize(("rate", "verdict"), [(5.5e9, "ok"), (1.2e9, "warn"), (0.5e9, "fail")])
def test_a_disk_s_rate_at_our_records(view: View, rate: float, verdict: str) -> None:
    points = [{"in_flight": 1, "bytes_per_s": rate / 3, "s": 0.004}, {"in_flight": 8, "bytes_per_s": rate, "s": 0.01}]
    told = {"record_bytes": 9_400_320, "records": 1, "direct": True, "points": points, "not_measured": ""}
    view.engine = Scripts(reads=told)
    found = disks.rate(view)
    assert found.verdict == verdict
    assert f"{rate / 1e9:.2f} GB/s with 8 in flight" in found.evidence
    assert "4.0 ms alone (records of 9 MB)" in found.evidence
    curve = [{"in_flight": p["in_flight"], "gb_s": p["bytes_per_s"] / 1e9, "latency_ms": 4.0} for p in points]
    beside = disks.rate(running(view, expert_reads={"curve": curve}))
    assert beside.verdict == verdict
    assert "when it was started" in beside.evidence


def test_a_disk_that_was_not_measured(view: View) -> None:
    view.engine = Scripts(reads={"points": [], "not_measured": "too few records", "record_bytes": 1})
    assert disks.rate(view) == skip("too few records")
    view.engine = Scripts(reads=Answer("reads", crash="the process ended with -7"))
    assert disks.rate(view).verdict == "fail"
    assert disks.rate(running(view)).verdict == "skip"
    view.running = view.running._replace(profile="/another.toml")
    assert "something else runs" in disks.rate(view).evidence


def test_room_for_the_state(machine: Scripted, view: View) -> None:
    view.settings = settings(cache={"prefix_disk_bytes": 5_000_000_000})
    assert disks.free(view).verdict == "ok"  # of a directory that is not there yet
    machine.free = 4_000_000_000
    assert disks.free(view).verdict == "warn"
    machine.free = 1_000
    assert disks.free(view).verdict == "fail"


# Software


def test_driver_and_devices(machine: Scripted, view: View) -> None:
    device = {"name": "NVIDIA GB10", "capability": [12, 1], "memory_bytes": 1}
    told: dict[str, Any] = {"version": "2.13.0", "cuda": "13.0", "nccl": "2.29.7", "devices": [device]}
    assert software.driver(view).verdict == "fail"
    machine.put(
        "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release\n"
    )
    assert software.driver(view) == ok("NVIDIA 580.95.05")
    view.engine = Scripts(torch=told)
    assert software.cuda(view).evidence == "torch 2.13.0, CUDA 13.0, NCCL 2.29.7: NVIDIA GB10 (sm_121)"
    view.engine = Scripts(torch={**told, "devices": []})
    assert "0 devices for 1 ranks" in software.cuda(view).evidence
    assert software.ptxas(view).verdict == "skip"
    view.engine = Scripts(torch={**told, "cuda": "", "devices": []})
    assert "without CUDA" in software.cuda(view).evidence
    view.engine = Scripts(torch=Answer("torch", crash="the process ended with -11: nothing said"))
    assert software.cuda(view).verdict == "fail"


def test_an_assembler_that_does_not_know_the_device(machine: Scripted, view: View) -> None:
    device = {"name": "NVIDIA GB10", "capability": [12, 1], "memory_bytes": 1}
    view.engine = Scripts(torch={"devices": [device]})
    machine.environ = {"TRITON_PTXAS_BLACKWELL_PATH": "/opt/ptxas"}
    assert software.ptxas(view).verdict == "fail"
    machine.programs["/opt/ptxas"] = "Allowed values: 'sm_120','sm_120a'"
    assert "does not know sm_121" in software.ptxas(view).evidence
    machine.programs["/opt/ptxas"] = "Allowed values: 'sm_120','sm_121'"
    assert software.ptxas(view).verdict == "warn"  # the unit has another environment
    machine.environ = {}
    own = [path for path in (software._program(view, 121), software._program(view, 90)) if Path(path).exists()]
    assert own, "the assembler that comes with triton"


# What runs, and what a start needs


def test_a_port_and_who_holds_it(machine: Scripted, view: View) -> None:
    assert served.ports(view).verdict == "ok"
    machine.taken[8000] = UnavailableError("the port is in use", hint="stop it")
    answering = " 0: 0100007F:1F40 0100007F:9999 01 0:0 0:0 0 0 0 4141 1"  # a connection to it is no listener
    listening = " 1: 0100007F:1F40 00000000:0000 0A 0:0 0:0 0 0 0 4242 1"
    machine.put("proc/net/tcp", f"  sl  local_address\n{answering}\n{listening}\n")
    for pid, name, inode in ((70, "client", 4141), (77, "llama-server", 4242)):
        machine.process(pid, name, 10)
        (machine.root / f"proc/{pid}/fd").mkdir()
        (machine.root / f"proc/{pid}/fd/5").symlink_to(f"socket:[{inode}]")
    found = served.ports(view)
    assert found.verdict == "fail"
    assert found.evidence == "127.0.0.1:8000: the port is in use, by llama-server (pid 77)"
    assert served.ports(running(view)).verdict == "ok"
    view.__dict__["ranks_here"] = [1]
    assert served.ports(view).verdict == "skip"


def test_a_real_listener_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        machine = Machine()
        holder = machine.holder(port)
        assert holder is not None
        assert holder.pid == os.getpid()
        assert "in use" in str(machine.port_fault("127.0.0.1", port, "server.port"))
    assert machine.holder(port) is None
    assert machine.port_fault("127.0.0.1", port, "server.port") is None


def test_what_runs_is_told(view: View, tmp_path: Path) -> None:
    assert served.running(view) == ok("nothing runs here")
    assert served.running(running(view)).verdict == "ok"
    view.running = view.running._replace(profile="/another.toml")
    assert served.running(view).verdict == "warn"
    view.running = view.running._replace(trouble=["rank 1 has ended"])
    assert served.running(view).verdict == "fail"
    view.running = STOPPED._replace(last=Ended("/x.toml", 1.0, 1, [EndedRank(1, 70, "rank 0 is gone\nmore")]))
    found = served.running(view)
    assert found.verdict == "warn"
    assert found.evidence.endswith(": rank 0 is gone")


def test_a_state_directory_that_others_read(view: View) -> None:
    assert "made by the first start" in served.state(view).evidence
    view.state_dir.mkdir(mode=0o755)
    assert served.state(view).verdict == "warn"
    view.state_dir.chmod(0o700)
    assert served.state(view).verdict == "ok"
    assert "brings it to the other nodes" in served.keys(view).evidence
    named, view.settings = view.settings, settings(parallel={"key_file": str(view.state_dir / "none")})
    assert served.keys(view).verdict == "fail"
    view.settings = named
    key = view.state_dir / "curve.key"
    key.write_text("secret")
    key.chmod(0o644)
    assert "mode 0644" in served.keys(view).evidence
    key.chmod(0o600)
    assert served.keys(view).verdict == "ok"


def test_where_units_run_the_ranks_their_keys_are_roots(
    view: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.units, "in_use", lambda directory: directory == view.state_dir)
    monkeypatch.setattr(runner, "SITE_DIR", tmp_path / "etc")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "curve.key").write_text("secret")
    (tmp_path / "etc" / "curve.key").chmod(0o644)
    assert f"{tmp_path / 'etc' / 'curve.key'} has mode 0644" in served.keys(view).evidence


def test_a_profile_and_its_mistakes(view: View) -> None:
    view.profile = MINI
    from tided.profile import load

    view.settings = load(MINI)
    assert served.profile(view).verdict == "ok"
    view.wrong = "pair.toml:3:1: error: unknown key\n more"
    assert served.profile(view).evidence == "pair.toml:3:1: error: unknown key"
    view.wrong, view.settings = "", settings()
    view.profile = ROOT / "profiles" / "glm53-exl3.toml"
    assert served.profile(view).verdict == "warn"  # its checkpoint is not here
    view.profile = None
    assert served.profile(view).verdict == "skip"


# Weights


def test_an_unfinished_fetch_and_a_file_that_was_written_to(view: View, tmp_path: Path) -> None:
    view.settings = settings(model={"path": str(tmp_path), "dense": str(tmp_path / "dense")})
    assert weights.fetched(view).verdict == "skip"
    (tmp_path / "a.safetensors").write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    entry = Entry(3, digest, "sha256", (tmp_path / "a.safetensors").stat().st_mtime_ns)
    manifest = Manifest("owner/model", "c" * 40, files={"a.safetensors": entry})
    write_manifest(tmp_path, manifest)
    found = weights.fetched(view)
    assert found.verdict == "fail"
    assert f"`tidectl fetch owner/model --to {tmp_path}` goes on" in found.fix
    manifest.complete = True
    write_manifest(tmp_path, manifest)
    assert weights.fetched(view).verdict == weights.sums(view).verdict == "ok"
    (tmp_path / "a.safetensors").write_bytes(b"abd")
    assert weights.fetched(view).verdict == "warn"
    found = weights.sums(view)
    assert "a.safetensors: sha256" in found.evidence
    assert found.fix == f"`tidectl fetch owner/model --to {tmp_path} --verify` mends them"
    (tmp_path / "tidelm-fetch.json").write_text("{}")
    assert weights.fetched(view).verdict == "fail"


def test_tensors_against_the_model_s(view: View) -> None:
    opened = {"tensors": 3488, "shards": 18, "bytes": 46_000_000}
    view.engine = Scripts(checkpoint=opened, inventory={"family": "deepseek_v41", "tensors": 3488})
    assert weights.inventory(view) == ok("3488 tensors in 18 files, 46 MB: all of deepseek_v41, and no other")
    view.engine = Scripts(
        checkpoint=opened, inventory=Answer("inventory", what="tensors: 1 missing: norm.weight", where="/m")
    )
    found = weights.inventory(view)
    assert (found.verdict, found.evidence) == ("fail", "/m: tensors: 1 missing: norm.weight")
    view.engine = Scripts(checkpoint=Answer("checkpoint", what="there is no such directory", where="/m"))
    assert weights.inventory(view).verdict == "fail"


def test_packs_of_another_checkpoint(view: View, tmp_path: Path) -> None:
    assert weights.packs(view).verdict == weights.pack_sums(view).verdict == "skip"
    view.settings = settings(experts={"source": "pack", "pack_dir": str(tmp_path)})
    view.engine = Scripts(packs=Answer("packs", what="is of another checkpoint", where="/p", hint="make it again"))
    assert weights.packs(view) == fail("/p: is of another checkpoint", "make it again")
    view.engine = Scripts(packs={"ranks": [0]})
    assert weights.packs(view).verdict == "ok"
    assert weights.pack_sums(view).verdict == "fail"  # there is none
    (tmp_path / "experts-rank-0-of-2.mxfp4").write_bytes(b"no pack")
    assert weights.pack_sums(view).verdict == "fail"


# All of them together


def test_the_page_names_every_check() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert sorted(re.findall(r"^\| `([a-z_.]+)` \|", page, re.M)) == sorted(check.id for check in CHECKS)


def test_every_check_has_a_name_of_its_own_and_an_end() -> None:
    names = [check.id for check in CHECKS]
    assert len(set(names)) == len(names)
    assert all(check.limit_s <= 130 for check in CHECKS if not check.deep)
    assert {check.id for check in CHECKS if check.deep} == {"weights.sums", "weights.pack_sums"}


def test_one_that_crashes_or_hangs_is_a_finding_and_hides_no_other(view: View) -> None:
    def raises(error: Exception) -> Any:
        raise error

    checks = [
        Check("crash", lambda view: raises(KeyError("x"))),
        Check("hang", lambda view: time.sleep(30) or ok(""), limit_s=0.05),
        Check("ours", lambda view: raises(DataError("is damaged", where="/x", hint="fetch it"))),
        Check("well", lambda view: ok("fine")),
    ]
    found = {one.id: one.finding for one in results(checks, view, lambda name: None)}
    assert found["crash"].verdict == "fail"
    assert "the check crashed: KeyError: 'x'" in found["crash"].evidence
    assert found["hang"].evidence == "no answer in 0.05 s"
    assert found["ours"] == fail("/x: is damaged", "fetch it")
    assert found["well"].verdict == "ok"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_no_check_crashes_on_a_machine_that_tells_nothing(check: Check, tmp_path: Path) -> None:
    """No /proc, no /sys, no programs, no answers: a container of another kind."""
    silent = view_on(Scripted(tmp_path / "root"), tmp_path)
    found = examined(check, silent)
    assert "crashed" not in found.evidence, found
    bare = View(Scripted(tmp_path / "root"), tmp_path / "state", STOPPED)
    assert "crashed" not in examined(check, bare).evidence


def test_what_is_not_asked_for_is_skipped(machine: Scripted, tmp_path: Path) -> None:
    never = Check("x", lambda view: ok("looked"), needs="pair")
    assert examined(never, View(machine, tmp_path, STOPPED)) == skip("no profile: name one")
    assert examined(never, View(machine, tmp_path, STOPPED, wrong="x")) == skip("the profile is wrong")
    alone = view_on(machine, tmp_path, settings(parallel={"hosts": ()}))
    assert examined(never, alone) == skip("all ranks are on this machine")


def test_a_process_that_ends_without_an_answer(tmp_path: Path) -> None:
    told = json.dumps({"question": "torch", "value": {}})
    code = f"import sys; print('noise'); print({told!r}, flush=True); sys.exit('broken driver')"
    engine = Examined(tmp_path, [0], True, [sys.executable, "-c", code])
    assert engine.answer("torch", 20).fault == ""
    assert engine.answer("needs", 20).fault == "it crashed: the process ended with 1: broken driver"
    engine.close()
    slow = Examined(tmp_path, [0], True, [sys.executable, "-c", "import time; time.sleep(60)"])
    assert slow.answer("torch", 0.05).crash == "no answer in 0 s"
    slow.close()


def test_the_screen_reads_without_colours(capsys: pytest.CaptureFixture[str]) -> None:
    draw(
        {
            "": [
                Result("a.b", ok("fine"), 0.1),
                Result("c", warn("odd", "look\x1b[2J"), 0.1),
                Result("d", fail("broken", "mend"), 0),
            ]
        }
    )
    seen = capsys.readouterr().out
    assert seen.splitlines()[:3] == ["✓ ok    a.b  fine", "! warn  c    odd", "             -> look[2J"]
    assert seen.endswith("1 ok, 1 warn, 1 fail\n")


def test_what_wants_a_profile_is_one_row_of_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    draw({"": [Result(name, skip(NO_PROFILE), 0.0) for name in "ab"] + [Result("c", ok("fine"), 0.0)]})
    seen = capsys.readouterr().out
    assert seen.splitlines()[0] == "✓ ok    c       fine"
    assert "- skip  2 more  ports, nodes" in seen
    assert "`tidectl doctor PROFILE`" in seen
    assert seen.endswith("1 ok, 2 skip\n")


def test_colours_on_a_terminal() -> None:
    code = "from tidectl.doctor.screen import *; from tidectl.doctor.check import fail; "
    code += "draw({'': [Result('x', fail('no', 'mend'), 0)]})"
    assert "\x1b[1;31m" in on_a_terminal(code)
    assert "\x1b" not in on_a_terminal(code, NO_COLOR="1")


def test_other_nodes_look_at_themselves(machine: Scripted, view: View, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": "memory.swap", "verdict": "warn", "evidence": "in use", "fix": "end it", "seconds": 0.1, "node": ""}]
    machine.programs["ssh"] = "Welcome to spark-2\n" + json.dumps({"schema": "tidectl.doctor/1", "checks": rows})
    assert view.settings is not None
    found = Remote(machine, "192.168.177.12", view.settings, deep=True).results()
    assert found == [Result("memory.swap", warn("in use", "end it"), 0.1)]
    assert machine.ran[-1][-1].endswith("-P -m tidectl.main doctor - --here --json --deep")
    draw({"": [Result("memory.swap", ok("none"), 0.0)], "192.168.177.12": found})
    seen = capsys.readouterr().out
    assert seen.splitlines()[0] == "this node"
    assert "192.168.177.12\n! warn  memory.swap  in use\n" in seen
    assert seen.endswith("1 ok, 1 warn\n")


@pytest.mark.parametrize(
    ("ran", "told"),
    [
        (Ran(255, "", "No route to host"), "No route"),
        (Ran(1, "", "python: No module named tidectl"), "no TideLM at"),
        (Ran(None, "", ""), "no answer in time"),
        (Ran(0, "{}", ""), "ended with 0"),
        (None, "no ssh"),
    ],
)
def test_a_node_that_cannot_look_at_itself_is_a_finding(
    machine: Scripted, view: View, ran: Ran | None, told: str
) -> None:
    if ran:
        machine.programs["ssh"] = ran
    assert view.settings is not None
    (found,) = Remote(machine, "192.168.177.12", view.settings, deep=False).results()
    assert found.finding.verdict == "fail"
    assert told in found.finding.evidence


def test_alone_nobody_is_asked(machine: Scripted, view: View) -> None:
    view.alone = True
    for check in CHECKS:
        if check.id.startswith(("node.", "link.collective")):
            assert examined(check, view).verdict == "skip"
    assert not any(command[0] == "ssh" for command in machine.ran)


def test_a_running_profile_is_known_by_what_it_says(machine: Scripted, tmp_path: Path) -> None:
    """A node keeps what it runs as a file of its own; and a profile comes to another node by its stdin."""
    from tidectl.sent import text_of
    from tided.profile import load

    kept, other = tmp_path / "profile.toml", tmp_path / "other.toml"
    kept.write_text(text_of(load(MINI)))
    other.write_text(text_of(load(MINI)).replace("spare_slots = 8", "spare_slots = 9"))
    serving = Snapshot("serving", str(kept), "", 1.0, [], {}, [], None)
    view = View(machine, tmp_path, serving, MINI, load(MINI))
    assert view.is_running
    assert not View(machine, tmp_path, serving, other, load(other)).is_running


def test_on_this_machine_with_nothing_running(tidectl: Tidectl, state: Path) -> None:
    """The whole of it, with the engine's own process and two ranks that meet; and it makes nothing."""
    ran = tidectl("doctor", str(MINI), "--json")
    said = json.loads(ran.stdout)
    assert said["schema"] == "tidectl.doctor/1"
    found = {row["id"]: row for row in said["checks"]}
    assert [row["id"] for row in said["checks"]] == [check.id for check in CHECKS if not check.deep]
    for name in ("profile", "state.directory", "disk.direct", "weights.inventory", "link.collective", "gpu.cuda"):
        assert found[name]["verdict"] == "ok", found[name]
    assert "gloo over loopback" in found["link.collective"]["evidence"]
    assert ran.exit_code == (0 if said["ok"] else 1)
    assert said["ok"] == all(row["verdict"] != "fail" for row in said["checks"])
    assert not state.exists()


def test_a_profile_that_is_wrong_is_a_finding(tidectl: Tidectl, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[model]\npth = 3\n")
    ran = tidectl("doctor", str(wrong))
    assert ran.exit_code == 1
    assert "fail  profile" in ran.stdout
    assert "skip  weights.inventory" in ran.stdout
    assert tidectl("doctor", "no-such-profile").exit_code == 2


def commands_of(machine: Scripted) -> set[str]:
    return {command[0] for command in machine.ran}


def test_programs_that_are_run_only_look(machine: Scripted, view: View) -> None:
    """A check that changed something would have to call a program that can."""
    pair(machine)

    def looked(command: Sequence[str]) -> Ran:
        return Ran(0, str(time.time()), "")

    machine.programs |= {"ssh": looked, "ping": "", "dmesg": ""}
    for check in CHECKS:
        if check.id not in ("link.collective", "gpu.ptxas"):
            examined(check, view)
    assert commands_of(machine) <= {"ip", "ping", "ssh", "dmesg"}
    assert all(command[-1].startswith("date ") for command in machine.ran if command[0] == "ssh")


def test_examine_tells_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Each question has its own answer."""
    text = (
        MINI.read_text().replace('"../minis/deepseek"', f'"{tmp_path / "none"}"').replace('"../minis', f'"{ROOT}/minis')
    )
    profile = tmp_path / "p.toml"
    profile.write_text(text)
    from tided.engine.examine import answers
    from tided.profile import load

    told = list(answers(load(profile), [0], at_rest=True))
    assert [one.question for one in told] == ["torch", "checkpoint", "inventory", "needs", "reads"]
    assert all("no such directory" in one.what for one in told[1:])
    assert [one.question for one in answers(load(profile), [0], at_rest=False)][-1] == "needs"
