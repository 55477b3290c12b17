"""What goes wrong with reads, by seed: every scenario gives each (read, rank) the same fault in every run."""

from collections.abc import Callable

import numpy as np

from tided.sim.machine import Fault

Faults = Callable[[int, int], Fault]  # (number of the read, rank) -> what goes wrong with it


def none(read: int, rank: int) -> Fault:
    return Fault()


def delayed(share: float, seconds: float, seed: int) -> Faults:
    """Some reads of some ranks land late."""
    return lambda read, rank: Fault(delay_s=seconds if _chance(seed, read, rank) < share else 0.0)


def reordered(seconds: float, seed: int) -> Faults:
    """Every read lands up to so much later, each rank in an order of its own."""
    return lambda read, rank: Fault(delay_s=seconds * _chance(seed, read, rank))


def failing(share: float, seed: int) -> Faults:
    """Some reads fail, mostly on one rank and not on the other."""
    return lambda read, rank: Fault(fails=_chance(seed, read, rank) < share)


def stalled(rank: int, first: int, last: int, seconds: float) -> Faults:
    """One rank's disk answers nothing of reads `first` to `last` for so long."""
    return lambda read, at: Fault(delay_s=seconds if at == rank and first <= read <= last else 0.0)


SCENARIOS: dict[str, Faults] = {
    "no fault": none,
    "delayed reads": delayed(0.2, 0.5, seed=1),
    "reordered reads": reordered(0.3, seed=2),
    "failed reads": failing(0.1, seed=3),
    "a stalled rank": stalled(1, 100, 140, 4.0),
}


def _chance(seed: int, read: int, rank: int) -> float:
    return float(np.random.default_rng([seed, read, rank]).random())
