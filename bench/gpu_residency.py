"""Decode steps beside expert reads, and without: a ring that follows every step must not slow it down.

Steps are the engine's own: messages that `tided.engine.executor` carries out, with the demand added up and the tokens
drawn; behind each, the reads that have ended are collected as rank 0 does. A step with reads publishes what has
landed, lets as many of the oldest entries go, and asks for others, by `tided.experts.residents`. Records come from a
file in the system's memory through the engine's scheduler, are staged in pinned memory and copied to the device beside
the step.

    under way   records of the real size: 64 are under way at each step's launch. The machine bounds what lands.
    a step      records of a 64th of it: 64 are asked for in each step, and 64 published: what the interpreter takes.

Steps with and without take turns; between two turns what is under way lands. The ring's slots are its own, not the
model's: its weights are random, and stay."""

import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_step import prepared
from kernels.record import ExpertRecord
from tided.control.messages import Admission, Change, Decode, Load, Step
from tided.engine.executor import Executor
from tided.engine.types import Request, Sampling
from tided.experts.arena import Arena, Pair
from tided.experts.io import IoScheduler
from tided.experts.read_queue import Depths, Priority
from tided.experts.residents import Residents
from tided.experts.tables import RoutingTables
from tided.models.deepseek_v41.model import DeepseekV41

READS, TURNS, STEPS, READERS = 64, 8, 20, (2, 4, 8)
RING = 2 * READS  # what is routable, and what is on its way
SMALL = ExpertRecord(1440, 128, 2)  # 64 of them have the bytes of one of the real size
LAND_S = 60.0


class Records:
    """An `ExpertSource`: one file of 16 records, whoever is asked for."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._nbytes, path = nbytes, folder / "records"
        with path.open("wb") as file:
            for _ in range(16):
                file.write(os.urandom(nbytes))
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, layer: int, expert: int, out: memoryview) -> None:
        done, at = 0, expert % 16 * self._nbytes
        while done < len(out):
            done += os.preadv(self._fd, [out[done:]], at + done)

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class Rank0:
    """What a leader and its motion would say: which reads begin, and which are routable with the next step."""

    residents: Residents
    landed: list[int] = field(default_factory=list)
    published: int = 0
    _loads: dict[int, Load] = field(default_factory=dict)
    _entries: deque[Pair] = field(default_factory=deque)
    _absent: deque[Pair] = field(default_factory=deque)
    _tickets: int = 0

    def __post_init__(self) -> None:
        layers, experts = self.residents.layers, self.residents.experts
        pairs = [(n % layers, n // layers) for n in range(layers * experts)]
        here = set(self.residents.pairs)
        self._absent.extend(pair for pair in pairs if pair not in here)

    def change(self, most: int) -> Change:
        """`most` reads are to be under way."""
        publish, self.landed = self.landed, []
        coming = [self._loads.pop(ticket).pair for ticket in publish]
        self.published += len(publish)
        load = [self._load() for _ in range(min(most, READS) - len(self._loads))]
        over = len(self._entries) + len(coming) + len(self._loads) - RING
        withdraw = [self._entries.popleft() for _ in range(max(0, over))]
        self._absent.extend(withdraw)
        self._entries.extend(coming)
        return Change(publish=publish, withdraw=withdraw, load=load)

    def collect(self) -> None:
        self.landed += self.residents.landed()
        if self.residents.failed():
            raise SystemExit("a read failed")

    @property
    def under_way(self) -> int:
        return len(self._loads)

    def _load(self) -> Load:
        self._tickets += 1
        load = self._loads[self._tickets] = Load(self._tickets, self._absent.popleft())
        return load


class Run:
    """Steps of some lanes of a model beside a ring."""

    def __init__(self, model: DeepseekV41, lanes: list[Any], context: int, residents: Residents) -> None:
        bank = model.blocks[0].moe.bank
        self._executor, self.rank0 = Executor(model, residents, bank.tap), Rank0(residents)
        self._work = Decode([lane.index for lane in lanes])
        self._context = context
        greedy = Sampling(temperature=0.0)
        for lane in lanes:
            model.close_lane(lane)
        admit = [
            Admission(n, Request(request_id=str(n), prompt_ids=[1], sampling=greedy, max_tokens=1, stop_ids=()))
            for n in self._work.lanes
        ]
        self._seq = 0
        self._say(Step(seq=1, plan_version=0, admit=admit))
        for n in self._work.lanes:
            lane = self._executor.lanes[n]
            lane.token = 5 + 29 * n
            model.pool.grow([lane.state], self._context + 64)
            lane.state.windows.normal_()
        self.changes_ms: list[float] = []
        self.again()

    def again(self) -> None:
        """The contexts are as long as at the beginning, and no group of tokens is open."""
        for n in self._work.lanes:
            state: Any = self._executor.lanes[n].state
            state.position, state.remainders = self._context, {}

    def steps(self, most: int) -> Iterator[float]:
        """Milliseconds of each, from ids to ids, and what goes with it."""
        for _ in range(STEPS):
            began = time.perf_counter()
            self._say(Step(seq=self._seq + 1, plan_version=0, change=self.rank0.change(most), work=self._work))
            self.rank0.collect()
            yield 1e3 * (time.perf_counter() - began)
            if most:
                self.changes_ms.append(self._executor.parts_ms["change"])

    def land(self) -> None:
        """All that is under way."""
        ends = time.perf_counter() + LAND_S
        while self.rank0.under_way and time.perf_counter() < ends:
            self.rank0.collect()
            self._say(Step(seq=self._seq + 1, plan_version=0, change=self.rank0.change(0)))
            time.sleep(0.001)
        self.rank0.residents.check_integrity()

    def close(self) -> None:
        self._say(Step(seq=self._seq + 1, plan_version=0, release=self._work.lanes))

    def _say(self, step: Step) -> None:
        self._executor.execute(step)
        self._seq = step.seq


def ring_of(record: ExpertRecord, layers: int, experts: int, io: IoScheduler, device: torch.device) -> Residents:
    """A resident of each layer, and a ring of 64 entries and as many that are on their way."""
    arena = Arena(record, layers, 1, device, ring=RING)
    made = Residents(arena, RoutingTables(layers, experts, device), io, layers, experts, top_k=1)
    made.fill([(layer, 0) for layer in range(layers)], lambda done, of: None)
    return made


def show(model: DeepseekV41, options: Any) -> None:
    whole = model.blocks[0].moe.bank.plain_record
    for name, record in (("64 under way", whole), ("64 a step", SMALL)):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            source = Records(Path(folder), record.slot_bytes)
            for readers in READERS:
                for rows in options.rows:
                    compare(model, name, source, record, readers, rows, options.context)
            source.close()


def compare(
    model: DeepseekV41, name: str, source: Records, record: ExpertRecord, readers: int, rows: int, context: int
) -> None:
    io = IoScheduler(source, Depths(readers, readers))
    layers, experts = model.blocks[0].moe.bank.tables.slot_of.shape
    residents = ring_of(record, layers, experts, io, model.norm.device)  # what readers write is no inference tensor
    io.set_mode("serve")
    times: dict[int, list[float]] = {0: [], READS: []}
    reads, seconds = 0, 0.0
    with torch.inference_mode():
        run = Run(model, prepared(model, rows, context).lanes, context, residents)
        for turn in range(TURNS):
            most = (0, READS)[turn % 2]
            run.again()
            before, began = run.rank0.published, time.perf_counter()
            times[most] += run.steps(most)
            if most:
                reads, seconds = reads + run.rank0.published - before, seconds + time.perf_counter() - began
                run.land()
        run.close()
    io.close()
    off, on = (statistics.median(times[most]) for most in (0, READS))
    worst_off, worst_on = (float(np.quantile(times[most], 0.95)) for most in (0, READS))
    steps, hot = STEPS * TURNS // 2, io.counts[Priority.ASYNC_HOT]
    print(
        f"residency, {rows} rows, {name}, {readers} readers: step {off:.3f} ms without reads (95th percentile "
        f"{worst_off:.3f}), {on:.3f} ms beside them ({on / off:.3f}; 95th percentile {worst_on:.3f}; "
        f"{statistics.median(run.changes_ms):.3f} of it for the change); "
        f"{reads / steps:.1f} records of {record.slot_bytes / 1e6:.2f} MB a step, "
        f"{reads * record.slot_bytes / seconds / 1e9:.1f} GB/s, {1e3 * hot.seconds / hot.reads:.2f} ms each",
        flush=True,
    )
