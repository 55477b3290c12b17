"""Requests on their way to the engine: who is refused before a body is read, who waits, who is given up."""

import asyncio
import json
import threading
import zlib

import pytest
from scripted_engine import said, until

from tided.api.ports import Limits
from tided.api.slots import SHORT_BYTES
from tided.chat.tokenizer import Tokenizer

LONG = "the tide comes in, " * (SHORT_BYTES // 16)
PATIENT = Limits(prepare_s=20.0)


class Gate:
    """Stands in for the tokenizer: prompts that hold `marked` stay in it until they are let through or given up."""

    def __init__(self, marked: str = "tide") -> None:
        self.marked = marked
        self.opened = threading.Event()
        self.inside = self.ended = 0
        self._lock = threading.Lock()

    def encode_in_parts(self, segments):
        if not any(self.marked in segment.text for segment in segments):
            yield [1, 2, 3]
            return
        with self._lock:
            self.inside += 1
        try:
            while not self.opened.wait(0.01):
                yield []
            yield [1, 2, 3]
        finally:
            with self._lock:
                self.ended += 1


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(Tokenizer, "encode_in_parts", lambda _, segments: gate.encode_in_parts(segments))
    monkeypatch.setattr(Tokenizer, "least_tokens", lambda _, segments: 0)
    yield gate
    gate.opened.set()


async def ask_later(server, text: str) -> asyncio.Task:
    return asyncio.create_task(server.ask(said(text)))


async def test_the_loop_answers_while_a_prompt_is_tokenised(serve, engine, gate):
    """A tokenizer that does not return, whatever it does, holds up nothing but its own request."""
    server = await serve(PATIENT)
    engine.script("</think>x")
    stuck = threading.Event()
    monkey = gate.encode_in_parts

    def blocks(segments):
        assert stuck.wait(20)
        yield from monkey(segments)

    gate.encode_in_parts = blocks
    task = await ask_later(server, "hi")
    async with asyncio.timeout(5):
        async with server.session.get("/health") as response:
            assert response.status == 200
    assert not task.done()
    stuck.set()
    assert (await task)[0] == 200


async def test_short_prompts_do_not_wait_behind_long_ones(serve, engine, gate):
    server = await serve(PATIENT)
    engine.script("</think>x")
    tasks = [await ask_later(server, LONG) for _ in range(4)]
    await until(lambda: gate.inside == 1)
    async with asyncio.timeout(5):
        assert (await server.ask(said("short")))[0] == 200
    assert gate.inside == 1  # long ones are worked on one by one
    gate.opened.set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 4


async def test_the_work_of_clients_that_have_gone_ends(serve, engine, gate):
    server = await serve(PATIENT)
    engine.script("</think>x")
    tasks = [await ask_later(server, LONG) for _ in range(5)]
    await until(lambda: gate.inside == 1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: gate.ended == gate.inside)
    gate.marked = "nothing"
    async with asyncio.timeout(5):
        assert (await server.ask(said(LONG)))[0] == 200
    assert gate.inside <= 2  # who left while waiting was never worked for
    assert len(engine.answers) == 1


async def test_a_body_that_unfolds_is_a_long_one(serve, engine, gate):
    server = await serve(PATIENT)
    engine.script("</think>x")
    first = await ask_later(server, LONG)
    await until(lambda: gate.inside == 1)
    packed = zlib.compress(json.dumps(said(LONG)).encode())
    assert len(packed) < SHORT_BYTES
    second = asyncio.create_task(server.ask(packed, headers={"Content-Encoding": "deflate"}))
    small = zlib.compress(json.dumps(said("small")).encode())
    assert (await server.ask(small, headers={"Content-Encoding": "deflate"}))[0] == 200
    assert (gate.inside, second.done()) == (1, False)
    gate.opened.set()
    assert [(await task)[0] for task in (first, second)] == [200, 200]


async def test_long_bodies_are_unfolded_one_by_one(serve, engine, gate, monkeypatch):
    """What waits for its turn waits as it was sent."""
    from tided.api import exchange

    server = await serve(PATIENT)
    engine.script("</think>x")
    unfolded = []

    def decompressed(body, encoding, limit_bytes, alive):
        plain = plainly(body, encoding, limit_bytes, alive)
        unfolded.append(len(plain))
        return plain

    plainly = exchange.decompressed
    monkeypatch.setattr(exchange, "decompressed", decompressed)
    packed = zlib.compress(json.dumps(said(LONG)).encode())
    asked = [asyncio.create_task(server.ask(packed, headers={"Content-Encoding": "deflate"})) for _ in range(4)]
    await until(lambda: gate.inside == 1)
    for _ in range(4):
        assert (await server.ask(said("short")))[0] == 200
    assert sum(size > SHORT_BYTES for size in unfolded) == 1
    gate.opened.set()
    assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 4


async def send(server, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode() + body)
    return reader, writer


async def refusal(server, head: str, body: bytes = b"") -> tuple[int, str]:
    """Status and message of a request whose body never comes."""
    reader, writer = await send(server, head, body)
    async with asyncio.timeout(5):
        text = await reader.readuntil(b"}}")
    writer.close()
    return int(text.split()[1]), json.loads(text.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize("expects", ["", "Expect: 100-continue\r\n"], ids=["sends", "asks"])
@pytest.mark.parametrize(("state", "words"), [("starting", "being loaded"), ("draining", "down"), ("fault", "rank 1")])
async def test_nobody_sends_a_body_to_a_server_that_does_not_serve(serve, engine, state, words, expects):
    server = await serve(Limits(body_s=60))
    engine.state, engine.fault = state, "rank 1 is silent"
    status, message = await refusal(server, f"Content-Length: 1000\r\n{expects}")
    assert (status, words in message) == (503, True)


async def test_nobody_sends_a_body_to_a_full_server(serve, engine, monkeypatch):
    server = await serve(Limits(body_s=60))
    full = {"state": "ready", "fault": "", "lanes": {"total": 2, "busy": 1}, "queue": 65, "busy": True}
    monkeypatch.setattr(engine, "health", lambda: full)
    status, message = await refusal(server, "Content-Length: 1000\r\n")
    assert status == 429
    assert message == "all places are taken (2 lanes, 64 in the queue); try again in a moment"
    full["queue"] = 64
    engine.script("</think>x")
    assert (await server.ask(said("hi")))[0] == 200


async def test_requests_on_their_way_take_places(serve, engine):
    server = await serve(Limits(body_s=60))
    engine.script("</think>x")
    open_ones = [await send(server, "Content-Length: 1000\r\n", b"{") for _ in range(66)]
    context = server.context
    await until(lambda: context.admission.preparing == 66)
    assert (await refusal(server, "Content-Length: 1000\r\n"))[0] == 429
    open_ones.pop()[1].transport.abort()
    await until(lambda: context.admission.preparing == 65)
    assert (await server.ask(said("hi")))[0] == 200
    for _, writer in open_ones:
        writer.transport.abort()
    await until(lambda: context.admission.preparing == 0)


async def test_long_bodies_have_a_budget_and_short_ones_need_none(serve, engine):
    size = 4 * SHORT_BYTES
    server = await serve(Limits(body_s=60), max_body_bytes=size)
    engine.script("</think>x")
    context = server.context
    declared = [await send(server, f"Content-Length: {size}\r\n", b"{") for _ in range(3)]
    chunk = b"%x\r\n" % (SHORT_BYTES + 1) + b" " * (SHORT_BYTES + 1) + b"\r\n"
    declared.append(await send(server, "Transfer-Encoding: chunked\r\n", chunk))
    await until(lambda: context.admission.held_bytes == 4 * size)
    status, message = await refusal(server, f"Content-Length: {SHORT_BYTES + 1}\r\n")
    assert (status, "long requests" in message) == (429, True)
    assert (await refusal(server, f"Content-Length: {SHORT_BYTES + 1}\r\nExpect: 100-continue\r\n"))[0] == 429
    assert (await refusal(server, "Transfer-Encoding: chunked\r\n", chunk))[0] == 429
    assert (await refusal(server, f"Content-Length: {size + 1}\r\n"))[0] == 413
    assert (await server.ask(said("short")))[0] == 200
    for _, writer in declared:
        writer.transport.abort()
    await until(lambda: (context.admission.held_bytes, context.admission.preparing) == (0, 0))
    assert (await server.ask(said("tide")))[0] == 200


async def test_a_running_answer_holds_no_place_and_no_body(serve, engine):
    server = await serve(PATIENT, max_body_bytes=4 * SHORT_BYTES)
    body = said("hi", user="x" * SHORT_BYTES)
    tasks = [asyncio.create_task(server.ask(body)) for _ in range(6)]
    await until(lambda: len(engine.answers) == 6)
    assert (server.context.admission.held_bytes, server.context.admission.preparing) == (0, 0)
    for answer in engine.answers:
        answer.start().say("</think>x").finish()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 6


async def test_preparing_has_a_limit(serve, gate):
    server = await serve(Limits(prepare_s=0.3))
    error = await server.refused(said(LONG), 503)
    assert "try again" in error["message"]
    await until(lambda: gate.ended == gate.inside)


async def test_a_prompt_beyond_the_context_is_not_tokenised_to_its_end(server, monkeypatch):
    parts = []

    def encode_in_parts(_, segments):
        for _ in range(100):
            parts.append(1)
            yield [7] * 1000

    monkeypatch.setattr(Tokenizer, "encode_in_parts", encode_in_parts)
    error = await server.refused(said("hi"))
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in error["message"]
    assert "more than 4096 in the messages" in error["message"]
    assert len(parts) == 5


async def test_a_prompt_that_cannot_fit_is_not_tokenised_at_all(server, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode_in_parts", None)
    error = await server.refused(said("x" * 2_000_000))
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in error["message"]


async def test_what_a_running_answer_holds_is_not_the_prompts_text(server, engine, monkeypatch):
    from tided.api import answers

    held = []
    monkeypatch.setattr(answers, "Generation", lambda *given: held.append(given[1]) or 1 / 0)
    await server.ask(said("SECRET WORD", tools=[]))
    assert "SECRET" not in str(held[0].chat) + str(held[0].prompt)
