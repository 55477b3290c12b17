"""What one node does for the others: keeps a profile, runs its ranks, tells how they are. On this machine it is called,
on another `tidectl.node` calls it."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import tomli

from tidectl import logs, runner
from tidectl.about import line
from tidectl.fits import refuse_misfit
from tidectl.journal import Journal
from tidectl.node_messages import (
    PROTOCOL,
    About,
    Begin,
    Declared,
    Done,
    End,
    Ends,
    Facts,
    Free,
    Hello,
    Lines,
    Look,
    MoreLogs,
    OpenLogs,
    Prepare,
    Prepared,
    Process,
    Reply,
    Request,
    Room,
    Seen,
    Tail,
)
from tidectl.processes import POLL_S
from tidectl.room import room_of
from tidectl.sent import adapted
from tided import guard
from tided.errors import ConfigError, NotRunningError, UnavailableError
from tided.files import write_private
from tided.profile import load_for_start
from tided.profile.instances import is_own_address

BEGINNING_S = 10.0  # from a supervisor's start until it tells of its ranks
SOURCES = (*guard.SOURCE_PACKAGES, "tidectl")


class Work:
    """`state_dir`: of this node."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self._logs: list[logs.Log | Journal] = []
        self._awaited: list[int] = []  # ranks that have no log yet

    def __call__(self, request: Request) -> Reply:
        """Raises what is wrong as errors of ours."""
        match request:
            case Hello():
                return about(self.state_dir)
            case Prepare():
                return self._prepare(request)
            case Begin():
                runner.start(Path(request.profile), self.state_dir, request.ranks)
                return Done()
            case Look():
                return seen(self.state_dir)
            case End():
                return Ends(end(self.state_dir, request.timeout_s), runner.status(self.state_dir).last)
            case Tail():
                found = runner.tail_of(self.state_dir, request.rank, request.lines)
                return Lines([(request.rank, text) for text in found], False)
            case OpenLogs():
                return self._open_logs(request)
            case MoreLogs():
                return self._more_logs()
            case Facts():
                return self._facts(request)
            case Room():
                return self._room(request)

    def close(self) -> None:
        for log in self._logs:
            log.close()
        self._logs, self._awaited = [], []

    def _prepare(self, request: Prepare) -> Prepared:
        """Everything that this node can refuse is refused before a rank is started anywhere."""
        if not is_own_address(request.host):
            raise ConfigError(f"{request.host} in parallel.hosts is no address of the machine that answers there")
        from tided.control.keys import load_keys  # with the library of the control plane

        runner.claim(self.state_dir)
        path = runner.keep_profile(request.name, adapted(request.profile, self.state_dir), self.state_dir)
        settings = load_for_start(path)
        refuse_misfit(settings, path)
        key_file = Path(settings.parallel.key_file or runner.key_file(self.state_dir))
        if request.keys and not settings.parallel.key_file:
            write_private(key_file, request.keys.encode())
        if load_keys(key_file, create=False).leader.public != request.leader:
            hint = "copy rank 0's key file here, mode 0600"
            raise ConfigError("the keys of the control plane are not rank 0's", where=str(key_file), hint=hint)
        return Prepared(str(path))

    def _open_logs(self, request: OpenLogs) -> Lines:
        self.close()
        running = runner.is_running(self.state_dir)
        self._awaited = list(request.ranks)
        self._open_awaited()
        return Lines([line for log in self._logs for line in log.last(request.lines, request.all_runs)], running)

    def _open_awaited(self) -> None:
        for rank in list(self._awaited):
            with suppress(FileNotFoundError):  # nothing was started there yet
                self._logs.append(runner.log_of(self.state_dir, rank))
                self._awaited.remove(rank)

    def _more_logs(self) -> Lines:
        running = runner.is_running(self.state_dir)  # asked before reading: what an ended rank wrote last is read
        self._open_awaited()
        fresh = [line for log in self._logs for line in log.added()]
        if not running and not fresh and self._logs:
            fresh = [line for log in self._logs for line in log.rest()]
            self.close()  # so that the next question finds the end
        return Lines(fresh, running)

    def _facts(self, request: Facts) -> Declared:
        """By opening the checkpoint as a rank does, up to where it would allocate."""
        from tided.engine.build import open_model, open_source
        from tided.engine.devices import refuse_beyond
        from tided.engine.facts import facts_of

        path = self.state_dir / f"guard-{os.getpid()}.toml"
        try:
            write_private(path, adapted(request.profile, self.state_dir).encode(), durable=False)
            settings = load_for_start(path)
            refuse_misfit(settings, path)
            opened = open_model(settings)
        finally:
            path.unlink(missing_ok=True)
        for rank in request.ranks:
            open_source(opened, rank).close()
            if total_bytes := _meminfo().get("MemTotal"):
                refuse_beyond(opened, rank, total_bytes)
        facts = facts_of(opened)
        return Declared(dict.fromkeys(request.ranks, facts))

    def _room(self, request: Room) -> Free:
        directory = request.directory
        if request.profile:
            model = tomli.loads(adapted(request.profile, self.state_dir))["model"]
            directory = str(model["dense" if request.dense else "path"])
        return room_of(Path(directory), request.files)


def about(state_dir: Path) -> About:
    return About(PROTOCOL, line(), build(), _place(state_dir), time.time())


def _place(state_dir: Path) -> str:
    """Tells state directories apart, on whatever machine."""
    found = state_dir.stat()
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {found.st_dev} {found.st_ino}"
    return ""


def build() -> str:
    """Of everything that runs on a node, `tidectl` too."""
    return guard.code_digest(packages=SOURCES)


def end(state_dir: Path, timeout_s: float) -> bool:
    """As `supervisor.stop`, of a start that has only begun too. Whether something ran."""
    deadline = time.monotonic() + BEGINNING_S
    while runner.status(state_dir).run is None and runner.is_running(state_dir):
        if time.monotonic() > deadline:
            raise UnavailableError("a start does not tell of its ranks, so they cannot be ended", where=str(state_dir))
        time.sleep(POLL_S)
    with suppress(NotRunningError):
        runner.stop(state_dir, timeout_s)
        return True
    return False


def seen(state_dir: Path) -> Seen:
    now = runner.status(state_dir)
    memory = _meminfo()
    children = now.run.ranks if now.run else []
    running = {child.rank: child.process.pid for child in children if child.process.is_alive()}
    return Seen(
        now.running,
        now.run,
        now.ranks,
        now.last,
        time.time(),
        memory.get("MemAvailable", 0),
        memory.get("MemTotal", 0),
        {rank: _process(pid) for rank, pid in running.items()},
    )


def _meminfo() -> dict[str, int]:
    found = _fields(Path("/proc/meminfo"))
    return {name: value * 1024 for name, value in found.items()}


def _process(pid: int) -> Process:
    resident = _fields(Path(f"/proc/{pid}/status"), ["VmRSS"]).get("VmRSS", 0)
    return Process(resident * 1024, _fields(Path(f"/proc/{pid}/io")).get("read_bytes", -1))


def _fields(path: Path, names: Sequence[str] = ()) -> dict[str, int]:
    """`name: number` a line, of /proc; nothing where it cannot be read."""
    found = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            number = rest.split()[:1]
            if number and number[0].isdigit() and (not names or name in names):
                found[name] = int(number[0])
    return found
