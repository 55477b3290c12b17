"""What to keep while nobody asks: the set that the next request finds, of whatever topic it is.

A mean of all that was asked keeps what the newest requests wanted, and what the newest tokens wanted even more so. A
request of another topic then finds so little that its prompt is computed wrongly before anything can be read for it,
and harm grows faster than the share that is missed: a tenth is hardly felt, a half is. So the cases that may come are
weighed by how likely they are, and by how badly the set would serve them: topics of the seed, the last requests one by
one, what is left of older ones; and, as likely as all of these together, more of what was asked last.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tided.tide.demand import Grid, per_layer

REQUESTS = 32  # are remembered, each by itself
ROUNDS = 12  # of the search; each looks for the best set of all, so the harm of every case is known to about a tenth
HARM = 1.5  # harm is the missed share to this power: 1 is a mean, and more looks after the case that is served worst
LAST_REQUESTS = 3.0  # half-life of what was asked last


class Cases(NamedTuple):
    """`wants` [cases, layers, experts], every layer sums to 1, or to 0 where nothing is known; `weights` [cases]."""

    wants: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]


def cases(topics: Sequence[Grid], topic_votes: float, recent: Sequence[Grid], history: Grid, decay: float) -> Cases:
    """`topics` share `topic_votes`; `recent` are the votes of the last requests, the newest last, each `decay` of the
    next; `history` [layers, experts] is the aged sum of theirs and of all before them."""
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
        weights.append(sum(weights))
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
