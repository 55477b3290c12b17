"""A machine out of files and scripted programs, for checks that look at one."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tidectl.doctor.check import View
from tidectl.doctor.engine import Answer, Engine
from tidectl.doctor.machine import Machine, Ran
from tidectl.running import Snapshot
from tided.errors import TideError
from tided.settings import Cache, Experts, Model, Parallel, Settings
from tided.settings import Engine as EngineSettings

STOPPED = Snapshot("stopped", "", "", 0.0, [], None, [], None)
MEMINFO = {"MemTotal": 130_700_000, "MemFree": 120_000_000, "MemAvailable": 122_000_000, "Cached": 2_000_000}

IP = """\
1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever
3: enp1s0f0np0    inet 192.168.177.11/24 brd 192.168.177.255 scope global enp1s0f0np0\\       valid_lft forever
4: enP2p1s0f0np0    inet 192.168.178.11/24 brd 192.168.178.255 scope global enP2p1s0f0np0\\       valid_lft forever
"""
LINK_LOCAL, MAPPED = "fe80:0000:0000:0000:4ebb:47ff:fe2d:0001", "0000:0000:0000:0000:0000:ffff:{}"
NOTHING = "0000:0000:0000:0000:0000:0000:0000:0000"


class Scripted(Machine):
    """Programs by their first word: what they print, or how they ran. What is not listed is not installed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, {})
        self.programs: dict[str, str | Ran | Callable[[Sequence[str]], Ran]] = {}
        self.ran: list[Sequence[str]] = []
        self.free, self.not_direct = 10**12, ""
        self.taken: dict[int, TideError] = {}

    def run(self, command: Sequence[str], timeout_s: float, stdin: bytes = b"") -> Ran | None:
        self.ran.append(command)
        found = self.programs.get(command[0])
        if callable(found):
            return found(command)
        return Ran(0, found, "") if isinstance(found, str) else found

    def free_bytes(self, path: Path) -> int:
        return self.free

    def reads_directly(self, path: Path) -> str:
        return self.not_direct

    def port_fault(self, host: str, port: int, setting: str) -> TideError | None:
        return self.taken.get(port)

    def put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def memory(self, **kilobytes: int) -> None:
        lines = {**MEMINFO, **kilobytes}
        self.put("proc/meminfo", "".join(f"{name}: {value} kB\n" for name, value in lines.items()))

    def process(self, pid: int, name: str, kilobytes: int) -> None:
        self.put(f"proc/{pid}/status", f"Name:\t{name}\nState:\tS\nVmRSS:\t{kilobytes} kB\n")
        self.put(f"proc/{pid}/comm", f"{name}\n")


class Scripts(Engine):
    """Answers by question; what is not listed was never asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def answer(self, question: str, timeout_s: float) -> Answer:
        found = self.answers[question]
        return found if isinstance(found, Answer) else Answer(question, found)


def settings(**changes: Any) -> Settings:
    """Of a pair on CUDA; `changes` by section."""
    base: dict[str, Any] = {
        "model": Model(path="/models/here", served_name="x"),
        "experts": Experts(resident=100),
        "cache": Cache(context_tokens=64, pool_tokens=64),
        "engine": EngineSettings(device="cuda"),
        "parallel": Parallel(ranks=2, hosts=("192.168.177.11", "192.168.177.12"), interface="enp1s0f0np0"),
    }
    for section, fields in changes.items():
        base[section] = msgspec.structs.replace(base.get(section) or getattr(EMPTY, section), **fields)
    return Settings(**base)


EMPTY = Settings(
    model=Model(path="/x", served_name="x"), experts=Experts(resident=1), cache=Cache(context_tokens=16, pool_tokens=16)
)


def view_on(machine: Machine, tmp_path: Path, made: Settings | None = None, **fields: Any) -> View:
    """Rank 0's machine of a pair, nothing running."""
    profile = tmp_path / "pair.toml"
    view = View(machine, tmp_path / "state", STOPPED, profile, made or settings(), **fields)
    view.__dict__["ranks_here"] = [0] if view.settings and view.settings.parallel.hosts else [0, 1]
    return view


def running(view: View, **measured: Any) -> View:
    """The profile serves, and /health has what its start measured."""
    health = {"status": "ok", "engine_config": measured}
    view.running = Snapshot("serving", str(view.profile), "http://x", 1.0, [], health, [], None)
    return view


def adapter(
    machine: Scripted, name: str, interface: str, gids: Sequence[tuple[str, str]], state: str = "4: ACTIVE"
) -> None:
    """An RDMA device of one port. `gids`: address and kind by place; an empty place cannot be read."""
    at = f"sys/class/infiniband/{name}"
    machine.put(f"{at}/ports/1/state", state)
    machine.put(f"{at}/ports/1/rate", "100 Gb/sec (4X EDR)")
    machine.put(f"{at}/device/net/{interface}", "")
    for place, (address, kind) in enumerate(gids):
        machine.put(f"{at}/ports/1/gids/{place}", address)
        if kind:
            machine.put(f"{at}/ports/1/gid_attrs/types/{place}", kind)


def interface(machine: Scripted, name: str, state: str = "up", speed: str = "200000", mtu: str = "9000") -> None:
    for file, text in (("operstate", state), ("speed", speed), ("mtu", mtu)):
        machine.put(f"sys/class/net/{name}/{file}", f"{text}\n")
