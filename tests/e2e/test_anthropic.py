"""Anthropic's own client and the mini model on two ranks: plain, streamed, thinking, tools."""

import asyncio
from collections.abc import Iterator

import aiohttp
import anthropic
import pytest

from tests.daemon.helpers import Running, running
from tests.e2e.conftest import get, mini

pytestmark = pytest.mark.xdist_group("anthropic")
READ = {
    "name": "read_file",
    "description": "Read a text file",
    "input_schema": {
        "type": "object",
        "required": ["path"],
        "properties": {"path": {"type": "string", "description": "Path of the file"}},
    },
}
OFF = {"type": "disabled"}


@pytest.fixture(scope="module")
def long_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The context that the mini was made for: an agent's system text and tools fit."""
    profile = mini().replace("context_tokens = 1024\npool_tokens = 2048", "context_tokens = 4096\npool_tokens = 8192")
    with running(profile, tmp_path_factory.mktemp("anthropic")) as started:
        yield started


@pytest.fixture
async def client(long_pair):
    async with anthropic.AsyncAnthropic(api_key="none", base_url=long_pair.url, max_retries=0, timeout=120) as made:
        yield made


def ask(text: str, **fields):
    plain = {"model": "claude-mini", "max_tokens": 64, "extra_body": {"temperature": 0}, "thinking": OFF}
    return {"messages": [{"role": "user", "content": text}]} | plain | fields


async def test_plain_and_streamed_are_the_same(client):
    whole = await client.messages.create(**ask("Tell me about Japan."))
    assert "Japan" in whole.content[0].text
    assert (whole.stop_reason, whole.model) == ("end_turn", "claude-mini")
    async with client.messages.stream(**ask("Tell me about Japan.")) as stream:
        streamed = await stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 5
    counted = await client.messages.count_tokens(
        model="x", messages=ask("Tell me about Japan.")["messages"], thinking=OFF
    )
    used = whole.usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


async def test_thinking(client):
    async with client.messages.stream(
        **ask("What is 25 + 13?", thinking={"type": "adaptive"}, max_tokens=200)
    ) as stream:
        reply = await stream.get_final_message()
    assert [block.type for block in reply.content] == ["thinking", "text"]
    assert "38" in reply.content[1].text
    assert reply.content[0].signature


async def test_a_tool_round_trip(client):
    first = await client.messages.create(**ask("Read notes.txt.", tools=[READ]))
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "read_file", {"path": "notes.txt"})
    turns = [
        {"role": "user", "content": "Read notes.txt."},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "buy milk"}]},
    ]
    second = await client.messages.create(**ask("", tools=[READ]) | {"messages": turns})
    assert second.stop_reason in ("end_turn", "max_tokens", "tool_use")
    assert second.content


async def test_errors_and_cancels(client, long_pair):
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: [0-9]+ tokens > 4096 maximum"):
        await client.messages.create(**ask("word " * 9000))
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.role"):
        await client.messages.create(**ask("") | {"messages": [{"role": "robot", "content": "x"}]})
    async with client.messages.stream(
        **ask("Tell me a long story.", max_tokens=3000, extra_body={"temperature": 1})
    ) as stream:
        async for event in stream:
            if event.type == "text":
                break
    async with asyncio.timeout(20):
        while (await get(long_pair.url, "/health"))[1]["busy"]:
            await asyncio.sleep(0.02)


async def test_the_map_and_the_metrics_of_a_pair_that_works(client, long_pair):
    asked = asyncio.create_task(client.messages.create(**ask("Tell me about Japan.")))
    looked = 0
    while not asked.done() or looked < 3:
        status, shown = await get(long_pair.url, "/v1/expert-map")
        assert status == 200
        assert sum(shown["counts"].values()) == shown["total_experts"]
        assert shown["counts"]["resident"] == sum(shown["resident_per_layer"]) == 312
        looked += 1
        await asyncio.sleep(0.1)
    await asked
    async with aiohttp.ClientSession() as session, session.get(f"{long_pair.url}/metrics") as reply:
        text = await reply.text()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["tidelm_generation_tokens_total"]) > 0
    assert float(values["tidelm_rank_waits_total"]) > 0
    assert float(values['tidelm_rank_wait_seconds_total{rank="1"}']) > 0
    assert {float(values[f'tidelm_memory_available_bytes{{rank="{rank}"}}']) > 1e6 for rank in (0, 1)} == {True}
    _, shown = await get(long_pair.url, "/v1/expert-map?slots=1")
    held = sorted(slot for layer in shown["slots"] for slot in layer if slot >= 0)
    assert len(held) == len(set(held)) == shown["counts"]["resident"] + shown["counts"]["transient"]
    assert held[-1] < shown["arena_slots"]
    assert float(values["tidelm_kv_tokens_capacity"]) == 8192
    assert float(values["tidelm_expert_resident"]) == 312
