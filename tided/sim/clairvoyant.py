"""A policy that knows the future: how much better could any be?

Belady by weight. Like the others it reads only what was missed; what it keeps is what will carry the most routing
weight soon, near tokens counting for more. Which horizon is best depends on how long a slot can be held, so the bound
of a run is the best of several. A strong reference, not a proof: greedy choices under a read budget may be improved.
"""

import numpy as np
import numpy.typing as npt

from tided.sim.policies import Exchanging, Floats, Picks, lowest
from tided.sim.trace import Trace
from tided.tide.hot import Moves

HORIZONS_TOKENS = (60.0, 200.0)


class Clairvoyant(Exchanging):
    def __init__(self, trace: Trace, slots: int, horizon_tokens: float) -> None:
        super().__init__(trace.shape, slots, trace.base)
        self._future = _future(trace, horizon_tokens)
        self._at = 0
        self._missed: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

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
            victim = next((v for v in map(int, victims) if self.spares(v)), -1)
            if victim < 0 or future[victim] >= future[newcomer]:
                break
            self.exchange(victim, newcomer, moves)
        return moves


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
