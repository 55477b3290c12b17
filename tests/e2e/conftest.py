"""The bundled mini model on real ranks, as a user starts it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from tests.bundled import DEEPSEEK, MINIS, Mini
from tests.daemon.helpers import Running, running

ROOT = Path(__file__).parents[2]


def mini(
    of: Mini = DEEPSEEK, *, resident: int = 0, lanes: int = 2, queue: int = 64, extra: str = "", tide: str = ""
) -> str:
    """The bundled profile without its ports; a short context keeps starts quick. `resident` 0: two thirds. `tide`: more
    lines of that section."""
    return f"""
[model]
path = "{of.path}"
served_name = "mini-{of}"
prefill_chunk_tokens = 64
[experts]
resident = {resident or of.some}
[tide]
seed = "{of.path}/demand-seed.json"
{tide}
[audit]
remember_tokens = 20000
[cache]
context_tokens = 1024
pool_tokens = 2048
[engine]
lanes = {lanes}
queue = {queue}
guard_every_steps = 8
{extra}
"""


@pytest.fixture(scope="module", params=MINIS, ids=str)
def model(request: pytest.FixtureRequest) -> Mini:
    """Tests that ask for it run on every bundled model."""
    return cast(Mini, request.param)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two ranks at two thirds of the experts, shared by the tests of a module that leave it alive."""
    with running(mini(), tmp_path_factory.mktemp("pair")) as started:
        yield started


def ask(text: str, **fields: Any) -> dict[str, Any]:
    plain = {"temperature": 0, "max_tokens": 48, "enable_thinking": False}
    return {"messages": [{"role": "user", "content": text}]} | plain | fields


async def post(url: str, body: Any) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, (bytes, str)) else json.dumps(body)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session,
        session.post(f"{url}/v1/chat/completions", data=data) as reply,
    ):
        return reply.status, await reply.json()


async def get(url: str, path: str) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}{path}") as reply:
        return reply.status, await reply.json()


def answer(reply: tuple[int, dict[str, Any]]) -> str:
    status, body = reply
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


async def chunks(reply: aiohttp.ClientResponse) -> list[Any]:
    """The data of a stream's events, up to [DONE] or the end of the connection."""
    found: list[Any] = []
    try:
        async for line in reply.content:
            if line.startswith(b"data: "):
                found.append("[DONE]" if line.strip() == b"data: [DONE]" else json.loads(line[6:]))
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, asyncio.IncompleteReadError):
        found.append("broken")
    return found
