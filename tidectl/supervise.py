"""The supervisor process: `python -m tidectl.supervise PROFILE STATE_DIR LOCK_FD RANKS PROGRAM...`, started by
`tidectl.supervisor.start` in a session of its own. One thread; it sleeps until a rank writes, a rank ends, or a signal
comes. When one rank ends, all end: half a model serves nobody.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from tidectl.logs import log_path, run_mark
from tidectl.nodes import local_ranks
from tidectl.processes import Identity, identify
from tidectl.supervisor import SIGNAL_CODES, Child, Ended, EndedRank, Run, how_ended
from tided.control.state import read_rank
from tided.errors import PairError, TideError
from tided.files import write_private
from tided.profile import load
from tided.settings import Settings

LOG_BYTES = 16 << 20
LOGS_KEPT = 3  # beside the one in use
CHUNK_BYTES = 64 << 10
FAULT_GRACE_S = 8.0  # the others notice by themselves, tell their clients and end; then they are made to
STOP_MARGIN_S = 10.0  # on top of server.drain_s


class Log:
    """Appends to `path`; a full file becomes `path.1`, and so on."""

    def __init__(self, path: Path, limit_bytes: int = LOG_BYTES) -> None:
        self._path, self._limit_bytes = path, limit_bytes
        self._open()

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._at_line_end = not self._size or os.pread(self._fd, 1, self._size - 1) == b"\n"

    def mark(self, line: str) -> None:
        """A line of our own: what an earlier run left without its end is ended first."""
        self.write(line.encode() if self._at_line_end else f"\n{line}".encode())

    def write(self, data: bytes) -> None:
        """A file is changed between two lines."""
        if self._size and self._size + len(data) > self._limit_bytes:
            if not self._at_line_end:
                head, newline, data = data.partition(b"\n")
                self._append(head + newline)
            if data and self._at_line_end:
                self._rotate()
        self._append(data)

    def _append(self, data: bytes) -> None:
        """A disk that is full loses lines of the log, not the service."""
        if data:
            self._at_line_end = data.endswith(b"\n")
            with suppress(OSError):
                self._size += os.write(self._fd, data)

    def _rotate(self) -> None:
        os.close(self._fd)
        for number in range(LOGS_KEPT, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            with suppress(FileNotFoundError):
                newer.replace(older)
        self._open()

    def close(self) -> None:
        os.close(self._fd)


class Member:
    """One rank as the supervisor holds it: process, log pipe, log file."""

    def __init__(self, rank: int, command: list[str], log: Log) -> None:
        self.rank, self.log = rank, log
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        )
        self.identity: Identity = identify(self.process.pid)
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)

    def copy_output(self) -> bool:
        """Whether more may come."""
        try:
            data = os.read(self.output, CHUNK_BYTES)
        except BlockingIOError:
            return True
        self.log.write(data)
        return bool(data)

    def drain_output(self) -> None:
        """What is in the pipe now; a grandchild that still holds it is not waited for."""
        for _ in range(64):
            if not self.copy_output():
                return

    @property
    def exit_code(self) -> int | None:
        code = self.process.poll()
        return SIGNAL_CODES - code if code is not None and code < 0 else code


class Supervisor:
    def __init__(
        self, profile: Path, state_dir: Path, program: list[str], ranks: list[int], settings: Settings
    ) -> None:
        self._profile, self._state_dir, self._program, self._settings = profile, state_dir, program, settings
        self._ranks = ranks
        self._started = time.time()
        self._selector = selectors.DefaultSelector()
        self._members: list[Member] = []
        self._stopping = False  # set by a signal
        self._at_once = False  # by SIGUSR1: what has not ended is killed
        self._told = False  # the ranks were asked to end
        self._first: int | None = None
        self._deadline = 0.0  # when those that are left are killed

    def run(self) -> int:
        self._wake_on_signals()
        try:
            for rank in self._ranks:
                self._spawn(rank, len(self._ranks))
            while any(member.exit_code is None for member in self._members):
                self._judge()
                self._sleep()
            self._judge()
        finally:
            self._finish()
        return 0 if self._stopping else 70

    def _wake_on_signals(self) -> None:
        self._signals, writer = socket.socketpair()
        for end in (self._signals, writer):
            end.setblocking(False)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._selector.register(self._signals, selectors.EVENT_READ, None)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._stopping |= number != signal.SIGCHLD
        self._at_once |= number == signal.SIGUSR1

    def _spawn(self, rank: int, planned: int) -> None:
        arguments = ["--profile", str(self._profile), "--rank", str(rank), "--state-dir", str(self._state_dir)]
        member = Member(rank, [*self._program, *arguments], Log(log_path(self._state_dir, rank)))
        member.log.mark(run_mark(self._profile))
        self._members.append(member)
        self._selector.register(member.output, selectors.EVENT_READ, member)
        self._tell(planned)

    def _tell(self, planned: int) -> None:
        """What runs, for `tidectl status`."""
        children = [Child(member.rank, member.identity) for member in self._members]
        run = Run(str(self._profile), identify(os.getpid()), self._started, planned, children, self._stopping)
        write_private(self._state_dir / "supervisor.json", msgspec.json.encode(run) + b"\n")

    def _sleep(self) -> None:
        for key, _ in self._selector.select(timeout=0.25 if self._told else 5.0):
            if key.data is None:
                self._signals.recv(4096)
            elif not key.data.copy_output():
                self._selector.unregister(key.fd)

    def _judge(self) -> None:
        """The first to end, or a request to stop, ends all. What does not end in time, or cannot hear, is killed."""
        ended = [member for member in self._members if member.exit_code is not None]
        if not self._told and self._stopping:
            with suppress(OSError):  # on a full disk the end itself still comes
                self._tell(len(self._members))
            self._end_all(self._settings.server.drain_s + STOP_MARGIN_S)
        elif not self._told and ended:
            # Of several, not one that only lost its peer.
            self._first = min(ended, key=lambda member: member.exit_code == PairError.exit_code).rank
            self._end_all(FAULT_GRACE_S)
        for member in self._members if self._told else ():
            late = self._at_once or time.monotonic() > self._deadline
            if member.exit_code is None and (late or member.identity.is_stopped()):
                member.process.kill()

    def _end_all(self, grace_s: float) -> None:
        self._told, self._deadline = True, time.monotonic() + grace_s
        for member in self._members:
            member.identity.send(signal.SIGTERM)

    def _finish(self) -> None:
        ranks = []
        for member in self._members:
            if member.exit_code is None:  # we end by an error of our own
                member.process.kill()
            member.process.wait()
            member.drain_output()
            said = read_rank(self._state_dir, member.rank)
            own = said if said and said.pid == member.process.pid else None
            message = own.message if own and own.phase == "failed" else ""
            code = member.exit_code or 0
            if own and own.phase == "stopped" and code == SIGNAL_CODES + signal.SIGTERM:
                code = 0  # rank 0 had taken it along, and our word came when it had done all but to end
            ranks.append(EndedRank(member.rank, code, message))
            with suppress(OSError):
                print(f"rank {member.rank} {how_ended(code)}", flush=True)
        self._tell_how_it_ended(Ended(str(self._profile), time.time(), self._first, ranks))

    def _tell_how_it_ended(self, last: Ended) -> None:
        """On a full disk in the room of what is removed; where there is none either, it is not told."""
        file, run, words = self._state_dir / "last.json", self._state_dir / "supervisor.json", msgspec.json.encode(last)
        try:
            write_private(file, words + b"\n")
            run.unlink(missing_ok=True)
        except OSError:
            with suppress(OSError):
                run.unlink(missing_ok=True)
                write_private(file, words + b"\n")


def main() -> int:
    profile, state_dir, _lock, chosen, *program = sys.argv[1:]  # the lock is held open until this process ends
    try:
        settings = load(Path(profile))
        ranks = local_ranks(settings.parallel) if chosen == "local" else [int(rank) for rank in chosen.split(",")]
        supervisor = Supervisor(Path(profile), Path(state_dir), program, ranks, settings)
    except TideError as error:
        print(error, flush=True)
        return error.exit_code
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
