"""GET /v1/expert-map/events: the map and the tide as they move, to viewers who may be slow."""

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from documented import EVENTS, _validator
from scripted_engine import ScriptedEngine, until

from tided.api import viewers
from tided.api.ports import Limits
from tided.api.viewers import MOST_VIEWERS, QUEUE, Viewers, delta
from tided.errors import RequestError

COUNTERS = {
    "weight": 10.0,
    "missed_weight": 1.0,
    "substituted_weight": 0.5,
    "swaps": 3,
    "reads_hot_issued": 4,
    "reads_nbytes": 5000,
    "answer_tokens": 7,
    "available_bytes": {0: 1 << 30, 1: 2 << 30},
    "lanes": [],
}
LANE = {
    "lane": 1, "phase": "answer", "admitted_s": 5.0, "prompt_tokens": 9, "computed_tokens": 9, "answer_tokens": 2,
    "drafted": 4, "accepted": 3, "fidelity": "fast",
}  # fmt: skip

FAST_STALL = Limits(keepalive_s=0.2, stall_s=0.3)
Event = tuple[str, dict[str, Any]]


class Copy:
    """What a viewer makes of the events: its own map."""

    def __init__(self) -> None:
        self.cells = bytearray()
        self.names: list[str] = []
        self.now: dict[str, Any] = {}
        self.tide: dict[str, list[Any]] = {}

    def take(self, text: str) -> None:
        for name, value in parsed(text):
            self.names.append(name)
            _validator("get", "/v1/expert-map/events", 200, EVENTS).validate(value)
            if name == "map":
                self.cells = bytearray(base64.b64decode(value["cells"]))
                assert len(self.cells) == value["layers"] * value["experts"]
            elif name == "cells":
                codes = base64.b64decode(value["cells"])
                for at in range(0, len(codes), 3):
                    code = int.from_bytes(codes[at : at + 3])
                    self.cells[code >> 6] = code & 63
            elif name == "now":
                self.now = value
            elif value.pop("whole", False):
                self.tide = value
            else:
                self.tide = {key: self.tide[key] + column for key, column in value.items()}


def parsed(text: str) -> list[Event]:
    found = []
    for event in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.split("\n") if not line.startswith(":") and line)
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


@pytest.fixture
def shown(engine: ScriptedEngine) -> ScriptedEngine:
    engine.counters = dict(COUNTERS)
    engine.map_shape, engine.map_cells = (2, 4), bytes([0x19, 0x05, 0x20, 0x3F, 0, 0, 0, 0])
    return engine


async def read(copy: Copy, texts: AsyncIterator[str]) -> None:
    async for text in texts:
        copy.take(text)


async def test_what_is_now_in_one_reply(server, shown):
    async with server.session.get("/v1/expert-map/events?follow=0") as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        copy = Copy()
        copy.take(await response.text())
    assert copy.names == ["map", "tide", "now"]
    assert bytes(copy.cells) == shown.map_cells
    assert copy.now["counts"] == {"not_loaded": 5, "resident": 1, "transient": 1, "loading": 1}
    assert copy.now["available_bytes"] == {"0": 1 << 30, "1": 2 << 30}
    assert server.context.viewers.count == 0


async def test_a_stream_follows_what_changes(server, shown):
    async with server.session.get("/v1/expert-map/events") as response:
        copy = Copy()

        async def follow() -> None:
            text = ""
            async for line in response.content:
                text += line.decode()
                if text.endswith("\n\n"):
                    copy.take(text)
                    text = ""

        reading = asyncio.create_task(follow())
        await until(lambda: "now" in copy.names)
        shown.map_cells = bytes([0x19, 0x15, *shown.map_cells[2:]])
        shown.counters = COUNTERS | {"swaps": 4, "lanes": [LANE]}
        await until(lambda: bytes(copy.cells) == shown.map_cells and copy.now["swaps"] == 4)
        assert copy.now["lanes"][0].items() >= {"lane": 1, "accepted": 3, "tok_s": None}.items()
        assert "admitted_s" not in copy.now["lanes"][0]
        assert copy.names.count("map") == 1
        await until(lambda: bool(copy.tide["swaps"]) and copy.tide["swaps"][-1] == 4)
        reading.cancel()
    await until(lambda: server.context.viewers.count == 0)


async def test_nothing_is_sent_where_nothing_changes(shown):
    watched = Viewers(shown, "m")
    stream = watched.follow(60)
    await anext(stream)
    for tick in range(100):
        watched.publish(1e6 + tick / 1000, 0.0)
    text = await anext(stream)
    assert [name for name, _ in parsed(text)] == ["tide"]
    await stream.aclose()
    assert watched.count == 0


async def test_deltas_are_what_changed_and_a_flood_is_the_whole():
    dice = np.random.default_rng(7)
    before = dice.integers(0, 64, 19_200, dtype=np.uint8)
    now = before.copy()
    places = np.array([0, 255, 256, 19_199])
    now[places] ^= 0x11
    codes = base64.b64decode(delta(before.tobytes(), now.tobytes()))
    told = [int.from_bytes(codes[at : at + 3]) for at in range(0, len(codes), 3)]
    assert told == [int(place) << 6 | int(now[place]) for place in places]
    assert delta(before.tobytes(), (before ^ 1).tobytes()) is None


async def test_random_changes_reach_every_viewer(shown):
    """Four viewers of the largest model; one reads nothing for a while, and still ends up with the same map."""
    dice = np.random.default_rng(3)
    shown.map_shape, cells = (40, 480), dice.integers(0, 64, 19_200, dtype=np.uint8)
    shown.map_cells = cells.tobytes()
    watched, copies = Viewers(shown, "m"), [Copy() for _ in range(4)]
    streams = [watched.follow(60) for _ in copies]
    for copy, stream in zip(copies, streams, strict=True):
        copy.take(await anext(stream))
    readers = [asyncio.create_task(read(*both)) for both in zip(copies[1:], streams[1:], strict=True)]
    for tick in range(2 * QUEUE):
        changes = dice.integers(0, 6_000 if tick == 40 else 50)
        cells[dice.integers(0, 19_200, changes)] = dice.integers(0, 64, changes)
        shown.map_cells = cells.tobytes()
        watched.publish(tick * 0.1, tick * 0.1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    readers.append(asyncio.create_task(read(copies[0], streams[0])))
    await until(lambda: all(bytes(copy.cells) == shown.map_cells for copy in copies))
    assert copies[0].names.count("map") == 2  # it was skipped, once
    assert copies[1].names.count("map") <= 2
    assert len(copies[0].tide["at"]) == len(copies[1].tide["at"])
    watched.close()
    await asyncio.wait_for(asyncio.gather(*readers), 10)
    assert watched.count == 0


async def test_what_waits_for_a_viewer_is_bounded(shown):
    watched = Viewers(shown, "m")
    stream = watched.follow(60)
    await anext(stream)
    [viewer] = watched._open
    for tick in range(1000):
        shown.map_cells = bytes([tick % 50, *shown.map_cells[1:]])
        watched.publish(float(tick), float(tick))
        assert len(viewer.events) <= QUEUE
    await stream.aclose()


async def test_viewers_are_counted(shown):
    watched = Viewers(shown, "m")
    streams = [watched.follow(60) for _ in range(MOST_VIEWERS)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(RequestError) as refused:
        await anext(watched.follow(60))
    assert (refused.value.status, refused.value.code) == (429, "too_many_viewers")
    await streams[0].aclose()
    one_more = watched.follow(60)
    await anext(one_more)
    for stream in (*streams, one_more):
        await stream.aclose()


async def test_one_too_many_is_refused_over_http(serve, shown, monkeypatch):
    monkeypatch.setattr(viewers, "MOST_VIEWERS", 0)
    server = await serve()
    async with server.session.get("/v1/expert-map/events") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (429, "too_many_viewers")
        assert "Retry-After" in response.headers


async def test_while_nothing_is_loaded(server, engine):
    engine.map_cells = None
    for query in ("", "?follow=0"):
        async with server.session.get("/v1/expert-map/events" + query) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "engine_unavailable")


async def test_the_end_of_the_server_ends_the_streams(server, shown):
    async with server.session.get("/v1/expert-map/events") as response:
        await response.content.readuntil(b"\n\n")
        began_s = asyncio.get_running_loop().time()
        closing = asyncio.create_task(server.door.close())
        await asyncio.wait_for(response.content.read(), 4)
        await closing
        # Shorter than what replies are given to end: none had to be cut.
        assert asyncio.get_running_loop().time() - began_s < server.context.limits.close_s


async def test_a_fault_of_the_publisher_ends_the_streams(server, shown, caplog):
    async with server.session.get("/v1/expert-map/events") as response:
        await response.content.readuntil(b"\n\n")
        shown.counters = {"weight": None}
        await asyncio.wait_for(response.content.read(), 10)
    assert "could not be published" in caplog.text


@pytest.mark.parametrize("ticks", [1, 2 * QUEUE], ids=["some events", "more than wait"])
@pytest.mark.parametrize("before", [0, 1, 2 * QUEUE], ids="{} before".format)
async def test_who_is_slow_when_the_streams_end_finds_the_end(shown, before, ticks):
    """The publisher goes on until it is cancelled, and may tell of more while a viewer still takes what was before."""
    watched, copy, first = Viewers(shown, "m"), Copy(), shown.map_cells
    stream = watched.follow(0.2)
    copy.take(await anext(stream))

    def goes_on(count: int) -> None:
        for _ in range(count):
            shown.map_cells = bytes([(shown.map_cells[0] + 1) % 64, *shown.map_cells[1:]])
            watched.publish(0.0, 0.0)

    goes_on(before)
    at_the_end = shown.map_cells
    watched.close()
    goes_on(ticks)
    await asyncio.wait_for(read(copy, stream), 10)
    # What waited is told; who was skipped would have begun anew.
    assert bytes(copy.cells) == (at_the_end if before < QUEUE else first)
    assert watched.count == 0


async def test_who_reads_nothing_is_given_up(serve, shown, monkeypatch):
    monkeypatch.setattr(viewers, "CELLS_EVERY_S", 0.002)
    server = await serve(FAST_STALL)
    shown.map_shape, dice = (40, 480), np.random.default_rng(5)
    shown.map_cells = bytes(19_200)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(b"GET /v1/expert-map/events HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: server.context.viewers.count == 1)
        for held in server.door.held:
            held._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

        def gone() -> bool:
            shown.map_cells = dice.integers(0, 64, 19_200, dtype=np.uint8).tobytes()
            return server.context.viewers.count == 0

        await until(gone)


async def test_silence_is_broken(serve, shown, monkeypatch):
    server = await serve()
    monkeypatch.setattr(server.context.viewers, "publish", lambda *_: None)
    async with server.session.get("/v1/expert-map/events") as response:
        await asyncio.wait_for(response.content.readuntil(b": keep-alive\n\n"), 10)


def test_a_lanes_speed_is_that_of_the_last_seconds():
    from tided.api.speeds import SPAN_S, LaneSpeeds

    speeds = LaneSpeeds()
    assert speeds.told([LANE], 10.0)[0]["tok_s"] is None
    for tick in range(1, 80):
        lane = LANE | {"answer_tokens": 2 + tick}
        [told] = speeds.told([lane], 10.0 + tick / 10)
    assert told["tok_s"] == pytest.approx(10.0)
    assert told["age_s"] == pytest.approx(12.9)
    for tick in range(int(SPAN_S) + 2):
        [told] = speeds.told([lane], 18.0 + tick)
    assert told["tok_s"] is None  # it stands
    [other] = speeds.told([LANE | {"admitted_s": 20.0, "answer_tokens": 1}], 30.0)
    assert other["tok_s"] is None  # another request of the same lane
