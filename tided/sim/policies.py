"""The policies that ours is held against. All have the same slots, see the same picks and may read as much.

They read what was missed, the heaviest first, and differ in what they throw out. None throws out what the step that
just ended used, or what would leave a layer with fewer experts than a token picks.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tided.tide.demand import Grid, RouterShape
from tided.tide.hot import Moves
from tided.tide.planner import Pair, boot_set

Floats = npt.NDArray[np.float64]
Picks = npt.NDArray[np.int64]  # [rows, picks of a row] as layer * experts + expert


class Policy(Protocol):
    """`observe` every step, in order; `token_done` behind a token whose answer goes on, `request_done` behind a
    request's last step; then `moves`. `published` and `failed` tell what became of each load; with a load that was a
    swap's, `published` answers what leaves in the same moment. `chunks_left`: how many of the prompt are to come; None
    in an answer. `rest`: nobody asks for a while. `paces_itself`: the queues of the disks are its limit, and not what a
    step's disk time is worth."""

    paces_itself: bool

    def observe(self, picks: Picks, weights: Floats, chunks_left: int | None) -> None: ...
    def moves(self, reads: int) -> Moves: ...
    def published(self, pair: Pair) -> Pair | None: ...
    def failed(self, pair: Pair) -> None: ...
    def token_done(self) -> None: ...
    def request_done(self) -> None: ...
    def rest(self) -> None: ...


class Static:
    """Keeps what it began with."""

    paces_itself = False

    def observe(self, picks: Picks, weights: Floats, chunks_left: int | None) -> None: ...
    def moves(self, reads: int) -> Moves:
        return Moves()

    def published(self, pair: Pair) -> None:
        raise AssertionError("nothing was loaded")

    def failed(self, pair: Pair) -> None:
        raise AssertionError("nothing was loaded")

    def token_done(self) -> None: ...
    def request_done(self) -> None: ...
    def rest(self) -> None: ...


class Exchanging:
    """What is in the slots. An expert that is read takes the place of one that is there, when it has come."""

    paces_itself = False

    def __init__(self, shape: RouterShape, slots: int, base: Grid) -> None:
        self.shape = shape
        self.residents = boot_set(base, slots, shape.top_k)
        self.present = np.zeros(shape.layers * shape.experts, dtype=bool)
        self.present[[layer * shape.experts + expert for layer, expert in self.residents]] = True
        self._loading: set[int] = set()
        self._count = self.present.reshape(shape.layers, -1).sum(axis=1)

    def exchange(self, victim: int, newcomer: int, moves: Moves) -> None:
        self.present[victim] = False
        self._count[victim // self.shape.experts] -= 1
        self._loading.add(newcomer)
        moves.withdraw.append(divmod(victim, self.shape.experts))
        moves.load.append(divmod(newcomer, self.shape.experts))

    def spares(self, victim: int) -> bool:
        """Whether a layer has more than a token picks without it."""
        return bool(self._count[victim // self.shape.experts] > self.shape.top_k)

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


class Demanded(Exchanging):
    """Reads misses; `worth` ranks what is present, the least worth goes first."""

    def __init__(self, shape: RouterShape, slots: int, base: Grid, worth: "Callable[[Demanded], Floats]") -> None:
        super().__init__(shape, slots, base)
        self._worth, self.clock, pairs = worth, 0, len(self.present)
        order = np.argsort(np.argsort(base, axis=None, kind="stable"), kind="stable")
        self.last_use: Floats = order / pairs - 1.0  # before the first token, the likeliest last
        self.uses: Floats = base.ravel() * shape.top_k * PRIOR_TOKENS  # ever
        self.uses_here: Floats = np.zeros(pairs)  # since it was loaded
        self._recent: Picks = np.zeros(0, dtype=np.int64)
        self._missed: Picks = np.zeros(0, dtype=np.int64)  # in the last step, the heaviest first

    def observe(self, picks: Picks, weights: Floats, chunks_left: int | None) -> None:
        for row in picks:
            self.clock += 1
            self.last_use[row] = self.clock
        found, at = np.unique(picks, return_inverse=True)
        count = np.bincount(at.ravel())
        self.uses[found] += count
        self.uses_here[found] += count
        self._recent = picks[-1]
        missed = ~self.present[found]
        weight = np.bincount(at.ravel(), weights.ravel())[missed]
        self._missed = found[missed][np.argsort(-weight, kind="stable")]

    def moves(self, reads: int) -> Moves:
        moves = Moves()
        wanted = [int(pair) for pair in self._missed if int(pair) not in self._loading][:reads]
        if not wanted:
            return moves
        worth = np.where(self.present, self._worth(self), np.inf)
        worth[self._recent] = np.inf
        victims = iter(lowest(worth, len(wanted) + 64))
        for newcomer in wanted:
            victim = next((v for v in map(int, victims) if self._may_go(v, worth)), None)
            if victim is None:
                break
            self.exchange(victim, newcomer, moves)
        return moves

    def published(self, pair: Pair) -> None:
        super().published(pair)
        self.uses_here[pair[0] * self.shape.experts + pair[1]] = 1.0

    def _may_go(self, victim: int, worth: Floats) -> bool:
        return bool(np.isfinite(worth[victim])) and self.spares(victim)


PRIOR_TOKENS = 256.0  # what the seed is worth to those that count


def lru(policy: Demanded) -> Floats:
    return policy.last_use


def lfu(policy: Demanded) -> Floats:
    return policy.uses


def lfru(policy: Demanded) -> Floats:
    """Two halves: the recently used are safe, and of the others the least used goes. A use lifts into the first."""
    present = policy.last_use[policy.present]
    half = len(present) // 2 - 1
    safe = policy.last_use > np.partition(present, half)[half]
    kept: Floats = policy.uses + 1e9 * safe
    return kept


def age_over_uses(policy: Demanded) -> Floats:
    """The largest age / (1 + uses since it was loaded) goes first."""
    return -(policy.clock - policy.last_use) / (1.0 + policy.uses_here)


DEMANDED: dict[str, Callable[[Demanded], Floats]] = {
    "LRU": lru, "LFU": lfu, "LFRU": lfru, "age/(1+uses)": age_over_uses,
}  # fmt: skip


def lowest(keys: Floats, count: int) -> list[int]:
    """Indices of about the `count` lowest keys (all that equal the last of them too), lowest first."""
    count = min(count, len(keys) - 1)
    chosen = np.flatnonzero(keys <= np.partition(keys, count)[count])
    return [int(index) for index in chosen[np.argsort(keys[chosen], kind="stable")]]
