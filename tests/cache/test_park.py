"""Contexts that wait on disk for their lane."""

import threading

import pytest
import torch

from tided.cache import bundle
from tided.cache.background import Background
from tided.cache.park import ParkedLanes

PARTS = {"windows": torch.arange(600.0)}


@pytest.fixture
def background():
    found = Background()
    yield found
    found.close()


def files(tmp_path):
    return [path.name for path in (tmp_path / "parked").iterdir()]


def same(taken) -> bool:
    return taken[0] == 9 and torch.equal(taken[1]["windows"], PARTS["windows"])


def test_it_goes_to_disk_and_comes_back(tmp_path, background):
    parked = ParkedLanes(tmp_path / "parked", background)
    parked.park(3, 9, PARTS)
    assert background.flush(30)
    assert parked._lanes[3].parts is None  # its memory is free again
    assert files(tmp_path) == ["3-1.context"]
    assert (tmp_path / "parked" / "3-1.context").stat().st_mode & 0o777 == 0o600
    assert parked.load(3)
    assert same(parked.take(3))
    assert (files(tmp_path), parked.lanes) == ([], [])


def test_back_before_it_was_written(tmp_path, background):
    parked = ParkedLanes(tmp_path / "parked", background)
    for turn in range(20):
        parked.park(0, 9, PARTS)
        assert parked.load(0), turn
        assert same(parked.take(0))
    assert background.flush(30)
    assert files(tmp_path) == []


def test_back_while_it_is_written(tmp_path, background, monkeypatch):
    """The lane is asked for in the middle of the write, when its context is still in memory."""
    parked, real = ParkedLanes(tmp_path / "parked", background), bundle.write

    def write(path, pieces, turn):
        real(path, pieces)
        assert parked.load(0)

    monkeypatch.setattr(bundle, "write", write)
    parked.park(0, 9, PARTS)
    assert background.flush(30)
    assert same(parked.take(0))
    assert files(tmp_path) == []


def test_a_lane_that_is_over_leaves_nothing(tmp_path, background):
    parked = ParkedLanes(tmp_path / "parked", background)
    parked.park(0, 9, PARTS)
    parked.drop(0)
    parked.park(1, 9, PARTS)
    assert background.flush(30)
    parked.drop(1)
    assert (files(tmp_path), parked.lanes) == ([], [])
    assert not parked.load(1)


def test_a_damaged_context_is_told(tmp_path, background, caplog):
    parked = ParkedLanes(tmp_path / "parked", background)
    parked.park(0, 9, PARTS)
    assert background.flush(30)
    (path,) = (tmp_path / "parked").iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    assert not parked.load(0)
    assert "lane 0 is lost" in caplog.text


def test_a_full_disk_keeps_it_in_memory(tmp_path, background, caplog, monkeypatch):
    monkeypatch.setattr("tided.cache.park.free_bytes", lambda folder: 100)
    parked = ParkedLanes(tmp_path / "parked", background)
    parked.park(0, 9, PARTS)
    assert background.flush(30)
    assert "stays in memory" in caplog.text
    assert parked.load(0)
    assert same(parked.take(0))


def test_a_start_drops_what_an_earlier_run_left(tmp_path, background):
    (tmp_path / "parked").mkdir()
    (tmp_path / "parked" / "0-1.context").write_bytes(b"old")
    parked = ParkedLanes(tmp_path / "parked", background)
    assert (files(tmp_path), parked.load(0)) == ([], False)


def test_no_thread_begins_with_a_job(background, monkeypatch):
    """Where memory has run out a thread may fail to begin, and an engine that starts it waits for it without end."""

    def refuse(self):
        raise AssertionError("a thread begins in the middle of a step")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    read = threading.Event()
    background.read(read.set)
    assert background.flush(30)
    assert read.wait(30)


def test_reads_are_waited_for_like_writes(background):
    """One that finds a file damaged removes it, whether its request still wants it or not."""
    ends = threading.Event()
    background.read(lambda: ends.wait(30))
    assert not background.flush(0.05)
    ends.set()
    assert background.flush(30)
