"""Finished answers scored again with every expert: what residency changed, and which tokens would be others.

Lives on the loop, beside the client. What it needs of an answer, its token ids, it keeps in memory alone, and only as
much as the profile allows. The engine computes it in the background (`Request.background`): in chunks, while nobody
else asks, and it gives way at once. An audit that lost its lane begins again.

    exact     the answer under `exact`, each missing expert read: log probabilities, and what would have been drawn. It
              votes like a request: what the router wants there is the true demand, not that of substituted rows
    resident  the same tokens at the answer's own fidelity, with the experts that are resident now; nobody learns of it
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from msgspec import structs

from tided.engine.types import (
    Audit,
    Difference,
    Event,
    Failed,
    Fidelity,
    Finished,
    Request,
    Scored,
    TokenLogprob,
    Tokens,
)
from tided.errors import QueueFullError, RequestError

log = logging.getLogger("tided.engine")

KEPT_AUDITS = 64
MOST_WAITING = 8  # who ask for an audit at the same time
MOST_DIFFERENCES = 1000  # that one audit tells one by one
PATIENCE_S = 3600.0  # for a server that is never idle
LOOK_S = 1.0  # between two looks whether there is time for an audit
OVERHEAD_TOKENS = 16  # what an answer takes beside its ids


class Answered(NamedTuple):
    """`reason`: why it ended; "loop": `loop_break` ended it, and not a token that it drew."""

    request: Request
    ids: list[int]
    reason: str

    @property
    def tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.ids) + OVERHEAD_TOKENS


class Scores(NamedTuple):
    """Of an answer's tokens."""

    told: list[TokenLogprob]
    redrawn: list[int]
    stats: dict[str, Any]
    ended: bool
    tries: int


class Client(Protocol):
    """`engine.client.EngineClient`, as far as audits use it."""

    @property
    def serves(self) -> bool: ...

    @property
    def idle_s(self) -> float:
        """Seconds since the last request of somebody ended; 0 while one is open."""
        ...

    def submit(self, request: Request) -> AsyncIterator[Event]: ...

    def cancel(self, request_id: str) -> None: ...

    async def rests(self, timeout_s: float) -> bool:
        """Waits until no request of somebody is open; False: there is one still."""
        ...


class Auditor:
    """`remember_tokens`: of prompts and answers kept, 0: none. `idle_s`: after so much quiet they are audited without
    being asked for, 0: never. `can_wait`: there are slots to read experts into."""

    def __init__(self, remember_tokens: int, idle_s: float, can_wait: bool, context_tokens: int = 1 << 62) -> None:
        self._context_tokens = context_tokens
        self._most, self._idle_s, self._can_wait = remember_tokens, idle_s, can_wait
        self._open: dict[str, tuple[Request, list[int]]] = {}
        self._kept: OrderedDict[str, Answered] = OrderedDict()  # the newest last
        self._tokens = 0
        self._audits: OrderedDict[str, Audit] = OrderedDict()
        self._lock = asyncio.Lock()
        self._number = self._waiting = 0

    # What the client tells

    def opened(self, request: Request) -> None:
        plain = not (request.scored or request.background or request.images)
        if self._most and plain:
            self._open[request.request_id] = (request, [])

    def heard(self, event: Event) -> None:
        """Before anybody else, who may join what comes."""
        held = self._open.get(event.request_id)
        if held is None:
            return
        request, ids = held
        if isinstance(event, Tokens):
            ids += event.token_ids
        elif isinstance(event, Finished):
            del self._open[event.request_id]
            del ids[self._context_tokens - 1 - len(request.prompt_ids) :]  # a scored prompt has a token behind it
            if ids and event.reason != "cancelled":
                self._keep(Answered(request, ids, "loop" if event.stats.get("loop_break") else event.reason))
        elif isinstance(event, Failed):
            del self._open[event.request_id]

    def _keep(self, answered: Answered) -> None:
        """The oldest go. One that is larger than all there is room for is not kept."""
        if answered.tokens > self._most:
            return
        self._kept[answered.request.request_id] = answered
        self._tokens += answered.tokens
        while self._tokens > self._most:
            self._tokens -= self._kept.popitem(last=False)[1].tokens

    # What is asked

    def asker_of(self, request_id: str) -> str | None:
        """Who asked for an answer that is remembered; None: there is none of that id."""
        found = self._find(request_id)
        return None if found is None else found.request.asker

    def _find(self, request_id: str) -> Answered | None:
        if request_id == "latest":
            return next(reversed(self._kept.values()), None)
        return self._kept.get(request_id)

    async def audit(self, client: Client, request_id: str) -> Audit:
        """Waits until there is time. Raises RequestError: 404 for an answer that is not remembered, 400 where nothing
        can be read before use, 503 when the server is never idle, 429 where too many wait."""
        answered = self._find(request_id)
        if answered is None:
            raise self._unknown()
        if not self._can_wait:
            raise RequestError("there are no slots to read experts into: set tide.sync_slots", param="id")
        if self._waiting >= MOST_WAITING:
            raise QueueFullError(self._waiting)
        self._waiting += 1
        try:
            async with self._lock:
                return await self._once(client, answered)
        finally:
            self._waiting -= 1

    async def _once(self, client: Client, answered: Answered) -> Audit:
        name = answered.request.request_id
        if name not in self._audits:
            self._audits[name] = await self._audited(client, answered)
            while len(self._audits) > KEPT_AUDITS:
                self._audits.popitem(last=False)
        return self._audits[name]

    def _unknown(self) -> RequestError:
        what = (
            "No such answer is remembered: it is too old, had images, was not finished by the engine (a stop string or "
            "a call ended it, or who asked left), or is a scored prompt."
        )
        if not self._most:
            what = "Answers are not remembered here: set remember_tokens in [audit]."
        return RequestError(what, status=404, code="request_not_found", param="id")

    async def _audited(self, client: Client, answered: Answered) -> Audit:
        began_s, request = time.monotonic(), answered.request
        exact = await self._scored(client, answered, "exact")
        resident = exact if request.fidelity == "exact" else await self._scored(client, answered, request.fidelity)
        audit = audit_of(answered, exact, resident, time.monotonic() - began_s)
        log.info("audit of %s", log_line(audit))
        return audit

    async def _scored(self, client: Client, answered: Answered, fidelity: Fidelity) -> Scores:
        """Tries again when the background gave way."""
        deadline_s, tries = time.monotonic() + PATIENCE_S, 0
        while (left_s := deadline_s - time.monotonic()) > 0:
            await client.rests(left_s)
            tries += 1
            self._number += 1
            asked = again(answered, f"audit-{self._number}", fidelity)
            found = await _listened(client, asked)
            if found is not None:
                return found._replace(tries=tries)
            if not client.serves:
                raise RequestError("The server is shutting down.", status=503, kind="server_error", code="draining")
        raise RequestError("The server was never idle for long enough.", status=503, kind="server_error", code="busy")

    async def watch(self, client: Client) -> None:
        """Audits what is remembered, the newest first, when nobody has asked for `idle_s`. Until it is cancelled."""
        done: set[str] = set()
        while True:
            await asyncio.sleep(LOOK_S)
            done &= self._kept.keys()
            due = next((name for name in reversed(self._kept) if name not in {*done, *self._audits}), None)
            if due is not None and client.serves and client.idle_s >= self._idle_s:
                done.add(due)
                try:
                    await self.audit(client, due)
                except RequestError:
                    pass  # it is told where it was asked for
                except Exception:  # of this answer: the watch goes on to the next
                    log.exception("an answer could not be audited")

    @property
    def watches(self) -> bool:
        return bool(self._idle_s and self._most and self._can_wait)


def again(answered: Answered, name: str, fidelity: Fidelity) -> Request:
    """The answer as a prompt whose own tokens are told."""
    request = answered.request
    return structs.replace(
        request,
        request_id=name,
        prompt_ids=[*request.prompt_ids, *answered.ids],
        max_tokens=1,
        fidelity=fidelity,
        logprobs=None,
        guided=False,
        loop_break=0,
        scored=True,
        scored_top=0,
        background=True,
        adapts=fidelity == "exact",
        redrawn_from=0 if request.guided else len(request.prompt_ids),
    )


async def _listened(client: Client, asked: Request) -> Scores | None:
    """None: it gave way. An audit that nobody waits for any more is cancelled."""
    told: list[TokenLogprob] = []
    redrawn: list[int] = []
    try:
        async for event in client.submit(asked):
            if isinstance(event, Scored):
                told += event.logprobs
                redrawn += event.redrawn
            elif isinstance(event, Failed):
                raise RequestError(f"The audit failed: {event.message}", status=500, kind="server_error")
            elif isinstance(event, Finished):
                if event.reason == "cancelled":
                    return None
                return Scores(told, redrawn, event.stats, event.reason == "stop", 0)
    except asyncio.CancelledError:
        client.cancel(asked.request_id)
        raise
    return None


def audit_of(answered: Answered, exact: Scores, resident: Scores, seconds: float) -> Audit:
    count, request = len(answered.ids), answered.request
    whole, now = exact.told[-count:], resident.told[-count:]
    differences = [
        Difference(at, one.token_id, redrawn, one.rank, one.logprob)
        for at, (one, redrawn) in enumerate(zip(whole, exact.redrawn, strict=False))
        if one.token_id != redrawn
    ]
    loss, own = -fmean(one.logprob for one in whole), -fmean(one.logprob for one in now)
    reads = exact.stats.get("read_before_use") or {}
    return Audit(
        request_id=request.request_id,
        fidelity=request.fidelity,
        tokens=count,
        exact_loss=loss,
        exact_top1=fmean(one.rank == 1 for one in whole),
        resident_loss=own,
        residency_loss=own - loss,
        substituted_weight_share=resident.stats.get("substituted_weight_share"),
        reads=int(reads.get("reads", 0)),
        read_bytes=int(1e9 * (exact.stats.get("nvme_gb") or 0)),
        seconds=seconds,
        tries=exact.tries,
        differ=None if request.guided else len(differences),
        differences=differences[:MOST_DIFFERENCES],
        ends_alike=None if request.guided or answered.reason != "stop" else exact.ended,
    )


def log_line(audit: Audit) -> str:
    """Numbers, and the request's id."""
    differ = "unknown" if audit.differ is None else audit.differ
    return (
        f"{audit.request_id}: {audit.tokens} tokens at {audit.fidelity}, {differ} would be others, "
        f"loss {audit.exact_loss:.4f} with every expert, {audit.residency_loss:+.4f} by residency, "
        f"{audit.reads} experts read, {audit.seconds:.1f} s, {audit.tries} tries"
    )
