"""The link between the nodes: interfaces, both halves of an adapter, GIDs, frames, and how fast the ranks add."""

import ipaddress
import json
import re
import shlex
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from tidectl.doctor.check import Finding, View, fail, ok, skip, warn
from tidectl.doctor.machine import Machine, Ran
from tidectl.doctor.peers import SSH

JUMBO_BYTES = 9000
PING_OVERHEAD_BYTES = 28  # of IPv4 and ICMP
MOST_GIDS = 256
SLOW_SUM_S, SLOW_LARGE_BYTES_PER_S = 500e-6, 5e9  # of a pair over RoCE: a sum of 40 KB, and of 8 MB
MEET_S = 60.0
ADDRESS = re.compile(r"^\d+: (\S+)\s+inet (\S+?)/", re.M)


class Port(NamedTuple):
    """The first port of an RDMA device. `gbit_s` 0: not told."""

    device: str
    active: bool
    gbit_s: float
    interfaces: tuple[str, ...]


class Gid(NamedTuple):
    place: int
    kind: str  # "RoCE v2"
    address: str  # IPv4, or an IPv6 that is none in disguise


def interface(view: View) -> Finding:
    assert view.settings is not None
    parallel, own = view.settings.parallel, addresses(view.machine)
    if not view.ranks_here:
        return fail(
            f"none of parallel.hosts ({', '.join(parallel.hosts)}) is an address of this machine",
            "correct parallel.hosts, or give the link's interface its address",
        )
    host = view.machine.address(parallel.hosts[view.ranks_here[0]])
    name = parallel.interface or next((one for one, address in own if address == host), "")
    if not name:
        return warn(f"no interface has the address {host}", "set parallel.interface, or the address of the link")
    state = (view.machine.text(f"sys/class/net/{name}/operstate") or "").strip()
    if not state:
        have = ", ".join(view.machine.names("sys/class/net"))
        return fail(f"there is no interface {name}; there are {have}", "set parallel.interface to the link's")
    speed = (view.machine.text(f"sys/class/net/{name}/speed") or "").strip()
    seen = f"{name} is {state}" + (f", {int(speed) // 1000} Gb/s" if speed.isdigit() else "")
    held = [address for one, address in own if one == name]
    seen += f", {', '.join(held) or 'no IPv4 address'}"
    if state not in ("up", "unknown"):
        return fail(seen, f"bring it up: `ip link set {name} up`; is the cable in?")
    if own and host not in held:
        return fail(f"{seen}; the profile says {host}", "parallel.interface and parallel.hosts must name one link")
    return ok(seen)


def halves(view: View) -> Finding:
    """One port of such an adapter is two devices of half its speed each; NCCL takes what it is told, or finds."""
    assert view.settings is not None
    if not view.on_cuda:
        return skip("ranks on a CPU use no RDMA")
    found, named = ports(view.machine), _named(view.settings.parallel.hca)
    if not found:
        fix = "is the driver loaded (`ibv_devices`), and /dev/infiniband there? Without it NCCL falls back to TCP"
        return fail("there is no RDMA device", fix)
    seen = ", ".join(f"{p.device} {'active' if p.active else 'down'} {p.gbit_s:.0f} Gb/s" for p in found)
    active = {port.device: port for port in found if port.active}
    if missing := [name for name in named if name not in active]:
        return fail(f"{seen}; parallel.hca names {', '.join(missing)}", "`ibdev2netdev` lists them; is the cable in?")
    if not active:
        return fail(seen, "is the cable in, and the other node up?")
    used = named or list(active)
    if len(used) < len(active):
        rest = ", ".join(sorted(active.keys() - set(used)))
        return warn(
            f"{seen}; only {', '.join(used)} is used", f"name {rest} in parallel.hca too: half of the link idles"
        )
    bare = [p.device for p in active.values() if not any(one in p.interfaces for one, _ in addresses(view.machine))]
    if bare and len(active) > 1:
        return warn(
            f"{seen}; {', '.join(bare)} has no IPv4 address", "give each half an address, or half of the link idles"
        )
    return ok(seen)


def gid(view: View) -> Finding:
    """The index of RoCE v2 moves with every boot and differs between nodes: by type and address it is found, not by
    number."""
    assert view.settings is not None
    if not view.on_cuda:
        return skip("ranks on a CPU use no RDMA")
    if view.machine.environ.get("NCCL_IB_GID_INDEX") == "":
        return fail("NCCL_IB_GID_INDEX is set and empty, which counts as 0", "`unset NCCL_IB_GID_INDEX`")
    tables = {port.device: gids(view.machine, port.device) for port in ports(view.machine) if port.active}
    if not tables:
        return skip("no RDMA device is active")
    own, wanted = {address for _, address in addresses(view.machine)}, view.settings.parallel.gid_index
    right = {
        name: [g.place for g in table if g.kind == "RoCE v2" and g.address in own] for name, table in tables.items()
    }
    seen = ", ".join(f"{name}: RoCE v2 at {', '.join(map(str, found)) or 'none'}" for name, found in right.items())
    if not any(right.values()):
        fix = "give the interface its IPv4 address, then look again: `show_gids`"
        return fail(f"{seen}; no entry has an address of this node", fix)
    if wanted < 0:
        return ok(f"{seen}; NCCL chooses")
    if wrong := [name for name, found in right.items() if found and wanted not in found]:
        fix = f"set parallel.gid_index to -1, or {next(f[0] for f in right.values() if f)}"
        return fail(f"{seen}; parallel.gid_index is {wanted}, another entry of {', '.join(wrong)}", fix)
    return ok(f"{seen}; parallel.gid_index is {wanted}")


def mtu(view: View) -> Finding:
    """The interface's own, and whether a frame of that size reaches the other node whole."""
    assert view.settings is not None
    parallel = view.settings.parallel
    host = view.machine.address(parallel.hosts[view.ranks_here[0]]) if view.ranks_here else ""
    name = parallel.interface or next((one for one, address in addresses(view.machine) if address == host), "")
    text = (view.machine.text(f"sys/class/net/{name}/mtu") or "").strip()
    if not text.isdigit():
        return skip(f"no interface of the link is known ({name or 'none'})")
    mtu_bytes, fix = int(text), f"`ip link set {name} mtu {JUMBO_BYTES}` on both nodes, and what lies between them"
    ran = None
    for peer in view.peers:
        ran = view.machine.run(["ping", "-c1", "-W2", "-Mdo", f"-s{mtu_bytes - PING_OVERHEAD_BYTES}", "--", peer], 4.0)
        if ran is not None and ran.code != 0:
            return fail(f"{name}: {mtu_bytes}; a frame of that size does not reach {peer}", fix)
    if mtu_bytes < JUMBO_BYTES:
        return warn(f"{name}: {mtu_bytes}, not {JUMBO_BYTES}", fix)
    return ok(f"{name}: {mtu_bytes}, {'not tried: no ping here' if ran is None else 'and such frames arrive'}")


def collective(view: View) -> Finding:
    """What a running pair measured at its start; else ranks are started here that measure the same, and end."""
    assert view.settings is not None
    if view.settings.parallel.ranks == 1:
        return skip("one rank adds nothing over a link")
    if view.is_running:
        found = view.measured("data_plane")
        return _judged(view, found, "measured when it was started") if found else skip("what runs here does not tell")
    if view.is_busy:
        return skip("something else runs here, and a trial would slow it")
    if view.peers and (view.alone or 0 not in view.ranks_here):
        return skip("its ranks are on several nodes: rank 0's own, without --here, makes a trial")
    if faults := [peer for peer in view.peers_asked if peer.fault]:
        return skip(f"{faults[0].host} does not answer: see node.ssh")
    return _measured(view)


def _measured(view: View) -> Finding:
    """By a rank of its own on each node, of the same installation path there as here; they meet at the profile's own
    address and port, or here at any."""
    assert view.settings is not None
    replace, parallel = msgspec.structs.replace, view.settings.parallel
    port = parallel.data_port if view.peers else free_port()
    trial = replace(view.settings, parallel=replace(parallel, data_port=port, start_timeout_s=MEET_S / 2))
    text, ranks = msgspec.json.encode(trial), range(parallel.ranks)

    def run(rank: int) -> Ran | None:
        command = [sys.executable, "-P", "-m", "tided.engine.link_rank", str(rank)]
        there = [] if rank in view.ranks_here else [*SSH, parallel.hosts[rank]]
        return view.machine.run([*there, shlex.join(command)] if there else command, MEET_S, text)

    with ThreadPoolExecutor(len(ranks)) as pool:
        runs = list(pool.map(run, ranks))
    for rank, ran in enumerate(runs):
        if ran is None or ran.code != 0:
            said = "it came to no end" if ran is None or ran.code is None else ran.err.strip() or f"ended by {ran.code}"
            return fail(f"rank {rank} of a trial: {said.splitlines()[-1][:200]}", "a start would end in the same way")
    where = f"on {len(view.peers) + 1} nodes" if view.peers else "on this machine"
    how = f"{len(ranks)} ranks {where}" + ("" if view.on_cuda else ", gloo" + " over loopback" * (not view.peers))
    assert runs[0] is not None
    return _judged(view, json.loads(runs[0].out.splitlines()[-1]), how)


def _judged(view: View, found: object, how: str) -> Finding:
    assert isinstance(found, dict)
    small_s, large = found["sum_us"] / 1e6, found["large_sum_gb_s"] * 1e9
    small = f"a sum of {found['sum_bytes'] >> 10} KB takes {found['sum_us']:.0f} us"
    seen = f"{small}, a large one goes at {large / 1e9:.3g} GB/s ({how})"
    if one_shot := found.get("one_shot"):
        seen += f"; by one launch {one_shot['sum_us']:.0f} us, {one_shot['large_sum_gb_s']:.3g} GB/s"
    if view.on_cuda and view.peers and (small_s > SLOW_SUM_S or large < SLOW_LARGE_BYTES_PER_S):
        return warn(
            seen, "RoCE would be faster: see link.halves, link.gid and link.mtu; NCCL_DEBUG=INFO names its path"
        )
    return ok(seen)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def addresses(machine: Machine) -> list[tuple[str, str]]:
    """(interface, IPv4 address)."""
    ran = machine.run(["ip", "-o", "-4", "addr"], 3.0)
    return [(name, address) for name, address in ADDRESS.findall(ran.out)] if ran and ran.code == 0 else []


def ports(machine: Machine) -> list[Port]:
    found = []
    for device in machine.names("sys/class/infiniband"):
        at = f"sys/class/infiniband/{device}"
        state, rate = machine.text(f"{at}/ports/1/state") or "", (machine.text(f"{at}/ports/1/rate") or "0").split()
        speed = float(rate[0]) if rate and re.fullmatch(r"[\d.]+", rate[0]) else 0.0
        found.append(Port(device, "ACTIVE" in state, speed, tuple(machine.names(f"{at}/device/net"))))
    return found


def gids(machine: Machine, device: str) -> list[Gid]:
    """The table's entries that hold something."""
    at, found = f"sys/class/infiniband/{device}/ports/1", []
    for index in sorted(int(name) for name in machine.names(f"{at}/gids") if name.isdigit())[:MOST_GIDS]:
        text, kind = (machine.text(f"{at}/gids/{index}") or "").strip(), machine.text(f"{at}/gid_attrs/types/{index}")
        if not kind or not text.replace(":", "").strip("0"):
            continue
        address = ipaddress.IPv6Address(text)
        found.append(Gid(index, kind.strip(), str(address.ipv4_mapped or address)))
    return found


def _named(hca: str) -> list[str]:
    """Of NCCL_IB_HCA: "=mlx5_0:1,mlx5_1"; a list of those that are not to be used names none."""
    return [] if hca.startswith("^") else [name.partition(":")[0] for name in hca.lstrip("=").split(",") if name]
