"""One pack in progress: records in order, flushed to the device before their checksums are entered into the index. What
a pack is while it grows, and how a later run goes on: `packers.pack`."""

import errno
import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from kernels.record import PAGE_BYTES
from packers.memory import page_aligned
from packers.pack_header import DIGEST_BYTES, PackHeader
from packers.packs import checksum, decode_header, encode_header
from packers.pool import Pool
from packers.shard_writer import sync_directory
from tided.errors import DataError, UnavailableError

UNKNOWN = "0" * 2 * DIGEST_BYTES  # the index's checksum while a pack is written: as long, so that it moves nothing
FLUSH_BYTES = 256 << 20  # of records between two flushes; a kill loses no more than this
END_TIMEOUT_S = 5.0  # for reads and writes that nobody waits for any more


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
        self._failed = False
        self._thread = Pool(1, "pack-writer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """A write that hangs is left to itself, and the files open: their numbers would soon be those of others."""
        if not self._thread.end(END_TIMEOUT_S):
            return
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)

    @property
    def missing_bytes(self) -> int:
        return self.header.size_bytes - self.header.offset(self.done)

    def send(self, number: int, record: memoryview) -> Future[None]:
        """Record `number` is written behind those that were sent before it, by a thread of the writer's own."""
        return self._thread.submit(self.write, number, record)

    def write(self, number: int, record: memoryview) -> None:
        """Raises ValueError unless it is the next record: none may follow one that could not be written."""
        if number != self.done or record.nbytes != self.header.nbytes(number):
            raise ValueError(f"record {number} of {record.nbytes} bytes, not record {self.done}")
        with self._last_if_it_fails():
            self._put_record(record, self.header.offset(number))
            self._index += checksum(record)
            self.done += 1
            if self.header.offset(self.done) - self.header.offset(self._flushed) >= FLUSH_BYTES:
                self._flush()

    def finish(self) -> None:
        """The pack gets its name. Raises ValueError when records are missing."""
        if self.done != self.header.records:
            raise ValueError(f"{self.done} of {self.header.records} records")
        with self._last_if_it_fails():
            self._flush()
            index = bytes(self._index).ljust(self.header.index_bytes, b"\0")
            self._put(index, self.header.header_bytes)
            os.fsync(self._fd)
            whole = encode_header(replace(self.header, index=checksum(index).hex()), self.header.MAGIC)
            self._put(whole[:PAGE_BYTES], 0)  # at once or not at all; behind this page the header is as it was
            os.fsync(self._fd)
            self.temporary.rename(self.path)
            sync_directory(self.path.parent)

    @contextmanager
    def _last_if_it_fails(self) -> Iterator[None]:
        """A device tells once that what it had taken is lost: a second flush would say that all is well."""
        if self._failed:
            raise ValueError("a write before this one failed: only another run, which looks at what is there, goes on")
        self._failed = True
        yield
        self._failed = False

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
        # What counts is on the device; memory may hold what a write that failed did not bring there.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        index = self._intact() if self._is_ours(region) else bytearray()
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
        """Past the page cache where it can be: what is written there comes back to nobody, and others must give way.
        In one call: a file that grows is written by one at a time, and the kernel cuts what is long into requests."""
        if self._direct is None or not page_aligned(record):
            self._put(record, offset)
            return
        written = 0
        try:
            written = os.pwrite(self._direct, record, offset)
        except OSError as e:
            if e.errno != errno.EINVAL:  # a device with larger blocks
                raise
        self._put(record[written:], offset + written)

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
