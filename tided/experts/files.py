"""Reads of a file's byte ranges past the page cache (O_DIRECT) where the file system takes it."""

import errno
import logging
import mmap
import os
import threading
from functools import cache
from io import FileIO
from pathlib import Path

from packers.memory import device_memory
from tided.errors import DataError

log = logging.getLogger(__name__)

ALIGN_BYTES = 4096  # of offset, length and memory in a direct read


def aligned_down(offset: int) -> int:
    return offset - offset % ALIGN_BYTES


def aligned_up(offset: int) -> int:
    return aligned_down(offset + ALIGN_BYTES - 1)


class RangeFile:
    """An open file, closed when it is dropped at the latest. Reads may run from many threads at once;
    `direct` tells whether they bypass the page cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            fd, self.direct = _open(path)
        except OSError as e:
            raise DataError(f"cannot be opened: {e.strerror}", where=str(path)) from e
        self._file = FileIO(fd)
        if not self.direct:
            _say_not_direct(path.parent)

    def read(self, offset: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Bytes [offset, offset + nbytes) as a slice of `buffer`: page-aligned memory of at least `span_bytes` of them.

        The range is widened outward to ALIGN_BYTES; a last block cut short by the end of the file is normal.
        Raises DataError when the file ends inside the range or the device fails.
        """
        fd, start = self._file.fileno(), aligned_down(offset)
        head, needed, wanted = offset - start, offset + nbytes - start, span_bytes(offset, nbytes)
        got = 0
        while got < needed:
            try:
                count = os.preadv(fd, [buffer[got:wanted]], start + got)
            except OSError as e:
                raise DataError(f"cannot be read: {e.strerror}", where=f"{self.path}:{start + got}") from e
            # A direct read goes on at a block's start only: what a short one left in a broken block is read again.
            reached = got + count if got + count >= needed else aligned_down(got + count)
            if reached <= got:
                raise DataError(
                    f"the file ends at byte {os.fstat(fd).st_size}, before byte {offset + nbytes} of an expert",
                    where=f"{self.path}:{offset}",
                    hint="it was cut or replaced since the start; fetch this file again",
                )
            got = reached
        return buffer[head:needed]

    def close(self) -> None:
        self._file.close()


def span_bytes(offset: int, nbytes: int) -> int:
    """Memory that a read of [offset, offset + nbytes) takes once it is widened to whole blocks."""
    return aligned_up(offset + nbytes) - aligned_down(offset)


class Staging(threading.local):
    """Page-aligned memory of the calling thread; grows to the largest size asked for."""

    def __init__(self) -> None:
        self._memory = device_memory(ALIGN_BYTES)

    def buffer(self, nbytes: int) -> memoryview:
        if len(self._memory) < nbytes:
            self._memory = device_memory(nbytes)
        return self._memory


@cache
def _say_not_direct(directory: Path) -> None:
    """Once a directory: its files lie on one file system."""
    log.warning(
        "%s: this file system takes no direct reads; experts go through the page cache, which costs memory and speed",
        directory,
    )


def _open(path: Path) -> tuple[int, bool]:
    """File systems refuse O_DIRECT when a file is opened or at its first read; only EINVAL means that they do."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return os.open(path, flags), False
    try:
        os.preadv(fd, [mmap.mmap(-1, ALIGN_BYTES)], 0)
    except OSError as e:
        os.close(fd)
        if e.errno != errno.EINVAL:
            raise
        return os.open(path, flags), False
    return fd, True
