"""Files that are replaced as a whole: another name beside them, fsync, rename.

    .<name>.<8 hexadecimal digits>.tmp    beside the file; nobody else's, and locked as long as its writer lives

What a killed writer left is not locked: `sweep` removes it."""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp", re.DOTALL)
PRIVATE = 0o600


def write_private(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Mode 0600. Raises OSError; the old file is there then."""
    with whole(path, PRIVATE, durable=durable) as file:
        file.write(data)


@contextmanager
def whole(path: Path, mode: int = 0o666, *, durable: bool = True) -> Iterator[BinaryIO]:
    """What is written takes the place of `path` when the block has ended well. Without `durable` no fsync, which on a
    busy disk takes seconds: a power cut may then leave the file empty. `mode`: less the umask. Raises OSError."""
    temporary, fd = _begun(path, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(fd)
            temporary.replace(path)  # still locked
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_of(path: Path) -> Path:
    """A name that nobody has."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def sweep(directory: Path) -> None:
    """Removes what writers that were killed left in the directory. Raises OSError where it cannot be read."""
    for entry in os.scandir(directory):
        if TEMPORARY.fullmatch(entry.name):
            with suppress(OSError):  # somebody writes it, or another has swept it, or may alone
                _remove_if_left(entry.path)


def _begun(path: Path, mode: int) -> tuple[Path, int]:
    while True:
        temporary = temporary_of(path)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        if _held(fd):
            return temporary, fd
        os.close(fd)


def _held(fd: int) -> bool:
    """Whether the new file is the writer's: not where it was swept in the moment before it was locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where nothing is swept either
        return True
    return os.fstat(fd).st_nlink > 0


def _remove_if_left(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)  # noqa: PTH108  as scandir told it
    finally:
        os.close(fd)
