"""Experts for tests: the golden checkpoint's, and a source whose records tell whose they are."""

import threading
import time
from pathlib import Path

import numpy as np
import torch

from kernels.record import ExpertRecord
from packers.shards import Checkpoint
from tided.errors import DataError
from tided.experts.arena import Arena, Pair
from tided.experts.io import Depths, IoScheduler
from tided.experts.residents import Residents
from tided.experts.tables import RoutingTables

GOLDEN = Path(__file__).parents[1] / "golden" / "deepseek-v41"
LAYERS, EXPERTS, TOP_K = 10, 8, 3
CPU = torch.device("cpu")
RECORD = ExpertRecord(hidden=32, intermediate=32, ranks=1)


def golden() -> Checkpoint:
    return Checkpoint.open(GOLDEN)


def golden_record(ranks: int) -> ExpertRecord:
    return ExpertRecord(hidden=128, intermediate=64, ranks=ranks)


def expert_names(layer: int, expert: int) -> list[str]:
    stem = f"layers.{layer}.ffn.experts.{expert}"
    return [f"{stem}.{w}.{kind}" for kind in ("weight", "scale") for w in ("w1", "w3", "w2")]


class FakeSource:
    """Fills a record with bytes made from the pair. The `fails_at`-th read (from 1) fails as a broken disk does."""

    def __init__(self, fails_at: int = 0, holds: threading.Event | None = None) -> None:
        self.reads, self.fails_at, self.holds = 0, fails_at, holds
        self._lock = threading.Lock()

    def read(self, layer: int, expert: int, out: memoryview) -> None:
        with self._lock:
            self.reads += 1
            number = self.reads
        if self.holds is not None:
            self.holds.wait(30)
        if number == self.fails_at:
            raise DataError("cannot be read: Input/output error", where="model-00001.safetensors:4096")
        out[:] = record_of(layer, expert)


def record_of(layer: int, expert: int) -> bytes:
    return bytes(np.random.default_rng(1000 * layer + expert).integers(0, 256, RECORD.slot_bytes, dtype=np.uint8))


def fake_residents(
    layers: int,
    experts: int,
    top_k: int,
    resident: int,
    spare: int,
    source: FakeSource,
    read_threads: int = 1,
    ring: int = 0,
) -> Residents:
    arena, io = Arena(RECORD, resident, spare, CPU, ring), IoScheduler(source, Depths(read_threads, 1))
    return Residents(arena, RoutingTables(layers, experts, CPU), io, layers, experts, top_k)


def begin(residents: Residents, swaps, first_number: int = 1) -> list[int]:
    """Begins to read newcomers; `None` as the outgoing pair: into the ring."""
    numbers = [first_number + i for i in range(len(swaps))]
    for number, (out, in_) in zip(numbers, swaps, strict=True):
        residents.read(number, in_, out)
    return numbers


def wait(residents: Residents, numbers) -> None:
    missing, deadline_s = set(numbers), time.monotonic() + 30
    while missing and time.monotonic() < deadline_s:
        missing -= set(residents.landed())
        time.sleep(0.0005)
    assert not missing


def ended(residents: Residents, numbers) -> tuple[list[int], list[int]]:
    """(those that failed, those that landed)"""
    failed, landed, deadline_s = [], [], time.monotonic() + 30
    while len(failed) + len(landed) < len(numbers) and time.monotonic() < deadline_s:
        landed += residents.landed()
        failed += residents.failed()
        time.sleep(0.0005)
    assert sorted([*failed, *landed]) == sorted(numbers)
    return failed, landed


def apply(residents: Residents, swaps) -> None:
    numbers = begin(residents, swaps)
    wait(residents, numbers)
    residents.publish(numbers)


def quiet(done: int, total: int) -> None:
    pass


def bytes_of(residents: Residents, pair: Pair) -> bytes:
    """What the model would compute the pair with."""
    slot = int(residents.tables.slot_of[pair])
    assert slot >= 0, f"{pair} has no slot"
    return residents.arena.data[slot].numpy().tobytes()


def first(layers: int, each: int) -> list[Pair]:
    return [(layer, expert) for layer in range(layers) for expert in range(each)]
