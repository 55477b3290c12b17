"""How fast the ranks add is measured within seconds over whatever link, by the same sums on every rank."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from real_pair import ThreadGroup

from tided.engine import link_probe
from tided.engine.link_probe import LARGE, SMALL, LinkSpeed, measure

CLOCK = threading.local()


class Link(ThreadGroup):
    """Time passes with what is sent, on each rank's own clock; rank 1's sums take half as long again."""

    def __init__(self, rank, parts, barrier, bytes_per_s: float) -> None:
        super().__init__(rank, parts, barrier)
        self._bytes_per_s = bytes_per_s
        self.sums: list[int] = []

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        self.sums.append(part.numel())
        CLOCK.now += (20e-6 + 4 * part.numel() / self._bytes_per_s) * (1 + self.rank / 2)
        return super().sum(part.clone())  # as what is sent


def measured(bytes_per_s: float, monkeypatch) -> tuple[list[Link], list[LinkSpeed], list[float]]:
    monkeypatch.setattr(link_probe, "time", SimpleNamespace(perf_counter=lambda: CLOCK.now))
    parts, barrier = [None, None], threading.Barrier(2)
    links = [Link(rank, parts, barrier, bytes_per_s) for rank in range(2)]

    def one(link: Link) -> tuple[LinkSpeed, float]:
        CLOCK.now = 100.0 * link.rank
        try:
            return measure(link, torch.device("cpu")), CLOCK.now - 100.0 * link.rank
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(2) as ranks:
        told = list(ranks.map(one, links))
    return links, [speed for speed, _ in told], [seconds for _, seconds in told]


def test_a_fast_link_has_all_rounds(monkeypatch):
    links, (speed, _), _ = measured(1e9, monkeypatch)
    assert links[0].sums == links[1].sums == [SMALL] * 42 + [LARGE] * 7
    assert speed.small_s == pytest.approx(20e-6 + 4 * SMALL / 1e9)
    assert speed.about()["large_sum_gb_s"] == pytest.approx(1.0, rel=0.01)
    assert str(speed) == "sums of 40 KB in 61 us, of 8 MB at 0.998 GB/s"


@pytest.mark.parametrize("bytes_per_s", [10e6, 1e6, 5e5, 1e5])
def test_a_slow_link_is_measured_within_seconds_by_the_same_sums_on_every_rank(bytes_per_s, monkeypatch):
    links, speeds, seconds = measured(bytes_per_s, monkeypatch)
    assert links[0].sums == links[1].sums
    assert len(links[0].sums) > 3
    assert max(seconds) < 8
    assert speeds[0].bytes_per_s == pytest.approx(bytes_per_s, rel=0.05)
    assert speeds[0].about()["large_sum_gb_s"] > 0  # however slow: a share of what it was
    assert speeds[0].large_bytes < 4 * LARGE
    assert speeds[0].about()["large_sum_bytes"] == 4 * links[0].sums[-1] == speeds[0].large_bytes
