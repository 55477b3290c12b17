"""Decode steps of fixed shape, one for each number of rows: what is alike in all families.

The first step of a number of rows runs eagerly: it is a real step, and it compiles the kernels. Then the same code is
captured, which runs nothing, so no warm-up serves nobody and none leaves demand behind."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tided.cache.context import Context
from tided.experts.tables import DemandTap, Together
from tided.models.copies import Copies
from tided.models.graphs import Graphs

Step = TypeVar("Step")
Captured = TypeVar("Captured")


@dataclass
class Prepared(Generic[Step, Captured]):
    """A number of rows: the step, where it leaves what its rows wanted, until when its inputs on the host are read, and
    its graphs once they are captured. A family adds the inputs."""

    step: Step
    wish: Together
    copies: Copies
    captured: Captured | None = field(default=None, kw_only=True)

    def recorded(
        self, tap: DemandTap, lanes: Iterable[Context], alone: bool, capture: Callable[[Step], Captured] | None
    ) -> None:
        """Behind a step that waited for nobody: what its rows, of these lanes, wanted. `alone`: it may lie where it is,
        for the next step adds it up before it writes. `capture`: makes the graphs, where there may be some."""
        wish = self.wish._replace(lanes=tuple(lane.index for lane in lanes))
        tap.record_step(wish if alone else wish.copied())
        if self.captured is None and capture is not None:
            self.captured = capture(self.step)
            self.wish = self.wish._replace(standing=tap.standing(self.wish))


One = TypeVar("One", bound=Prepared[Any, Any])


class FixedSteps(Generic[One]):
    """Of one model. Used by the engine's thread alone."""

    def __init__(self) -> None:
        self.captures = True  # False: every step runs eagerly
        self.prepared: dict[int, One] = {}  # by rows
        self.graphs = Graphs()

    def has_captured(self, rows: int) -> bool:
        made = self.prepared.get(rows)
        return made is not None and made.captured is not None
