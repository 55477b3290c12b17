"""Bodies and sockets made to hurt the Anthropic routes: refused in their shape, while another stream goes on."""

import asyncio
import json

import pytest
from scripted_engine import flow

GOOD = {"max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
BODIES = [
    (b"\xff\xfe{", 400),
    (b"[" * 100_000, 400),
    (b'{"max_tokens":1,"messages":' + b"[" * 129 + b"]" * 129 + b"}", 400),
    (b'{"max_tokens":' + b"9" * 5000 + b',"messages":[{"role":"user","content":"x"}]}', 400),
    (b'{"max_tokens":1e999,"messages":[]}', 400),
    (b'{"max_tokens":NaN}', 400),
    (b'{"max_tokens":5,"messages":[{"role":"system","content":""}]}', 400),
    (b'{"max_tokens":5,"messages":[' + b"{}," * 400_000 + b"{}]}", 413),
    (json.dumps(GOOD | {"system": "x" * (65 << 20)}).encode(), 413),
]
HEADS = [
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(5000)) + b"\r\n",
    b"POST /v1/messages?" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
]


@pytest.fixture
async def goes_on(server):
    """A stream whose tokens keep coming while the test does its worst, and which is whole at its end."""
    async with flow(server) as running:
        yield running


@pytest.mark.parametrize(("body", "status"), BODIES, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_bodies(server, engine, goes_on, path, body, status):
    asked = asyncio.create_task(server.ask(body, path=path))
    await goes_on.goes_on()
    got, reply = await asked
    assert (got, reply["type"]) == (status, "error")
    assert len(engine.answers) == 1


@pytest.mark.parametrize("head", HEADS, ids=["long header", "many headers", "long line"])
@pytest.mark.usefixtures("goes_on")
async def test_heads(server, head):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head)
    async with asyncio.timeout(10):
        assert b" 400 " in await reader.readline()
        head = await reader.readuntil(b"\r\n\r\n")
        error = json.loads(await reader.read())["error"]
    assert b"x-request-id: req_" in head
    assert error["message"].startswith("The head of the request cannot be read: ")
    writer.close()


@pytest.mark.usefixtures("goes_on")
async def test_slow_and_half_closed(server, engine):
    """A body that drips is given up; one that ends too early reaches no engine."""
    head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    slow_reader, slow = await asyncio.open_connection("127.0.0.1", server.port)
    slow.write(head + b"{")
    cut_reader, cut = await asyncio.open_connection("127.0.0.1", server.port)
    cut.write(head + b"{")
    cut.write_eof()
    async with asyncio.timeout(10):
        assert b" 408 " in await slow_reader.readline()
        await cut_reader.read()
    slow.close()
    cut.close()
    assert len(engine.answers) == 1
