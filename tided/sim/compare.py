"""Policies side by side, on the same traces, with the same memory and as much to read: what each missed and read."""

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from tided.sim.clairvoyant import HORIZONS_TOKENS, Clairvoyant
from tided.sim.machine import Machine
from tided.sim.ours import Engine
from tided.sim.policies import DEMANDED, Demanded, Policy, Static
from tided.sim.runner import Outcome, run
from tided.sim.trace import Trace
from tided.tide.planner import Pair, boot_set

OURS, PLANS, BOUND, STATIC = "ours", "ours, plans only", "clairvoyant", "static"
RIVALS = (STATIC, *DEMANDED)
POLICIES = (*RIVALS, PLANS, OURS, BOUND)

Progress = Callable[[str], None]


class Row(msgspec.Struct, frozen=True):
    """One policy, means over seeds. Shares are of routing weight of answers; `worst`: the worst stretch of 100 tokens
    after a change of topic. `swaps`: experts read into the place of another. `regret`: missed above the clairvoyant."""

    policy: str
    covered: float
    missed: float
    missed_of_seed: list[float]
    bytes_per_token: float
    swaps: float
    worst: float
    regret: float


class Table(msgspec.Struct, frozen=True):
    """`share` of all pairs have a slot. `beaten`: rivals that missed more on every seed, and on average did not read
    less (static reads nothing, whatever it may)."""

    traffic: str
    share: float
    seeds: list[int]
    answer_tokens: float
    rows: list[Row]

    def row(self, policy: str) -> Row:
        return next(row for row in self.rows if row.policy == policy)

    @property
    def beaten(self) -> list[str]:
        ours = self.row(OURS)
        return [rival for rival in RIVALS if _beats(ours, self.row(rival))]

    @property
    def regret_of_lfu(self) -> float:
        """Our regret as a share of LFU's."""
        return self.row(OURS).regret / self.row("LFU").regret


def compare(
    name: str, traces: Sequence[tuple[int, Trace]], share: float, machine: Machine,
    progress: Progress = lambda _: None, rest_s: float = 0.0,
) -> Table:  # fmt: skip
    """traces: (seed, trace) each."""
    outcomes: dict[str, list[Outcome]] = {policy: [] for policy in POLICIES}
    for seed, trace in traces:
        for policy in POLICIES:
            outcomes[policy].append(outcome(policy, trace, share, machine, seed, rest_s))
            progress(f"{name}, {share:.0%}, seed {seed}: {policy}")
    bound = [one.missed_share for one in outcomes[BOUND]]
    rows = [_row(policy, outcomes[policy], bound) for policy in POLICIES]
    tokens = float(np.mean([len(one.missed) for one in outcomes[OURS]]))
    return Table(name, share, [seed for seed, _ in traces], tokens, rows)


def outcome(policy: str, trace: Trace, share: float, machine: Machine, seed: int, rest_s: float = 0.0) -> Outcome:
    """Raises ValueError for a policy that is none, or a share that leaves a layer too little."""
    slots = round(share * trace.shape.layers * trace.shape.experts)
    runs = [
        run(trace, made, residents, slots, machine, seed, rest_s=rest_s)
        for made, residents in _made(policy, trace, slots)
    ]
    return min(runs, key=lambda one: one.missed_share)


def _made(policy: str, trace: Trace, slots: int) -> Iterable[tuple[Policy, list[Pair]]]:
    """The policy and what it begins with; several of it, of which the best counts, for the bound."""
    if policy == BOUND:
        for horizon in HORIZONS_TOKENS:
            bound = Clairvoyant(trace, slots, horizon)
            yield bound, bound.residents
    elif policy == STATIC:
        residents = boot_set(trace.base, slots, trace.shape.top_k)
        yield Static(), residents
    elif policy in DEMANDED:
        demanded = Demanded(trace.shape, slots, trace.base, DEMANDED[policy])
        yield demanded, demanded.residents
    elif policy in (OURS, PLANS):
        ours = Engine(trace, slots, has_ring=policy == OURS)
        yield ours, ours.residents
    else:
        raise ValueError(f"there is no policy {policy!r}; there are {', '.join(POLICIES)}")


def _row(policy: str, outcomes: list[Outcome], bound: list[float]) -> Row:
    missed = [one.missed_share for one in outcomes]
    return Row(
        policy,
        covered=1.0 - float(np.mean(missed)),
        missed=float(np.mean(missed)),
        missed_of_seed=missed,
        bytes_per_token=float(np.mean([one.bytes_per_token for one in outcomes])),
        swaps=float(np.mean([one.reads - one.failed for one in outcomes])),
        worst=float(np.mean([one.worst_stretch for one in outcomes])),
        regret=float(np.mean(missed) - np.mean(bound)),
    )


def _beats(ours: Row, rival: Row) -> bool:
    less = all(a < b for a, b in zip(ours.missed_of_seed, rival.missed_of_seed, strict=True))
    return less and (ours.bytes_per_token <= rival.bytes_per_token or rival.policy == STATIC)
