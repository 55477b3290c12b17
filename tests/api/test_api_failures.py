"""Faults, disconnects, slow readers, odd bytes, and what the log may say."""

import asyncio
import contextlib
import itertools
import json
import logging
import random
import socket
from collections.abc import Iterator

import pytest
from scripted_engine import data, events, gather, said, until

from tided.api.ports import Limits

BROKEN = {"type": "server_error", "param": None, "code": "engine_error"}


async def connect(server, body: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    return reader, writer


def hang_up(writer: asyncio.StreamWriter, abruptly: bool) -> None:
    if abruptly:
        writer.transport.abort()
    else:
        writer.close()


@pytest.mark.parametrize("abruptly", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("when", ["queued", "prefill", "decoding"])
async def test_a_client_that_leaves_cancels_once(server, engine, when, stream, abruptly):
    reader, writer = await connect(server, said("hi", stream=stream))
    await until(lambda: bool(engine.answers))
    answer = engine.answers[0]
    if when != "queued":
        answer.start()
    if when == "decoding":
        answer.say("some words")
    if stream:
        await reader.readuntil(b"some words" if when == "decoding" else b": ok\n\n")
    hang_up(writer, abruptly)
    await until(lambda: bool(engine.cancels))
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.cancels == [answer.request.request_id]
    engine.script("</think>clean")
    assert (await server.ask(said("next")))[1]["choices"][0]["message"]["content"] == "clean"
    assert len(engine.cancels) == 1


async def test_many_clients_that_leave_leak_nothing(server, engine):
    before = len(asyncio.all_tasks())
    for _ in range(1000):
        _, writer = await connect(server, said("hi", stream=True))
        writer.transport.abort()
    for _ in range(20):
        count = len(engine.answers)
        reader, writer = await connect(server, said("hi", stream=True))
        await until(lambda count=count: len(engine.answers) > count)
        await reader.readuntil(b": ok")
        writer.transport.abort()
    await until(lambda: len(engine.cancels) == len(engine.answers))
    await until(lambda: len(asyncio.all_tasks()) <= before + 2)
    assert len(set(engine.cancels)) == len(engine.cancels)


async def test_a_finished_answer_is_not_cancelled(server, engine):
    engine.script("</think>x")
    await server.ask(said("hi"))
    await server.stream(said("hi"))
    assert engine.cancels == []


async def test_a_fault_before_the_reply_is_its_status(server, engine):
    engine.play = lambda answer: answer.start().fail("rank 1 is silent")
    status, reply = await server.ask(said("hi"))
    assert status == 500
    assert reply["error"] == {"message": "The engine failed: rank 1 is silent", **BROKEN}


async def test_a_fault_in_a_stream_is_its_last_event(server, engine):
    engine.play = lambda answer: answer.start().say("half an").fail("rank 1 is silent")
    sent = await server.stream(said("hi"))
    chunks = data(sent)
    assert chunks[-1] == {"error": {"message": "The engine failed: rank 1 is silent", **BROKEN}}
    assert gather(chunks[:-1])["reasoning_content"] == "half an"
    assert sent[-1] == "data: [DONE]\n\n"
    assert engine.cancels == []


async def test_an_answer_that_the_shutdown_cut_is_an_error(server, engine):
    engine.script("half an", reason="cancelled")
    status, reply = await server.ask(said("hi"))
    assert (status, reply["error"]["code"]) == (503, "engine_unavailable")
    assert data(await server.stream(said("hi")))[-1]["error"]["code"] == "engine_unavailable"


async def test_an_engine_that_drops_a_request_is_a_fault(server, engine):
    def play(answer):
        answer.start()
        answer.over = True

    engine.play = play
    assert (await server.ask(said("hi")))[0] == 500
    assert "error" in data(await server.stream(said("hi")))[-1]


async def test_a_bug_is_an_error_without_its_insides(server, engine, caplog):
    text = "".join(("ins", "ides"))  # not as one word in a line that a traceback shows

    def broken(request, guide, pixels):
        raise ValueError(text)

    engine.submit = broken
    with caplog.at_level(logging.INFO):
        status, reply = await server.ask(said("hi"))
    assert status == 500
    assert reply["error"] == {"message": "The server failed while answering this request.", **BROKEN}
    assert "ValueError" in caplog.text
    assert "broken" in caplog.text  # the place is told
    assert text not in caplog.text


async def test_a_bug_in_a_stream_is_an_event(server, engine, monkeypatch):
    engine.script("</think>x")
    monkeypatch.setattr("tided.api.openai_wire._delta", lambda delta: 1 / 0)
    sent = data(await server.stream(said("hi")))
    assert sent[-1]["error"]["message"] == "The server failed while answering this request."


async def test_a_reader_that_stalls_is_cancelled_and_slows_nobody(serve, engine, ids):
    server = await serve(Limits(keepalive_s=0.2, stall_s=0.5))
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        payload = json.dumps(said("slow", stream=True)).encode()
        slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(payload))
        slow.sendall(payload)
        await until(lambda: bool(engine.answers))
        flood, tokens = engine.answers[0].start(), ids("the tide " * 2000)
        engine.script("</think>quick")
        for _ in range(200):
            if engine.cancels:
                break
            flood.draw(tokens)
            assert (await server.ask(said("quick")))[1]["choices"][0]["message"]["content"] == "quick"
        await until(lambda: bool(engine.cancels))
        assert engine.cancels == [flood.request.request_id]


async def test_nothing_of_a_conversation_is_logged(server, engine, caplog):
    secret = "SECRETWORD"
    with caplog.at_level(logging.DEBUG):
        engine.script(f"{secret} thought</think>{secret} answer")
        await server.ask(said(secret, stop=[secret + "!"], model=secret, user=secret))
        await server.stream(said(secret))
        await server.ask(said(secret, temperature=secret))
        await server.ask(f'{{"messages": "{secret}')
        await server.ask({"messages": [{"role": secret, "content": secret}]})
        async with server.session.get(f"/v1/{secret}?q={secret}", headers={"Authorization": f"Bearer {secret}"}):
            pass
        engine.play = lambda answer: answer.start().say(secret).fail("lost")
        await server.ask(said(secret))
    records = [record.getMessage() for record in caplog.records if record.name.startswith(("tided", "aiohttp"))]
    assert len(records) >= 7
    assert secret not in caplog.text
    assert sum("/v1/chat/completions" in line for line in records) == 6
    assert any("route=unknown status=404" in line for line in records)


async def test_one_line_a_request(server, engine, caplog):
    engine.script("a</think>b")
    with caplog.at_level(logging.INFO, "tided.api"):
        await server.ask(said("hi"), headers={"x-request-id": "mine"})
    [line] = [record.getMessage() for record in caplog.records if record.name == "tided.api"]
    prompt, answer = len(engine.request.prompt_ids), engine.answers[0].drawn + 1
    pairs = dict(pair.split("=") for pair in line.split(" "))
    assert float(pairs.pop("seconds")) >= 0
    assert pairs == {
        "request": "mine",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": "200",
        "answer": engine.request.request_id,
        "prompt_tokens": str(prompt),
        "cached_tokens": "0",
        "answer_tokens": str(answer),
        "ended": "stop",
    }


@pytest.mark.parametrize(
    ("play", "stream", "ending"),
    [
        (lambda answer: answer.start().say("a").fail("rank 1 is silent"), True, "failed outcome=error_engine_error"),
        (lambda answer: answer.start().say("a").fail("rank 1 is silent"), False, "failed"),
        (
            lambda answer: answer.start().say("a").finish("cancelled"),
            True,
            "cancelled outcome=error_engine_unavailable",
        ),
        (lambda answer: answer.start().say("a").finish("length"), True, "length"),
        (lambda answer: answer.start().say("</think>a").finish(), True, "stop"),
        (lambda answer: setattr(answer.start(), "over", True), True, "failed outcome=error_engine_error"),
    ],
    ids=["failed", "failed whole", "cancelled", "length", "stop", "dropped"],
)
async def test_the_log_says_how_an_answer_ended(server, engine, caplog, play, stream, ending):
    engine.play = play
    with caplog.at_level(logging.INFO, "tided.api"):
        async with server.post(said("hi", stream=stream)) as response:
            await response.read()
    [line] = [record.getMessage() for record in caplog.records if record.name == "tided.api"]
    assert line.endswith(f" ended={ending}")


async def test_the_log_says_that_a_client_left(server, engine, caplog):
    with caplog.at_level(logging.INFO, "tided.api"):
        _, writer = await connect(server, said("hi", stream=True))
        await until(lambda: bool(engine.answers))
        writer.transport.abort()
        await until(lambda: any(record.name == "tided.api" for record in caplog.records))
    assert caplog.messages[-1].endswith("ended=not_finished outcome=client_gone")
    assert "status=499 " in caplog.messages[-1]


BASE = json.dumps(
    said(
        "hi",
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "strict": True,
                    "parameters": {
                        "properties": {"a": {"enum": [1, "b"]}, "c": {"const": 2}, "d": {"type": "string"}},
                        "required": ["a"],
                    },
                },
            }
        ],
        temperature=0.5,
        stop=["x"],
        stream_options={"include_usage": True},
        chat_template_kwargs={"thinking": True},
        reasoning_effort="low",
        seed=3,
    )
).encode()
VALUES = [
    *(None, True, -1, 0, 1.5, 1e308, 2**70, 10**400, "", "x", "\x7f", "\ud800"),
    *([], {}, [[]], [{}], {"type": []}, {"a": None}),
]


def mutated(dice: random.Random) -> bytes:
    """Bytes flipped, cut and doubled; or a valid body with odd values at any depth."""
    if dice.random() < 0.4:
        body = bytearray(BASE)
        for _ in range(dice.randint(1, 8)):
            at = dice.randrange(len(body))
            body[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
        return bytes(body)
    value = json.loads(BASE)
    for _ in range(dice.randint(1, 3)):
        node = value
        while isinstance(node, (dict, list)) and node:
            key = dice.choice(list(node)) if isinstance(node, dict) else dice.randrange(len(node))
            if dice.random() < 0.5 or not isinstance(node[key], (dict, list)):
                node[key] = dice.choice(VALUES)
                break
            node = node[key]
    return json.dumps(value).encode()


def places(node: object) -> Iterator[tuple[int | str, ...]]:
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield (key,)
        yield from ((key, *rest) for rest in places(node[key]))


def odd_at_each_place() -> Iterator[bytes]:
    for (*way, last), odd in itertools.product(places(json.loads(BASE)), VALUES):
        value = node = json.loads(BASE)
        for key in way:
            node = node[key]
        node[last] = odd
        yield json.dumps(value).encode()


async def test_no_body_is_a_server_error(server, engine):
    engine.script("</think>x")
    dice = random.Random(20)
    counts: dict[int, int] = {}
    at_random = (dice.randbytes(dice.randint(0, 64)) if at % 6 == 0 else mutated(dice) for at in range(600))
    for body in itertools.chain(odd_at_each_place(), at_random):
        async with server.post(body) as response:
            text = await response.text()
        counts[response.status] = counts.get(response.status, 0) + 1
        assert response.status in (200, 400), (body, text)
        if response.status == 400 and not text.startswith("data:"):
            assert json.loads(text)["error"]["message"], body
    assert min(counts.values()) >= 20, counts


async def test_a_stream_to_an_old_proxy(server, engine):
    """HTTP/1.0, as some proxies speak by default: no chunks, the end of the body is the end of the connection."""
    engine.script("</think>x")
    payload = json.dumps(said("hi", stream=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload
    )
    async with asyncio.timeout(5):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b" 200 " in head
    assert b"chunked" not in head
    assert gather(data(events(body.decode())))["content"] == "x"


async def test_bytes_that_are_no_http_do_not_hurt(server, engine):
    engine.script("</think>x")
    dice = random.Random(21)
    lines = [b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"X" * 20_000]
    for payload in [*lines, *(dice.randbytes(200) for _ in range(20))]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(payload)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                reply = await reader.read()
            assert b"Traceback" not in reply
        writer.close()
    assert (await server.ask(said("hi")))[0] == 200
