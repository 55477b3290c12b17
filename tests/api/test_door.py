"""Sockets made to hurt: refused or closed within their limits, while an answer's tokens keep coming."""

import asyncio
import contextlib
import json
import logging
import re
import resource
import socket
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from scripted_engine import Server, flow, said, until

from tided.api import door as module
from tided.api import expert_page
from tided.api.door import Connection, _unread_bytes
from tided.api.ports import Limits

LINE = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
PATIENT = Limits(keepalive_s=30, stall_s=30, body_s=30)


async def connect(server: Server, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    return reader, writer


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 10)
    return b""


async def refusal(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """The first reply, which must have the shape of every refusal."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    length = int(re.findall(rb"(?i)content-length: (\d+)", head)[0])
    assert b"application/json" in head
    body = json.loads(await asyncio.wait_for(reader.readexactly(length), 10))
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return int(head.split(b" ")[1]), body["error"]


@pytest.fixture
def files() -> Iterator[None]:
    """Room for thousands of sockets, both ends in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 8192 if hard == resource.RLIM_INFINITY else min(8192, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A byte at a time, until the server has had enough."""
    with contextlib.suppress(ConnectionError):
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.01)


async def test_heads_that_drip_are_given_up(serve):
    server = await serve(PATIENT, head_timeout_s=0.3)
    async with flow(server) as running:
        ends = [await connect(server) for _ in range(20)]
        dripping = [asyncio.create_task(drip(writer, LINE + b"X: a\r\n" * 1000)) for _, writer in ends]
        await running.goes_on()
        for reader, writer in ends:
            # Nothing, where the bytes that came after it have reset the connection.
            assert (await rest_of(reader))[:13] in (b"HTTP/1.1 408 ", b"")
            writer.close()
        for task in dripping:
            task.cancel()
    assert len(server.engine.answers) == 1


async def test_time_begins_with_the_first_byte_and_ends_with_the_head(serve, engine):
    """Connections that wait for a request, bodies and answers have other limits."""
    server = await serve(PATIENT, head_timeout_s=0.3)
    payload = json.dumps(said("hi", stream=True)).encode()
    head = LINE + b"Content-Length: %d\r\n\r\n" % len(payload)
    async with flow(server):
        idle_reader, idle = await connect(server)
        slow_reader, slow = await connect(server, head + payload[:5])
        late_reader, late = await connect(server, LINE)
        status, error = await refusal(late_reader)  # so the others have waited as long
        assert (status, error["type"]) == (408, "timeout_error")
        engine.script("</think>x")
        slow.write(payload[5:])
        idle.write(head + payload)
        for reader in (idle_reader, slow_reader):
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
        for writer in (idle, slow, late):
            writer.close()


async def test_what_a_head_holds_is_not_logged(serve, caplog):
    server = await serve(PATIENT)
    with caplog.at_level(logging.DEBUG):
        reader, writer = await connect(server, b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer SECRET\x00\r\n\r\n")
        status, error = await refusal(reader)
        assert (status, "SECRET" in error["message"]) == (400, False)
        writer.close()
    assert "BadHttpMessage" in caplog.text or "InvalidHeader" in caplog.text
    assert "SECRET" not in caplog.text


async def test_the_rest_of_a_body_that_nobody_wants_is_no_head(serve, engine):
    """One reply, and then the end: not a second one for a head that never came."""
    server = await serve(PATIENT, head_timeout_s=0.3)
    engine.state = "draining"
    reader, writer = await connect(server, LINE + b"Content-Length: 20\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(b"}}"), 10)
    writer.write(b"x" * 20)
    assert await rest_of(reader) == b""
    writer.close()


async def test_an_idle_connection_is_closed(serve):
    server = await serve(Limits(idle_s=0.2))
    ends = [await connect(server), await connect(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")]
    assert [await rest_of(reader) == b"" for reader, _ in ends] == [True, False]
    await until(lambda: not server.door.held)
    for _, writer in ends:
        writer.close()


async def test_a_second_head_has_its_own_time(serve):
    server = await serve(PATIENT, head_timeout_s=0.3)
    reader, writer = await connect(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
    writer.write(b"GET /health HTTP/1.1\r\n")
    assert b" 408 " in await rest_of(reader)
    writer.close()


async def test_thousands_of_idle_connections_keep_nobody_out(serve, engine, files):
    server = await serve(PATIENT, max_connections=64)
    async with flow(server) as running:
        ends = []
        for _ in range(20):
            ends += await asyncio.gather(*(connect(server, LINE[:9]) for _ in range(100)))
            await running.goes_on()
        engine.script("</think>x")
        assert (await server.ask(said("hi")))[0] == 200
        for _, writer in ends:
            writer.close()


async def test_one_more_takes_the_place_of_the_one_that_was_idle_longest(serve):
    server = await serve(PATIENT, max_connections=4)
    ends = [await connect(server) for _ in range(5)]
    assert await rest_of(ends[0][0]) == b""
    for reader, writer in ends[1:]:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
    ends[0][1].close()


async def test_after_its_reply_a_connection_is_idle_again(serve):
    server = await serve(PATIENT, max_connections=4)
    ends = [await connect(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(4)]
    for reader, _ in ends:
        await asyncio.wait_for(reader.readuntil(b"}"), 10)
    reader, writer = await connect(server, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 200 " in await rest_of(reader)
    await until(lambda: sum(reader.at_eof() for reader, _ in ends) == 1)
    for _, each in [*ends, (None, writer)]:
        each.close()


async def test_a_reply_that_is_being_read_is_not_cut(serve):
    """However long its connection has been without a request: others give way."""
    server = await serve(PATIENT, max_connections=4)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        await asyncio.to_thread(slow.sendall, b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 60)
        await until(lambda: any(not held.at_rest() for held in server.door.idle))
        ends = [await connect(server) for _ in range(6)]
        for reader, _ in ends[:3]:
            assert await rest_of(reader) == b""
        slow.settimeout(10)
        found = 0
        while found < 60:
            found += (await asyncio.to_thread(slow.recv, 1 << 20)).count(b'"openapi":')
        for _, writer in ends:
            writer.close()


def deaf(server: Server, data: bytes) -> socket.socket:
    """Sends what it can, and reads nothing."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(("127.0.0.1", server.port))
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        one.send(data)
    return one


def small_buffers(server: Server) -> None:
    """Of the server's sockets: what they do not take stays with their transports."""
    for held in server.door.held:
        held._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


PAGE = b"GET /expert-map HTTP/1.1\r\nHost: x\r\n\r\n"
DOCUMENT = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"  # forty times as long


@pytest.fixture(autouse=True)
def short_page(monkeypatch):
    """Of a length that these tests count on."""
    monkeypatch.setattr(expert_page, "PAGE", "x" * 3200)


@pytest.mark.parametrize("asked", [PAGE * 16, PAGE * 1000], ids=["few", "many"])
async def test_who_reads_nothing_gives_way(serve, asked):
    """Also where its reply fits into the transport, which then never asks anybody to wait."""
    server = await serve(Limits(stall_s=0.3, idle_s=0.3), max_connections=4)
    ends = [deaf(server, b"") for _ in range(4)]
    await until(lambda: len(server.door.held) == 4)
    small_buffers(server)
    for one in ends:
        one.send(asked)
    await until(lambda: len(server.door.idle) == 4 and not any(map(Connection.at_rest, server.door.idle)))
    if len(asked) == 16 * len(PAGE):
        assert all(held._transport.get_write_buffer_size() < 1 << 16 for held in server.door.idle)
    await until(lambda: not server.door.held)
    reader, writer = await connect(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
    for one in [*ends, writer]:
        one.close()


async def test_who_asks_and_asks_and_reads_nothing_gives_way_too(serve):
    """Each further request leaves more unread; it is no sign of a reader."""
    server = await serve(Limits(stall_s=0.3, idle_s=30))
    one = deaf(server, b"")
    await until(lambda: len(server.door.held) == 1)
    small_buffers(server)
    one.send(PAGE * 16)
    for _ in range(40):  # a sixth of what makes it wait for its reader
        with contextlib.suppress(ConnectionError):
            one.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.05)
    assert not server.door.held
    one.close()


async def test_who_reads_slowly_is_not_dropped(serve):
    """A little between two looks, over many of them."""
    server = await serve(Limits(stall_s=0.3, idle_s=30))
    one = deaf(server, DOCUMENT * 60)
    await until(lambda: bool(server.door.idle) and not any(map(Connection.at_rest, server.door.idle)))
    (held,) = server.door.held
    for _ in range(6):
        look = held._look
        one.recv(8192)
        await until(lambda look=look: held._look is not look)
        assert held in server.door.held
    one.close()


@pytest.mark.parametrize("whole", [True, False], ids=["all of it", "enough for the next reply"])
async def test_who_has_read_is_not_dropped_for_what_came_since(serve, whole):
    """However much more that is than at the look before."""
    server, loop = await serve(Limits(stall_s=0.3, idle_s=30)), asyncio.get_running_loop()
    one = deaf(server, b"")
    await until(lambda: len(server.door.held) == 1)
    small_buffers(server)
    (held,) = server.door.held
    one.send(PAGE * 10 if whole else PAGE * 40 + DOCUMENT)
    await until(lambda: held._unread is not None)
    before, look = held._unread, held._look
    async with asyncio.timeout(10):
        if whole:
            while not held.at_rest():
                await loop.sock_recv(one, 4096)
            one.send(DOCUMENT)
            await until(lambda: not held.at_rest())
        while _unread_bytes(held._transport) <= before:
            await loop.sock_recv(one, 4096)
    await until(lambda: held._look is not look)
    assert held in server.door.held
    assert held._unread > before
    one.close()


@pytest.fixture
def alone(monkeypatch) -> Connection:
    """A connection without a network, let in, with 100 bytes that nobody reads."""
    monkeypatch.setattr(module, "_unread_bytes", lambda transport: transport.get_write_buffer_size())
    door = Mock(head_s=0.05, stall_s=0.05, held=set(), idle={})
    one = Connection(door, Mock())
    door.held.add(one)
    one.connection_made(Mock(get_write_buffer_size=Mock(return_value=100)))
    return one


async def test_a_reader_who_makes_room_for_a_longer_reply_has_read(alone):
    alone.over()
    await until(lambda: alone._unread == 100)
    alone.pause_writing()
    alone.resume_writing()
    alone._transport.get_write_buffer_size.return_value = 200
    await until(lambda: alone._unread == 200)
    alone._transport.abort.assert_not_called()
    await until(lambda: alone._look is None)
    alone._transport.abort.assert_called_once()


async def test_the_time_of_a_head_does_not_run_while_a_reader_is_waited_for(alone):
    alone.pause_writing()
    alone.data_received(HALF)
    first = alone._timer
    await until(lambda: alone._timer is not first)
    again = alone._timer
    alone.resume_writing()
    assert again.cancelled()
    alone._transport.write.assert_not_called()
    await until(lambda: alone._transport.write.called)
    alone._transport.close.assert_called_once()


async def test_a_connection_that_is_closed_does_not_wait_for_a_reader(serve, monkeypatch):
    lost, plain = [], Connection.connection_lost
    monkeypatch.setattr(Connection, "connection_lost", lambda self, exc: (lost.append(self), plain(self, exc)))
    server = await serve(Limits(stall_s=0.2, idle_s=30))
    one = deaf(server, b"")
    await until(lambda: len(server.door.held) == 1)
    small_buffers(server)
    (held,) = server.door.held
    held._transport.write(bytes(1 << 15))
    await until(lambda: not held.at_rest())
    held.close()
    await until(lambda: lost == [held])
    one.close()


HALF = b"GET /health HTTP/1.1\r\nHost: x\r\n"


PAYLOAD = json.dumps(said("hi", stream=True)).encode()
SIZED = LINE + b"Content-Length: %d\r\n\r\n" % len(PAYLOAD)
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(PAYLOAD), PAYLOAD)
HALVES = {
    "with the first": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + HALF],
    "while it is busy": [SIZED + PAYLOAD, HALF],
    "with head and body": [SIZED + PAYLOAD + HALF],
    "with the body": [SIZED, PAYLOAD + HALF],
    "with the body's end": [SIZED[:-2], SIZED[-2:] + PAYLOAD[:5], PAYLOAD[5:] + HALF],
    "with the last chunk": [LINE + b"Transfer-Encoding: chunked\r\n\r\n", CHUNKED + HALF],
}


@pytest.mark.parametrize("sent", HALVES.values(), ids=HALVES)
async def test_a_half_head_behind_a_request_has_its_time_too(serve, engine, sent):
    server = await serve(PATIENT, head_timeout_s=0.3)
    reader, writer = await connect(server)
    for piece in sent:
        writer.write(piece)
        await until(lambda piece=piece: [held._end for held in server.door.held] == [piece[-4:]])
    if sent[0].startswith(LINE):
        await until(lambda: len(engine.answers) == 1)
        engine.answers[0].start().say("</think>x").finish()
    found = await rest_of(reader)
    assert (found.count(b" 200 OK"), found.count(b" 408 ")) == (1, 1)
    writer.close()


@pytest.mark.parametrize("count", [1, 3], ids=["alone", "pipelined"])
async def test_a_body_in_pieces_and_whole_heads_leave_a_connection_in_peace(serve, engine, count):
    server = await serve(PATIENT, head_timeout_s=0.2)
    engine.script("</think>x")
    payload = json.dumps(said("hi")).encode()
    reader, writer = await connect(server, LINE + b"Content-Length: %d\r\n\r\n" % len(payload) + payload[:5])
    await until(lambda: any(held._busy for held in server.door.held))
    writer.write(payload[5:] + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * (count - 1))
    for _ in range(count):
        await asyncio.wait_for(reader.readuntil(b" 200 OK"), 10)
    late_reader, late = await connect(server, HALF)
    assert b" 408 " in await rest_of(late_reader)  # so the other has been idle as long
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await rest_of(reader)).count(b" 200 OK") == 1
    late.close()
    writer.close()


WHOLE = [
    [SIZED + PAYLOAD],
    [SIZED + PAYLOAD, SIZED + PAYLOAD],
    [SIZED + PAYLOAD + SIZED + PAYLOAD],
    [SIZED, PAYLOAD + SIZED, PAYLOAD],
    [LINE + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED],
    [LINE + b"Transfer-Encoding: chunked\r\n\r\n", CHUNKED[:9], CHUNKED[9:] + SIZED + PAYLOAD],
]


@pytest.mark.parametrize("sent", WHOLE, ids=map(len, WHOLE))
async def test_who_has_sent_whole_requests_is_not_told_that_a_head_is_late(serve, engine, sent):
    server = await serve(PATIENT, head_timeout_s=0.2)
    engine.script("</think>x")
    reader, writer = await connect(server)
    for piece in sent:
        writer.write(piece)
        await until(lambda piece=piece: [held._end for held in server.door.held] == [piece[-4:]])
    for _ in range(b"".join(sent).count(LINE)):
        await asyncio.wait_for(reader.readuntil(b"[DONE]"), 10)
    late_reader, late = await connect(server, HALF)
    assert b" 408 " in await rest_of(late_reader)  # so the other has been idle as long
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 408 " not in (found := await rest_of(reader))
    assert found.count(b" 200 OK") == 1
    late.close()
    writer.close()


async def test_whole_heads_may_wait_for_a_slow_reader(serve):
    """Longer than a head may take to come."""
    server = await serve(PATIENT, head_timeout_s=0.3)
    one = deaf(server, DOCUMENT * 60)
    await until(lambda: any(held._paused for held in server.door.idle))
    one.send(PAGE)
    reader, writer = await connect(server, HALF)
    assert b" 408 " in await rest_of(reader)
    found, loop = 0, asyncio.get_running_loop()
    async with asyncio.timeout(20):
        tail = b""
        while found < 61:
            got = await loop.sock_recv(one, 1 << 20)
            assert got
            found += (tail + got).count(b"HTTP/1.1 200") - tail.count(b"HTTP/1.1 200")
            tail = got[-11:]
    one.close()
    writer.close()


async def test_where_all_are_busy_one_more_is_refused(serve, engine):
    server = await serve(PATIENT, max_connections=4)
    payload = json.dumps(said("hi", stream=True)).encode()
    ask = LINE + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload
    ends = [await connect(server, ask) for _ in range(4)]
    await until(lambda: len(engine.answers) == 4)
    reader, writer = await connect(server, ask)
    status, error = await refusal(reader)
    assert (status, error["code"]) == (503, "engine_unavailable")
    writer.close()
    engine.answers[0].start().say("</think>x").finish()
    waits = [asyncio.create_task(rest_of(reader)) for reader, _ in ends]
    done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    assert [b"[DONE]" in task.result() for task in done] == [True]
    engine.script("</think>x")
    reader, writer = await connect(server, ask)
    assert b"[DONE]" in await rest_of(reader)
    assert len(engine.cancels) == 0
    for task in others:
        task.cancel()
    for _, each in [*ends, (None, writer)]:
        each.close()


async def test_pipelined_requests_are_answered_in_their_order(serve):
    server = await serve(PATIENT)
    async with flow(server):
        asks = [b"GET /v1/models/%d HTTP/1.1\r\nHost: x\r\nx-request-id: n%d\r\n\r\n" % (n, n) for n in range(500)]
        reader, writer = await connect(
            server, b"".join([*asks, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"])
        )
        heads = (await rest_of(reader)).split(b"x-request-id: ")[1:]
        assert [head.split(b"\r\n")[0] for head in heads[:-1]] == [b"n%d" % n for n in range(500)]
        writer.close()


@pytest.mark.parametrize("when", ["asked", "answered"])
async def test_a_client_that_closes_its_half_is_gone(serve, engine, when):
    server = await serve(PATIENT)
    payload = json.dumps(said("hi", stream=True)).encode()
    async with flow(server):
        reader, writer = await connect(server, LINE + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
        await until(lambda: len(engine.answers) == 2)
        if when == "answered":
            engine.answers[1].start().say("</think>word")
            await asyncio.wait_for(reader.readuntil(b"word"), 10)
        writer.write_eof()
        await until(lambda: engine.cancels == [engine.answers[1].request.request_id])
        await rest_of(reader)
        writer.close()


NOISE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    b"\xff\xfe / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    LINE + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffff\r\n",
    LINE + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
    LINE + b"X: \xff\xfe\x00\r\n\r\n",
    LINE + b"Content-Length: 2\r\nContent-Encoding: gzip\r\n\r\n{}",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /" + b"%ff" * 2000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
]


@pytest.mark.parametrize("noise", NOISE, ids=range(len(NOISE)))
async def test_what_is_no_request_is_refused(serve, engine, noise):
    server = await serve(Limits(keepalive_s=30, body_s=0.5), head_timeout_s=0.5)
    async with flow(server):
        reader, writer = await connect(server, noise)
        writer.write(b"\r\n\r\n")
        status, error = await refusal(reader)
        assert status in (400, 404, 408)
        assert "\\x" not in error["message"]
        assert ("https" in error["message"]) == (not noise[:1].isalpha())
        writer.close()
    assert len(engine.answers) == 1
