"""Depths from a curve, and a probe that stays within its bytes. The rates are the source's own: no absolute time."""

import dataclasses
import threading
import types

import pytest

import tided.experts.probe as probe
from tided.errors import DataError
from tided.experts.probe import Curve, Point, choose, measure
from tided.experts.read_queue import Depths
from tided.experts.source import ReadStats


def curve(*latencies_ms: float) -> Curve:
    """Latencies at depth 1, 2, 4, ... of 9.4 MB records; a rate follows from each."""
    depths = [2**n for n in range(len(latencies_ms))]
    return Curve(tuple(Point(d, d * 9.4e6 / (ms / 1e3), ms / 1e3) for d, ms in zip(depths, latencies_ms, strict=True)))


CURVES = {
    "a flat disk: more in flight only takes longer": (curve(2.8, 5.6, 11.2, 22.4, 44.8), Depths(1, 1)),
    "gains up to 8, as one NVMe did": (curve(3.9, 6.6, 12.5, 23.5, 47), Depths(8, 1)),
    "gains all the way": (curve(4, 4, 4, 4, 4), Depths(16, 15)),
    "gains up to 8, twice as slow from 6 on": (curve(4, 4.4, 6, 10, 22), Depths(8, 5)),
    "noise: two faster than one": (curve(4, 3.8, 7.5), Depths(2, 2)),
    "one point": (curve(4), Depths(1, 1)),
}


@pytest.mark.parametrize(("found", "depths"), CURVES.values(), ids=CURVES.keys())
def test_depths_follow_from_the_curve(found, depths):
    assert choose(found, 16) == depths


def test_without_a_curve_the_settings_decide():
    assert choose(Curve((), "too small"), 6) == Depths(6, 1)
    assert str(Curve((), "too small")) == "not measured: too small"
    assert str(curve(4, 5)) == "1: 2.35 GB/s, 4.00 ms; 2: 3.76 GB/s, 5.00 ms"


class Source:
    """Counts; `each` bytes of the disk a record."""

    def __init__(self, each, direct=True, fails=False):
        self.stats, self.each, self.fails = ReadStats(direct=direct), each, fails
        self.pairs, self.most, self._running = [], 0, 0
        self._lock = threading.Lock()

    def read(self, layer, expert, out):
        with self._lock:
            self.pairs.append((layer, expert))
            self._running += 1
            self.most = max(self.most, self._running)
            self.stats = dataclasses.replace(self.stats, read_bytes=self.stats.read_bytes + self.each)
        if self.fails:
            raise DataError("cannot be read: Input/output error", where="x:0")
        out[:4] = b"read"
        with self._lock:
            self._running -= 1


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(probe, "MAX_S", 1e6)
    monkeypatch.setattr(probe, "MIN_TOTAL_BYTES", 1000 * 8192)


PAIRS = [(layer, expert) for layer in range(10) for expert in range(100)]


@pytest.mark.parametrize("factor", [1.0, 1.4, 2.0])
def test_a_probe_stays_within_its_bytes(monkeypatch, factor):
    for budget in (0, 3, 10, 27, 40, 1000):
        monkeypatch.setattr(probe, "MAX_BYTES", budget * 8192)
        source = Source(int(8192 * factor))
        found = measure(source, PAIRS, 8192, 16)
        first_wave = 3 * source.each  # what a record takes is known after it
        assert source.stats.read_bytes <= max(budget * 8192, first_wave if budget >= 3 else 0)
        assert all(point.bytes_per_s > 0 and point.latency_s > 0 for point in found.points)
        assert not found.points or found.points[0].depth == 1
        assert bool(found.points) == (budget >= 3)


def test_every_depth_is_measured_when_there_is_room_and_no_record_twice():
    source = Source(8192)
    found = measure(source, PAIRS, 8192, 16)
    assert [point.depth for point in found.points] == [1, 2, 4, 8, 16]
    assert len(source.pairs) == len(set(source.pairs)) == 3 + 4 + 8 + 16 + 32
    assert source.pairs != sorted(source.pairs)
    assert source.most <= 16


def test_nothing_is_deeper_than_the_settings_allow():
    source = Source(8192)
    assert [point.depth for point in measure(source, PAIRS, 8192, 5).points] == [1, 2, 4]
    assert source.most <= 4


def test_a_slow_disk_ends_the_probe_after_the_time(monkeypatch):
    now = iter(range(10_000))
    monkeypatch.setattr(probe, "time", types.SimpleNamespace(perf_counter=lambda: float(next(now))))
    monkeypatch.setattr(probe, "MAX_S", 12.0)
    assert [point.depth for point in measure(Source(8192), PAIRS, 8192, 16).points] == [1]


def test_few_records_and_cached_ones_are_not_measured():
    source = Source(8192)
    assert "too few" in str(measure(source, PAIRS[:-1], 8192, 16))
    assert source.pairs == []
    found = measure(Source(8192, direct=False), PAIRS, 8192, 16)
    assert (found.points, found.why) == ((), "the file system reads through the page cache")


def test_a_probe_of_a_broken_disk_says_so():
    with pytest.raises(DataError, match="Input/output error"):
        measure(Source(8192, fails=True), PAIRS, 8192, 16)
