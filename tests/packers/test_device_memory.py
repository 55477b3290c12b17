"""Memory for transfers past the page cache: aligned, zero, in huge pages where there are some."""

import numpy as np
import pytest

from kernels.record import PAGE_BYTES
from packers import memory
from packers.memory import HUGE_PAGE_SIZE, LARGE_BYTES, device_memory, page_aligned
from tests.mapped import flags_of


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


@pytest.mark.skipif(not HUGE_PAGE_SIZE.exists(), reason="no huge pages here")
@pytest.mark.parametrize(("size", "asked"), [(LARGE_BYTES, True), (512 << 20, False), (None, False)])
def test_large_rooms_ask_for_huge_pages_of_the_size_that_they_are_cut_for(size, asked, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "HUGE_PAGE_SIZE", tmp_path / "size")
    if size:
        (tmp_path / "size").write_text(f"{size}\n")
    room = device_memory(3 * LARGE_BYTES)
    assert ("hg" in flags_of(address(room))) == asked
    assert ("hg" in flags_of(address(room) + len(room) - 1)) == asked
