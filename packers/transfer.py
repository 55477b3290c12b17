"""Files out of a repository's bytes: each grows under another name, goes on where it was, and takes its own name once
its sum is the one that the hub published.

A file grows at its end alone, so its length says how far it is, whatever ended the process. Bytes that came wrong, or
were lost on the disk, are found by the sum, and then all of the file is fetched once more.
"""

import errno
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

from packers.hub import Published, Repository
from packers.manifest import HASHED_BYTES, Entry
from packers.shard_writer import sync_directory
from packers.wanted import Piece, Target
from tided.errors import DataError, UnavailableError

T = TypeVar("T")
By = Literal["sha256", "git", ""]

REQUEST_BYTES = 256 << 20  # asked for at once; what breaks goes on where it broke
SYNC_BYTES = 256 << 20  # no dirty pages beyond that: a checkpoint is larger than the memory
TICK_S = 0.25
LEAVE_S = 2.0  # for threads to see that it is over; one that waits for the network is left behind

Came = Callable[[int], None]


class Stopped(Exception):
    """Somebody else's failure, or Ctrl-C, ended this one."""


def part_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def part_bytes(path: Path, most: int) -> int:
    """How much of a file that is being fetched is here already."""
    try:
        found = part_path(path).stat().st_size
    except OSError:
        return 0
    return found if found <= most else 0


def transfer(
    repository: Repository, target: Target, path: Path, stop: threading.Event, came: Came, keep: Callable[[Entry], None]
) -> None:
    """Makes `path`. `came` hears of each part, and by a negative number of what has to come again. `keep` gets the
    entry of the manifest before the file takes its name. Raises DataError for bytes that are not those that were
    published, UnavailableError, Stopped."""
    wrong = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            wrong = _attempt(repository, target, path, stop, came, keep)
            if not wrong:
                return
            came(-target.nbytes)
            part_path(path).unlink()
    except OSError as error:
        raise cannot_write(error, path) from error
    hint = "it was fetched twice: the hub sends something else than it published; try later, or another revision"
    raise DataError(wrong, where=f"{repository.name}/{target.name}", hint=hint)


def _attempt(
    repository: Repository, target: Target, path: Path, stop: threading.Event, came: Came, keep: Callable[[Entry], None]
) -> str:
    """What is wrong with the bytes that came; empty: `path` is there."""
    fd = os.open(part_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        sums = _grow(repository, target, fd, stop, came)
        if wrong := sums.wrong(target.published):
            return wrong
        os.fsync(fd)
        keep(Entry(target.nbytes, sums.sha256, sums.by(target.published), os.fstat(fd).st_mtime_ns))
        part_path(path).rename(path)
        sync_directory(path.parent)
    finally:
        os.close(fd)
    return ""


def adopted(path: Path, published: Published, stop: threading.Event, came: Came) -> Entry | None:
    """The entry of a file that is here and is the published one; None where it is another, or nobody can tell."""
    sums, here = _Sums(published), 0
    if not (published.sha256 or published.git):
        return None
    try:
        with path.open("rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            if found.st_size != published.size:
                return None
            while part := file.read(HASHED_BYTES):
                if stop.is_set():
                    raise Stopped
                sums.update(part)
                came(len(part))
                here += len(part)
    except OSError:
        came(-here)
        return None
    if sums.wrong(published):
        came(-here)
        return None
    return Entry(published.size, sums.sha256, sums.by(published), found.st_mtime_ns)


def in_parallel(
    jobs: Sequence[Callable[[], T]], workers: int, stop: threading.Event, tick: Callable[[], None]
) -> Iterator[T]:
    """The results, as they come. `tick` is called between them, and at least each TICK_S. The first job that fails sets
    `stop` and raises here; so does whatever is raised in the caller's thread, a Ctrl-C."""
    todo: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[T, None] | tuple[None, Exception]] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)

    def work() -> None:
        with suppress(queue.Empty):
            while not stop.is_set():
                job = todo.get_nowait()
                try:
                    done.put((job(), None))
                except Exception as error:
                    done.put((None, error))

    # Not a pool of the library: an interpreter that ends would wait for its threads, and so for the network.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(workers, len(jobs)))]
    for thread in threads:
        thread.start()
    try:
        for _ in jobs:
            yield _next(done, tick)
    except BaseException:
        stop.set()
        raise
    finally:
        ends_s = time.monotonic() + LEAVE_S
        for thread in threads:
            thread.join(max(0.0, ends_s - time.monotonic()))


def _next(done: "queue.SimpleQueue[tuple[T, None] | tuple[None, Exception]]", tick: Callable[[], None]) -> T:
    while True:
        tick()
        with suppress(queue.Empty):
            result, error = done.get(timeout=TICK_S)
            if error is not None:
                raise error
            return result  # type: ignore[return-value]


class _Sums:
    """Of bytes as they come. git names a blob by the SHA-1 of its length and its bytes."""

    def __init__(self, published: Published) -> None:
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(f"blob {published.size}\0".encode(), usedforsecurity=False) if published.git else None

    def update(self, part: bytes | memoryview) -> None:
        self._sha256.update(part)
        if self._git:
            self._git.update(part)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def wrong(self, published: Published) -> str:
        """What differs; empty: nothing, or nothing was published."""
        if published.sha256 and published.sha256 != self.sha256:
            return f"its sha256 is {self.sha256}, published is {published.sha256}"
        if self._git and published.git != self._git.hexdigest():
            return f"its git blob is {self._git.hexdigest()}, published is {published.git}"
        return ""

    def by(self, published: Published) -> By:
        return "sha256" if published.sha256 else "git" if published.git else ""


def _grow(repository: Repository, target: Target, fd: int, stop: threading.Event, came: Came) -> _Sums:
    """Appends what is missing; what is here is read, for its sum."""
    sums, here = _Sums(target.published), os.fstat(fd).st_size
    if here > target.nbytes:
        os.ftruncate(fd, 0)
        here = 0
    _read_again(fd, here, sums, stop)
    os.lseek(fd, here, os.SEEK_SET)
    since = 0
    for part in _stream(repository, target.pieces, here):
        if stop.is_set():
            raise Stopped
        _put(fd, part)
        sums.update(part)
        came(len(part))
        since += len(part)
        if since >= SYNC_BYTES:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            since = 0
    return sums


def _stream(repository: Repository, pieces: Sequence[Piece], begin: int) -> Iterator[bytes]:
    """The bytes of all pieces from `begin` on."""
    for piece in pieces:
        size = len(piece) if isinstance(piece, bytes) else piece.end - piece.begin
        if begin >= size:
            begin -= size
            continue
        if isinstance(piece, bytes):
            yield piece[begin:]
        else:
            yield from repository.read(piece.file, piece.begin + begin, piece.end, REQUEST_BYTES)
        begin = 0


def _read_again(fd: int, nbytes: int, sums: _Sums, stop: threading.Event) -> None:
    at = 0
    while at < nbytes:
        if stop.is_set():
            raise Stopped
        part = os.pread(fd, min(HASHED_BYTES, nbytes - at), at)
        if not part:
            raise OSError(errno.EIO, "ends early")
        sums.update(part)
        at += len(part)


def _put(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view) :]


def cannot_write(error: OSError, path: Path) -> UnavailableError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = "the file system is full" if full else f"cannot be written ({error.strerror})"
    return UnavailableError(what, where=str(path), hint="what is here stays: the same command goes on with it")
