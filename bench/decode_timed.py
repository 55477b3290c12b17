"""What takes the time of a decode step's parts: the model and the sampler of a rank, as it uses them, with a clock."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from torch import Tensor

from tided.engine import sampling
from tided.engine.build import Rank
from tided.engine.types import Sampling
from tided.models.base import LaneState

PARTS = ("model", "collectives", "sampler", "host")
SAMPLING = Sampling(temperature=1.0, top_p=0.95)


class Times(msgspec.Struct):
    """Milliseconds of rank 0's measured steps, and collectives a step."""

    step: list[float] = []
    model: list[float] = []
    collectives: list[float] = []
    sampler: list[float] = []
    host: list[float] = []
    moving: list[bool] = []  # steps with reads under way, or with a change of the routable set
    swapped: int = 0
    hot_reads: int = 0
    calls: int = 0
    resident: int = 0
    total: int = 0


class TimedModel:
    """The model of a rank, with the seconds of its last decode."""

    def __init__(self, rank: Rank) -> None:
        self._model, self.seconds = rank.model, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def decode(self, lanes: Sequence[LaneState], token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        began = time.perf_counter()
        logits = self._model.decode(lanes, token_ids, counts)
        self.seconds = time.perf_counter() - began
        return logits


class TimedSampler:
    """The executor's sampler, with the seconds of its last draw: to begin it, and to have the tokens."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, logits: Tensor, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
        return self.drawing(logits, rows)()

    def drawing(self, logits: Tensor, rows: Sequence[tuple[Sampling, int]]) -> Callable[[], list[int]]:
        began = time.perf_counter()
        tokens = sampling.drawing(logits, rows)
        self.seconds = time.perf_counter() - began

        def finish() -> list[int]:
            began = time.perf_counter()
            found = tokens()
            self.seconds += time.perf_counter() - began
            return found

        return finish
