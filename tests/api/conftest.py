"""A server on a real socket in front of a scripted engine."""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "chat"))

from scripted_engine import ScriptedEngine, Server, output_ids, settings_with
from small_tokenizer import build

from packers.overlay import Overlay
from tided.api.app import build_app
from tided.api.context import CONTEXT
from tided.api.door import Door
from tided.api.ports import Limits
from tided.chat.families import DEEPSEEK_V41, Family
from tided.chat.tokenizer import Tokenizer
from tided.images.geometry import Geometry

FAST = Limits(keepalive_s=0.2, stall_s=1.0, body_s=0.5)


def pytest_asyncio_loop_factories(config, item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The daemon runs on uvloop; what looks below HTTP is held to both loops' transports."""
    other = {"asyncio": asyncio.new_event_loop} if item.path.name == "test_door.py" else {}
    return {"uvloop": uvloop.new_event_loop} | other


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.open(build(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def ids(tokenizer) -> Callable[[str], list[int]]:
    return output_ids(tokenizer)


@pytest.fixture
def engine(ids) -> ScriptedEngine:
    return ScriptedEngine(ids)


@pytest.fixture
def family() -> Family:
    return DEEPSEEK_V41


@pytest.fixture
async def serve(engine, tokenizer, family):
    """serve(keys=…, limits=…, **server settings) -> Server; everything is closed at the end."""
    async with AsyncExitStack() as stack:

        async def start(
            limits: Limits = FAST,
            serves: Any = engine,
            geometry: Geometry | None = None,
            overlay: Overlay | None = None,
            profile: str = "",
            **server: Any,
        ) -> Server:
            made, more = settings_with(**server), {"limits": limits, "geometry": geometry, "overlay": overlay}
            more["profile"] = profile
            app = build_app(serves, tokenizer, family, made, identity="weights", **more)
            listener = socket.create_server(("127.0.0.1", 0))
            door = await Door.open(app, listener)
            stack.push_async_callback(door.close)
            port = listener.getsockname()[1]
            session = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
            return Server(session, port, engine, app[CONTEXT], app, door)

        yield start


@pytest.fixture
async def server(serve: Callable[..., Awaitable[Server]]) -> Server:
    return await serve()
