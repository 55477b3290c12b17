"""The simulated pair: a clock, one NVMe a rank, the link between the ranks. Nothing here knows an expert's weight.

A device shares its bandwidth among the reads in flight, so each takes longer the more there are: of n equal reads begun
together all land after n times the latency of one. Time is a number of seconds that the runner moves on, step by step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Machine:
    """`pairs` of the whole model share the bandwidth: of a smaller model the simulated disk is as much slower, so that
    a step is worth the same share of the model. Figures: a DGX Spark's disk, half an expert of DeepSeek-V4.1-Flash."""

    ranks: int = 2
    pairs: int = 15_360
    record_bytes: int = 9_400_320
    bandwidth_bytes_s: float = 4.87e9
    latency_s: float = 0.0004  # of one read beside the transfer
    jitter: float = 0.1  # standard deviation of a read's transfer, as a share of it
    link_s: float = 0.0001  # one message between the ranks
    step_s: float = 0.040  # one decode step
    prefill_tokens_s: float = 700.0
    depth: int = 4  # reads in flight at once: a deep queue is a tax on the read that is waited for
    share: float = 0.8  # of the disk that hot reads and swaps may use: the rest is for Engram rows and prefixes


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a read on one rank: `delay_s` later than it would have been, or `fails`."""

    delay_s: float = 0.0
    fails: bool = False


class Disk:
    """One rank's device. `begin` queues a read, `advance` moves the clock on and returns what has landed since."""

    def __init__(self, machine: Machine, pairs: int, rng: np.random.Generator) -> None:
        self.bytes_s = machine.bandwidth_bytes_s * machine.share * pairs / machine.pairs
        self.bytes_of_read = machine.record_bytes + machine.latency_s * self.bytes_s  # its latency as bytes
        self._machine, self._rng = machine, rng
        self.now_s = 0.0
        self.bytes_read = 0
        self._queue: list[tuple[int, float, Fault]] = []  # ticket, bytes that are left, fault
        self._late: list[tuple[float, int, bool]] = []  # when, ticket, good

    def begin(self, ticket: int, fault: Fault) -> None:
        size = self.bytes_of_read * max(0.2, 1.0 + self._machine.jitter * float(self._rng.standard_normal()))
        self._queue.append((ticket, size, fault))
        self.bytes_read += self._machine.record_bytes

    def advance(self, until_s: float) -> list[tuple[int, bool]]:
        """(ticket, good) of reads that ended by then, in the order in which they ended."""
        while self._queue and self.now_s < until_s:
            flying = self._queue[: self._machine.depth]
            rate = self.bytes_s / len(flying)
            step_s = min(until_s - self.now_s, min(left for _, left, _ in flying) / rate)
            self.now_s += step_s
            left = [(ticket, rest - rate * step_s, fault) for ticket, rest, fault in flying]
            self._late += [(self.now_s + f.delay_s, ticket, not f.fails) for ticket, rest, f in left if rest <= 1.0]
            self._queue[: len(flying)] = [read for read in left if read[1] > 1.0]
        self.now_s = until_s
        ended = sorted(one for one in self._late if one[0] <= until_s)
        self._late = [one for one in self._late if one[0] > until_s]
        return [(ticket, good) for _, ticket, good in ended]


class Ranks:
    """The disks of all ranks, and what rank 0 knows of them: a read has landed when every rank has said so, which it
    hears one message later. One rank's failure is everybody's: the read counts as failed once all have answered."""

    def __init__(self, machine: Machine, pairs: int, rng: np.random.Generator) -> None:
        self.machine = machine
        self.disks = [Disk(machine, pairs, rng) for _ in range(machine.ranks)]
        self.whole: list[set[int]] = [set() for _ in range(machine.ranks)]  # by rank: tickets it has read to the end
        self._answers: dict[int, list[bool]] = {}
        self._next = 0

    def read(self, faults: Sequence[Fault]) -> int:
        """Begins a read on every rank; its ticket. One fault a rank."""
        ticket, self._next = self._next, self._next + 1
        for disk, fault in zip(self.disks, faults, strict=True):
            disk.begin(ticket, fault)
        self._answers[ticket] = []
        return ticket

    def advance(self, until_s: float) -> list[tuple[int, bool]]:
        """(ticket, good) of the reads of which rank 0 has every rank's answer by then, by ticket."""
        for rank, disk in enumerate(self.disks):
            for ticket, good in disk.advance(until_s - (self.machine.link_s if rank else 0.0)):
                self._answers[ticket].append(good)
                if good:
                    self.whole[rank].add(ticket)
        complete = [ticket for ticket, answers in self._answers.items() if len(answers) == len(self.disks)]
        return [(ticket, all(self._answers.pop(ticket))) for ticket in sorted(complete)]

    @property
    def bytes_read(self) -> int:
        """Of one rank: each reads its own share of every expert."""
        return self.disks[0].bytes_read

    def reads_in(self, seconds: float) -> float:
        """How many reads that much disk time is worth."""
        return seconds * self.disks[0].bytes_s / self.disks[0].bytes_of_read
