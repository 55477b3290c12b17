"""How fast the ranks add: measured once, when they have met. Every rank measures the same sums, in lockstep (C1)."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from tided.models.parallel import Group

SMALL, LARGE = 10_240, 2 << 20  # fp32: a decode step's sums are of tens of kilobytes, a prompt chunk's of megabytes
SMALL_ROUNDS, LARGE_ROUNDS = 40, 5


@dataclass(frozen=True)
class LinkSpeed:
    """`small_s`: median of a sum of SMALL numbers; `bytes_per_s`: a rank's part of a sum of LARGE ones, over its median
    time. Both are of the engine's own sum, launches included: no figure of the wire alone."""

    small_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        return (
            f"sums of {4 * SMALL >> 10} KB in {1e6 * self.small_s:.0f} us, of {4 * LARGE >> 20} MB at {self._gb_s} GB/s"
        )

    @property
    def _gb_s(self) -> float:
        return round(self.bytes_per_s / 1e9, 2)

    def about(self) -> dict[str, Any]:
        """For /health."""
        return {"sum_us": round(1e6 * self.small_s, 1), "sum_bytes": 4 * SMALL, "large_sum_gb_s": self._gb_s}


def measure(group: Group, device: torch.device) -> LinkSpeed:
    """Raises what the group's collectives raise."""
    large_s = _median_s(group, device, LARGE, LARGE_ROUNDS)
    return LinkSpeed(_median_s(group, device, SMALL, SMALL_ROUNDS), 4 * LARGE / large_s)


def _median_s(group: Group, device: torch.device, numbers: int, rounds: int) -> float:
    part, times = torch.ones(numbers, device=device), []
    for _ in range(rounds + 2):  # the first ones make connections and buffers
        began_s = time.perf_counter()
        group.sum(part)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[2:])
