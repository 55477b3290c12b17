"""What the next tokens will ask for: the expected routing weight of every pair, learned while tokens are generated.

The estimate is a mixture. Its parts are running means of the routing weight over several horizons, kin (what earlier
requests asked for whose picks were like those of the requests that run now), the base (history and seed), and an even
spread. How much each part counts is learned too, by how well it foretold the picks that came a while later: on steady
traffic long horizons win, after a change of topic short ones and kin, with nothing to tune for a model or a machine.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from tided.tide.demand import Grid, RouterShape, per_layer

Indices = npt.NDArray[np.int64]  # pairs as layer * experts + expert
Weights = npt.NDArray[np.float64]

HORIZONS_TOKENS = (32.0, 128.0, 512.0)
LEARNING_TOKENS = 128.0  # after so many tokens the shares have followed a change
LEAST_SHARE = 0.005  # of a part: one that is wrong now must be able to come back
LAG_TOKENS = 16  # what is read now serves later: a part is judged by picks so many tokens ahead, or up to twice
SETTLED = (
    0.2  # of all pairs, the most wanted: nobody asks whether to keep them, so the shares are not learned from them
)


class Heat:
    """`expected` [layers * experts]: every layer sums to about 1. Same calls, same numbers."""

    def __init__(self, shape: RouterShape, base: Grid) -> None:
        self.shape = shape
        self._horizons = np.array(HORIZONS_TOKENS)
        self._running = slice(1, 1 + len(HORIZONS_TOKENS))
        parts = len(HORIZONS_TOKENS) + 3  # even, horizons, kin, base
        self.shares: Weights = np.full(parts, 1.0 / parts)
        self._parts: Weights = np.tile(self._flat(base), (parts, 1))  # [parts, pairs]
        self._parts[0] = 1.0 / shape.experts
        self._snapshots: deque[Weights] = deque(maxlen=2)
        self.expected: Weights = self.shares @ self._parts
        self._take_snapshot()

    def rebase(self, base: Grid) -> None:
        """New scores [layers, experts] from history, seed and prompts (`Pilot.scores`)."""
        self._set(-1, base)

    def set_kin(self, kin: Grid) -> None:
        """What requests like the running ones asked for [layers, experts] (`Kin.like`)."""
        self._set(-2, kin)

    def observe(self, pairs: Indices, weights: Weights, tokens: int) -> None:
        """The router's wish in `tokens` tokens, resident or not: pairs [n] as layer * experts + expert, weights [n] as
        means over the rows of their layer, so that each layer sums to 1 however many of the tokens it computed.
        Repeated pairs add up; a weight of 0 counts for nothing. Raises ValueError for what no router gives."""
        if tokens <= 0 or not len(pairs):
            return
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError("routing weights must be finite and not negative")
        self._learn_shares(pairs, weights, tokens)
        seen = np.bincount(pairs, weights, minlength=self._parts.shape[1])
        keep = np.exp(-tokens / self._horizons)[:, None]
        self._parts[self._running] *= keep
        self._parts[self._running] += (1.0 - keep) * seen
        self.expected = self.shares @ self._parts
        self._since_snapshot += tokens
        if self._since_snapshot >= LAG_TOKENS:
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        self._snapshots.append(self._parts.copy())
        self._since_snapshot = 0
        settled = max(1, round(SETTLED * len(self.expected)))
        self._open = self.expected < np.partition(self.expected, -settled)[-settled]
        self._open_mass = self._snapshots[0] @ self._open  # [parts]

    def _learn_shares(self, pairs: Indices, weights: Weights, tokens: int) -> None:
        """One step of expectation maximisation for the shares: how the parts, as they were a while ago, foretold these
        picks among those that are not settled."""
        parts = self._snapshots[0]
        chosen = self._open[pairs] & (weights > 0)
        if not chosen.any():
            return
        foretold = self.shares[:, None] * parts[:, pairs[chosen]]
        credit = (foretold / foretold.sum(axis=0)) @ weights[chosen]
        credit = np.divide(credit, self._open_mass, out=np.zeros_like(credit), where=self._open_mass > 0)
        credit /= credit.sum()
        self.shares += (1.0 - np.exp(-tokens / LEARNING_TOKENS)) * (credit - self.shares)
        self.shares = np.maximum(self.shares, LEAST_SHARE)
        self.shares /= self.shares.sum()

    def _set(self, part: int, grid: Grid) -> None:
        flat = self._flat(grid)
        self._parts[part] = flat
        self.expected = self.shares @ self._parts

    def _flat(self, base: Grid) -> Weights:
        if base.shape != (self.shape.layers, self.shape.experts):
            raise ValueError(f"scores are {list(base.shape)}, must be [{self.shape.layers}, {self.shape.experts}]")
        flat: Weights = per_layer(base).ravel()
        return flat
