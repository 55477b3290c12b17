"""What the API needs of its neighbours, and its own time limits."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec

from tided.engine.types import Audit, Event, Guide, Pixels, Request


class Engine(Protocol):
    """`tided.engine.client.EngineClient`, as far as the API uses it. All of it runs on the loop and never blocks."""

    def submit(
        self, request: Request, guide: Guide | None = None, pixels: Sequence[Pixels] = ()
    ) -> AsyncIterator[Event]:
        """Queues a request; `guide` is what its grammar lets it draw, `pixels` are its images'. Raises
        `QueueFullError`, or a `RequestError` 503 when nothing is served, at once.

        A wait for the next event may be given up and taken up again; events that came together come joined.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Asks for the end of a request, wherever it is; does nothing when it has ended."""
        ...

    def trace(self, request_id: str) -> dict[str, Any] | None:
        """Which experts a request that has ended wanted, missed and got; `latest`: the newest. None: not kept."""
        ...

    async def audit(self, request_id: str) -> Audit:
        """What every expert says of a finished answer, once there is time. Raises RequestError."""
        ...

    def asker_of(self, request_id: str) -> str | None:
        """`Request.asker` of an answer that may be audited; None: there is none of that id."""
        ...

    def expert_map(self, slots: bool = False) -> dict[str, Any] | None:
        """Where every expert is, by layer; None while nothing is loaded."""
        ...

    def shape(self) -> tuple[int, int]:
        """Layers of experts, experts of a layer."""
        ...

    def cells(self) -> bytes | None:
        """A byte an expert, its state times 16 and its heat, 0 to 9 (15: nobody follows it); None while nothing is
        loaded."""
        ...

    def held(self) -> float | None:
        """Share of what the next tokens are expected to ask for that is in memory; None where nobody expects."""
        ...

    def recent(self, count: int) -> list[dict[str, Any]]:
        """`x_engine_stats` of the last answers, the newest first; 100 are kept."""
        ...

    def figures(self) -> dict[str, Any]:
        """Counters since the start, as the engine published them last, some of them by rank; empty while nothing is
        loaded."""
        ...

    def health(self) -> dict[str, Any]:
        """`state` (starting, ready, draining, fault), `fault`, `lanes` {total, busy}, `queue`, `busy`."""
        ...


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. `keepalive_s`: longest silence of a stream; `stall_s`: longest wait for a reader; `body_s`: for a body;
    `prepare_s`: from a body to the engine, waiting included;
    `idle_s`: how long an unused connection stays open (clients reuse them; a shorter time looks like a reset);
    `close_s`: for handlers when the server ends, after the engine has drained."""

    keepalive_s: float = 5.0
    stall_s: float = 60.0
    body_s: float = 60.0
    prepare_s: float = 60.0
    idle_s: float = 90.0
    close_s: float = 5.0
