"""Faults by stages: what a seed strikes with, where, and what must come of it."""

import random
from dataclasses import dataclass, field
from typing import Literal

from tests.faults.strike import STAGES, Deed, Stage, Strike

Layout = Literal["host", "nodes"]
Expects = Literal["ends", "goes on", "either"]

READ_AT_A_START = "the history is read at a start alone, and locked from then on"
BEFORE_IT = "the prompt's cached beginning is read before this stage"


@dataclass(frozen=True)
class Fault:
    """`rank` None: either, by the seed. `deed` None: the rank tells that the stage is reached and holds, and the parent
    does it. `amounts`: of what the deed takes. `cannot`: why a stage has no such fault."""

    name: str
    deed: Deed | None
    expects: Expects
    rank: int | None = None
    layout: Layout = "host"
    amounts: tuple[int, ...] = (1,)
    cannot: dict[Stage, str] = field(default_factory=dict)
    at_shutdown: Expects = "ends"


HOUR_S = 3600
LOST = 10**9
FAULTS = (
    Fault("kill -9 of rank 0", "kill", "ends", rank=0),
    Fault("kill -9 of rank 1", "kill", "ends", rank=1),
    Fault("SIGSTOP of rank 0", "stop", "ends", rank=0),
    Fault("SIGSTOP of rank 1", "stop", "ends", rank=1),
    Fault("SIGSTOP, SIGCONT after 1 s", "stop", "either"),
    Fault("EIO from the disk of experts", "eio", "either", amounts=(1, 2, 3, 20, LOST)),
    Fault("short reads", "short", "goes on", amounts=(1, 7, 100)),
    Fault("corrupt records", "corrupt", "either", amounts=(1, 2, 3, 20)),
    Fault("full disk", "full", "either"),
    Fault(
        "damaged history and cached prompts",
        None,
        "goes on",
        cannot={"decode": BEFORE_IT, "swap": BEFORE_IT, "snapshot": BEFORE_IT, "shutdown": READ_AT_A_START},
    ),
    Fault(
        "the clock jumps", "clock", "goes on", amounts=(-400 * 24 * HOUR_S, -HOUR_S, 26 * HOUR_S, 4000 * 24 * HOUR_S)
    ),
    Fault("allocations fail", "memory", "either"),
    Fault("the node runs short of memory", "short of memory", "either"),
    Fault("a client that does not read", None, "goes on", rank=0),
    Fault("the link is cut", None, "ends", layout="nodes"),
    Fault("the link is away for 1 s", None, "goes on", layout="nodes"),
    Fault("a slow link (8 Mbit/s)", None, "goes on", layout="nodes"),
    Fault("SIGSTOP, SIGCONT after 9 s, on two nodes", "stop", "ends", layout="nodes"),
)
CELLS = tuple((fault, stage) for fault in FAULTS for stage in STAGES if stage not in fault.cannot)
MOST = {"boot": 4, "prefill": 6, "decode": 24, "swap": 8, "snapshot": 5, "shutdown": 1}  # times at the stage


@dataclass(frozen=True)
class Case:
    seed: int
    fault: Fault
    stage: Stage
    rank: int
    strike: Strike

    @property
    def expects(self) -> Expects:
        return self.fault.at_shutdown if self.stage == "shutdown" else self.fault.expects

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.fault.name}, rank {self.rank}, {self.stage} {self.strike.after}"


def case(seed: int, cell: tuple[Fault, Stage] | None = None) -> Case:
    """Without a cell the seed chooses it: as many seeds in a row as there are cells take each once."""
    chance = random.Random(seed)
    fault, stage = cell or CELLS[(seed - 1) % len(CELLS)]
    rank = chance.randrange(2) if fault.rank is None else fault.rank
    after = chance.randint(1, MOST[stage])
    amount, jitter_s = chance.choice(fault.amounts), chance.choice((0.0, chance.uniform(0, 0.03)))
    strike = Strike(seed, fault.deed or "hold", stage, after, jitter_s, amount)
    return Case(seed, fault, stage, rank, strike)


def named(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


def numbers(text: str) -> list[int]:
    """A, or A-B, or several of either with commas."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
