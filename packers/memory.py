"""Memory that files are read into and written from past the page cache."""

import errno
import mmap

import numpy as np

from kernels.record import PAGE_BYTES

LARGE_BYTES = 2 << 20  # of a huge page on x86_64, and on aarch64 with pages of 4 KiB


def device_memory(nbytes: int) -> memoryview:
    """At least so many bytes, page-aligned, zero, and there once they are written. A child has none of them: pages that
    it shared would be parted from what a device is just moving.

    In huge pages where the system has some: a request to a disk has a bounded number of pieces (254 of a virtual one),
    and of small pages each is a piece. A virtual disk read 4.0 GB/s into huge pages and 1.4 into small ones."""
    large = nbytes >= LARGE_BYTES
    whole = -(-nbytes // LARGE_BYTES) * LARGE_BYTES if large else max(nbytes, 1)
    room = mmap.mmap(-1, whole + LARGE_BYTES if large else whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_DONTFORK)
    if not large:
        return memoryview(room)
    try:
        room.madvise(mmap.MADV_HUGEPAGE)
    except OSError as e:
        if e.errno != errno.EINVAL:  # a kernel without them
            raise
    begin = -_address(memoryview(room)) % LARGE_BYTES
    return memoryview(room)[begin : begin + whole]


def page_aligned(data: memoryview) -> bool:
    return _address(data) % PAGE_BYTES == 0


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)
