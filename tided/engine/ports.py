"""What the engine asks of the rooms beside it: residents, the demand pilot, the link between ranks."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from numpy.typing import ArrayLike

from tided.control.messages import Step, Stop

Pair = tuple[int, int]  # (layer, expert)
PairSwap = tuple[Pair, Pair]  # (leaves the resident set, takes its place)


class Residents(Protocol):
    """The routable set and its bytes (`tided.experts.residents`)."""

    @property
    def pairs(self) -> Sequence[Pair]: ...

    def apply(self, swaps: Sequence[PairSwap]) -> None:
        """Reads each (out, in) pair's newcomer and publishes all of them at once. Raises when one cannot be read."""
        ...

    def digest(self) -> str:
        """A digest of the routable (layer, expert) ids as the tables hold them now."""
        ...

    def check_integrity(self) -> None:
        """Raises PairError unless slots, directory and tables agree."""
        ...


class Pilot(Protocol):
    """Rank 0's owner of history and plans (`tided.tide.pilot`). counts, mass [layers, experts] and totals [4] are what
    `DemandTap.take` gives, on CPU. A plan is published in portions, in its order, and dropped for a newer one;
    `applied` tells of each portion."""

    def prompt_done(
        self, counts: ArrayLike, mass: ArrayLike, totals: ArrayLike, tokens: int, *, lane: int
    ) -> Sequence[PairSwap]: ...

    def request_done(
        self, counts: ArrayLike, mass: ArrayLike, totals: ArrayLike, tokens: int, *, lane: int
    ) -> None: ...

    def idle_plan(self) -> Sequence[PairSwap]: ...

    def applied(self, swaps: Iterable[PairSwap]) -> None: ...


class LeaderLink(Protocol):
    """Rank 0's end of lockstep."""

    def send(self, step: Step) -> None: ...

    def compare(self, seq: int, digest: str) -> None:
        """Waits for the other ranks' digests of the step. Raises PairError for a difference or a silence."""
        ...

    def stop(self, reason: str) -> None: ...


class FollowerLink(Protocol):
    def receive(self, timeout_s: float) -> Step | Stop | None:
        """The next message, or None after `timeout_s` without one."""
        ...

    def report(self, seq: int, digest: str) -> None: ...
