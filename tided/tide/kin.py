"""Earlier requests as a memory: what did those ask for whose picks were like these?

Topics come back. A history that sums over requests knows what was popular, but not what goes together. Here the last
requests stay apart, as votes, and what a new request has picked so far is explained as a mixture of them. In memory
only: sums over whole requests, no tokens, no order.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from tided.tide.demand import Grid, RouterShape, per_layer

REQUESTS = 32
ROUNDS = 12  # of expectation maximisation


class Kin:
    """`requests` votes are kept, the newest for the oldest."""

    def __init__(self, shape: RouterShape, base: Grid, requests: int = REQUESTS) -> None:
        self._layers = shape.layers
        self._base = per_layer(base).astype(np.float32).ravel()
        self._votes: deque[npt.NDArray[np.float32]] = deque(maxlen=requests)

    def remember(self, mass: Grid) -> None:
        """A request has ended; mass [layers, experts]: what it picked, prompt and answer."""
        self._votes.append(per_layer(mass).astype(np.float32).ravel())

    def like(self, mass: Grid) -> Grid:
        """[layers, experts]: the mixture of earlier requests, and of the base, that explains `mass` best."""
        vote = per_layer(mass).astype(np.float32).ravel()
        known = np.stack([self._base, *self._votes])  # [requests + 1, pairs]
        shares = np.full(len(known), 1.0 / len(known), dtype=np.float32)
        asked = np.flatnonzero(vote)
        of_asked, weight = known[:, asked], vote[asked]
        for _ in range(ROUNDS):
            total = shares @ of_asked
            shares *= of_asked @ np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)
            if not shares.any():  # nothing that is known explains a single pick
                shares[0] = 1.0
            shares /= shares.sum()
        mixed: Grid = (shares @ known).reshape(self._layers, -1).astype(np.float64)
        return mixed
