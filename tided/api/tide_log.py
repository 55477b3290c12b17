"""The tide over time: a sample a second of the engine's counters, for the last quarter of an hour.

Counters are told as they stand, so that whoever reads may take a difference over any span: 1 - missed / weight is the
coverage, the share of the routing weight that found its expert in memory.
"""

from collections import deque
from typing import Any, NamedTuple

from tided.api.ports import Engine

KEPT_S = 900
EVERY_S = 1.0


class Sample(NamedTuple):
    """`at`: Unix time. `weight`, `missed`, `substituted`: routing weight of all picks, of those whose expert was not in
    memory, and of those that another expert answered for. `held`: share of what the next tokens are expected to ask for
    that is in memory."""

    at: float
    weight: float
    missed: float
    substituted: float
    swaps: int
    hot_reads: int
    read_bytes: int
    tokens: int
    held: float | None


class TideLog:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.samples: deque[Sample] = deque(maxlen=int(KEPT_S / EVERY_S))

    def take(self, now: float) -> Sample | None:
        """One more, at the Unix time `now`; None while nothing is loaded."""
        figures = self._engine.figures()
        if not figures:
            return None
        held = self._engine.held()
        sample = Sample(
            at=round(now, 2),
            weight=round(figures["weight"], 3),
            missed=round(figures["missed_weight"], 3),
            substituted=round(figures["substituted_weight"], 3),
            swaps=figures["swaps"],
            hot_reads=figures["reads_hot_issued"],
            read_bytes=figures["reads_nbytes"],
            tokens=figures["answer_tokens"],
            held=None if held is None else round(held, 4),
        )
        self.samples.append(sample)
        return sample


def as_columns(samples: list[Sample]) -> dict[str, list[Any]]:
    return {name: [getattr(one, name) for one in samples] for name in Sample._fields}
