"""The whole comparison: traffics, budgets and seeds, and the control in which nothing can be learned."""

from collections.abc import Iterable

import msgspec

from tided.sim.calibration import Likeness, likeness
from tided.sim.compare import OURS, RIVALS, STATIC, Progress, Table, compare
from tided.sim.machine import Machine
from tided.sim.trace import Trace, shuffled
from tided.sim.traffic import MIXED, SWITCHING, Mix, traffic

TRAFFICS: dict[str, Mix] = {mix.name: mix for mix in (MIXED, SWITCHING)}
SHARES = (0.25, 0.40, 0.65)
CONTROL_SHARE = 0.40
CONTROL_GAIN = 0.01  # of the missed weight: more is a gain, and in the control there is none to be had


class Study(msgspec.Struct, frozen=True):
    """`control`: the same comparison on shuffled traces. `likeness`: simulated demand beside the real model's."""

    tables: list[Table]
    control: Table | None = None
    likeness: list[Likeness] = []

    @property
    def unbeaten(self) -> list[str]:
        """What ours did not beat, in words."""
        return [
            f"{rival} at {table.share:.0%} of {table.traffic} traffic"
            for table in self.tables
            for rival in RIVALS
            if rival not in table.beaten
        ]

    @property
    def control_gain(self) -> float:
        """By how much ours missed less than a static set in the control, as a share of what that missed."""
        if self.control is None:
            return 0.0
        return 1.0 - self.control.row(OURS).missed / self.control.row(STATIC).missed


def synthetic(
    names: Iterable[str], shares: Iterable[float], seeds: list[int], layers: int, control: bool, machine: Machine,
    progress: Progress, rest_s: float = 0.0,
) -> Study:  # fmt: skip
    """Raises ValueError for traffic that is none, or a share that no resident set can have."""
    tables: list[Table] = []
    shuffled_traces: list[tuple[int, Trace]] = []
    for name in names:
        if name not in TRAFFICS:
            raise ValueError(f"there is no traffic {name!r}; there are {', '.join(TRAFFICS)}")
        traces = [(seed, traffic(TRAFFICS[name], layers, seed=seed)) for seed in seeds]
        tables += [compare(name, traces, share, machine, progress, rest_s) for share in shares]
        shuffled_traces = shuffled_traces or [(seed, shuffled(trace, seed)) for seed, trace in traces]
    lesson = compare("shuffled", shuffled_traces, CONTROL_SHARE, machine, progress, rest_s) if control else None
    return Study(tables, lesson, likeness(_many_topics(layers)))


def recorded(
    trace: Trace, shares: Iterable[float], seeds: list[int], machine: Machine, progress: Progress, rest_s: float = 0.0
) -> Study:
    """The same trace for every seed; what differs is the disk."""
    traces = [(seed, trace) for seed in seeds]
    return Study([compare("recorded", traces, share, machine, progress, rest_s) for share in shares])


def _many_topics(layers: int) -> Trace:
    return traffic(Mix("likeness", 60, 2), layers=min(layers, 4), topic_count=8, seed=1)
