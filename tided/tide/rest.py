"""What to keep while nobody asks: the set that the next request finds, of whatever topic it is.

A mean of all that was asked keeps what the newest requests wanted, and what the newest tokens wanted even more so. A
request of another topic then finds so little that its prompt is computed wrongly before anything can be read for it,
and harm grows as the square of the share that is missed: a tenth is hardly felt, a half is. So the cases that may come
are weighed by how likely they are, and by how badly the set would serve them: topics of the seed, the last requests one
by one, what is left of older ones; and more of what was asked last, as likely as that has been lately (`Habit`).
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tided.tide.demand import Grid, per_layer

REQUESTS = 32  # are remembered, each by itself
ROUNDS = 12  # of the search; each looks for the best set of all, so the harm of every case is known to about a tenth
HARM = 2.0  # harm is the missed share to this power: so the mini's loss grows from budget to budget; 1 is a mean
LAST_REQUESTS = 3.0  # half-life of what was asked last
HABIT_REQUESTS = 16.0  # half-life of how often requests asked for more of the same
LEAST_HABIT = 0.5  # requests: neither way is ever ruled out

Flags = npt.NDArray[np.bool_]  # [layers * experts]


class Cases(NamedTuple):
    """`wants` [cases, layers, experts], every layer sums to 1, or to 0 where nothing is known; `weights` [cases]."""

    wants: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]


class Habit:
    """Do requests ask for more of the same? Of the first behind each rest it is asked which would have served it
    better: all that fits of what was asked last, or all that fits of everything else."""

    def __init__(self) -> None:
        self._stayed = self._moved = 1.0
        self._sets: tuple[Flags, Flags] | None = None

    @property
    def share(self) -> float:
        """How likely the next request is to ask for more of what was asked last."""
        return self._stayed / (self._stayed + self._moved)

    def await_next(self, likely: Cases, budget: int, floor: int) -> None:
        """`likely` of the rest that begins: what was asked last is the last of its cases, if anything was."""
        wants, weights = likely
        last, others = wants[-1].ravel(), np.tensordot(weights[:-1], wants[:-1], 1).ravel()
        self._sets = _best(last, len(wants[0]), budget, floor), _best(others, len(wants[0]), budget, floor)

    def came(self, vote: Grid) -> None:
        """What the request wanted [layers, experts]."""
        if self._sets is None:
            return
        last, others = (float(vote.ravel()[kept].sum()) for kept in self._sets)
        keep, self._sets = 0.5 ** (1.0 / HABIT_REQUESTS), None
        self._stayed = max(LEAST_HABIT, keep * self._stayed + (last > others))
        self._moved = max(LEAST_HABIT, keep * self._moved + (last <= others))


class LastRequests:
    """What the last ones wanted, each by itself, and whether such are followed by more of the same."""

    def __init__(self) -> None:
        self.habit = Habit()
        self._recent: deque[Grid] = deque(maxlen=REQUESTS)

    def came(self, vote: Grid) -> None:
        """What the newest wanted [layers, experts]."""
        self._recent.append(vote)
        self.habit.came(vote)

    def cases(self, topics: Sequence[Grid], topic_votes: float, history: Grid, decay: float) -> Cases:
        """What the next may ask for."""
        return cases(topics, topic_votes, list(self._recent), history, decay, self.habit.share)

    def rested(self, likely: Cases, budget: int, floor: int) -> None:
        """A rest begins: the next request tells whether it asks for more of the same."""
        if self._recent:
            self.habit.await_next(likely, budget, floor)


def cases(
    topics: Sequence[Grid], topic_votes: float, recent: Sequence[Grid], history: Grid, decay: float, more: float = 0.5
) -> Cases:
    """`topics` share `topic_votes`; `recent` are the votes of the last requests, the newest last, each `decay` of the
    next; `history` [layers, experts] is the aged sum of theirs and of all before them. `more`: how likely the next
    request is to ask for what was asked last; the last case, where there are recent ones."""
    newest_first = list(reversed(recent))
    ages = np.arange(len(newest_first))
    aged = decay**ages
    older = history - sum(
        (weight * vote for weight, vote in zip(aged, newest_first, strict=True)), np.zeros_like(history)
    )
    older = np.maximum(older, 0.0)
    wants = [*topics, *newest_first, per_layer(older)]
    weights = [topic_votes / len(topics)] * len(topics) + [*aged, older.sum() / len(older)]
    if newest_first:
        wants.append(np.average(newest_first, axis=0, weights=0.5 ** (ages / LAST_REQUESTS)))
        weights.append(sum(weights) * more / (1.0 - more))
    return Cases(np.array(wants), np.array(weights))


def rest_scores(likely: Cases, budget: int, floor: int) -> Grid:
    """[layers, experts], every layer sums to about 1: what each pair is worth when the mean harm over the cases is to
    be least. Frank-Wolfe steps: the same for the same cases."""
    wants, weights = likely
    count, layers, experts = wants.shape
    flat = wants.reshape(count, -1)
    held = np.zeros(layers * experts)  # of each pair, in what share of the sets so far
    slope = weights
    for turn in range(ROUNDS):
        chosen = _best(slope @ flat, layers, budget, floor)
        held += (chosen - held) * 2.0 / (turn + 2.0)
        missed = np.maximum(1.0 - flat @ held / layers, 0.0)
        slope = weights * missed ** (HARM - 1.0)
    return per_layer((slope @ flat).reshape(layers, experts))


def _best(scores: npt.NDArray[np.float64], layers: int, budget: int, floor: int) -> npt.NDArray[np.bool_]:
    """[pairs]: `tided.tide.planner.boot_set` without its order among equals."""
    chosen = np.zeros((layers, len(scores) // layers), dtype=bool)
    np.put_along_axis(chosen, np.argpartition(-scores.reshape(layers, -1), floor - 1, axis=1)[:, :floor], True, axis=1)
    best, others = chosen.ravel(), budget - layers * floor
    if others:
        best[np.argpartition(np.where(best, np.inf, -scores), others - 1)[:others]] = True
    return best
