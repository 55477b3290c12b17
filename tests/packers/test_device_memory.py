"""Memory for transfers past the page cache: aligned, zero, in huge pages where there are some."""

import re
from pathlib import Path

import numpy as np
import pytest

from kernels.record import PAGE_BYTES
from packers.memory import LARGE_BYTES, device_memory, page_aligned


def address(room: memoryview) -> int:
    return int(np.frombuffer(room, np.uint8).ctypes.data)


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 5 * LARGE_BYTES])
def test_it_is_aligned_zero_and_no_smaller_than_asked(nbytes):
    room = device_memory(nbytes)
    assert nbytes <= len(room) < nbytes + LARGE_BYTES
    assert address(room) % (LARGE_BYTES if nbytes >= LARGE_BYTES else PAGE_BYTES) == 0
    assert page_aligned(room)
    assert not any(room[:PAGE_BYTES])
    assert "dc" in flags_of(address(room)), "a child would share it"
    room[-1:] = b"x"


def test_memory_off_a_page_is_told_apart():
    assert not page_aligned(device_memory(PAGE_BYTES)[512:])


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="no huge pages here")
def test_large_rooms_ask_for_huge_pages():
    room = device_memory(3 * LARGE_BYTES)
    assert "hg" in flags_of(address(room))
    assert "hg" in flags_of(address(room) + len(room) - 1)


def flags_of(at: int) -> list[str]:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= at < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {at:x}")
