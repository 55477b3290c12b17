"""How fast the ranks add: measured once, when they have met. Every rank measures the same sums, in lockstep (C1)."""

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tided.engine.dataplane import TorchGroup
from tided.models.parallel import Group

SMALL, LARGE = 10_240, 2 << 20  # fp32: a decode step's sums are of tens of kilobytes, a prompt chunk's of megabytes
SMALL_ROUNDS, LARGE_ROUNDS = 40, 5
FIRST_ROUNDS = 2  # make connections and buffers
SPENT_S = 1.0  # on sums of one size: over a slow link fewer are measured
LARGEST_S = 0.5  # that a sum may take: over a slow link it is of fewer numbers


@dataclass(frozen=True)
class LinkSpeed:
    """`small_s`: median of a sum of SMALL numbers; `bytes_per_s`: a rank's part of a sum of `large_bytes`, over its
    median time. Both are of the engine's own sum, launches included: no figure of the wire alone. `one_shot`: the same
    of the sums that need no library, as large as these may be."""

    small_s: float
    bytes_per_s: float
    large_bytes: int = 4 * LARGE
    one_shot: "LinkSpeed | None" = None

    def __str__(self) -> str:
        large = f"{self.large_bytes / (1 << 20):.3g} MB at {self._gb_s:.3g} GB/s"
        text = f"sums of {4 * SMALL >> 10} KB in {1e6 * self.small_s:.0f} us, of {large}"
        return f"{text}; by one launch, {self.one_shot}" if self.one_shot else text

    @property
    def _gb_s(self) -> float:
        return float(f"{self.bytes_per_s / 1e9:.3g}")

    def about(self) -> dict[str, Any]:
        """For /health."""
        found = {
            "sum_us": round(1e6 * self.small_s, 1),
            "sum_bytes": 4 * SMALL,
            "large_sum_gb_s": self._gb_s,
            "large_sum_bytes": self.large_bytes,
        }
        return found | ({"one_shot": self.one_shot.about()} if self.one_shot else {})


def measure(group: Group, device: torch.device) -> LinkSpeed:
    """Raises what the group's collectives raise, and PairError if a peer did not come to one. Some seconds, unless a
    sum of SMALL numbers takes as long."""
    one_shot = group.one_shot if isinstance(group, TorchGroup) else None
    with group.by_library() if isinstance(group, TorchGroup) else nullcontext():
        found = _measured(group, device, LARGE)
    if one_shot is not None:
        found = replace(found, one_shot=_measured(group, device, min(LARGE, one_shot.most_bytes // 4)))
    group.check()
    return found


def _measured(group: Group, device: torch.device, large: int) -> LinkSpeed:
    small_s, mean_s = _rounds(group, device, SMALL, SMALL_ROUNDS)
    while large > SMALL and mean_s * large / SMALL > LARGEST_S:  # more than it takes: a small sum is mostly its way
        large = max(large // 4, SMALL)
    large_s = small_s if large == SMALL else _rounds(group, device, large, LARGE_ROUNDS)[0]
    return LinkSpeed(small_s, 4 * large / large_s, 4 * large)


def _rounds(group: Group, device: torch.device, numbers: int, most: int) -> tuple[float, float]:
    """Seconds of a sum: this rank's median, and the mean over all ranks, which every rank has to the bit and decides
    by. A sum carries what each rank has spent before it."""
    part, times, mean_s = torch.ones(numbers, device=device), list[float](), 0.0
    for _ in range(FIRST_ROUNDS):
        _timed(group, part)
    while len(times) < most and mean_s * len(times) < SPENT_S:
        part[0] = sum(times)
        seconds, total = _timed(group, part)
        if times:
            mean_s = float(total[0]) / (group.ranks * len(times))
        times.append(seconds)
    return statistics.median(times), mean_s


def _timed(group: Group, part: Tensor) -> tuple[float, Tensor]:
    """part [numbers] -> seconds, the sum [numbers]."""
    _wait(part)
    began_s = time.perf_counter()
    total = group.sum(part)
    _wait(part)
    return time.perf_counter() - began_s, total


def _wait(part: Tensor) -> None:
    if part.is_cuda:
        torch.cuda.synchronize(part.device)
