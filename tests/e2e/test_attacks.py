"""Bodies made to hurt: whatever one client sends, the pair goes on and others are answered."""

import asyncio
import json
import zlib
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import answer, ask, get, post

pytestmark = pytest.mark.xdist_group("attacks")


def values(count: int) -> bytes:
    """Keys, arrays and numbers: what the parser is slowest with."""
    keys = b",".join(b'"%d":""' % key for key in range(count // 4))
    return b'{"messages":0,"x":{' + keys + b'},"y":[' + b"[]," * (count // 16) + b"1," * (count // 16) + b"1]}"


WORST = [
    pytest.param(b'{"messages":[' + b"[]," * 20_000_000 + b"[]]}", 413, id="arrays"),
    pytest.param(b'{"messages":[' + b"{}," * 20_000_000 + b"{}]}", 413, id="objects"),
    pytest.param(values(10_000_000), 413, id="keys"),
    pytest.param(values(290_000), 400, id="values just below the limit"),
    pytest.param(b'{"messages":0,"x":"' + b'\\"' * 30_000_000 + b'"}', 400, id="escapes"),
    pytest.param(b'{"x":' + b"[]," * 280_000 + b'"' + b'\\"' * 29_000_000, 413, id="open string"),
    pytest.param(b'{"x":' + b" " * 60_000_000, 400, id="spaces"),
    pytest.param(b'{"x":' + b"1" * 60_000_000, 400, id="digits"),
    pytest.param(b"[" * 60_000_000, 413, id="depth"),
]


async def folded(session: aiohttp.ClientSession, url: str, body: Any) -> int:
    async with session.post(f"{url}/v1/chat/completions", data=body, headers={"Content-Encoding": "deflate"}) as reply:
        await reply.read()
        return reply.status


async def goes_on(pair) -> None:
    """Both ranks heard each other all the time: the same pair answers."""
    assert (await get(pair.url, "/health"))[0] == 200
    assert answer(await post(pair.url, ask("What is the capital of Norway?", max_tokens=8)))
    assert pair.handle.process.poll() is None


@pytest.mark.parametrize(("body", "status"), WORST)
async def test_the_worst_bodies_leave_the_pair_serving(pair, body, status):
    packed = zlib.compress(body, 1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        replies = await asyncio.gather(*(folded(session, pair.url, packed) for _ in range(3)))
    assert replies == [status] * 3
    await goes_on(pair)


async def test_long_requests_of_clients_that_have_gone_hold_up_nobody(pair):
    """Each would be worked on for seconds; the one that stays does not wait for them."""
    packed = zlib.compress(json.dumps(ask("the tide comes in, " * 3_000_000)).encode(), 1)
    sent = 0

    async def body():
        nonlocal sent
        yield packed
        sent += 1

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        gone = [asyncio.create_task(folded(session, pair.url, body())) for _ in range(20)]
        async with asyncio.timeout(30):
            while sent < len(gone):
                await asyncio.sleep(0.01)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
    async with asyncio.timeout(30):
        await goes_on(pair)


async def test_a_flood_of_large_bodies_is_refused_or_answered(pair):
    """More than may be held at once: some are refused before they are sent, none harms."""
    body = json.dumps(ask("x", max_tokens=1) | {"user": "x" * 20_000_000}).encode()

    async def send() -> int:
        try:
            return (await post(pair.url, body))[0]
        except aiohttp.ClientError:
            return 0  # refused while it was still sending

    statuses = await asyncio.gather(*(send() for _ in range(24)))
    assert statuses.count(200) >= 4
    assert set(statuses) <= {200, 429, 0}
    await goes_on(pair)


async def test_more_connections_than_there_are_places_keep_nobody_out(pair):
    """Heads that never end, more of them than `server.max_connections`: the pair answers beside them."""
    host, port = pair.url.removeprefix("http://").split(":")
    ends = []
    for _ in range(6):
        ends += await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(100)))
        for _, writer in ends[-100:]:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nX: ")
        await goes_on(pair)
    for _, writer in ends:
        writer.close()
