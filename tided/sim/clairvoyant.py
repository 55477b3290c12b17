"""A policy that knows the future: how much better could any be?

Belady by weight. Like the others it reads only what was missed; what it keeps is what will carry the most routing
weight soon, near tokens counting for more. Which horizon is best depends on how long a slot can be held, so the bound
of a run is the best of several. A strong reference, not a proof: greedy choices under a read budget may be improved.
"""

import numpy as np
import numpy.typing as npt

from tided.sim.policies import Floats, Picks, lowest
from tided.sim.trace import Trace
from tided.tide.hot import Moves
from tided.tide.planner import Pair, boot_set

HORIZONS_TOKENS = (60.0, 200.0)


class Clairvoyant:
    paces_itself = False

    def __init__(self, trace: Trace, slots: int, horizon_tokens: float) -> None:
        self.shape = trace.shape
        self._future = _future(trace, horizon_tokens)
        self.residents = boot_set(trace.base, slots, self.shape.top_k)
        self.present = np.zeros(self._future.shape[1], dtype=bool)
        self.present[[layer * self.shape.experts + expert for layer, expert in self.residents]] = True
        self._count = self.present.reshape(self.shape.layers, -1).sum(axis=1)
        self._at = 0
        self._missed: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._loading: set[int] = set()

    def observe(self, picks: Picks, weights: Floats, chunks_left: int | None) -> None:
        self._at += len(picks)
        found = np.unique(picks)
        self._missed = found[~self.present[found]]

    def moves(self, reads: int) -> Moves:
        moves, future = Moves(), self._future[self._at]
        wanted = [int(pair) for pair in self._missed[np.argsort(-future[self._missed], kind="stable")]]
        wanted = [pair for pair in wanted if pair not in self._loading][:reads]
        if not wanted:
            return moves
        worth = np.where(self.present, future, np.inf)
        victims = iter(lowest(worth, len(wanted) + 64))
        for newcomer in wanted:
            victim = next((v for v in map(int, victims) if self._count[v // self.shape.experts] > self.shape.top_k), -1)
            if victim < 0 or future[victim] >= future[newcomer]:
                break
            self.present[victim] = False
            self._count[victim // self.shape.experts] -= 1
            self._loading.add(newcomer)
            moves.withdraw.append(divmod(victim, self.shape.experts))
            moves.load.append(divmod(newcomer, self.shape.experts))
        return moves

    def published(self, pair: Pair) -> None:
        index = pair[0] * self.shape.experts + pair[1]
        self._loading.remove(index)
        self.present[index] = True
        self._count[pair[0]] += 1

    def failed(self, pair: Pair) -> None:
        self._loading.remove(pair[0] * self.shape.experts + pair[1])

    def token_done(self) -> None: ...
    def request_done(self) -> None: ...
    def rest(self) -> None: ...


def _future(trace: Trace, horizon_tokens: float) -> npt.NDArray[np.float32]:
    """[tokens + 1, pairs]: routing weight that comes at or after a token, discounted. Only answers count, as in the
    result."""
    pairs, tokens = trace.shape.layers * trace.shape.experts, len(trace.experts)
    picks, weights = trace.flat(0, tokens), trace.weight(0, tokens)
    for span in trace.requests:
        weights[span.first : span.first + span.prompt] = 0.0
    keep = np.float32(np.exp(-1.0 / horizon_tokens))
    future = np.zeros((tokens + 1, pairs), dtype=np.float32)
    for at in range(tokens - 1, -1, -1):
        np.multiply(future[at + 1], keep, out=future[at])
        future[at, picks[at]] += weights[at].astype(np.float32)
    return future
