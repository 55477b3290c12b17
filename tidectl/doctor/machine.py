"""What checks see of a machine: its files, its programs, its ports. Tests give them another root, other programs."""

import mmap
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tidectl.preflight import require_free
from tided.errors import TideError

MAX_TEXT_BYTES = 1 << 20
ALIGN_BYTES = 4096


class Ran(NamedTuple):
    """`code` None: it did not end in time."""

    code: int | None
    out: str
    err: str


class Holder(NamedTuple):
    """Who listens on a port; `pid` 0: somebody whom this user may not see."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.pid else "a process of another user"


class Machine:
    """All of it read-only. A path is named without its leading slash."""

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> None:
        self.root, self.environ = root, environ

    def text(self, path: str) -> str | None:
        """None: there is no such file, or it does not tell (an empty place of a GID table is an error to read)."""
        with suppress(OSError), (self.root / path).open("rb") as file:
            return file.read(MAX_TEXT_BYTES).decode(errors="replace")
        return None

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; nothing where it is none."""
        with suppress(OSError):
            return sorted(os.listdir(self.root / path))  # noqa: PTH208
        return []

    def link(self, path: str) -> str:
        with suppress(OSError):
            return os.readlink(self.root / path)  # noqa: PTH115
        return ""

    def run(self, command: Sequence[str], timeout_s: float, stdin: bytes = b"") -> Ran | None:
        """None: there is no such program."""
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, timeout=timeout_s, check=False)
        except FileNotFoundError:
            return None
        except subprocess.TimeoutExpired:
            return Ran(None, "", "")
        except OSError as error:
            return Ran(126, "", str(error))
        return Ran(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    def free_bytes(self, path: Path) -> int:
        """Of the file system that a directory lies on, or will."""
        there = next(one for one in (path, *path.parents) if one.exists())
        return shutil.disk_usage(there).free

    def reads_directly(self, path: Path) -> str:
        """Why the file cannot be read past the page cache; empty: it can."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            try:
                os.preadv(fd, [mmap.mmap(-1, ALIGN_BYTES)], 0)
            finally:
                os.close(fd)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def address(self, host: str) -> str:
        """The IPv4 address of a host, which may be named by it already; else what was given."""
        with suppress(OSError, IndexError):
            return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        return host

    def port_fault(self, host: str, port: int, setting: str) -> TideError | None:
        """Why nobody could listen there now; None: one could."""
        try:
            require_free(host, port, setting)
        except TideError as error:
            return error
        return None

    def holder(self, port: int) -> Holder | None:
        """Who listens on a TCP port; None: nobody."""
        sockets = {inode for table in ("proc/net/tcp", "proc/net/tcp6") for inode in self._listening(table, port)}
        if not sockets:
            return None
        for pid in filter(str.isdigit, self.names("proc")):
            for fd in self.names(f"proc/{pid}/fd"):
                if self.link(f"proc/{pid}/fd/{fd}") in sockets:
                    return Holder(int(pid), (self.text(f"proc/{pid}/comm") or "?").strip())
        return Holder(0, "")

    def _listening(self, table: str, port: int) -> list[str]:
        rows = [line.split() for line in (self.text(table) or "").splitlines()[1:]]
        return [f"socket:[{row[9]}]" for row in rows if len(row) > 9 and row[3] == "0A" and _port(row[1]) == port]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2] or "0", 16)
