"""What the engine asks of the rooms beside it: residents, the demand pilot, the link between ranks."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tided.control.messages import Step, Stop, Swap

Pair = tuple[int, int]


class Residents(Protocol):
    """The routable set and its bytes (`tided.experts.residents`)."""

    @property
    def pairs(self) -> Sequence[Pair]: ...

    def apply(self, swaps: Sequence[tuple[Pair, Pair]]) -> None:
        """Reads each (out, in) pair's newcomer and publishes all of them at once. Raises when one cannot be read."""
        ...

    def digest(self) -> str:
        """A digest of the routable (layer, expert) ids as the tables hold them now."""
        ...

    def check_integrity(self) -> None:
        """Raises PairError unless slots, directory and tables agree."""
        ...


class Pilot(Protocol):
    """Rank 0's owner of history and plans (`tided.tide.pilot`). Demand: counts, mass [layers, experts]."""

    def prompt_done(self, counts: Tensor, mass: Tensor, totals: Tensor, tokens: int) -> Sequence[Swap]: ...

    def request_done(self, counts: Tensor, mass: Tensor, totals: Tensor, tokens: int) -> None: ...

    def idle_plan(self) -> Sequence[Swap]: ...


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
