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
    from tided.api import openai

    held = []
    monkeypatch.setattr(openai, "Generation", lambda *given: held.append(given[1]) or 1 / 0)
    await server.ask(said("SECRET WORD", tools=[]))
    assert "SECRET" not in str(held[0].chat) + str(held[0].prompt)
