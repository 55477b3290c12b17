"""Writing packs: resumable after a kill at any point, whole or not there under their names.

A pack grows under a temporary name: header page (marked as partial), then records, each batch of them flushed to the
device before its checksums are entered into the index. A later run keeps the longest run of records that agree with
their checksums, whatever order the device wrote them in, and goes on behind it. When all are there, index and final
header are flushed and the file gets its name.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType

import numpy as np
from msgspec.structs import replace

from kernels.record import PAGE_BYTES
from packers.pack_header import DIGEST_BYTES, PackHeader
from packers.packs import Pack, Progress, checksum, decode_header, encode_header
from tided.errors import DataError, PermissionError_, UnavailableError

UNKNOWN = "0" * 2 * DIGEST_BYTES  # the index's checksum while a pack is written: as long, so that it moves nothing
FLUSH_BYTES = 256 << 20  # of records between two flushes; a kill loses no more than this
READ_TIMEOUT_S = 120.0  # for one expert: the source's disk is gone
WRITE_TIMEOUT_S = 120.0
READERS = 4
PARTS = 4  # of a record that are written at once
AT_ONCE = READERS + 1  # at most so many experts in a row are being read or written

# (layer, expert) -> the record of each pack, in the order of the packs. READERS threads call it; what it gave is needed
# until it is asked for the expert AT_ONCE behind.
ReadRecords = Callable[[int, int], Sequence[memoryview]]


def pack(directory: Path, headers: Sequence[PackHeader], read: ReadRecords, progress: Progress) -> list[Path]:
    """Writes the packs in one pass over the source; those that exist are left as they are. `progress` counts experts.

    Raises DataError for a file in the way that is not this pack, UnavailableError when there is no room."""
    paths = [directory / header.file_name for header in headers]
    with _failures(directory), ExitStack() as stack:
        directory.mkdir(parents=True, exist_ok=True)
        missing = [not _is_there(path, header) for path, header in zip(paths, headers, strict=True)]
        pairs = zip(paths, headers, missing, strict=True)
        writers = [stack.enter_context(PackWriter(path, header)) if absent else None for path, header, absent in pairs]
        active = [writer for writer in writers if writer is not None]
        check_room(directory, active)
        _copy(writers, headers[0], read, progress)
        for writer in active:
            writer.finish()
    return paths


def check_room(directory: Path, writers: Sequence["PackWriter"]) -> None:
    """Raises UnavailableError unless the rest of the packs fits."""
    found = os.statvfs(directory)
    room, needed = found.f_bavail * found.f_frsize, sum(writer.missing_bytes for writer in writers)
    if needed > room:
        raise UnavailableError(
            f"the packs need {needed / 1e9:.2f} GB more, there are {room / 1e9:.2f}",
            where=str(directory),
            hint="make room, or choose another directory with --out",
        )


class PackWriter:
    """One pack in progress. `done` records are there and intact; `write` takes the next."""

    def __init__(self, path: Path, header: PackHeader) -> None:
        self.path, self.header = path, header
        self.temporary = path.with_name(f".{path.name}.part")
        self._fd = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            self._lock()
            self._index = self._resume()
            self._direct = _direct(self.temporary)
        except BaseException:
            os.close(self._fd)
            raise
        self.done = self._flushed = len(self._index) // DIGEST_BYTES
        self._pool = ThreadPoolExecutor(PARTS, thread_name_prefix="pack-writer")

    def __enter__(self) -> "PackWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pool.shutdown()
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)

    @property
    def missing_bytes(self) -> int:
        return self.header.size_bytes - self.header.offset(self.done)

    def write(self, record: memoryview) -> None:
        if record.nbytes != self.header.nbytes(self.done):
            raise ValueError(f"a record of {record.nbytes} bytes, not {self.header.nbytes(self.done)}")
        self._put_record(record, self.header.offset(self.done))
        self._index += checksum(record)
        self.done += 1
        if self.header.offset(self.done) - self.header.offset(self._flushed) >= FLUSH_BYTES:
            self._flush()

    def finish(self) -> None:
        """The pack gets its name. Raises ValueError when records are missing."""
        if self.done != self.header.records:
            raise ValueError(f"{self.done} of {self.header.records} records")
        self._flush()
        index = bytes(self._index).ljust(self.header.index_bytes, b"\0")
        self._put(index, self.header.header_bytes)
        os.fsync(self._fd)
        whole = encode_header(replace(self.header, index=checksum(index).hex()), self.header.MAGIC)
        self._put(whole[:PAGE_BYTES], 0)  # at once or not at all; behind this page the header is as it was
        os.fsync(self._fd)
        self.temporary.rename(self.path)
        _sync_directory(self.path.parent)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise UnavailableError("another process is writing this pack", where=str(self.temporary)) from e
        if not self._is_at_its_name():
            raise UnavailableError(
                "another process has just finished or removed this pack",
                where=str(self.temporary),
                hint="run the command again: what is finished stays as it is",
            )

    def _is_at_its_name(self) -> bool:
        """Between opening and locking, a writer that was here first may have renamed the file: it is a whole pack."""
        try:
            there = self.temporary.lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._fd), there)

    def _resume(self) -> bytearray:
        """The checksums of the records that an earlier run left intact; an empty file is started. The header is on the
        device before the file is any longer: a file with records has a whole one."""
        region = os.pread(self._fd, self.header.header_bytes, 0)
        index = self._intact() if self._is_ours(region) else bytearray()
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._put(encode_header(replace(self.header, index=UNKNOWN), self.header.PARTIAL), 0)
        os.fsync(self._fd)
        os.ftruncate(self._fd, self.header.offset(len(index) // DIGEST_BYTES))
        return index

    def _is_ours(self, region: bytes) -> bool:
        """False where a run ended before its header was whole. Raises DataError for anything else in the way."""
        whole, partial, header_bytes = self.header.MAGIC, self.header.PARTIAL, self.header.header_bytes
        magic = region[: len(whole)]
        begun = magic in (whole, partial) or not any(region[:PAGE_BYTES])
        if not any(region) or (begun and os.fstat(self._fd).st_size <= header_bytes):
            return False
        # With the magic of a whole pack only the name was missing.
        found = decode_header(region, self.temporary, partial=magic != whole)
        if replace(found, index="") != self.header:
            raise DataError(
                "an unfinished pack of another checkpoint or layout is in the way",
                where=str(self.temporary),
                hint="delete it, or choose another directory with --out",
            )
        if not found.index and header_bytes > PAGE_BYTES:
            raise DataError(
                "an unfinished pack of an earlier version is in the way: a kill would damage it while it is finished",
                where=str(self.temporary),
                hint="delete it: the pack is made from its beginning",
            )
        return True

    def _intact(self) -> bytearray:
        entered, kept = os.pread(self._fd, self.header.index_bytes, self.header.header_bytes), bytearray()
        for number in range(self.header.records):
            nbytes = self.header.nbytes(number)
            record = os.pread(self._fd, nbytes, self.header.offset(number))
            digest = entered[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            if len(record) != nbytes or checksum(record) != digest:
                break
            kept += digest
        return kept

    def _flush(self) -> None:
        """Records to the device, then their checksums into the index, and the pages out of the cache: a pack is larger
        than the memory that the system would give for it."""
        os.fdatasync(self._fd)
        begin = self._flushed * DIGEST_BYTES
        self._put(memoryview(self._index)[begin:].tobytes(), self.header.header_bytes + begin)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._flushed = self.done

    def _put_record(self, record: memoryview, offset: int) -> None:
        """Past the page cache where it can be: what is written there comes back to nobody, and others must give way. A
        few parts are in flight at once."""
        if self._direct is None or _address(record) % PAGE_BYTES:
            self._put(record, offset)
            return
        size = -(-len(record) // (PARTS * PAGE_BYTES)) * PAGE_BYTES
        begins = range(0, len(record), size)
        running = [self._pool.submit(self._put_direct, record[at : at + size], offset + at) for at in begins]
        for part in running:
            part.result(WRITE_TIMEOUT_S)

    def _put_direct(self, part: memoryview, offset: int) -> None:
        written = 0
        try:
            written = os.pwrite(self._direct or self._fd, part, offset)
        except OSError as e:
            if e.errno != errno.EINVAL:  # a device with larger blocks
                raise
        self._put(part[written:], offset + written)

    def _put(self, data: "bytes | memoryview", offset: int) -> None:
        view = memoryview(data)
        while len(view):
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count


def _direct(path: Path) -> int | None:
    """The file, to write past the page cache; None: this file system cannot."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return None


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _is_there(path: Path, header: PackHeader) -> bool:
    """Raises DataError for a file that is another pack, a damaged one, or none."""
    if not path.exists() and not path.is_symlink():
        return False
    if replace(Pack.open(path).header, index="") != header:
        raise DataError(
            "is a pack of another checkpoint or layout, and stays as it is",
            where=str(path),
            hint="delete it, or choose another directory with --out",
        )
    return True


def _copy(writers: "Sequence[PackWriter | None]", header: PackHeader, read: ReadRecords, progress: Progress) -> None:
    begin = min((writer.done for writer in writers if writer), default=header.records)
    progress(begin, header.records)
    for number, records in enumerate(_ahead(read, header, begin), begin):
        for writer, record in zip(writers, records, strict=True):
            if writer is not None and writer.done == number:  # another one may be ahead
                writer.write(record)
        progress(number + 1, header.records)


def _ahead(read: ReadRecords, header: PackHeader, begin: int) -> Iterator[Sequence[memoryview]]:
    """Records in order; a few experts are read while the one before them is written."""
    numbers = iter(range(begin, header.records))
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="pack-reader")
    try:
        running: list[Future[Sequence[memoryview]]] = []
        while True:
            coming = islice(numbers, READERS - len(running))
            running += [pool.submit(read, *divmod(number, header.experts)) for number in coming]
            if not running:
                return
            yield running.pop(0).result(READ_TIMEOUT_S)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _failures(directory: Path) -> Iterator[None]:
    """What the system says of the target, as errors of ours."""
    try:
        yield
    except PermissionError as e:
        raise PermissionError_("this user may not write there", where=e.filename or str(directory)) from e
    except TimeoutError as e:
        raise UnavailableError(f"no expert could be read for {READ_TIMEOUT_S:.0f} s", hint="check the disk") from e
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UnavailableError(
            "the file system is full" if full else f"the pack cannot be written ({e.strerror})",
            where=str(directory),
            hint="make room and run the command again: it goes on where it stopped" if full else "",
        ) from e


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
