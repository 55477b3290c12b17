"""How a disk answers to reads in flight, measured at each start: the same box gives other figures on other days.

The curve decides two depths. Deep, for the first set: where more in flight reads no more bytes a second. Background,
while serving: as many as leave a read that comes beside them at most twice as slow as it is alone.
"""

import itertools
import mmap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tided.experts.arena import Pair
from tided.experts.read_queue import Depths
from tided.experts.source import ExpertSource, ReadStats

DEPTHS = (1, 2, 4, 8, 16)
MAX_BYTES = 256 << 20
MAX_S = 1.0
MIN_TOTAL_BYTES = 1 << 30  # of all records: what is smaller is read in a moment, and a curve of it says nothing
LEAST_READS = 3
ENOUGH = 0.95  # of the best rate
MOST_SLOWER = 2.0
WAIT_S = 30.0  # for one read


class CountedSource(ExpertSource, Protocol):
    @property
    def stats(self) -> ReadStats: ...


@dataclass(frozen=True)
class Point:
    """`depth` reads in flight: bytes a second of all, and the mean seconds of one."""

    depth: int
    bytes_per_s: float
    latency_s: float

    def __str__(self) -> str:
        return f"{self.depth}: {self.bytes_per_s / 1e9:.2f} GB/s, {1e3 * self.latency_s:.2f} ms"


@dataclass(frozen=True)
class Curve:
    """Empty `points`: not measured, and `why`."""

    points: tuple[Point, ...]
    why: str = ""

    def __str__(self) -> str:
        return "; ".join(map(str, self.points)) or f"not measured: {self.why}"


def measure(source: CountedSource, pairs: Sequence[Pair], record_bytes: int, most: int) -> Curve:
    """Reads some of `pairs` at depth 1, 2, 4, 8 and 16, none deeper than `most`, for at most MAX_S seconds (and the one
    read in flight) and MAX_BYTES. Raises what a read raises."""
    if len(pairs) * record_bytes < MIN_TOTAL_BYTES:
        return Curve((), f"{len(pairs)} records of {record_bytes} bytes are too few to tell")
    order = np.random.default_rng(0).permutation(len(pairs))
    records = (pairs[i] for i in itertools.cycle(order))
    points: list[Point] = []
    ends_s, left, each = time.perf_counter() + MAX_S, float(MAX_BYTES), float(record_bytes)
    for depth in (depth for depth in DEPTHS if depth <= most):
        if points:  # what the rest of the time is worth at the last rate
            left = min(left, points[-1].bytes_per_s * (ends_s - time.perf_counter()))
        count = min(max(LEAST_READS, 2 * depth), int(left / each))
        if count < max(LEAST_READS, depth):
            break
        point, nbytes = _point(source, list(itertools.islice(records, count)), record_bytes, depth)
        if not source.stats.direct:
            return Curve((), "the file system reads through the page cache")
        points.append(point)
        left, each = left - nbytes, nbytes / count
    return Curve(tuple(points), "" if points else "records are too large for a probe")


def _point(source: CountedSource, pairs: Sequence[Pair], record_bytes: int, depth: int) -> tuple[Point, int]:
    """With the bytes that it took. `depth` threads, each with memory of its own that is there already."""
    rooms = [mmap.mmap(-1, record_bytes) for _ in range(depth)]
    for room in rooms:
        room[:] = bytes(record_bytes)
    before, waiting, latencies = source.stats.read_bytes, iter(pairs), list[float]()

    def read_some(room: mmap.mmap) -> None:
        for pair in waiting:
            began_s = time.perf_counter()
            source.read(*pair, memoryview(room))
            latencies.append(time.perf_counter() - began_s)

    with ThreadPoolExecutor(depth, thread_name_prefix="probe") as pool:
        began_s = time.perf_counter()
        for reader in [pool.submit(read_some, room) for room in rooms]:
            reader.result(WAIT_S)
        seconds = time.perf_counter() - began_s
    nbytes = source.stats.read_bytes - before
    return Point(depth, nbytes / seconds, sum(latencies) / len(latencies)), nbytes


def choose(curve: Curve, most: int) -> Depths:
    """Without a curve: as deep as the settings allow, and one background read."""
    if not curve.points:
        return Depths(most, 1)
    best = max(point.bytes_per_s for point in curve.points)
    deep = next(point.depth for point in curve.points if point.bytes_per_s >= ENOUGH * best)
    alone_s, deepest = curve.points[0].latency_s, curve.points[-1].depth
    background = 1
    while background < min(deep, deepest - 1) and _latency_s(curve, background + 2) <= MOST_SLOWER * alone_s:
        background += 1
    return Depths(deep, background)


def _latency_s(curve: Curve, depth: int) -> float:
    """Of a read beside depth - 1 others, between the measured ones on a line."""
    return float(np.interp(depth, [p.depth for p in curve.points], [p.latency_s for p in curve.points]))
