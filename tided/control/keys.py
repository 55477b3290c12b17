"""The CURVE keys of the control plane: one file, the same on every node, made by whoever comes first.

Or the service manager hands it to the process as a credential, which only root keeps on disk (`credential`).

The file holds two key pairs: rank 0's, and one that all other ranks share. Rank 0 lets in the holder of the second
only, and the others speak to the holder of the first only. Whoever can read the file is a rank: mode 0600.
"""

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from tided.errors import DataError, PermissionError_, UnavailableError
from tided.files import write_private

MAX_FILE_BYTES = 4096
CREDENTIAL = "curve.key"
LOCK_TIMEOUT_S = 10.0
LOCK_POLL_S = 0.02


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Z85 text, 40 characters each."""

    public: str
    secret: str

    def __repr__(self) -> str:  # a secret must not reach a log by way of a traceback
        return f"KeyPair(public={self.public!r})"


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    leader: KeyPair
    followers: KeyPair


def load_keys(path: Path, *, create: bool) -> Keys:
    """The keys in `path`; made first when it is not there and `create` says so (never on a second node: its keys
    would not be the first node's). Raises PermissionError_, DataError, UnavailableError."""
    if create:
        _create_once(path)
    return _read(path)


def credential(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The key file that the service manager gave (LoadCredential=curve.key), if it gave one: where a node has none, the
    unit has a comment sign stand in its place, because without the file it would not start."""
    if not (directory := environment.get("CREDENTIALS_DIRECTORY")):
        return None
    path = Path(directory) / CREDENTIAL
    try:
        with path.open("rb") as file:
            return None if file.read(1) == b"#" else path
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PermissionError_(f"the credential cannot be read: {error.strerror}", where=str(path)) from None


def _create_once(path: Path) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with _lock(path.with_name(path.name + ".lock")):
        if not path.exists():
            keys = Keys(1, _new_pair(), _new_pair())
            write_private(path, msgspec.json.format(msgspec.json.encode(keys)) + b"\n")


def _new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held for the milliseconds in which keys are made; the ranks of a machine start at the same time. Raises
    UnavailableError when somebody holds it for longer."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _take(fd, path)
        yield
    finally:
        os.close(fd)


def _take(fd: int, path: Path) -> None:
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"another process holds the lock of the key file for over {LOCK_TIMEOUT_S:g} s",
                    where=str(path),
                    hint="end the rank that hangs there, then start again",
                ) from None
            time.sleep(LOCK_POLL_S)


def _read(path: Path) -> Keys:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise UnavailableError(
            "the keys of the control plane are not there",
            where=str(path),
            hint="copy the file from rank 0's node (mode 0600), or name it by parallel.key_file",
        ) from None
    except OSError as error:
        raise PermissionError_(
            f"the keys of the control plane cannot be read: {error.strerror}", where=str(path)
        ) from None
    with os.fdopen(fd, "rb") as file:
        _check_private(path, os.fstat(file.fileno()))
        return _decode(path, file.read(MAX_FILE_BYTES + 1))


def _check_private(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode) or info.st_uid not in (os.geteuid(), 0):
        raise PermissionError_("the key file must be a regular file of this user", where=str(path))
    # A credential may be root's, with an ACL for this user: then the group's bits are the ACL's mask. In a directory
    # of this user alone they open it to nobody else.
    given = path.parent == Path(os.environ.get("CREDENTIALS_DIRECTORY", "/nonexistent"))
    if info.st_mode & (0o037 if given else 0o077):
        raise PermissionError_(
            f"others may read the key file (mode {stat.S_IMODE(info.st_mode):04o})",
            where=str(path),
            hint=f"if nobody did: chmod 600 {path}; otherwise delete it on every node, and new keys are made",
        )


def _decode(path: Path, data: bytes) -> Keys:
    try:
        keys = msgspec.json.decode(data, type=Keys)
        for pair in (keys.leader, keys.followers):
            if zmq.curve_public(pair.secret.encode()) != pair.public.encode():
                raise ValueError
    except (msgspec.MsgspecError, ValueError, zmq.ZMQError):
        raise DataError(
            "this is not a key file, or it is damaged",
            where=str(path),
            hint="delete it on every node; new keys are made at the next start",
        ) from None
    return keys
