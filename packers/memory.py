"""Memory that files are read into and written from past the page cache."""

import mmap
from pathlib import Path

import numpy as np

from kernels.record import PAGE_BYTES

LARGE_BYTES = 2 << 20  # of a huge page on x86_64, and on aarch64 with pages of 4 KiB
HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


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
    begin = ask_for_huge_pages(room)
    return memoryview(room)[begin : begin + whole]


def ask_for_huge_pages(room: mmap.mmap) -> int:
    """Where the first of them begins. Where the system's are of another size (512 MB on aarch64 with pages of 64 KiB)
    none are asked for: a byte that is written would take one whole."""
    if _huge_page_bytes() == LARGE_BYTES:
        room.madvise(mmap.MADV_HUGEPAGE)
    return -_address(memoryview(room)) % LARGE_BYTES


def _huge_page_bytes() -> int:
    """0: the kernel has none."""
    try:
        return int(HUGE_PAGE_SIZE.read_text())
    except (OSError, ValueError):
        return 0


def page_aligned(data: memoryview) -> bool:
    return _address(data) % PAGE_BYTES == 0


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)
