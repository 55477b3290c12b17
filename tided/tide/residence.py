"""Who has just come stays for a while, and who has just left must be wanted more clearly to come back: else two experts
of about equal worth are read in turns. Time is computed tokens."""

from collections.abc import Iterable

from tided.tide.demand import Grid
from tided.tide.planner import Pair

RESIDENCE_TOKENS = 64  # for which a pair stays that was just read
GHOST_TOKENS = 256  # for which a pair that left has to be worth
GHOST_MARGIN = 1.25  # so many times what it would replace


class Residence:
    """`tokens`: computed since the start."""

    def __init__(self) -> None:
        self.tokens = 0
        self._came: dict[Pair, int] = {}
        self._left: dict[Pair, int] = {}

    def swapped(self, out: Pair, in_: Pair, settled: bool) -> None:
        """Not `settled`: it may be undone at once."""
        self._came.pop(out, None)
        self._left.pop(in_, None)
        if settled:
            self._came[in_] = self._left[out] = self.tokens

    def forget(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            self._came.pop(pair, None)
            self._left.pop(pair, None)

    def steadied(self, scores: Grid) -> Grid:
        """scores [layers, experts], changed in place: no pair is worth more than one that has just come, and a pair
        that has just left is worth less than it was."""
        self._came = {pair: at for pair, at in self._came.items() if self.tokens - at < RESIDENCE_TOKENS}
        self._left = {pair: at for pair, at in self._left.items() if self.tokens - at < GHOST_TOKENS}
        for pair in self._came:
            scores[pair] = 1.0
        for pair in self._left:
            scores[pair] /= GHOST_MARGIN
        return scores
