"""Drafted tokens: what is proposed, and what of it stays.

The target's draw at a position follows from its logits and from noise that only the seed and the position decide. A
draft is drawn from the drafter's logits with the same noise and stays exactly when the target then draws the same
token. What comes out is the target's own draw at every position, so the distribution is the target's whatever the
drafter thinks, and a seeded answer is the same with drafts and without. How often drafts stay depends on how alike two
draws with shared noise are: see `tided.engine.sampling`.
"""

from collections.abc import Collection, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from tided.engine.draft_law import law_of
from tided.engine.sampling import drawn_there, no_numbers
from tided.engine.types import Sampling
from tided.errors import PairError
from tided.models.proposals import Law


def block(token: int, drafts: Sequence[int], count: int) -> list[int]:
    """The tokens that a lane's rows compute: the newest, and `count` drafts. Raises PairError where some lack."""
    if count > len(drafts):
        raise PairError(f"{count} drafts are to be verified of {len(drafts)}: a message was lost")
    return [token, *drafts[:count]]


def accepted(drawn: Sequence[int], drafts: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """`drawn` [1 + drafts], by the rows of the newest token and of each draft -> the tokens that come: as many as
    are as drafted, and one more. A stop id is the last."""
    as_drafted = (t == draft and t not in stop_ids for t, draft in zip(drawn[:-1], drafts, strict=True))
    return list(drawn[: 1 + sum(takewhile(bool, as_drafted))])


class Chooser:
    """Draws the drafts of some lanes without looking at the device: place follows place while it computes. Or says how
    they are drawn, to who draws them inside a graph. `firsts`: the position of each lane's first draft."""

    def __init__(self, samplings: Sequence[Sampling], firsts: Sequence[int]) -> None:
        self._lanes = list(zip(samplings, firsts, strict=True))
        self._drawn: list[Tensor] = []

    def __call__(self, place: int, logits: Tensor) -> Tensor:
        """logits [R, vocab] -> [R] int64, ids of the vocabulary whatever the logits are: see `check`."""
        drawn = drawn_there(logits, [(sampling, first + place) for sampling, first in self._lanes])
        self._drawn.append(drawn)
        return drawn.clamp_min(0)

    def law(self, places: int) -> Law:
        return law_of(self._lanes, places)

    def took(self, drawn: Tensor) -> None:
        self._drawn.extend(drawn)

    def check(self) -> None:
        """Looks, once for all places. Raises PairError where logits were no numbers."""
        if self._drawn and bool((torch.stack(self._drawn) < 0).any()):
            raise no_numbers()
