"""Where systemd does not run the machine: one detached supervisor process starts the ranks and ends them together.

    STATE_DIR/lock             flock held by the supervisor as long as it lives: one instance a state directory
    STATE_DIR/supervisor.json  what it runs (`Run`); gone when it ended in order
    STATE_DIR/last.json        how the last run ended (`Ended`)
    STATE_DIR/rank-N.json      what each rank says of itself (`tided.control.state`)
    STATE_DIR/logs/            rank-N.log, and supervisor.log for the supervisor's own words

Start, wait, status, stop are called by `tidectl`; the process itself is `tidectl.supervise`. A `Run` without the lock
means that the supervisor was killed: its ranks are ended and its files removed by the next start or stop.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from tidectl.processes import KILL_WAIT_S, POLL_S, Identity, end
from tided.control.state import RankState, rank_file, read_rank
from tided.errors import (
    ConfigError,
    DataError,
    NotRunningError,
    PairError,
    PermissionError_,
    TideError,
    UnavailableError,
)

ORPHAN_GRACE_S = 5.0
DAEMON = (sys.executable, "-m", "tided.daemon")

SIGNAL_CODES = 128  # an exit code above is this and the number of a signal
LOCK_TRIES = 20  # a status command holds the lock for an instant while it looks

KINDS: dict[int, type[TideError]] = {
    kind.exit_code: kind for kind in (ConfigError, DataError, UnavailableError, PermissionError_)
}

Progress = Callable[[list[RankState]], None]
Record = TypeVar("Record", bound=msgspec.Struct)


class Child(msgspec.Struct, frozen=True):
    rank: int
    process: Identity


class Run(msgspec.Struct, frozen=True):
    """`started` in seconds of Unix time. `ranks` are those of this machine that run; there will be `planned`.
    `stopping`: a stop was asked for."""

    profile: str
    supervisor: Identity
    started: float
    planned: int
    ranks: list[Child]
    stopping: bool = False


class EndedRank(msgspec.Struct, frozen=True):
    """`exit_code` as the shell counts: `SIGNAL_CODES` + the number of the signal that ended it."""

    rank: int
    exit_code: int
    message: str


class Ended(msgspec.Struct, frozen=True):
    """`first` is the rank that ended first, by itself; None when the run was stopped by request."""

    profile: str
    ended: float
    first: int | None
    ranks: list[EndedRank]


@dataclass(frozen=True)
class Status:
    """`running`: the supervisor lives. `run` without `running`: it was killed, `ranks` may be orphans."""

    running: bool
    run: Run | None
    ranks: list[RankState]
    last: Ended | None


@dataclass(frozen=True)
class Handle:
    """A run that was just started."""

    state_dir: Path
    process: subprocess.Popen[bytes]

    def wait_ready(self, timeout_s: float, progress: Progress = lambda ranks: None) -> list[RankState]:
        """Waits until every rank of this machine serves. Raises the error of the rank that ended first, with its own
        exit code, or UnavailableError when the time is over (the run goes on)."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            now = status(self.state_dir)
            progress(now.ranks)
            if ended:
                raise why_ended(now, self.state_dir)
            if now.run and len(now.ranks) == now.run.planned and _all_ready(now.ranks):
                return now.ranks
            time.sleep(POLL_S)
        raise UnavailableError(
            f"the ranks are not ready after {timeout_s:g} s",
            hint="they go on loading: tidectl status shows how far they are, tidectl stop ends them",
        )


def _all_ready(ranks: list[RankState]) -> bool:
    return all(rank.phase == "ready" for rank in ranks)


def start(
    profile: Path, state_dir: Path, program: Sequence[str] = DAEMON, ranks: Sequence[int] | None = None
) -> Handle:
    """Starts the supervisor of some of a profile's ranks, by default of those of this machine, and returns at once.
    Raises UnavailableError when one runs already.

    The lock is taken here and handed to the supervisor open, so that no other start can come in between."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = take_lock(state_dir)
    try:
        clean(state_dir)
        for old in (state_dir / "last.json", *state_dir.glob("rank-*.json")):
            old.unlink(missing_ok=True)
        (state_dir / "logs").mkdir(mode=0o700, exist_ok=True)
        return Handle(state_dir, _detach(profile.absolute(), state_dir.absolute(), lock, program, ranks))
    finally:
        os.close(lock)


def _detach(
    profile: Path, state_dir: Path, lock: int, program: Sequence[str], ranks: Sequence[int] | None
) -> subprocess.Popen[bytes]:
    chosen = "local" if ranks is None else ",".join(map(str, ranks))
    command = [sys.executable, "-m", "tidectl.supervise", str(profile), str(state_dir), str(lock), chosen, *program]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    output = os.open(state_dir / "logs" / "supervisor.log", flags, 0o600)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[lock],
            start_new_session=True,
        )
    finally:
        os.close(output)


def status(state_dir: Path) -> Status:
    """Changes nothing."""
    run = read_file(state_dir / "supervisor.json", Run)
    last = read_file(state_dir / "last.json", Ended)
    numbers = [child.rank for child in run.ranks] if run else [rank.rank for rank in last.ranks] if last else []
    ranks = [state for number in numbers if (state := read_rank(state_dir, number))]
    return Status(is_locked(state_dir), run, ranks, last)


def stop(state_dir: Path, timeout_s: float, watch: Callable[[], None] = lambda: None) -> None:
    """Ends what runs: running requests may finish first, until `timeout_s`; then by force. `watch` is called before it
    and while it lasts. Raises NotRunningError."""
    now = status(state_dir)
    if now.run is None and not now.running:
        raise NotRunningError("nothing is running", where=str(state_dir))
    if now.running and now.run is not None:
        watch()
        _end_supervisor(now.run.supervisor, timeout_s, watch)
    if now.run is None:
        raise UnavailableError("a start is under way; try again in a moment", where=str(state_dir))
    lock = take_lock(state_dir)
    try:
        clean(state_dir, min(timeout_s, ORPHAN_GRACE_S))  # of use when the supervisor was killed, by us or before
    finally:
        os.close(lock)


def _end_supervisor(supervisor: Identity, timeout_s: float, watch: Callable[[], None]) -> None:
    """In order; when the time is over by SIGUSR1, on which it kills its ranks and still tells how they ended; at last
    without it."""
    for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGUSR1, KILL_WAIT_S)):
        supervisor.send(number)
        deadline = time.monotonic() + wait_s
        while supervisor.is_alive() and not supervisor.is_stopped() and time.monotonic() < deadline:
            watch()
            time.sleep(POLL_S)
    end([supervisor], 0)


def clean(state_dir: Path, grace_s: float = ORPHAN_GRACE_S) -> None:
    """Ends the ranks of a supervisor that was killed, and removes its files. Called with the lock held."""
    run = read_file(state_dir / "supervisor.json", Run)
    if run is not None:
        end([child.process for child in run.ranks], grace_s)
        for child in run.ranks:
            rank_file(state_dir, child.rank).unlink(missing_ok=True)
    (state_dir / "supervisor.json").unlink(missing_ok=True)


def take_lock(state_dir: Path) -> int:
    """An open file that holds the lock until it, and every copy of it, is closed. Raises UnavailableError naming the
    holder."""
    lock = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    for _ in range(LOCK_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        time.sleep(POLL_S)
    os.close(lock)
    raise _running_already(state_dir)


def _running_already(state_dir: Path) -> UnavailableError:
    run = read_file(state_dir / "supervisor.json", Run)
    what = f"{run.profile} runs already (process {run.supervisor.pid})" if run else "another start is under way"
    return UnavailableError(what, where=str(state_dir), hint="tidectl stop ends it, tidectl restart replaces it")


def is_locked(state_dir: Path) -> bool:
    try:
        lock = os.open(state_dir / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def read_file(path: Path, kind: type[Record]) -> Record | None:
    """None when it is not there or cannot be read."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=kind)
    return None


def culprit(last: Ended) -> EndedRank | None:
    """The rank that has a reason of its own, else the first to end: the others only lost their peer. None when the run
    was stopped by request."""
    by_first = sorted(last.ranks, key=lambda rank: rank.rank != last.first)
    wanted = [rank for rank in by_first if rank.exit_code in KINDS] or by_first[:1]
    return wanted[0] if wanted and last.first is not None else None


def how_ended(exit_code: int) -> str:
    """To follow the name of a rank."""
    if exit_code > SIGNAL_CODES:
        return f"was killed by signal {exit_code - SIGNAL_CODES}"
    return f"ended with exit code {exit_code}"


def has_own_reason(last: Ended | None) -> bool:
    """Whether a rank ended by itself, and not because it lost its peer."""
    found = culprit(last) if last else None
    return found is not None and found.exit_code != PairError.exit_code


def why_ended(now: Status, state_dir: Path | None, where: str = "") -> TideError:
    """The culprit's error. A rank that said nothing is told of by its end. `state_dir`: where its log is; None on
    another node, which `where` then names (" on HOST")."""
    found = culprit(now.last) if now.last else None
    if now.last and now.last.first is None:
        return UnavailableError(f"it was stopped before it served{where}", hint="by `tidectl stop`, or by a signal")
    if found is None:
        log = f"see {state_dir / 'logs' / 'supervisor.log'}" if state_dir else "see its logs/supervisor.log there"
        return UnavailableError(f"the supervisor{where} ended", hint=log)
    kind = KINDS.get(found.exit_code, PairError)
    log_of = f"tidectl logs --rank {found.rank}"
    hint = f"its log: {state_dir / 'logs' / f'rank-{found.rank}.log' if state_dir else log_of}"
    if found.message:
        return kind(found.message, where=f"rank {found.rank}{where}", hint=hint)
    return kind(f"rank {found.rank}{where} {how_ended(found.exit_code)} and said nothing", hint=hint)
