"""The official `openai` package against the mini model on two ranks: what a user's program does."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.daemon.helpers import Running
from tests.e2e.conftest import get

pytestmark = pytest.mark.xdist_group("openai")

QUESTION: list[Any] = [{"role": "user", "content": "Tell me about Japan."}]
# Answers that do not depend on which experts are resident when they are asked for.
PLAIN = {"enable_thinking": False, "fidelity": "exact"}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "enum": [1, 2, 3]},
            },
            "required": ["unit", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"enum": ["Tokyo", "Paris"]}, "large": {"type": "boolean"}},
    "required": ["name", "large"],
    "additionalProperties": False,
}


@pytest.fixture
async def client(pair: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def asked(**fields: Any) -> Any:
    body = {"model": "any", "messages": QUESTION, "max_tokens": 24, "temperature": 0, "extra_body": PLAIN}
    return body | fields


async def test_plain_and_streamed_are_the_same_answer(client):
    whole = await client.chat.completions.create(**asked())
    text = ""
    usage = None
    async for chunk in await client.chat.completions.create(
        **asked(stream=True, stream_options={"include_usage": True})
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert "Japan" in text
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_log_probabilities_are_of_the_distribution_and_greedy_takes_the_first(client):
    reply = await client.chat.completions.create(**asked(logprobs=True, top_logprobs=3, max_tokens=8))
    told = reply.choices[0].logprobs.content
    assert "".join(one.token for one in told) == reply.choices[0].message.content
    for one in told:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].token == one.token
        assert one.top_logprobs[0].logprob == one.logprob
        assert sum(math.exp(top.logprob) for top in one.top_logprobs) <= 1 + 1e-6
        assert bytes(one.bytes).decode("utf-8", "replace") == one.token


async def test_streamed_log_probabilities_are_those_of_the_whole(client):
    whole = await client.chat.completions.create(**asked(logprobs=True, max_tokens=8))
    streamed: list[Any] = []
    async for chunk in await client.chat.completions.create(**asked(logprobs=True, max_tokens=8, stream=True)):
        streamed += [one for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content or ()]
    assert [one.token for one in streamed] == [one.token for one in whole.choices[0].logprobs.content]


async def test_n_answers_have_the_seeds_that_follow(client):
    fields = {"temperature": 1.0, "max_tokens": 8}
    several = await client.chat.completions.create(**asked(n=3, seed=5, **fields))
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    for at, choice in enumerate(several.choices):
        alone = await client.chat.completions.create(**asked(seed=5 + at, **fields))
        assert alone.usage.prompt_tokens == several.usage.prompt_tokens
        assert alone.choices[0].message.content == choice.message.content
    assert several.usage.completion_tokens > 8


async def test_a_bias_bans_and_a_bias_forces(client):
    first = (await client.chat.completions.create(**asked(logprobs=True, top_logprobs=2, max_tokens=1))).choices[0]
    ids = await token_ids(client, [top.token for top in first.logprobs.content[0].top_logprobs])
    banned = await client.chat.completions.create(**asked(logit_bias={str(ids[0]): -100}, max_tokens=1))
    assert banned.choices[0].message.content != first.message.content


async def token_ids(client, texts: list[str]) -> list[int]:
    from tests.e2e.conftest import ROOT
    from tided.chat.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(ROOT / "minis/deepseek")
    return [tokenizer.encode_text(text)[0] for text in texts]


async def test_a_frequency_penalty_of_either_sign_changes_what_repeats(client):
    fields = asked(messages=[{"role": "user", "content": "Tell me a long story."}], max_tokens=48, logprobs=True)

    async def share_of_new_tokens(**more: Any) -> float:
        told = (await client.chat.completions.create(**fields, **more)).choices[0].logprobs.content
        return len({one.token for one in told}) / len(told)

    assert await share_of_new_tokens(frequency_penalty=2.0) > await share_of_new_tokens(frequency_penalty=-2.0)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_is_kept_after_the_reasoning(client, thinking, stream):
    kind = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    fields = asked(response_format=kind, temperature=1, seed=3, max_tokens=400)
    fields["extra_body"] = {"enable_thinking": thinking}
    if stream:
        text = ""
        async for chunk in await client.chat.completions.create(**fields, stream=True):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            ended = [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
    else:
        choice = (await client.chat.completions.create(**fields)).choices[0]
        text, ended = choice.message.content, [choice.finish_reason]
    if ended == ["length"]:
        return  # the mini went on thinking to its last token
    value = json.loads(text)
    assert value["name"] in ("Tokyo", "Paris")
    assert isinstance(value["large"], bool)


class Sight(pydantic.BaseModel):
    kind: Literal["tower", "park"]


class City(pydantic.BaseModel):
    name: Literal["Tokyo", "Paris"]
    large: bool
    best: Sight | None


async def test_a_class_of_the_program_is_what_comes_back(client):
    """The client makes the schema of it, with references to definitions."""
    fields = asked(max_tokens=300)
    chat = await client.chat.completions.parse(**fields, response_format=City)
    assert isinstance(chat.choices[0].message.parsed, City)
    text = await client.responses.parse(
        model="any", input="Name a city.", text_format=City, max_output_tokens=300, temperature=0, extra_body=PLAIN
    )
    assert isinstance(text.output_parsed, City)
    tool = openai.pydantic_function_tool(City)
    called = await client.chat.completions.parse(
        **fields, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    assert all(isinstance(call.function.parsed_arguments, City) for call in called.choices[0].message.tool_calls)


async def test_any_json_object(client):
    reply = await client.chat.completions.create(**asked(response_format={"type": "json_object"}, max_tokens=200))
    choice = reply.choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_forced_call_and_its_round_trip(client, choice):
    fields = asked(tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=200)
    message = (first := (await client.chat.completions.create(**fields)).choices[0]).message
    assert first.finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["unit"] in ("celsius", "fahrenheit")
    assert arguments["days"] in (1, 2, 3)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns = [*QUESTION, message.model_dump(exclude_none=True), result]
    second = await client.chat.completions.create(**asked(messages=turns, tools=[WEATHER], tool_choice="none"))
    assert not second.choices[0].message.tool_calls
    assert second.usage.prompt_tokens > len(turns)


async def test_a_streamed_call_is_put_together_by_the_client(client):
    fields = asked(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    async with client.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"unit", "days"}
    assert final.choices[0].finish_reason == "tool_calls"


READ: Any = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a text file",
        "parameters": {
            "type": "object",
            "required": ["path"],
            "properties": {"path": {"type": "string", "description": "Path of the file"}},
        },
    },
}


async def test_a_loop_that_thinks_calls_and_reads_the_result(client):
    """What the client put together from the stream is sent back as it is, the reasoning too."""
    turns: list[Any] = [{"role": "user", "content": "Read notes.txt."}]
    thinks = {"extra_body": {"enable_thinking": True, "fidelity": "exact"}}
    fields = asked(tools=[READ], tool_choice="required", parallel_tool_calls=False, max_tokens=300) | thinks
    async with client.chat.completions.stream(**fields | {"messages": turns}) as stream:
        async for _ in stream:
            pass
        first = (await stream.get_final_completion()).choices[0]
    assert first.finish_reason == "tool_calls"
    reply = first.message.model_dump(exclude_none=True)
    assert reply["reasoning_content"]
    assert all(set(json.loads(call["function"]["arguments"])) <= {"path"} for call in reply["tool_calls"])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "buy milk"} for call in reply["tool_calls"]]
    kept = ("role", "content", "reasoning_content", "tool_calls")
    sent = {name: value for name, value in reply.items() if name in kept}
    fields |= {"messages": [*turns, sent, *results], "tool_choice": "auto", "max_tokens": 48}
    second = await client.chat.completions.create(**fields)
    message = second.choices[0].message
    assert message.content or message.tool_calls or second.choices[0].finish_reason == "length"
    without = {name: value for name, value in sent.items() if name != "reasoning_content"}
    fields |= {"messages": [*turns, without, *results], "max_tokens": 1}
    shorter = await client.chat.completions.create(**fields)
    assert shorter.usage.prompt_tokens < second.usage.prompt_tokens


async def test_thinking_is_a_field_of_its_own(client):
    fields = asked(max_tokens=16) | {"extra_body": {"enable_thinking": True}}
    message = (await client.chat.completions.create(**fields)).choices[0].message
    assert message.reasoning_content


async def test_errors_have_the_client_s_classes_and_name_the_field(client):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**asked(temperature=3))
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as refused:
        await client.chat.completions.create(**asked(max_tokens=2000))
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")
    assert [card.id async for card in await client.models.list()] == ["mini-deepseek"]


async def test_a_stream_that_is_left_frees_its_lane(client, pair):
    stream = await client.chat.completions.create(
        **asked(stream=True, max_tokens=900, extra_body={**PLAIN, "ignore_eos": True})
    )
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(20):
        while (await get(pair.url, "/health"))[1]["busy"]:
            await asyncio.sleep(0.05)
    assert (await client.chat.completions.create(**asked(max_tokens=2))).choices[0].message.content


async def test_a_whole_answer_that_nobody_waits_for_frees_its_lane(client, pair):
    waiting = asyncio.create_task(
        client.chat.completions.create(**asked(max_tokens=900, extra_body={**PLAIN, "ignore_eos": True}))
    )
    async with asyncio.timeout(20):
        while not (await get(pair.url, "/health"))[1]["busy"]:
            await asyncio.sleep(0.02)
    waiting.cancel()
    async with asyncio.timeout(20):
        while (await get(pair.url, "/health"))[1]["busy"]:
            await asyncio.sleep(0.02)


async def test_completions_go_on_with_a_text_and_with_several(client):
    fields: Any = {"model": "any", "max_tokens": 8, "temperature": 0, "logprobs": 2, "extra_body": PLAIN}
    one = await client.completions.create(prompt="Japan is", **fields)
    two = await client.completions.create(prompt=["Japan is", "The sea"], **fields)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text == one.choices[0].text
    told = one.choices[0].logprobs
    assert "".join(told.tokens) == one.choices[0].text
    assert [max(top.values()) for top in told.top_logprobs] == told.token_logprobs
    text = ""
    async for chunk in await client.completions.create(prompt="Japan is", stream=True, **fields):
        text += "".join(choice.text for choice in chunk.choices)
    assert text == one.choices[0].text


async def test_a_prompt_is_scored_as_its_tokens_were_drawn(client):
    """What was said of the tokens of an answer is said of them again when they are the prompt."""
    fields: Any = {"model": "any", "logprobs": 1, "extra_body": PLAIN}
    prompt = "Japan is"
    drawn = (await client.completions.create(prompt=prompt, max_tokens=8, temperature=0, **fields)).choices[0]
    scored = await client.completions.create(prompt=prompt + drawn.text, echo=True, max_tokens=0, **fields)
    told = scored.choices[0].logprobs
    assert scored.choices[0].text == prompt + drawn.text
    assert scored.usage.completion_tokens == 0
    assert told.token_logprobs[0] is None
    assert told.tokens[-8:] == drawn.logprobs.tokens
    assert told.token_logprobs[-8:] == pytest.approx(drawn.logprobs.token_logprobs, abs=2e-2)


async def test_responses_stream_and_whole_and_a_function_s_round_trip(client):
    fields: Any = {"model": "any", "temperature": 0, "max_output_tokens": 200, "store": False, "extra_body": PLAIN}
    whole = await client.responses.create(input="Tell me about Japan.", **fields)
    assert whole.status == "completed"
    assert "Japan" in whole.output_text
    async with client.responses.stream(input="Tell me about Japan.", **fields) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    flat: Any = {"type": "function", **WEATHER["function"]}
    turn: list[Any] = [{"role": "user", "content": "Tell me about Japan."}]
    called = await client.responses.create(
        input=turn, tools=[flat], tool_choice="required", parallel_tool_calls=False, **fields
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert json.loads(call.arguments)["days"] in (1, 2, 3)
    turn += [
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
    ]
    answered = await client.responses.create(input=turn, tools=[flat], tool_choice="none", **fields)
    assert answered.usage.input_tokens > whole.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(input="x", previous_response_id="resp_1", **fields)
    assert refused.value.param == "previous_response_id"
