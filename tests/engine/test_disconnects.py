"""A client that hangs up: from its socket to the pages of both ranks, its request is gone a step or two later, wherever
it was. The engine is real, its ranks are threads of this process, and every step waits for the test to let it go."""

import asyncio
import json
import socket
import threading
from contextlib import asynccontextmanager

import pytest
from real_pair import Living
from small_model import CONTEXT, small_model, small_of, small_pages

from tests.chat.small_tokenizer import build
from tided.api.app import build_app
from tided.api.door import Door
from tided.chat.families import DEEPSEEK_V41
from tided.chat.tokenizer import Tokenizer
from tided.engine.client import EngineClient
from tided.engine.scheduler import Running

STEPS = 2  # one that was decided already, one that knows


class Turnstile:
    """A link of the leader. Each step waits until it is let go."""

    def __init__(self, link) -> None:
        self._link, self._go, self._free = link, threading.Semaphore(0), False
        self.waits, self.sent = False, []

    def __getattr__(self, name):
        return getattr(self._link, name)

    def send(self, step) -> None:
        if not self._free:
            self.waits = True
            assert self._go.acquire(timeout=60)
            self.waits = False
        self.sent.append(step)
        self._link.send(step)

    def let(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._go.release()

    def open(self) -> None:
        self._free = True
        self.let()


class Site:
    """Everything but the processes: sockets, HTTP, the engine's thread and its ranks."""

    def __init__(self, living: Living, client: EngineClient, turnstile: Turnstile, port: int) -> None:
        self.living, self.client, self.link, self.port = living, client, turnstile, port
        self.engine = living.engine
        self.connections: list[asyncio.StreamWriter] = []  # of clients that wait

    async def ask(self, letters: int, tokens: int, stream: bool) -> tuple[str, asyncio.StreamWriter]:
        """The name of a request, once the engine's inbox has it, and the connection it came by."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        message = {"role": "user", "content": "z" * letters}
        body = {"messages": [message], "max_tokens": tokens, "stream": stream, "ignore_eos": True, "temperature": 0}
        data = json.dumps(body | {"enable_thinking": False}).encode()
        known = set(self.client._open)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        await until(lambda: set(self.client._open) > known)
        (name,) = set(self.client._open) - known
        self.connections.append(writer)
        return name, writer

    async def step(self) -> None:
        """Lets the step go that waits; returns when every rank has done it and the next one waits."""
        await until(lambda: self.link.waits)
        seq = self.engine.seq
        self.link.let()
        await until(lambda: self.engine.seq > seq and self.link.waits)
        await until(lambda: all(other.seq == self.engine.seq for other in self.living.others))

    async def advance(self, condition) -> None:
        for _ in range(300):
            await until(lambda: self.link.waits)
            if condition():
                return
            await self.step()
        raise AssertionError("it never came so far")

    def running(self, name: str) -> Running | None:
        """Looked at while a step waits."""
        lanes = self.engine.scheduler.running.values()
        return next((running for running in lanes if running.request.request_id == name), None)


async def until(condition, seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def checkpoint(mini, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        small_pages(patch)
        yield small_of(mini, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(build(tmp_path_factory.mktemp("tokenizer")))


@asynccontextmanager
async def site(checkpoint, tokenizer, tmp_path, **cache):
    model = small_model(checkpoint, ranks=2, lanes=2, **cache)
    client, loop = EngineClient(2, 8, tokenizer.token_bytes), asyncio.get_running_loop()
    living = Living(model, cache_dir=tmp_path)
    turnstile = living.engine._link = Turnstile(living.link)
    living.engine._sink = client.post
    living.engine._on_fault = lambda error: loop.call_soon_threadsafe(client.fail_all, error.what)
    thread = threading.Thread(target=living.engine.run, daemon=True)
    thread.start()
    client.attach(living.engine)
    listener = socket.create_server(("127.0.0.1", 0))
    door = await Door.open(build_app(client, tokenizer, DEEPSEEK_V41, model.settings), listener)
    try:
        yield Site(living, client, turnstile, listener.getsockname()[1])
    finally:
        turnstile.open()
        await door.close()
        living.engine.close("done")
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()


def prefilling(running) -> bool:
    return running is not None and running.in_prefill and running.computed > 0


def decoding(running) -> bool:
    return running is not None and running.drawn > 2


WHERE = {
    "prefilling": prefilling,
    "decoding": decoding,
    "parked": lambda running: running is not None and running.parked,
    "queued": lambda running: running is None,
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("where", WHERE)
async def test_a_request_whose_client_has_gone_is_gone_too(checkpoint, tokenizer, tmp_path, where, stream):
    tight = {"pool_tokens": CONTEXT, "park_tokens": CONTEXT} if where == "parked" else {}
    async with site(checkpoint, tokenizer, tmp_path, **tight) as held:
        stays, _ = await held.ask(12, 70, True)
        await held.advance(lambda: decoding(held.running(stays)))
        if where == "queued":  # both lanes are taken
            await held.ask(12, 70, True)
        goes, connection = await held.ask(12 if where == "parked" else 60, 40, stream)
        await held.advance(lambda: goes in held.engine.ledger.open_ids and WHERE[where](held.running(goes)))
        connection.transport.abort()
        await until(lambda: held.engine._inbox.qsize() > 0)
        for _ in range(STEPS):
            await held.step()
        scheduler = held.engine.scheduler
        assert goes not in held.engine.ledger.open_ids
        assert goes not in {request.request_id for request in scheduler.waiting}
        assert held.running(goes) is None
        assert held.running(stays) is not None
        for rank in held.living.ranks:
            assert set(rank.executor.lanes) == set(scheduler.running)
            assert rank.executor.caching.parked.lanes == []
            rank.executor.check()  # open lanes and free pages make up the pool
        held.link.open()
        await until(lambda: not held.client._open)
        admitted = {one.request.request_id for step in held.link.sent for one in step.admit}
        assert (goes in admitted) == (where != "queued")
        ended = {stats["completion_tokens"] for stats in held.client.recent_stats}
        assert 70 in ended  # who stayed has its whole answer
        assert 40 not in ended
    held.living.check()
