"""Reads records of a pack at random as the engine does, next to fio on the same file: same block size, same reads in
flight, in turns.

    python bench/pack_read.py [--gb 8] [--depth 1 --depth 8] [--seconds 5] [--rounds 5] [--dir DIR] [--verify]
    python bench/pack_read.py --pack FILE ...

Without --pack a pack with records of DeepSeek-V4.1-Flash on two ranks (9,400,320 bytes) is written to DIR first and
removed at the end. Where fio is not installed, threads around a bare preadv take its place. `share` is ours over the
other's, the median of the rounds. Every read goes past the page cache.
"""

import argparse
import itertools
import json
import mmap
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from kernels.record import ExpertRecord
from packers.mxfp4 import Header, header_of
from packers.pack import pack
from packers.packs import Pack, checksum
from tided.errors import TideError, UnavailableError
from tided.experts.io import Depths, IoScheduler, Priority, Ticket
from tided.experts.pack import PackSource

RECORD = ExpertRecord(5120, 2304, 2)
WAIT_S = 60.0
AHEAD = 2  # reads queued for each in flight, so that no reader waits for this loop
NOISE_BYTES = 64 << 20


def synthetic(directory: Path, gb: float) -> Path:
    """A pack of random bytes, written in full."""
    header = header_of(secrets.token_hex(32), RECORD, 0, 1, max(1, round(gb * 1e9 / RECORD.slot_bytes)))
    noise = memoryview(np.random.default_rng(0).bytes(NOISE_BYTES + RECORD.slot_bytes))

    def read(layer: int, expert: int) -> list[memoryview]:
        begin = expert * 4096 * 37 % NOISE_BYTES
        return [noise[begin : begin + RECORD.slot_bytes]]

    [path] = pack(directory, [header], read, lambda done, total: None)
    return path


def ours(path: Path, header: Header, depth: int, seconds: float, verify: bool) -> float:
    """GB/s of the engine's own source and scheduler."""
    source = PackSource(path.parent, replace(header, index=""), verify)  # as a profile knows it
    if not source.stats.direct:
        raise UnavailableError("this file system has no direct reads", where=str(path))
    io = IoScheduler(source, Depths(depth, depth))
    rooms = deque(memoryview(mmap.mmap(-1, header.record_bytes)) for _ in range(AHEAD * depth))
    numbers = np.random.default_rng(1)
    running = deque[tuple[Ticket, memoryview]]()
    began_s, nbytes = time.perf_counter(), 0
    while (now_s := time.perf_counter()) - began_s < seconds:
        while rooms:
            layer, expert = divmod(int(numbers.integers(header.records)), header.experts)
            room = rooms.popleft()
            running.append((io.submit(Priority.SWAP, layer, expert, room), room))
        ticket, room = running.popleft()
        ticket.wait(WAIT_S)
        rooms.append(room)
        nbytes += header.record_bytes
    rate = nbytes / (now_s - began_s) / 1e9
    io.close()
    source.close()
    return rate


def fio(path: Path, header: Header, depth: int, seconds: float) -> float:
    """GB/s of fio's asynchronous engine: the depth is the kernel's, no thread is in the way."""
    command = [
        "fio", "--name=pack", f"--filename={path}", "--readonly", "--rw=randread", "--direct=1", "--ioengine=libaio",
        f"--iodepth={depth}", f"--bs={header.record_bytes}", f"--offset={header.data_offset}", "--norandommap",
        "--time_based", f"--runtime={seconds}", "--output-format=json",
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + WAIT_S)
    return float(json.loads(ran.stdout)["jobs"][0]["read"]["bw_bytes"]) / 1e9


def bare(path: Path, header: Header, depth: int, seconds: float) -> float:
    """GB/s of `depth` threads that do nothing but preadv."""
    fd, done = os.open(path, os.O_RDONLY | os.O_DIRECT), itertools.count()
    ends_s = time.perf_counter() + seconds

    def read_some(seed: int) -> None:
        room, numbers = mmap.mmap(-1, header.record_bytes), np.random.default_rng(seed)
        while time.perf_counter() < ends_s:
            os.preadv(fd, [room], header.offset(int(numbers.integers(header.records))))
            next(done)

    threads = [threading.Thread(target=read_some, args=(seed,)) for seed in range(depth)]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    return next(done) * header.record_bytes / (time.perf_counter() - began_s) / 1e9


class NoDisk:
    """A source whose reads take no time."""

    def read(self, layer: int, expert: int, out: memoryview) -> None:
        pass


def scheduler_us(depth: int, reads: int = 5000) -> float:
    """What asking, queueing, a thread's turn and waiting take of a read."""
    io, room, running = IoScheduler(NoDisk(), Depths(depth, depth)), memoryview(bytearray(1)), deque[Ticket]()
    began_s = time.perf_counter()
    for _ in range(reads):
        if len(running) >= AHEAD * depth:
            running.popleft().wait(WAIT_S)
        running.append(io.submit(Priority.SWAP, 0, 0, room))
    for ticket in running:
        ticket.wait(WAIT_S)
    io.close()
    return (time.perf_counter() - began_s) / reads * 1e6


def checksum_ms(nbytes: int, times: int = 50) -> float:
    rooms = [memoryview(secrets.token_bytes(nbytes)) for _ in range(8)]  # together larger than most caches
    began_s = time.perf_counter()
    for number in range(times):
        checksum(rooms[number % len(rooms)])
    return (time.perf_counter() - began_s) / times * 1e3


def compare(path: Path, options: argparse.Namespace) -> None:
    header = Pack.open(path).header
    name, other = ("fio", fio) if shutil.which("fio") else ("preadv", bare)
    rounds = f"{options.rounds} rounds of {options.seconds:g} s each"
    print(f"{header.size_bytes / 1e9:.2f} GB, records of {header.record_bytes} bytes; {rounds}; medians, GB/s")
    print(f"| in flight | ours | {name} | share | lowest | highest |\n|---|---|---|---|---|---|")
    for depth in options.depth:
        pairs = [_round(path, header, depth, options, other, first) for first in _turns(options.rounds)]
        mine, theirs = zip(*pairs, strict=True)
        shares = [a / b for a, b in pairs]
        cells = [statistics.median(mine), statistics.median(theirs)]
        spread = [statistics.median(shares), min(shares), max(shares)]
        print(f"| {depth} | " + " | ".join([*(f"{c:.2f}" for c in cells), *(f"{s:.1%}" for s in spread)]) + " |")
    alone = ", ".join(f"{scheduler_us(depth):.0f} us at {depth}" for depth in options.depth)
    print(f"\nThe scheduler alone takes of a read: {alone} in flight.")
    print(f"A record's checksum takes {checksum_ms(header.record_bytes):.2f} ms.")


def _round(
    path: Path,
    header: Header,
    depth: int,
    options: argparse.Namespace,
    other: Callable[[Path, Header, int, float], float],
    ours_first: bool,
) -> tuple[float, float]:
    if ours_first:
        mine = ours(path, header, depth, options.seconds, options.verify)
        return mine, other(path, header, depth, options.seconds)
    theirs = other(path, header, depth, options.seconds)
    return ours(path, header, depth, options.seconds, options.verify), theirs


def _turns(rounds: int) -> list[bool]:
    """Who comes first changes: a disk that slows down over the run must not count for either."""
    return [number % 2 == 0 for number in range(rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, help="a pack that is there")
    parser.add_argument("--gb", type=float, default=8.0, help="size of the synthetic one")
    parser.add_argument("--dir", type=Path, help="where it goes; default: the system's temporary directory")
    parser.add_argument(
        "--depth", type=int, action="append", help="reads in flight; may be given again (default: 1, 4)"
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--verify", action="store_true", help="check each record's checksum")
    options = parser.parse_args()
    options.depth = options.depth or [1, 4]
    try:
        if options.pack:
            compare(options.pack, options)
            return 0
        with tempfile.TemporaryDirectory(prefix="pack-read-", dir=options.dir) as name:
            compare(synthetic(Path(name), options.gb), options)
    except TideError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
