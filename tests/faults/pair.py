"""Two ranks of a bundled mini that can be struck: on one host, as `tidectl` starts them, or on two nodes with a link
between them. One folder, life after life."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from tests.bundled import Mini
from tests.control.conftest import free_ports
from tests.faults import strike
from tests.faults.link import Link
from tidectl import supervisor
from tided.control.keys import load_keys
from tided.errors import NotRunningError, TideError

PROGRAM = (sys.executable, "-m", "tests.faults.rank")
MARK = "TIDE_FAULTS_MARK"  # in the environment of all that belongs to a pair
READY_S, GONE_S, POLL_S = 240.0, 45.0, 0.01
DISK_BYTES = 6_000_000
DRAIN_S = 3
PROFILE = """
[model]
path = "{mini.path}"
served_name = "mini-{mini}"
prefill_chunk_tokens = 64
[experts]
resident = {resident}
spare_slots = 8
source = "pack"
pack_dir = "{packs}"
verify_reads = true
[tide]
seed = "{mini.path}/demand-seed.json"
hot_ring_slots = 16
[cache]
context_tokens = 640
pool_tokens = 640
prefix_ram_bytes = 1_000_000
prefix_disk_bytes = {disk_bytes}
[engine]
lanes = 2
guard_every_steps = 8
draft = "acceptance"
[parallel]
ranks = 2
control_port = {port}
data_port = {data_port}
peer_timeout_s = {peer_timeout_s}
start_timeout_s = 8
{parallel}
[server]
port = {http_port}
drain_s = {drain_s}
"""


def make_packs(folder: Path, mini: Mini) -> Path:
    command = [sys.executable, "-m", "tidectl.main", "pack", "--checkpoint", str(mini.path), "--ranks", "2"]
    subprocess.run([*command, "--out", str(folder)], check=True, capture_output=True, timeout=300)
    return folder


class Pair(ABC):
    """`reaction_s`: the silence after which a peer is dead."""

    def __init__(self, folder: Path, packs: Path, peer_timeout_s: float, mini: Mini, **profile: object) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.tmp = folder / "tmp"
        self.tmp.mkdir(parents=True)
        first = free_ports(4)
        self.url = f"http://127.0.0.1:{first + 3}"
        self.profile = folder / "profile.toml"
        text = {"port": first, "data_port": first + 2, "http_port": first + 3, "mini": mini, "parallel": ""}
        text |= {"packs": packs, "disk_bytes": DISK_BYTES, "resident": mini.experts * 5 // 12, "drain_s": DRAIN_S}
        self.profile.write_text(PROFILE.format(**text | {"peer_timeout_s": peer_timeout_s} | profile))
        self.environment = dict(os.environ) | {MARK: self.mark, "TMPDIR": str(self.tmp), "OMP_NUM_THREADS": "1"}
        self.environment["MALLOC_ARENA_MAX"] = "1"  # else each thread has memory in reserve that no balloon reaches

    @abstractmethod
    def state_dir(self, rank: int) -> Path: ...

    @abstractmethod
    def start(self) -> None:
        """Returns at once."""

    @abstractmethod
    def ask_to_stop(self) -> None: ...

    @abstractmethod
    def pids(self) -> list[int]:
        """Of the ranks, as far as they were started."""

    @abstractmethod
    def codes(self) -> list[int | None]:
        """How the ranks ended, as the shell counts."""

    @abstractmethod
    def log(self, rank: int) -> str: ...

    def words(self, lines: int = 25) -> str:
        """The newest of both ranks' logs, without the looks at their health."""
        kept = [[line for line in self.log(rank).splitlines() if "/health" not in line][-lines:] for rank in (0, 1)]
        return "\n".join(["--- rank 0", *kept[0], "--- rank 1", *kept[1]])

    def caches(self) -> list[Path]:
        return [self.state_dir(rank) / "cache" / f"rank-{rank}" for rank in (0, 1)]

    def left(self) -> list[int]:
        """Processes that belong to this pair and live."""
        return [
            int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and self._is_ours(int(path.name))
        ]

    def _is_ours(self, pid: int) -> bool:
        try:
            alive = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            return alive and f"{MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def wait_ready(self) -> bool:
        """Whether it serves; not when it ended instead."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if health(self.url)[0] == 200:
                return True
            if not self.left():
                time.sleep(0.2)  # a process has its environment, by which it is known, a moment after it begins
                if not self.left():
                    return False
            time.sleep(0.05)
        raise TideError(f"neither ready nor ended after {READY_S:g} s")

    def wait_gone(self, timeout_s: float = GONE_S) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.left():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def signal(self, rank: int, number: int) -> None:
        with suppress(ProcessLookupError, IndexError):
            os.kill(self.pids()[rank], number)

    def arm(self, rank: int, what: strike.Strike) -> None:
        strike.arm(self.state_dir(rank), rank, what)

    def disarm(self) -> None:
        for rank in (0, 1):
            strike.disarm(self.state_dir(rank), rank)

    def kill_all(self) -> None:
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_gone()

    def close(self) -> None:
        self.kill_all()


class Host(Pair):
    """`own_disk`: the state directory is a small disk of its own, where this process may make one."""

    def __init__(self, folder: Path, packs: Path, peer_timeout_s: float, mini: Mini, **profile: object) -> None:
        super().__init__(folder, packs, peer_timeout_s, mini, **profile)
        self._state = folder / "state"
        self._state.mkdir(mode=0o700)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=96m,mode=0700", "faults", str(self._state)], capture_output=True
        )
        self.own_disk = mounted.returncode == 0
        self._handle: supervisor.Handle | None = None

    def state_dir(self, rank: int) -> Path:
        return self._state

    def start(self) -> None:
        kept = dict(os.environ)
        os.environ.update(self.environment)
        try:
            self._handle = supervisor.start(self.profile, self._state, PROGRAM)
        finally:
            os.environ.clear()
            os.environ.update(kept)

    def ask_to_stop(self) -> None:
        if self._handle is not None and self._handle.process.poll() is None:
            self._handle.process.send_signal(signal.SIGTERM)

    def pids(self) -> list[int]:
        run = supervisor.status(self._state).run
        if run is not None:
            self._pids = [child.process.pid for child in run.ranks]
        return getattr(self, "_pids", [])

    def left(self) -> list[int]:
        if self._handle is not None:
            self._handle.process.poll()
        return super().left()

    def codes(self) -> list[int | None]:
        last = supervisor.status(self._state).last
        return [rank.exit_code for rank in last.ranks] if last else [None, None]

    def log(self, rank: int) -> str:
        path = self._state / "logs" / f"rank-{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def words(self, lines: int = 25) -> str:
        own = self._state / "logs" / "supervisor.log"
        return super().words(lines) + (f"\n--- supervisor\n{own.read_text()[-2000:]}" if own.exists() else "")

    def close(self) -> None:
        with suppress(NotRunningError, TideError):
            supervisor.stop(self._state, 1)
        super().close()
        if self.own_disk:
            subprocess.run(["umount", "-l", str(self._state)], check=True, timeout=30)


class Nodes(Pair):
    """Each rank is a process of its own, with a state directory of its own, and nobody watches over both."""

    def __init__(self, folder: Path, packs: Path, peer_timeout_s: float, mini: Mini, **profile: object) -> None:
        self.link = Link()
        hosts = f'hosts = ["{self.link.here}", "{self.link.there}"]\nkey_file = "{folder}/curve.key"'
        super().__init__(folder, packs, peer_timeout_s, mini, parallel=hosts, **profile)
        load_keys(folder / "curve.key", create=True)
        self._ranks: list[subprocess.Popen[bytes]] = []
        for rank in (0, 1):
            self.state_dir(rank).mkdir(mode=0o700)

    def state_dir(self, rank: int) -> Path:
        return self.folder / f"node-{rank}"

    def start(self) -> None:
        self.link.heal()
        self._ranks = []
        for rank in (0, 1):
            arguments = ["--profile", str(self.profile), "--rank", str(rank), "--state-dir", str(self.state_dir(rank))]
            command = [*(self.link.inside if rank else []), *PROGRAM, *arguments]
            with self._log(rank).open("ab") as output:
                self._ranks.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environment
                    )
                )

    def ask_to_stop(self) -> None:
        for process in self._ranks:
            process.terminate()

    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks]

    def left(self) -> list[int]:
        for process in self._ranks:
            process.poll()
        return super().left()

    def codes(self) -> list[int | None]:
        """Of processes that have let go of all they had, and may still be ending."""
        for process in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        return [code if code is None or code >= 0 else 128 - code for code in (p.returncode for p in self._ranks)]

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def log(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace") if self._log(rank).exists() else ""

    def close(self) -> None:
        super().close()
        self.link.close()


def health(url: str) -> tuple[int, dict[str, object]]:
    """Status 0 when nobody answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=3) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, {}
    except (OSError, http.client.HTTPException, ValueError):
        return 0, {}


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
