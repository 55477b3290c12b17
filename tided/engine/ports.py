"""What the engine asks of the rooms beside it: residents, the demand pilot, the link between ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tided.control.messages import Recalled, Step, Stop
from tided.experts.io import Priority, ReadCount
from tided.experts.slot_classes import Places, Sizes
from tided.tide.kinds import Kinds
from tided.tide.pilot import LaneDemand, Planned

Pair = tuple[int, int]  # (layer, expert)
Scores = NDArray[np.float64]
PairSwap = tuple[Pair, Pair]  # (leaves the resident set, takes its place)


class Residents(Protocol):
    """The routable set and its bytes (`tided.experts.residents`)."""

    @property
    def pairs(self) -> Sequence[Pair]:
        """The residents."""
        ...

    @property
    def count(self) -> int: ...

    @property
    def ring(self) -> Sequence[Pair]:
        """Routable beside the residents, the oldest first."""
        ...

    @property
    def ring_slots(self) -> int:
        """Pairs that may be routable beside the residents."""
        ...

    @property
    def sizes(self) -> Sizes | None:
        """How records differ in size; None: they do not."""
        ...

    @property
    def by_layer(self) -> tuple[int, ...]: ...

    @property
    def bytes_share(self) -> float | None:
        """Of all experts' bytes, where these differ in size."""
        ...

    @property
    def slots(self) -> int:
        """Records that the arena can hold."""
        ...

    @property
    def arena_bytes(self) -> int:
        """Of memory that the arena has."""
        ...

    def arena_bytes_with(self, places: Sequence[int]) -> int:
        """The same with places for so many residents of each size of records."""
        ...

    def slot_of(self, pair: Pair) -> int | None:
        """Where a pair that can be routed to lies; None: nowhere."""
        ...

    @property
    def mask_hash(self) -> int: ...

    @property
    def reads(self) -> Mapping[Priority, ReadCount]:
        """Reads that ended since the start, by class."""
        ...

    @property
    def reading(self) -> int:
        """Reads that are not published yet."""
        ...

    def at_once(self) -> AbstractContextManager[None]:
        """What changes in here is seen by what is launched behind it, all together."""
        ...

    def read(self, number: int, pair: Pair, out: Pair | None, joins: bool = False) -> None:
        """Begins to read a pair beside the steps, for the place of a resident, for a free one, or for the ring."""
        ...

    def landed(self) -> Sequence[int]:
        """Reads that ended well since the last call."""
        ...

    def failed(self) -> Sequence[int]:
        """Reads whose record could not be had, since the last call. Raises any other error of a read."""
        ...

    def give_up(self, numbers: Sequence[int]) -> None:
        """These reads are over, however they ended here."""
        ...

    def publish(self, numbers: Sequence[int]) -> None:
        """Makes reads that landed routable; a swap's outgoing pair leaves at once."""
        ...

    def promote(self, swaps: Sequence[PairSwap]) -> None:
        """(resident that becomes an entry of the ring, entry that becomes a resident)."""
        ...

    def withdraw(self, pairs: Sequence[Pair]) -> None:
        """These entries of the ring stop being routable."""
        ...

    def resize(self, residents: Sequence[int], evict: Sequence[Pair]) -> None:
        """Places for so many residents of each size of records; these leave at once."""
        ...

    def adopt(self, pairs: Sequence[Pair]) -> None:
        """These entries of the ring take free places among the residents."""
        ...

    @property
    def places(self) -> Places:
        """Of residents, and what they take."""
        ...

    def digest(self) -> str:
        """A digest of the routable (layer, expert) ids as the tables hold them now."""
        ...

    def state(self) -> str:
        """Everything that must be equal on ranks that were told the same, slots and reads under way included."""
        ...

    def check_integrity(self) -> None:
        """Raises PairError unless slots, directory and tables agree."""
        ...


class Pilot(Protocol):
    """Rank 0's owner of history and plans (`tided.tide.pilot`). counts, mass [layers, experts] are what
    `DemandTap.take` gives, on CPU, and totals [4] are the first of its totals. A plan is published in portions, in its
    order, and dropped for a newer one; `applied` tells of each portion, and of what hot reads exchanged."""

    @property
    def floor(self) -> int:
        """Residents that a layer keeps at least."""
        ...

    @property
    def kinds(self) -> Kinds | None:
        """Of records that differ in size, with the sizes of whole experts."""
        ...

    def scores(self) -> Scores:
        """[layers, experts]: what a plan made now would be made from."""
        ...

    def rest_scores(self) -> Scores:
        """[layers, experts]: the same of a plan for nobody's tokens."""
        ...

    def steadied(self, scores: Scores) -> Scores:
        """The scores that decide: pairs that have just come stay, those that have just left are worth less."""
        ...

    def chunk_done(
        self, tokens: int, chunks_left: int, demand: Callable[[int], LaneDemand], *, lane: int
    ) -> Sequence[PairSwap]: ...

    def step_done(
        self, answers: Mapping[int, tuple[int, ArrayLike]], demand: Callable[[int], LaneDemand], moving: bool
    ) -> Planned | None: ...

    def prompt_done(
        self, counts: ArrayLike, mass: ArrayLike, totals: ArrayLike, tokens: int, *, lane: int
    ) -> Sequence[PairSwap]: ...

    def request_done(
        self, counts: ArrayLike, mass: ArrayLike, totals: ArrayLike, tokens: int, *, lane: int
    ) -> None: ...

    @property
    def max_swaps(self) -> int:
        """Of one plan."""
        ...

    @property
    def rest_due(self) -> bool:
        """Whether a plan is to be made at rest: a request has ended since the last one."""
        ...

    def rested(self) -> None:
        """One was made of `rest_scores`."""
        ...

    def idle_plan(self) -> Sequence[PairSwap]: ...

    def resized(self, evicted: Iterable[Pair], joined: Iterable[Pair]) -> None:
        """The budget has changed: who has left, and who came into free places."""
        ...

    def applied(self, swaps: Iterable[PairSwap], settled: bool = True) -> None:
        """Published. Not `settled`: of a plan made of `rest_scores`."""
        ...


class LeaderLink(Protocol):
    """Rank 0's end of lockstep. `followers`: how many other ranks there are."""

    @property
    def followers(self) -> int: ...

    def send(self, step: Step) -> None: ...

    def landed(self) -> Sequence[int]:
        """Reads that ended well on other ranks since the last call, one mention a rank. Never waits."""
        ...

    def failed(self) -> Sequence[int]:
        """The same of reads that did not end well."""
        ...

    def recalled(self) -> Sequence[Recalled]:
        """What other ranks answered to recalls since the last call. Never waits."""
        ...

    def compare(self, seq: int, digest: str) -> Mapping[int, float]:
        """Waits for the other ranks' digests of the step; for each how long, in seconds. Raises PairError for a
        difference or a silence."""
        ...

    def stop(self, reason: str) -> None: ...


class FollowerLink(Protocol):
    def receive(self, timeout_s: float) -> Step | Stop | None:
        """The next message, or None after `timeout_s` without one."""
        ...

    def landed(self, tickets: Sequence[int], failed: Sequence[int]) -> None: ...

    def recalled(self, ticket: int, held: Sequence[int], loaded: int) -> None: ...

    def report(self, seq: int, digest: str) -> None: ...
