"""How fast the ranks add: measured once, when they have met. Every rank measures the same sums, in lockstep (C1)."""

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from tided.engine.dataplane import TorchGroup
from tided.models.parallel import Group

SMALL, LARGE = 10_240, 2 << 20  # fp32: a decode step's sums are of tens of kilobytes, a prompt chunk's of megabytes
SMALL_ROUNDS, LARGE_ROUNDS = 40, 5


@dataclass(frozen=True)
class LinkSpeed:
    """`small_s`: median of a sum of SMALL numbers; `bytes_per_s`: a rank's part of a sum of LARGE ones, over its median
    time. Both are of the engine's own sum, launches included: no figure of the wire alone. `one_shot`: the same of the
    sums that need no library, LARGE then as much as they take."""

    small_s: float
    bytes_per_s: float
    large_bytes: int = 4 * LARGE
    one_shot: "LinkSpeed | None" = None

    def __str__(self) -> str:
        large = f"{self.large_bytes >> 20} MB at {self._gb_s} GB/s"
        text = f"sums of {4 * SMALL >> 10} KB in {1e6 * self.small_s:.0f} us, of {large}"
        return f"{text}; by one launch, {self.one_shot}" if self.one_shot else text

    @property
    def _gb_s(self) -> float:
        return round(self.bytes_per_s / 1e9, 2)

    def about(self) -> dict[str, Any]:
        """For /health."""
        found = {"sum_us": round(1e6 * self.small_s, 1), "sum_bytes": 4 * SMALL, "large_sum_gb_s": self._gb_s}
        return found | ({"one_shot": self.one_shot.about()} if self.one_shot else {})


def measure(group: Group, device: torch.device) -> LinkSpeed:
    """Raises what the group's collectives raise, and PairError if a peer did not come to one."""
    one_shot = group.one_shot if isinstance(group, TorchGroup) else None
    with group.by_library() if isinstance(group, TorchGroup) else nullcontext():
        found = _measured(group, device, LARGE)
    if one_shot is not None:
        found = replace(found, one_shot=_measured(group, device, min(LARGE, one_shot.most_bytes // 4)))
    group.check()
    return found


def _measured(group: Group, device: torch.device, large: int) -> LinkSpeed:
    large_s = _median_s(group, device, large, LARGE_ROUNDS)
    return LinkSpeed(_median_s(group, device, SMALL, SMALL_ROUNDS), 4 * large / large_s, 4 * large)


def _median_s(group: Group, device: torch.device, numbers: int, rounds: int) -> float:
    part, times = torch.ones(numbers, device=device), []
    for _ in range(rounds + 2):  # the first ones make connections and buffers
        began_s = time.perf_counter()
        group.sum(part)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[2:])
