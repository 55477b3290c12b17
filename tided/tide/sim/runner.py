"""One policy, one trace, one simulated pair. The runner owns what is routable and believes no policy."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tided.errors import PairError
from tided.tide.planner import Pair
from tided.tide.sim.machine import Fault, Machine
from tided.tide.sim.machine import Pair as Ranks
from tided.tide.sim.policies import Policy
from tided.tide.sim.trace import Span, Trace

PREFILL_CHUNK_TOKENS = 128
STRETCH_TOKENS = 100
Faults = Callable[[int, int], Fault]  # (ticket, rank) -> what goes wrong


@dataclass
class Outcome:
    """`missed` [answer tokens]: the share of each token's routing weight whose experts were not routable."""

    missed: npt.NDArray[np.float64]
    bytes_read: int
    reads: int
    failed: int
    switches: list[int] = field(default_factory=list)  # answer tokens at which another topic begins

    @property
    def missed_share(self) -> float:
        return float(self.missed.mean())

    @property
    def covered_share(self) -> float:
        return 1.0 - self.missed_share

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_read / len(self.missed)

    @property
    def worst_stretch(self) -> float:
        """The largest missed share of `STRETCH_TOKENS` tokens after a change of topic (of any, where there is none)."""
        starts = self.switches or [0]
        return max(float(self.missed[at : at + STRETCH_TOKENS].mean()) for at in starts)


class World:
    """What every rank routes by. Raises PairError for a move that no engine could make."""

    def __init__(self, trace: Trace, policy: Policy, residents: list[Pair], slots: int, ranks: Ranks) -> None:
        self.shape, self.policy, self.ranks, self.slots = trace.shape, policy, ranks, slots
        self.routable = np.zeros(self.shape.layers * self.shape.experts, dtype=bool)
        self.routable[[self._index(pair) for pair in residents]] = True
        self._count = self.routable.reshape(self.shape.layers, -1).sum(axis=1)
        self._used = int(self.routable.sum())
        self.loading: dict[int, Pair] = {}
        self.reads = self.failed = 0

    def land(self, until_s: float) -> None:
        """What every rank has read by then becomes routable, now, on all of them."""
        for ticket, good in self.ranks.advance(until_s):
            pair = self.loading.pop(ticket)
            if good:
                self.routable[self._index(pair)] = True
                self._count[pair[0]] += 1
                leaves = self.policy.published(pair)
                if leaves is not None:
                    self._withdraw(leaves)
            else:
                self._used -= 1
                self.failed += 1
                self.policy.failed(pair)

    def move(self, reads: int, faults: Faults | None) -> None:
        moves = self.policy.moves(reads)
        if len(moves.load) > reads:
            raise PairError(f"{len(moves.load)} reads, the step is worth {reads}")
        for pair in moves.withdraw:
            self._withdraw(pair)
        for pair in moves.load:
            self._load(pair, faults)

    def _withdraw(self, pair: Pair) -> None:
        if not self.routable[self._index(pair)] or self._count[pair[0]] <= self.shape.top_k:
            raise PairError(f"{pair} was withdrawn: not routable, or the floor of its layer")
        self.routable[self._index(pair)] = False
        self._count[pair[0]] -= 1
        self._used -= 1

    def _load(self, pair: Pair, faults: Faults | None) -> None:
        if self.routable[self._index(pair)] or pair in self.loading.values() or self._used >= self.slots:
            raise PairError(f"{pair} was loaded: it is there already, or there is no slot")
        self._used += 1
        self.reads += 1
        ranks = range(self.ranks.machine.ranks)
        ticket = self.ranks.read([faults(self.reads, rank) for rank in ranks] if faults else None)
        self.loading[ticket] = pair

    def _index(self, pair: Pair) -> int:
        return pair[0] * self.shape.experts + pair[1]


def run(
    trace: Trace, policy: Policy, residents: list[Pair], slots: int, machine: Machine, seed: int,
    faults: Faults | None = None,
) -> Outcome:  # fmt: skip
    """Serves the trace. Routing of a step happens before what was read meanwhile is published; reads of a step begin
    when it is over; what has landed when the next step ends is routable in the one after."""
    ranks = Ranks(machine, trace.shape.layers * trace.shape.experts, np.random.default_rng([seed, 7]))
    world = World(trace, policy, residents, slots, ranks)
    now_s = credit = 0.0
    missed: list[npt.NDArray[np.float64]] = []
    for span in trace.requests:
        for first, rows, is_prompt in _steps(span):
            picks, weights = trace.flat(first, rows), trace.weight(first, rows)
            if not is_prompt:
                missed.append((weights * ~world.routable[picks]).sum(axis=1) / trace.shape.layers)
            step_s = rows / machine.prefill_tokens_s if is_prompt else machine.step_s
            now_s += step_s
            world.land(now_s)
            policy.observe(picks, weights, is_prompt)
            worth = ranks.reads_in(step_s)
            credit = min(credit + worth, max(worth, 1.0))
            reads = max(0, min(int(credit), int(max(worth, 1.0)) - len(world.loading)))
            before = world.reads
            world.move(reads, faults)
            credit -= world.reads - before
        policy.request_done()
    return Outcome(np.concatenate(missed), ranks.bytes_read, world.reads, world.failed, _switches(trace))


def _steps(span: Span) -> list[tuple[int, int, bool]]:
    """(first token, tokens, prompt?) of a request's steps."""
    end = span.first + span.prompt
    chunks = [(at, min(PREFILL_CHUNK_TOKENS, end - at), True) for at in range(span.first, end, PREFILL_CHUNK_TOKENS)]
    return chunks + [(at, 1, False) for at in range(end, end + span.answer)]


def _switches(trace: Trace) -> list[int]:
    answers = np.cumsum([0, *(span.answer for span in trace.requests)])
    return [int(answers[at]) for at in trace.switches]
