"""A coding agent's session, as Claude Code asks, through Anthropic's own client and the mini model on two ranks.

`sessions/agent.json` holds the requests: a long system text in parts that are marked for caching, behind an attribution
line; a dozen tools and a hosted one; parallel calls whose results come in another order, an error, an interruption;
thinking between the calls, some of it hidden; a system message in the middle. What the agent said is recorded too, so
each turn's prompt is known; what the mini says to it is not.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import anthropic
import pydantic
import pytest

from tests.daemon.helpers import Running, running
from tests.e2e.conftest import get, mini

pytestmark = pytest.mark.xdist_group("agent")

SESSION = json.loads((Path(__file__).parent / "sessions/agent.json").read_text())
CHUNK = 64
OFF = {"type": "disabled"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    profile = mini().replace(
        "context_tokens = 1024\npool_tokens = 2048",
        "context_tokens = 4096\npool_tokens = 8192\nprefix_ram_bytes = 268435456",
    )
    server = 'model_aliases = ["claude-tidelm"]'
    with running(profile, tmp_path_factory.mktemp("agent"), server=server) as started:
        yield started


@pytest.fixture
async def client(pair):
    async with anthropic.AsyncAnthropic(
        api_key="none", base_url=pair.url, max_retries=0, timeout=120, default_headers=SESSION["headers"]
    ) as made:
        yield made


def system(request: int) -> list[dict[str, Any]]:
    """Its first line is another one in every request."""
    first, *rest = SESSION["system"]
    return [{**first, "text": first["text"].replace("{turn}", f"{request:05x}")}, *rest]


def body(request: int, turns: int, **fields: Any) -> dict[str, Any]:
    """What the agent sends after so many turns. Its own `max_tokens` is larger than any context."""
    messages = [message for turn in SESSION["turns"][:turns] for message in turn]
    own = SESSION["fields"] | {"system": system(request), "tools": SESSION["tools"], "messages": messages}
    return as_arguments(own | fields)


def as_arguments(request: dict[str, Any]) -> dict[str, Any]:
    """The client's own arguments, and beside them what it does not name."""
    others = ("context_management", "thinking", "temperature")
    extra = {name: request[name] for name in others if name in request}
    return {name: value for name, value in request.items() if name not in others} | {"extra_body": extra}


def prompt_tokens(usage: Any) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


async def counted(client: anthropic.AsyncAnthropic, request: int, turns: int) -> int:
    given = body(request, turns)
    asked = {name: given[name] for name in ("model", "system", "tools", "messages", "output_config")}
    reply = await client.beta.messages.count_tokens(**asked, extra_body={"thinking": given["extra_body"]["thinking"]})
    return reply.input_tokens


def whole(message: Any) -> None:
    """A message that the client could send back: blocks in order, none empty, a reason for its end."""
    order = [("thinking", "text", "tool_use").index(block.type) for block in message.content]
    assert order == sorted(order)
    assert order.count(0) <= 1
    for block in message.content:
        assert getattr(block, block.type, True), "an empty block"
        if block.type == "thinking":
            assert block.signature
        if block.type == "tool_use":
            assert isinstance(block.input, dict)
    assert message.stop_reason in ("end_turn", "max_tokens", "tool_use")
    assert message.model == SESSION["fields"]["model"]


async def test_the_session(client, pair):
    await probes(pair.url)
    first_tokens = await counted(client, 0, 1)
    # The first turn, with a title asked for beside it; its answer is interrupted.
    title = asyncio.create_task(client.messages.create(**as_arguments(SESSION["title"])))
    async with client.beta.messages.stream(**body(1, 1)) as stream:
        async for event in stream:
            if event.type == "message_start":
                assert prompt_tokens(event.message.usage) == first_tokens
                assert event.message.usage.input_tokens > 0
            if event.type == "content_block_delta":
                break
    named = json.loads((await title).content[0].text)
    assert set(named) == {"title"}
    # The turns that follow find what came before them in the prompt cache, whatever the attribution line says.
    before = first_tokens
    for turns in range(2, len(SESSION["turns"]) + 1):
        tokens = await counted(client, 100 + turns, turns)
        async with client.beta.messages.stream(**body(turns, turns, max_tokens=24)) as stream:
            reply = await stream.get_final_message()
        whole(reply)
        assert prompt_tokens(reply.usage) == tokens > before
        assert reply.usage.cache_read_input_tokens >= before // CHUNK * CHUNK - CHUNK
        assert 0 < reply.usage.output_tokens <= 24
        before = tokens
    again = await client.beta.messages.create(**body(99, len(SESSION["turns"]), max_tokens=2))
    assert prompt_tokens(again.usage) == before
    assert again.usage.cache_read_input_tokens >= before // CHUNK * CHUNK - CHUNK
    await at_rest(pair.url)


async def probes(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for method, path in (("HEAD", "/"), ("HEAD", "/api/hello"), ("GET", "/api/hello")):
            async with session.request(method, f"{url}{path}", allow_redirects=False) as reply:
                assert reply.status == 200
        async with session.get(f"{url}/v1/models?limit=1000", allow_redirects=False) as reply:
            found = [(card["id"], card["display_name"]) for card in (await reply.json())["data"]]
    assert [one for one in found if "claude" in one[0]] == [("claude-tidelm", "claude-tidelm")]


async def at_rest(url: str) -> None:
    async with asyncio.timeout(20):
        while (await get(url, "/health"))[1]["busy"]:
            await asyncio.sleep(0.05)


async def test_a_conversation_that_grew_too_long_is_shortened(client):
    """The agent looks for these words, and compacts."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.beta.messages.create(**body(1, 1) | {"messages": [{"role": "user", "content": "tide " * 9000}]})
    error = refused.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ")
    assert "> 4096 maximum" in error["message"]
    short = await client.beta.messages.create(**body(2, 1, max_tokens=2))
    assert short.usage.output_tokens > 0


READ: dict[str, Any] = {
    "name": "read_file",
    "description": "Read a text file",
    "input_schema": {
        "type": "object",
        "required": ["path"],
        "properties": {"path": {"type": "string", "description": "Path of the file"}},
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("thinking", [OFF, {"type": "adaptive"}], ids=["plain", "thinking"])
async def test_a_loop_of_real_answers(client, thinking):
    """What the mini says is sent back as it came, block by block, with the results of its calls."""
    asked: dict[str, Any] = {"model": "m", "max_tokens": 300, "tools": [READ], "thinking": thinking}
    asked |= {"extra_body": {"temperature": 0, "fidelity": "exact"}}
    turns: list[Any] = [{"role": "user", "content": "Read notes.txt."}]
    first = await client.messages.create(messages=turns, tool_choice={"type": "any"}, **asked)
    assert [block.type for block in first.content if block.type != "text"][-1] == "tool_use"
    assert first.stop_reason == "tool_use"
    calls = [block for block in first.content if block.type == "tool_use"]
    assert all(set(call.input) == {"path"} and call.name == "read_file" for call in calls)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "buy milk"} for call in calls]
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    async with client.messages.stream(messages=turns, tool_choice={"type": "none"}, **asked) as stream:
        second = await stream.get_final_message()
    assert second.content
    assert not [block for block in second.content if block.type == "tool_use"]
    counted = await client.messages.count_tokens(
        model="m", messages=turns, tools=[READ], tool_choice={"type": "none"}, thinking=thinking
    )
    assert counted.input_tokens == prompt_tokens(second.usage)


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "pick"}]
)
async def test_forced_and_strict_calls_keep_to_the_schema_at_any_temperature(client, choice):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Tokyo", "Paris"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    pick = {"name": "pick", "description": "Pick a city", "strict": True, "input_schema": schema}
    async with client.messages.stream(
        model="m",
        max_tokens=200,
        messages=[{"role": "user", "content": "Where shall I go?"}],
        tools=[pick],
        tool_choice=choice,
        thinking=OFF,
        extra_body={"temperature": 1.5, "seed": 3},
    ) as stream:
        partial = "".join([event.delta.partial_json async for event in stream if event.type == "content_block_delta"])
        reply = await stream.get_final_message()
    assert reply.stop_reason == "tool_use"
    for call in reply.content:
        assert call.input["city"] in ("Tokyo", "Paris")
        assert call.input["days"] in (1, 2, 3)
    assert json.loads(partial) == reply.content[0].input


@pytest.mark.parametrize("thinking", [OFF, {"type": "enabled", "budget_tokens": 1024}], ids=["plain", "thinking"])
async def test_structured_output(client, thinking):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Tokyo", "Paris"]}, "large": {"type": "boolean"}},
        "required": ["name", "large"],
        "additionalProperties": False,
    }
    reply = await client.messages.create(
        model="m",
        max_tokens=1500,
        messages=[{"role": "user", "content": "Name a city."}],
        thinking=thinking,
        output_config={"format": {"type": "json_schema", "schema": schema}},
        extra_body={"temperature": 0, "fidelity": "exact"},
    )
    assert reply.stop_reason == "end_turn"
    value = json.loads(reply.content[-1].text)
    assert value["name"] in ("Tokyo", "Paris")
    assert isinstance(value["large"], bool)


class City(pydantic.BaseModel):
    name: Literal["Tokyo", "Paris"]
    large: bool


async def test_a_class_of_the_program_is_what_comes_back(client):
    reply = await client.messages.parse(
        model="m",
        max_tokens=200,
        messages=[{"role": "user", "content": "Name a city."}],
        thinking=OFF,
        output_format=City,
        extra_body={"temperature": 0, "fidelity": "exact"},
    )
    assert isinstance(reply.parsed_output, City)
