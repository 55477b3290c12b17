"""What the next tokens will ask for: the expected routing weight of every pair, learned while tokens are generated.

The estimate is a mixture. Its parts are running means of the routing weight over several horizons, from a few tokens to
a long conversation, and the base: what history, seed and prompts say. How much each part counts is learned too, by how
well it foretold the picks that came: on steady traffic long horizons win, after a change of topic short ones
take over within tokens, with nothing to tune for a model or a machine.
"""

import numpy as np
import numpy.typing as npt

from tided.tide.demand import Grid, RouterShape, per_layer

Indices = npt.NDArray[np.int64]  # pairs as layer * experts + expert
Weights = npt.NDArray[np.float64]

HORIZONS_TOKENS = (16.0, 64.0, 256.0, 1024.0)
LEARNING_TOKENS = 64.0  # tokens after which the shares of the parts have followed a change
LEAST_SHARE = 0.02  # of a part: one that is wrong now must be able to come back


class Heat:
    """`expected` [layers * experts]: every layer sums to 1. Same calls, same numbers."""

    def __init__(self, shape: RouterShape, base: Grid) -> None:
        self.shape = shape
        parts = len(HORIZONS_TOKENS) + 1
        self.shares: Weights = np.full(parts, 1.0 / parts)  # of the horizons, then of the base
        self._horizons = np.array(HORIZONS_TOKENS)
        flat = self._flat(base)
        self._parts: Weights = np.tile(flat, (parts, 1))  # [parts, pairs]
        self.expected: Weights = flat.copy()

    def rebase(self, base: Grid) -> None:
        """New scores [layers, experts] from history, seed and prompts (`Pilot.scores`)."""
        self._parts[-1] = self._flat(base)
        self.expected = self.shares @ self._parts

    def observe(self, pairs: Indices, weights: Weights, tokens: int) -> None:
        """The router's wish in one step, resident or not, of `tokens` rows that count: pairs [n] as layer * experts +
        expert, weights [n] normalised to 1 a row and layer. Repeated pairs add up; a weight of 0 counts for nothing.
        Raises ValueError for what no router gives."""
        if tokens <= 0 or not len(pairs):
            return
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError("routing weights must be finite and not negative")
        self._learn_shares(pairs, weights, tokens)
        seen = np.bincount(pairs, weights, minlength=self._parts.shape[1]) / tokens
        keep = np.exp(-tokens / self._horizons)[:, None]
        self._parts[:-1] *= keep
        self._parts[:-1] += (1.0 - keep) * seen
        self.expected = self.shares @ self._parts

    def _learn_shares(self, pairs: Indices, weights: Weights, tokens: int) -> None:
        """One step of expectation maximisation for the mixture's shares, before the parts have seen these picks."""
        foretold = self.shares[:, None] * self._parts[:, pairs]  # [parts, n]
        total = foretold.sum(axis=0)
        known = np.where(total > 0, weights, 0.0)
        if not known.any():
            return
        credit = (foretold / np.where(total > 0, total, 1.0)) @ (known / known.sum())
        self.shares += (1.0 - np.exp(-tokens / LEARNING_TOKENS)) * (credit - self.shares)
        self.shares = np.maximum(self.shares, LEAST_SHARE)
        self.shares /= self.shares.sum()

    def _flat(self, base: Grid) -> Weights:
        if base.shape != (self.shape.layers, self.shape.experts):
            raise ValueError(f"scores are {list(base.shape)}, must be [{self.shape.layers}, {self.shape.experts}]")
        flat: Weights = per_layer(base).ravel()
        return flat
