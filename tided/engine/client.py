"""The loop's side of rank 0's engine: requests in, events out. Lives on the asyncio loop and never blocks it.

The engine's thread hands over the events of a step at once; one wake-up of the loop carries all that arrived until it
runs. A reader that is slower than the model finds its tokens joined in one event: what waits for it is bounded by the
answer it asked for.
"""

import asyncio
import dataclasses
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Literal, Protocol

from msgspec.structs import asdict

from tided.control.memory import available_bytes
from tided.engine.audit import Auditor
from tided.engine.board import ExpertBoard, Figures, HeatLevels, cells, held, tide
from tided.engine.board import as_json as as_map
from tided.engine.budget import BudgetAsk, Forecast
from tided.engine.speed import DecodeSpeed
from tided.engine.stats import Residency, rounded
from tided.engine.trace import Traces, as_json
from tided.engine.types import Audit, Event, Failed, Finished, Guide, Pixels, Request, Started, Tokens
from tided.errors import QueueFullError, RequestError
from tided.tide.heat import Weights

State = Literal["starting", "ready", "draining", "fault"]
RECENT_STATS = 100
CANCEL_GRACE_S = 2.0
BUDGET_S = 100.0  # the engine answers between two steps


class EngineThread(Protocol):
    """What the client uses of `LeaderEngine`; every method may be called from another thread."""

    last_step_s: float
    expert_reads: Mapping[str, Any]
    data_plane: Mapping[str, Any]
    about: Mapping[str, Any]
    board: ExpertBoard
    figures: Figures
    token_bytes: Sequence[bytes | None]

    @property
    def residency(self) -> Residency: ...

    @property
    def traces(self) -> Traces: ...

    @property
    def heat(self) -> Weights | None: ...

    @property
    def seq(self) -> int: ...

    @property
    def living(self) -> tuple[int, int]:
        """The budget of experts, and the profile's."""
        ...

    def ask_budget(self, ask: BudgetAsk) -> None: ...

    def submit(self, request: Request, guide: Guide | None = None, pixels: Sequence[Pixels] = ()) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def close(self, reason: str) -> None: ...


class Answer(AsyncIterator[Event]):
    """The events of one request; ends after `Finished` or `Failed`. `aclose` cancels a request that is not done."""

    def __init__(self, client: "EngineClient", request: Request) -> None:
        self.request = request
        self.started = self.cancelled = self.done = False
        self.growing = False  # its first token is here, its last is not
        self._client = client
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, Tokens) and isinstance(last, Tokens):
            last.token_ids.extend(event.token_ids)
            last.logprobs.extend(event.logprobs)
        else:
            self._events.append(event)
        self.started |= isinstance(event, Started)
        self.done |= isinstance(event, Finished | Failed)
        self.growing = not self.done and (self.growing or isinstance(event, Tokens))
        self._arrived.set()

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self.done:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()

    async def aclose(self) -> None:
        self._events.clear()
        if not self.done:
            self._client.cancel(self.request.request_id)


class EngineClient:
    """`lanes` and `queue` bound the requests that may be open. `attach` makes it ready; until then it refuses.
    `token_bytes`: what each token id spells, None for special ones. Requests in the background are nobody's: they count
    nowhere. `auditor`: remembers answers and scores them again; None: nobody does."""

    def __init__(
        self, lanes: int, queue: int, token_bytes: Sequence[bytes | None] = (), auditor: Auditor | None = None
    ) -> None:
        self.state: State = "starting"
        self.fault = ""
        self.recent_stats: deque[dict[str, Any]] = deque(maxlen=RECENT_STATS)  # newest first
        self.peer_bytes: dict[int, int] = {}  # memory that the other ranks' nodes could still give
        self._lanes, self._queue, self._token_bytes = lanes, queue, token_bytes
        self._speed, self._levels = DecodeSpeed(), HeatLevels()
        self._engine: EngineThread | None = None
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, Answer] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._auditor, self._idle_since_s = auditor or Auditor(0, 0.0, False), time.monotonic()
        self._arrived: list[Event] = []
        self._lock = threading.Lock()

    def attach(self, engine: EngineThread) -> None:
        engine.token_bytes = self._token_bytes
        self._engine, self.state = engine, "ready"

    # Called on the loop

    def submit(self, request: Request, guide: Guide | None = None, pixels: Sequence[Pixels] = ()) -> Answer:
        """Queues the request. Raises at once, before any event: RequestError for one that cannot run, QueueFullError,
        RequestError 503 when not ready."""
        engine = self._ready()
        if not request.background and len(self._asked) >= self._lanes + self._queue:
            raise QueueFullError(self.waiting)
        if request.request_id in self._open:
            raise RequestError(f"request id {request.request_id} is in use", param="request_id")
        engine.submit(request, guide, pixels)
        self._auditor.opened(request)
        if not request.background:
            self._idle.clear()
        answer = self._open[request.request_id] = Answer(self, request)
        return answer

    def cancel(self, request_id: str) -> None:
        """Asks for the end of a request, queued or running; its `Finished("cancelled")` follows. Else does nothing."""
        answer = self._open.get(request_id)
        if answer is not None and not answer.cancelled and self._engine is not None:
            answer.cancelled = True
            self._engine.cancel(request_id)

    def fail_all(self, message: str) -> None:
        """The pair is lost: every open request ends with `Failed`, later ones are refused."""
        if self.state != "fault":
            self.state, self.fault = "fault", message
        for request_id in list(self._open):
            self._deliver(Failed(request_id, message))
        self._speed.note(0, False, time.monotonic())

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits for the open ones. Those that `timeout_s` did not suffice for are cancelled,
        and given a moment for their last event to reach their readers."""
        if self.state != "fault":
            self.state = "draining"
        for request_id in self._open.keys() - {answer.request.request_id for answer in self._asked}:
            self.cancel(request_id)
        if await self.rests(timeout_s):
            return
        for request_id in list(self._open):
            self.cancel(request_id)
        await self.rests(CANCEL_GRACE_S)

    async def rests(self, timeout_s: float) -> bool:
        """Waits until no request of somebody is open."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return not self._asked

    @property
    def serves(self) -> bool:
        return self.state == "ready"

    @property
    def idle_s(self) -> float:
        """Since the last request of somebody ended; 0 while one is open."""
        return 0.0 if self._asked else time.monotonic() - self._idle_since_s

    @property
    def _asked(self) -> list[Answer]:
        """The open requests that somebody waits for."""
        return [answer for answer in self._open.values() if not answer.request.background]

    async def budget(self, resident: int | None, nbytes: int | None, apply: bool) -> Forecast:
        """What another budget of experts would mean; `apply`: it begins with one of the next steps. Raises RequestError
        for one that cannot be, and when nothing is served."""
        engine = self._ready()
        found: asyncio.Future[Forecast | RequestError] = self._loop.create_future()

        def tell(answer: Forecast | RequestError) -> None:
            if not found.done():
                found.set_result(answer)

        def reply(answer: Forecast | RequestError) -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(tell, answer)

        engine.ask_budget(BudgetAsk(resident, nbytes, apply, self._available_bytes(), reply))
        answer = await asyncio.wait_for(found, BUDGET_S)
        if isinstance(answer, RequestError):
            raise answer
        return answer

    def _available_bytes(self) -> dict[int, int]:
        """Of the ranks' nodes, as far as they tell."""
        own = available_bytes()
        return ({} if own is None else {0: own}) | self.peer_bytes

    @property
    def waiting(self) -> int:
        return sum(not answer.started for answer in self._asked)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens a second of all lanes together, in the last seconds; None while no answer grows."""
        return rounded(self._speed.tok_s(time.monotonic()), 2)

    async def audit(self, request_id: str) -> Audit:
        """What every expert says of a finished answer. Raises RequestError (`Auditor.audit`)."""
        return await self._auditor.audit(self, request_id)

    def asker_of(self, request_id: str) -> str | None:
        return self._auditor.asker_of(request_id)

    async def audit_when_idle(self) -> None:
        """Until it is cancelled."""
        if self._auditor.watches:
            await self._auditor.watch(self)

    def trace(self, request_id: str) -> dict[str, Any] | None:
        """What became of the experts of a request that has ended, `latest`: of the newest; None: nobody knows."""
        traces = self._engine.traces if self._engine is not None else None
        if traces is None:
            return None
        found = traces.newest if request_id == "latest" else traces.find(request_id)
        return None if found is None else as_json(found)

    def expert_map(self, slots: bool = False) -> dict[str, Any] | None:
        """Where every expert is; None while nothing is loaded. A copy of what the engine's thread shows."""
        engine = self._engine
        if engine is None:
            return None
        last = self.recent_stats[0].get("experts", {}).get("miss_rate") if self.recent_stats else None
        shown = as_map(engine.board, engine.heat, time.monotonic(), slots)
        return {"generation": engine.residency.generation, "last_request_miss_rate": last} | shown

    def shape(self) -> tuple[int, int]:
        """Layers of experts, and experts of a layer; of nothing while nothing is loaded."""
        return (0, 0) if self._engine is None else (self._engine.board.layers, self._engine.board.experts)

    def cells(self) -> bytes | None:
        """A byte an expert, its state times 16 and its heat (15: nobody follows it); None while nothing is loaded."""
        engine = self._engine
        return None if engine is None else cells(engine.board, self._levels.of(engine.heat, time.monotonic()))

    def held(self) -> float | None:
        """Share of what the next tokens are expected to ask for that is in memory; None where nobody expects."""
        heat = None if self._engine is None else self._engine.heat
        return None if heat is None or self._engine is None else held(self._engine.board, heat)

    def recent(self, count: int) -> list[dict[str, Any]]:
        """Statistics of the last answers, the newest first."""
        return list(islice(self.recent_stats, count))

    def figures(self) -> dict[str, Any]:
        """Counters of the engine, at most a moment old; none while nothing is loaded. By rank: `rank_wait_s`, and
        `available_bytes` of the ranks' nodes. `lanes`: the requests that have one."""
        if self._engine is None:
            return {}
        figures = asdict(self._engine.figures)
        reads = dataclasses.asdict(figures.pop("reads"))
        figures["lanes"] = [asdict(lane) for lane in figures["lanes"]]
        memory = {"available_bytes": self._available_bytes()}
        return figures | {f"reads_{name}": value for name, value in reads.items()} | memory

    def health(self) -> dict[str, Any]:
        """A snapshot: no lock, no tensor, no wait."""
        waiting, engine, asked = self.waiting, self._engine, len(self._asked)
        health: dict[str, Any] = {
            "state": self.state,
            "fault": self.fault,
            "lanes": {"total": self._lanes, "busy": asked - waiting},
            "queue": waiting,
            "busy": bool(asked),
            "decode_tok_s": self.decode_tok_s,
        }
        if engine is not None:
            residency = engine.residency
            health |= {
                "residents": residency.residents,
                "residents_by_layer": residency.by_layer,
                "residents_bytes_share": residency.bytes_share,
                "experts": residency.total,
                "budget": dict(zip(("resident", "resident_of_profile"), engine.living, strict=True)),
                "generation": residency.generation,
                "mask_hash": residency.mask_hash,
                "tide": tide(engine.board, time.monotonic()),
                "expert_reads": dict(engine.expert_reads),
                "data_plane": dict(engine.data_plane),
                **engine.about,
                "engine_seq": engine.seq,
                "last_step_age_s": round(time.monotonic() - engine.last_step_s, 3),
            }
        return health

    def _ready(self) -> EngineThread:
        if self.state == "ready" and self._engine is not None:
            return self._engine
        texts = {"starting": "the model is still being loaded", "draining": "the server is shutting down"}
        what = texts.get(self.state, f"the engine stopped: {self.fault}")
        raise RequestError(what, status=503, kind="server_error", code=self.state)

    # Called by the engine's thread

    def post(self, events: Sequence[Event]) -> None:
        """Hands the events of a step to the loop; one wake-up at a time is on its way."""
        with self._lock:
            wake = not self._arrived
            self._arrived += events
        if wake:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        with self._lock:
            events, self._arrived = self._arrived, []
        # Counted first: what is delivered may be joined with what follows it.
        mine = {answer.request.request_id for answer in self._asked}
        tokens = sum(len(e.token_ids) for e in events if isinstance(e, Tokens) and e.request_id in mine)
        for event in events:
            self._deliver(event)
        self._speed.note(tokens, any(answer.growing for answer in self._asked), time.monotonic())

    def _deliver(self, event: Event) -> None:
        answer = self._open.get(event.request_id)
        if answer is None:
            return  # failed already, when the pair was lost
        self._auditor.heard(event)
        answer.put(event)
        if isinstance(event, Finished) and not answer.request.background:
            self.recent_stats.appendleft(event.stats)
        if answer.done:
            del self._open[event.request_id]
            if not self._asked:
                self._idle.set()
            if not answer.request.background:
                self._idle_since_s = time.monotonic()
