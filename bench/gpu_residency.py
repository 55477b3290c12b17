"""Decode steps beside expert reads, and without: a ring that follows every step must not slow it down.

Records of the real size are read from a file in the system's memory by the engine's scheduler, staged in pinned memory
and copied to the device on streams of their own, as hot reads are (`tided.experts.arena`); what has landed is
published. A step asks for 64 more, unless so many are on their way still: the link to the device bounds what comes."""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu_step import prepared
from tided.experts.arena import Arena
from tided.experts.io import IoScheduler, Ticket
from tided.experts.read_queue import Depths, Priority
from tided.models.deepseek_v41.model import DeepseekV41

READS, TURNS, STEPS = 64, 6, 25


class Records:
    """An `ExpertSource`: one file of 16 records, whoever is asked for."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._nbytes, path = nbytes, folder / "records"
        with path.open("wb") as file:
            for _ in range(16):
                file.write(os.urandom(1 << 20) * (nbytes >> 20) + bytes(nbytes % (1 << 20)))
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, layer: int, expert: int, out: memoryview) -> None:
        done, at = 0, expert % 16 * self._nbytes
        while done < len(out):
            done += os.preadv(self._fd, [out[done:]], at + done)

    def close(self) -> None:
        os.close(self._fd)


class Ring:
    """Keeps reads on their way."""

    def __init__(self, model: DeepseekV41, arena: Arena, io: IoScheduler) -> None:
        self._tables, self._arena, self._io = model.blocks[0].moe.bank.tables, arena, io
        self._coming: list[tuple[Ticket, int]] = []
        self._slots: list[int] = self._tables.slot_of[0].tolist()  # where experts of layer 0 lie, and stay
        self.landed = 0

    def step(self, most: int) -> None:
        """Before a step: what has landed is published, others are asked for."""
        done = [(ticket, slot) for ticket, slot in self._coming if ticket.done]
        self._coming = [one for one in self._coming if not one[0].done]
        pairs = [(0, ticket.expert) for ticket, _ in done]
        for (ticket, slot), pair in zip(done, pairs, strict=True):
            ticket.wait(0)
            self._arena.hold(slot, pair)
        self._arena.drop(*pairs)
        self.landed += len(done)
        if done:
            self._tables.change({pair: self._slots[pair[1]] for pair in pairs})
        for _ in range(min(most, READS - len(self._coming))):
            slot = self._arena.take()
            land = lambda read, slot=slot: self._arena.load(slot, read)  # noqa: E731
            self._coming.append((self._io.submit(Priority.ASYNC_HOT, 0, slot, land), slot))

    def drain(self) -> None:
        for ticket, _ in self._coming:
            ticket.wait(30)
        self.step(0)


def show(model: DeepseekV41, options: Any) -> None:
    record, device = model.blocks[0].moe.bank.plain_record, model.norm.device
    arena = Arena(record, READS, 1, device)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        source = Records(Path(folder), record.slot_bytes)
        for readers in (4, 8):
            io = IoScheduler(source, Depths(readers, readers))
            io.set_mode("serve")
            for rows in options.rows:
                compare(model, Ring(model, arena, io), rows, options.context, readers, record.slot_bytes)
            io.close()
        source.close()


def compare(model: DeepseekV41, ring: Ring, rows: int, context: int, readers: int, nbytes: int) -> None:
    at, times, reads, seconds = prepared(model, rows, context), {0: list[float](), READS: list[float]()}, 0, 0.0
    for turn in range(TURNS):
        most = (0, READS)[turn % 2]
        ring.step(most)
        before, began_turn = ring.landed, time.perf_counter()
        for _ in range(STEPS):
            began = time.perf_counter()
            ring.step(most)
            model.decode(at.lanes, at.ids).amax(1).tolist()  # a step ends when the host has its ids
            times[most].append(1e3 * (time.perf_counter() - began))
        if most:
            reads, seconds = reads + ring.landed - before, seconds + time.perf_counter() - began_turn
            ring.drain()
    off, on = (statistics.median(times[most]) for most in (0, READS))
    worst = sorted(times[READS])[int(0.95 * len(times[READS]))]
    steps = STEPS * TURNS // 2
    print(
        f"residency, {rows} rows, {readers} readers: step {off:.3f} ms without reads, {on:.3f} ms beside them "
        f"({on / off:.3f}; 95th percentile {worst:.3f}); {reads / steps:.1f} records of {nbytes / 1e6:.1f} MB a step, "
        f"{reads * nbytes / seconds / 1e9:.1f} GB/s",
        flush=True,
    )
    for lane in at.lanes:
        model.close_lane(lane)
