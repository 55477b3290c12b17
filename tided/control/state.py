"""What a rank writes about itself while it lives, for `tidectl` to show: `rank-N.json` in the state directory."""

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from tided.errors import UnavailableError
from tided.files import write_private

log = logging.getLogger("state")

Phase = Literal["checking", "joining", "loading", "ready", "draining", "stopped", "failed"]
LAST_PHASES = ("stopped", "failed")
MAX_FILE_BYTES = 64 << 10


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """`started` and `since` in seconds of Unix time: of the process, of the phase. `port` is where HTTP is served, 0
    for none. `exit_code` is known in the last phases. `message` holds progress, or the error in full; `done` of `total`
    is the same progress in numbers, `total` 0 where it has none."""

    rank: int
    pid: int
    started: float
    phase: Phase
    since: float
    message: str = ""
    done: int = 0
    total: int = 0
    port: int = 0
    exit_code: int | None = None


class StateFile:
    """The writer's side. One process writes one file."""

    def __init__(self, state_dir: Path, rank: int) -> None:
        now = time.time()
        self.path = rank_file(state_dir, rank)
        self._state = RankState(rank=rank, pid=os.getpid(), started=now, phase="checking", since=now)
        self._write()

    @property
    def state(self) -> RankState:
        return self._state

    def enter(
        self,
        phase: Phase,
        message: str = "",
        *,
        done: int = 0,
        total: int = 0,
        port: int | None = None,
        exit_code: int | None = None,
    ) -> None:
        state = self._state
        self._state = msgspec.structs.replace(
            state,
            phase=phase,
            since=state.since if state.phase == phase else time.time(),
            message=message,
            done=done,
            total=total,
            port=state.port if port is None else port,
            exit_code=exit_code,
        )
        self._write()

    def _write(self) -> None:
        try:
            # Progress is written on the loop, twice a second: only a last word is worth a wait for the disk, in which
            # no heartbeat goes out.
            durable = self._state.phase in LAST_PHASES
            write_private(self.path, msgspec.json.encode(self._state) + b"\n", durable=durable)
        except OSError as error:  # a full disk must not end a service for what people read only
            log.warning("%s cannot be written: %s", self.path, error.strerror)


class Claim:
    """A rank's hold on its state directory: one process writes its state and its history. Held until the process ends,
    however it ends; by a record lock, which no child inherits. Raises UnavailableError naming who holds it."""

    def __init__(self, state_dir: Path, rank: int, words: str) -> None:
        """`words`: what this process is, for the one that is refused."""
        self._path = lock_file(state_dir, rank)
        self._take(rank)
        while not self._is_at_its_name():  # who held it has removed it since it was opened
            os.close(self._fd)
            self._take(rank)
        with suppress(OSError):  # a full disk: the lock counts, its words are for people
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{words}, pid {os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """For a process that goes on."""
        os.close(self._fd)

    def remove(self) -> None:
        """Releases it and leaves no file: of a rank that never was here."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def _take(self, rank: int) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(self._fd, MAX_FILE_BYTES).decode(errors="replace").strip()
            os.close(self._fd)
            hint = "stop it first: `tidectl status`"
            raise UnavailableError(
                f"rank {rank} runs here already ({owner})", where=str(self._path), hint=hint
            ) from None

    def _is_at_its_name(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.lstat())
        except FileNotFoundError:
            return False


def lock_file(state_dir: Path, rank: int) -> Path:
    return state_dir / f"rank-{rank}.lock"


def rank_file(state_dir: Path, rank: int) -> Path:
    return state_dir / f"rank-{rank}.json"


def read_rank(state_dir: Path, rank: int) -> RankState | None:
    """The rank's last word, or None when it has said nothing that can be read."""
    try:
        with rank_file(state_dir, rank).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_FILE_BYTES), type=RankState)
    except (OSError, msgspec.MsgspecError):
        return None
