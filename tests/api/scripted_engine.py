"""An engine that says what a test tells it to, and a client that reads what the server makes of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from documented import check_events, check_reply

from tided.api.context import Context
from tided.api.door import Door
from tided.chat.messages import Segment
from tided.chat.tokenizer import Tokenizer
from tided.engine.types import Audit, Difference, Event, Failed, Finished, Guide, Pixels, Request, Started, Tokens
from tided.errors import RequestError
from tided.settings import Cache, Experts, Model, Settings, Vision
from tided.settings import Server as ServerSettings

STATS = {"lane": 0, "cached_tokens": 0, "decode_tok_s": 12.5}


@dataclass
class ScriptedAnswer:
    """The events of one request. A cancelled one ends with `Finished("cancelled")`, as the engine's do."""

    request: Request
    ids: Callable[[str], list[int]]
    pixels: Sequence[Pixels] = ()
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    over: bool = False
    drawn: int = 0

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self.over and self.events.empty():
            raise StopAsyncIteration
        return await self.events.get()

    def start(self) -> "ScriptedAnswer":
        self.events.put_nowait(Started(self.request.request_id))
        return self

    def say(self, text: str) -> "ScriptedAnswer":
        return self.draw(self.ids(text))

    def draw(self, token_ids: list[int]) -> "ScriptedAnswer":
        self.drawn += len(token_ids)
        self.events.put_nowait(Tokens(self.request.request_id, token_ids))
        return self

    def finish(self, reason: str = "stop", stats: dict[str, Any] | None = None) -> None:
        if self.over:
            return
        self.over = True
        drawn = self.drawn + (reason == "stop")  # the end token counts
        last = Finished(self.request.request_id, reason, len(self.request.prompt_ids), drawn, dict(stats or STATS))
        self.events.put_nowait(last)

    def fail(self, message: str) -> None:
        self.over = True
        self.events.put_nowait(Failed(self.request.request_id, message))


class ScriptedEngine:
    def __init__(self, ids: Callable[[str], list[int]]) -> None:
        self.ids = ids
        self.answers: list[ScriptedAnswer] = []
        self.cancels: list[str] = []
        self.refusal: RequestError | None = None
        self.play: Callable[[ScriptedAnswer], None] | None = None
        self.state, self.fault = "ready", ""
        self.map: dict[str, Any] | None = None
        self.counters: dict[str, Any] = {}
        self.map_shape, self.map_cells, self.held_share = (2, 4), bytes(8), 0.75
        self.audited = Audit("cmpl-1", "fast", 3, 0.5, 1.0, 0.75, 0.25, 0.1, 7, 4096, 0.5, 1, 1,
                             [Difference(2, 5, 6, 2, -1.5)], True)  # fmt: skip
        self._arrived = asyncio.Condition()

    def script(self, *pieces: str, reason: str = "stop") -> None:
        """Every request is answered with these pieces, an event each."""

        def play(answer: ScriptedAnswer) -> None:
            answer.start()
            for piece in pieces:
                answer.say(piece)
            answer.finish(reason)

        self.play = play

    def submit(self, request: Request, guide: Guide | None = None, pixels: Sequence[Pixels] = ()) -> ScriptedAnswer:
        if self.refusal is not None:
            raise self.refusal
        answer = ScriptedAnswer(request, self.ids, pixels)
        self.answers.append(answer)
        if self.play is not None:
            self.play(answer)
        return answer

    def cancel(self, request_id: str) -> None:
        self.cancels.append(request_id)
        for answer in self.answers:
            if answer.request.request_id == request_id:
                answer.finish("cancelled")

    def trace(self, request_id: str) -> dict[str, Any] | None:
        return {"request_id": "chatcmpl-1", "pairs": []} if request_id in ("chatcmpl-1", "latest") else None

    async def audit(self, request_id: str) -> Audit:
        if self.asker_of(request_id) is None:
            raise RequestError("No such answer is remembered.", status=404, code="request_not_found", param="id")
        return self.audited

    def asker_of(self, request_id: str) -> str | None:
        found = (one.request for one in self.answers[::-1] if request_id in (one.request.request_id, "latest"))
        return next((one.asker for one in found), None)

    def expert_map(self, slots: bool = False) -> dict[str, Any] | None:
        return self.map and self.map | ({"slots": [[0, -1]]} if slots else {})

    def shape(self) -> tuple[int, int]:
        return self.map_shape

    def cells(self) -> bytes | None:
        return self.map_cells

    def held(self) -> float | None:
        return self.held_share

    def recent(self, count: int) -> list[dict[str, Any]]:
        return [dict(STATS)] * min(count, len(self.answers))

    def figures(self) -> dict[str, Any]:
        return self.counters

    def health(self) -> dict[str, Any]:
        lanes = {"total": 2, "busy": 0}
        return {"state": self.state, "fault": self.fault, "lanes": lanes, "queue": 0, "busy": False}

    @property
    def request(self) -> Request:
        return self.answers[-1].request


def output_ids(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Ids of a model's output: what spells a special token is that token, as if the model had drawn it."""

    def encode(text: str) -> list[int]:
        pieces = tokenizer.special_spellings.split(text)
        return tokenizer.encode([Segment(piece, special=at % 2 == 1) for at, piece in enumerate(pieces) if piece])

    return encode


def settings_with(cache: Cache | None = None, vision: Vision | None = None, **server: Any) -> Settings:
    return Settings(
        model=Model(path="/secret/place", served_name="deepseek"),
        experts=Experts(resident=4),
        cache=cache or Cache(context_tokens=4096, pool_tokens=8192),
        server=ServerSettings(**server),
        vision=vision or Vision(),
    )


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@dataclass
class Server:
    session: aiohttp.ClientSession
    port: int
    engine: ScriptedEngine
    context: Context
    app: web.Application
    door: Door

    def post(self, body: Any, **options: Any) -> Any:
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        return self.session.post(options.pop("path", "/v1/chat/completions"), data=data, **options)

    async def ask(self, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        async with self.post(body, **options) as response:
            reply = await response.json()
            check_reply("post", response.url.path, response.status, reply)
            return response.status, reply

    async def refused(self, body: Any, status: int = 400, **options: Any) -> dict[str, Any]:
        """The error of a request that must be refused before it reaches the engine."""
        before = len(self.engine.answers)
        got, reply = await self.ask(body, **options)
        assert got == status, reply
        assert len(self.engine.answers) == before
        assert set(reply["error"]) == {"message", "type", "param", "code"}
        assert "\n" not in reply["error"]["message"]
        return reply["error"]

    async def stream(self, body: Any, **options: Any) -> list[str]:
        """The events of a stream as they stood on the wire."""
        async with self.post({**body, "stream": True}, **options) as response:
            assert response.status == 200
            text = await response.text()
            check_events(response.url.path, text)
            return events(text)


def events(text: str) -> list[str]:
    assert text.endswith("\n\n")
    return [event + "\n\n" for event in text.split("\n\n")[:-1]]


def data(sent: list[str]) -> list[dict[str, Any]]:
    """The JSON of the data events before [DONE]."""
    lines = [event[len("data: ") : -2] for event in sent if event.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def gather(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client's accumulator makes of the chunks."""
    total: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            total["content"] += delta.get("content", "")
            total["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(total["tool_calls"])
                    total["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                total["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            total["finish_reason"] = choice["finish_reason"] or total["finish_reason"]
    return total


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits for a condition, with a deadline."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class Flow:
    """A running stream: it is given a token a millisecond, and counts what its reader has seen."""

    def __init__(self) -> None:
        self.seen = 0

    async def goes_on(self) -> None:
        before = self.seen
        await until(lambda: self.seen >= before + 20)


@asynccontextmanager
async def flow(server: Server) -> AsyncIterator[Flow]:
    found, drawn = Flow(), 0
    async with server.post(said("hi", stream=True, max_tokens=2000)) as reply:
        await until(lambda: bool(server.engine.answers))
        answer = server.engine.answers[-1].start().say("</think>")

        async def draw() -> None:
            nonlocal drawn
            while True:
                answer.say("x")
                drawn += 1
                await asyncio.sleep(0.001)

        async def read() -> None:
            async for line in reply.content:
                found.seen += b'"content": "x"' in line

        drawing, reading = asyncio.create_task(draw()), asyncio.create_task(read())
        await found.goes_on()
        yield found
        await found.goes_on()
        drawing.cancel()
        answer.finish()
        await asyncio.wait_for(reading, 10)
        assert found.seen == drawn
    assert answer.request.request_id not in server.engine.cancels
