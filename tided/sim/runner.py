"""One policy, one trace, one simulated pair. The runner owns what is routable and believes no policy."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tided.errors import PairError
from tided.sim import faults as rig
from tided.sim.faults import Faults
from tided.sim.machine import Machine, Ranks
from tided.sim.policies import Policy
from tided.sim.trace import Span, Trace
from tided.tide.planner import Pair

PREFILL_CHUNK_TOKENS = 128
STRETCH_TOKENS = 100
QUIET_S = 1.0  # before a pause counts as rest, as in the engine


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
        self._grid = (self.shape.layers, self.shape.experts)
        self._count = self.routable.reshape(self._grid).sum(axis=1)
        self._used = int(self.routable.sum())
        self.loading: dict[int, Pair] = {}
        self._came_by: dict[int, int] = {}  # routable pairs that were read: by which ticket
        self.reads = self.failed = 0

    def land(self, until_s: float) -> None:
        """What every rank has read by then becomes routable, now, on all of them."""
        for ticket, good in self.ranks.advance(until_s):
            pair = self.loading.pop(ticket)
            if good:
                self._came_by[self._index(pair)] = ticket
                self.routable[self._index(pair)] = True
                self._count[pair[0]] += 1
                leaves = self.policy.published(pair)
                if leaves is not None:
                    self._withdraw(leaves)
            else:
                self._used -= 1
                self.failed += 1
                self.policy.failed(pair)

    def move(self, reads: int, faults: Faults) -> None:
        moves = self.policy.moves(reads)
        if len(moves.load) > reads and not self.policy.paces_itself:
            raise PairError(f"{len(moves.load)} reads, the step is worth {reads}")
        for pair in moves.withdraw:
            self._withdraw(pair)
        for pair in moves.load:
            self._load(pair, faults)

    def check(self) -> None:
        """Raises PairError unless all that is routable is whole on every rank, every layer has its floor, and nobody
        has more than the slots."""
        for index, ticket in self._came_by.items():
            if not all(ticket in whole for whole in self.ranks.whole):
                raise PairError(f"pair {index} is routable, but not every rank has read it")
        if self._count.min() < self.shape.top_k or (self.routable.reshape(self._grid).sum(axis=1) != self._count).any():
            raise PairError("a layer is below its floor")
        if not int(self.routable.sum()) + len(self.loading) == self._used <= self.slots:
            raise PairError(f"{self._used} slots of {self.slots} are in use")

    def _withdraw(self, pair: Pair) -> None:
        if not self.routable[self._index(pair)] or self._count[pair[0]] <= self.shape.top_k:
            raise PairError(f"{pair} was withdrawn: not routable, or the floor of its layer")
        self.routable[self._index(pair)] = False
        self._came_by.pop(self._index(pair), None)
        self._count[pair[0]] -= 1
        self._used -= 1

    def _load(self, pair: Pair, faults: Faults) -> None:
        if self.routable[self._index(pair)] or pair in self.loading.values() or self._used >= self.slots:
            raise PairError(f"{pair} was loaded: it is there already, or there is no slot")
        self._used += 1
        self.reads += 1
        ticket = self.ranks.read([faults(self.reads, rank) for rank in range(self.ranks.machine.ranks)])
        self.loading[ticket] = pair

    def _index(self, pair: Pair) -> int:
        return pair[0] * self.shape.experts + pair[1]


def run(
    trace: Trace, policy: Policy, residents: list[Pair], slots: int, machine: Machine, seed: int,
    faults: Faults = rig.none, check: bool = False, rest_s: float = 0.0,
) -> Outcome:  # fmt: skip
    """Serves the trace. A step routes by what was published when it began; its reads begin when it is over; what has
    landed by the end of a step is routable in the next. With `rest_s` nobody asks for so long behind each request;
    without, the next one always waits already, and there is no rest. With `check` the invariants hold after every step,
    or raise."""
    ranks = Ranks(machine, trace.shape.layers * trace.shape.experts, np.random.default_rng([seed, 7]))
    world = World(trace, policy, residents, slots, ranks)
    now_s = credit = 0.0
    missed: list[npt.NDArray[np.float64]] = []
    for span in trace.requests:
        steps = _steps(span)
        for left, (first, rows, chunks_left) in zip(reversed(range(len(steps))), steps, strict=True):
            is_prompt = chunks_left is not None
            picks, weights = trace.flat(first, rows), trace.weight(first, rows)
            if not is_prompt:
                missed.append((weights * ~world.routable[picks]).sum(axis=1) / trace.shape.layers)
            step_s = rows / machine.prefill_tokens_s if is_prompt else machine.step_s
            now_s += step_s
            world.land(now_s)
            policy.observe(picks, weights, chunks_left)
            if not left:
                policy.request_done()
            elif not is_prompt:
                policy.token_done()
            worth = ranks.reads_in(step_s)
            credit = min(credit + worth, max(worth, 1.0))
            reads = max(0, min(int(credit), int(max(worth, 1.0)) - len(world.loading)))
            before = world.reads
            world.move(reads, faults)
            if check:
                world.check()
            credit -= world.reads - before
        if rest_s:
            now_s = _rest(world, now_s, rest_s, faults)
    return Outcome(np.concatenate(missed), ranks.bytes_read, world.reads, world.failed, _switches(trace))


def _rest(world: World, now_s: float, rest_s: float, faults: Faults) -> float:
    """Nobody asks; the time after it. Who reads only what was missed has nothing to read."""
    rests_s, end_s, rests = now_s + QUIET_S, now_s + rest_s, False
    while now_s < end_s:
        if not rests and now_s >= rests_s:
            world.policy.rest()
            rests = True
        if world.policy.paces_itself:
            world.move(0, faults)
        now_s = min(end_s, now_s + world.ranks.machine.step_s)
        world.land(now_s)
    return now_s


def _steps(span: Span) -> list[tuple[int, int, int | None]]:
    """(first token, tokens, chunks of the prompt that are left; None in the answer) of a request's steps."""
    end = span.first + span.prompt
    starts = range(span.first, end, PREFILL_CHUNK_TOKENS)
    chunks = [
        (at, min(PREFILL_CHUNK_TOKENS, end - at), left)
        for at, left in zip(starts, reversed(range(len(starts))), strict=True)
    ]
    return [*chunks, *((at, 1, None) for at in range(end, end + span.answer))]


def _switches(trace: Trace) -> list[int]:
    answers = np.cumsum([0, *(span.answer for span in trace.requests)])
    return [int(answers[at]) for at in trace.switches]
