"""POST /v1/messages with Anthropic's own client, and its bytes."""

import asyncio
import json
import re
from pathlib import Path

import anthropic
import pytest
from scripted_engine import said, until

from tided.api.ports import Limits
from tided.chat.anthropic import parse_request
from tided.chat.deepseek_v41 import encode_prompt
from tided.chat.families import DEEPSEEK_V41
from tided.chat.fields import Fields

GOLDEN = Path(__file__).parents[1] / "golden" / "encodings" / "sse_streams.json"
TOOLS = [
    {"name": "f", "description": "F", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
]
TOOLS += [{"name": "g", "input_schema": {"type": "object"}}]
INVOKE_F = (
    '<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n</｜DSML｜ invoke>'
)
INVOKE_G = '<｜DSML｜ invoke name="g">\n</｜DSML｜ invoke>'
CALLS = f"\n\n<｜DSML｜ calls>\n{INVOKE_F}\n{INVOKE_G}\n</｜DSML｜ calls>"
CUT = CALLS[: CALLS.index('name="g"') + 9]  # inside the second call
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client(server):
    async with anthropic.AsyncAnthropic(
        api_key="none", base_url=f"http://127.0.0.1:{server.port}", max_retries=0
    ) as made:
        yield made


def ask(**fields):
    return {"model": "claude-x", "max_tokens": 100, "messages": USER, **fields}


async def test_a_plain_answer(client, engine):
    engine.script("thought</think>answer")
    reply = await client.messages.create(**ask())
    thinking, text = reply.content
    assert (thinking.type, thinking.thinking, bool(thinking.signature)) == ("thinking", "thought", True)
    assert (text.type, text.text) == ("text", "answer")
    assert (reply.model, reply.role, reply.stop_reason, reply.stop_sequence) == (
        "claude-x",
        "assistant",
        "end_turn",
        None,
    )
    assert re.fullmatch(r"msg_[0-9A-Za-z]{24}", reply.id)
    assert reply._request_id
    usage = reply.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(engine.request.prompt_ids), 0)
    assert (usage.output_tokens, usage.service_tier) == (engine.answers[0].drawn + 1, "standard")
    assert usage.cache_creation_input_tokens == 0
    assert "x_engine_stats" not in reply.model_dump()


@pytest.mark.parametrize("cut", [None, 1, 2, 3, 7])
async def test_a_stream_of_every_block(client, engine, cut):
    text = f"plan</think>Hi 🌊涨潮é{CALLS}"

    def play(answer):
        answer.start()
        tokens = answer.ids(text)
        for at in range(0, len(tokens), cut or len(tokens)):
            answer.draw(tokens[at : at + (cut or len(tokens))])
        answer.finish()

    engine.play = play
    async with client.messages.stream(**ask(tools=TOOLS)) as stream:
        seen = [event.type async for event in stream]
        reply = await stream.get_final_message()
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (reply.content[0].thinking, reply.content[1].text) == ("plan", "Hi 🌊涨潮é")
    assert [(call.name, call.input) for call in reply.content[2:]] == [("f", {"a": 1}), ("g", {})]
    assert all(re.fullmatch(r"toolu_[A-Za-z0-9_-]{24}", call.id) for call in reply.content[2:])
    assert reply.stop_reason == "tool_use"
    assert reply.usage.output_tokens == engine.answers[0].drawn + 1
    assert seen[0] == "message_start"
    assert seen[-1] == "message_stop"


async def test_the_bytes_of_a_stream(serve, engine, ids):
    """The golden stream, but for ids, signatures and counts."""
    [case] = [one for one in json.loads(GOLDEN.read_text())["cases"] if one["id"] == "sse-anthropic-messages"]

    def play(answer):
        answer.events.put_nowait(type(answer.start().events.get_nowait())(answer.request.request_id, 4))
        for piece in ("plan", "</think>", "Hi"):
            answer.say(piece)

    engine.play = play
    server = await serve(Limits(keepalive_s=0.3))
    body = {**ask(tools=TOOLS), "stream": True, "model": "m"}
    got = b""
    async with server.post(body, path="/v1/messages") as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["request-id"] == response.headers["x-request-id"]
        async for data in response.content.iter_any():
            got += data
            if got.count(b"event: ping") == 2 and not engine.answers[0].over:
                engine.answers[0].say(CALLS[:-20]).say(CALLS[-20:]).finish()
    prompt = len(engine.request.prompt_ids)
    tokens = engine.answers[0].drawn + 1
    found = re.findall(r"(.*?\n\n)", got.decode(), re.DOTALL)
    assert "".join(found) == got.decode()
    assert json.loads(found[1].split("data: ")[1])["message"]["usage"]["input_tokens"] == prompt - 4
    text = got.decode().replace(f'"input_tokens": {prompt - 4},', '"input_tokens": 1,')
    text = text.replace(f'"output_tokens": {tokens},', '"output_tokens": 9,')
    text = re.sub(r"msg_\w+", "msg_x", text)
    text = re.sub(r'"signature": "[0-9a-f]{64}"', '"signature": "sig"', text)
    for name in ("a", "b"):
        text = re.sub(r"toolu_[\w-]{24}", f"toolu_{name}", text, count=1)
    wanted = "".join(case["chunks"])
    # Where a call's arguments are cut depends on the tokens; their sum does not.
    joined = re.compile(r'"partial_json": "(.*?)"\}\}\n\nevent: content_block_delta\ndata: [^\n]*?"partial_json": "')
    for _ in range(8):
        text, wanted = joined.sub(r'"partial_json": "\1', text), joined.sub(r'"partial_json": "\1', wanted)
    # The silence fell behind the open text block here, and behind the closed one there.
    ping, stop = (
        'event: ping\ndata: {"type": "ping"}\n\n',
        'event: content_block_stop\ndata: {"type": "content_block_stop", "index": 1}\n\n',
    )
    assert text == wanted.replace(stop + ping, ping + stop)


async def test_message_start_comes_before_the_prompt_is_computed(server, engine):
    """Silence is filled with comments before it, and with pings from then on."""
    async with server.post({**ask(), "stream": True}, path="/v1/messages") as response:
        got = b""

        async def read(mark: bytes) -> None:
            nonlocal got
            async with asyncio.timeout(5):
                while mark not in got:
                    got += await response.content.readany()

        await read(b": keep-alive")
        assert got.startswith(b": ok\n\n")
        assert b"event" not in got
        engine.answers[0].start()
        await read(b"event: ping")
        assert got.index(b"event: message_start") < got.index(b"event: ping")
        got = b""
        await read(b"event: ping")
        assert got.replace(b'event: ping\ndata: {"type": "ping"}\n\n', b"") == b""
        engine.answers[0].say("</think>x").finish()
        await read(b"message_stop")


@pytest.mark.parametrize(
    ("pieces", "reason", "fields", "stop", "types"),
    [
        (("</think>", "a"), "length", {}, ("max_tokens", None), ["text"]),
        (
            ("</think>a DEF", "G", "HI", "J b"),
            "stop",
            {"stop_sequences": ["DEFGHIJ"]},
            ("stop_sequence", "DEFGHIJ"),
            ["text"],
        ),
        (("</think>", CALLS), "stop", {"tools": TOOLS}, ("tool_use", None), ["tool_use", "tool_use"]),
        (("</think>", CUT), "length", {"tools": TOOLS}, ("max_tokens", None), ["tool_use"]),
        (("</think>",), "stop", {}, ("end_turn", None), []),
        (("only thought",), "length", {}, ("max_tokens", None), ["thinking"]),
    ],
    ids=["length", "stop string", "calls", "cut call", "nothing", "cut thought"],
)
async def test_why_an_answer_ended(client, engine, pieces, reason, fields, stop, types):
    engine.script(*pieces, reason=reason)
    whole = await client.messages.create(**ask(**fields))
    assert (whole.stop_reason, whole.stop_sequence) == stop
    assert [block.type for block in whole.content] == types
    assert all(block.text for block in whole.content if block.type == "text")
    async with client.messages.stream(**ask(**fields)) as stream:
        streamed = await stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == stop
    # Of a call that was cut its beginning was sent already.
    assert [block.type for block in streamed.content][: len(types)] == types


def conversation_of(body):
    return parse_request(Fields(body), True, family=DEEPSEEK_V41)[0]


async def test_a_tool_round_trip_and_the_replay_of_what_was_said(client, engine, tokenizer):
    engine.script(f"plan</think>Hi{CALLS}")
    first = await client.messages.create(**ask(tools=TOOLS))
    engine.script("</think>done")
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"r-{block.name}"} for block in first.content[:1:-1]
    ]
    turns = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = await client.messages.create(**ask(tools=TOOLS, messages=turns))
    assert second.content[-1].text == "done"
    prompt = encode_prompt(conversation_of(ask(tools=TOOLS, messages=as_json(turns)))).text
    assert f"<think>plan</think>Hi\n\n<｜DSML｜ calls>\n{INVOKE_F}" in prompt
    # Results stand in the order of their calls.
    assert prompt.index("<tool_result>r-f</tool_result>") < prompt.index("<tool_result>r-g</tool_result>")
    assert engine.request.prompt_ids == tokenizer.encode(
        encode_prompt(conversation_of(ask(tools=TOOLS, messages=as_json(turns)))).segments
    )


def as_json(turns):
    """Blocks of a reply as the client sends them back."""
    return json.loads(json.dumps(turns, default=lambda block: block.model_dump(exclude_none=True)))


RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
TOOL_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [TOOL_USE]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [TOOL_USE]}]}]},
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "search_result", "content": [RESULT]}]}]},
            "messages[0].content[0].content[0].type",
        ),
        ({"system": [{"type": "thinking", "thinking": "x"}]}, "system[0].type"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "text", "text": 1}]}, "system[0].text"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_k": 10**30}, "top_k"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"effort": "ultra"}}, "output_config.effort"),
        ({"output_config": {"effort": ["low"]}}, "output_config.effort"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "h"}}, "tool_choice.name"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w"}], "tool_choice": {"type": "tool", "name": "w"}},
            "tool_choice.name",
        ),
        ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers"),
    ],
    ids=str,
)
async def test_refusals_name_the_field(server, engine, fields, param):
    async with server.post(ask(**fields), path="/v1/messages") as response:
        body = await response.json()
        assert response.status == 400, body
        assert response.headers["x-should-retry"] == "false"
        assert body["request_id"] == response.headers["request-id"]
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["message"].startswith(f"{param}: ")
    assert not engine.answers


IMAGES = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}},
]


@pytest.mark.parametrize("image", IMAGES, ids=["data", "url"])
async def test_images_are_refused_by_their_place(server, image):
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}, image]}
    for block, place in [(image, "messages[0].content[1]"), (result, "messages[0].content[1].content[1]")]:
        messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, block]}]
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            async with server.post(ask(messages=messages), path=path) as response:
                error = (await response.json())["error"]
            assert (response.status, error["type"]) == (400, "invalid_request_error")
            assert error["message"] == f"{place}: images are not supported by this server"


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/nothing", 404, "not_found_error"),
        ("GET", "/v1/v1/messages/batches", 404, "not_found_error"),
        ("DELETE", "/v1/messages/count_tokens/", 405, "invalid_request_error"),
    ],
)
async def test_paths_and_methods(server, method, path, status, kind):
    async with server.session.request(method, path) as response:
        body = await response.json()
        assert (response.status, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["request_id"] == response.headers["request-id"]
        assert ("Allow" in response.headers) == (status == 405)


async def test_a_key_is_asked_for_in_anthropics_shape(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    server = await serve(api_keys_file=str(keys))
    url = f"http://127.0.0.1:{server.port}"
    async with anthropic.AsyncAnthropic(api_key="wrong", base_url=url, max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as refusal:
            await client.messages.create(**ask())
        assert refusal.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError):
            await client.models.list()
    server.engine.script("</think>x")
    async with anthropic.AsyncAnthropic(
        api_key="wrong", default_headers={"Authorization": "Bearer right"}, base_url=url, max_retries=0
    ) as client:
        assert (await client.messages.create(**ask())).content[0].text == "x"


async def test_models_as_anthropics_client_lists_them(serve):
    server = await serve(model_aliases=("claude-tidelm", "deepseek"))
    url = f"http://127.0.0.1:{server.port}"
    async with anthropic.AsyncAnthropic(api_key="none", base_url=url, max_retries=0) as client:
        listed = [model async for model in await client.models.list(limit=1000)]
        assert [model.id for model in listed] == ["deepseek", "claude-tidelm"]
        assert listed[1].display_name == "claude-tidelm"
        assert (await client.models.retrieve("claude-tidelm")).created_at == listed[1].created_at
        with pytest.raises(anthropic.NotFoundError) as refusal:
            await client.models.retrieve("nothing")
    assert refusal.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("state", "status", "kind"), [("starting", 503, "overloaded_error"), ("draining", 503, "overloaded_error")]
)
async def test_when_nothing_is_served(server, engine, state, status, kind):
    engine.state = state
    async with server.post(ask(), path="/v1/messages") as response:
        assert (response.status, (await response.json())["error"]["type"]) == (status, kind)
        assert 1 <= int(response.headers["Retry-After"]) <= 60
        assert response.headers["x-should-retry"] == "true"


async def test_a_full_queue_and_a_large_body(serve, engine):
    server = await serve(max_body_bytes=2000)
    plain = engine.health
    engine.health = lambda: plain() | {"lanes": {"total": 2, "busy": 2}, "queue": 64}
    async with server.post(ask(), path="/v1/messages") as response:
        assert (response.status, (await response.json())["error"]["type"]) == (429, "rate_limit_error")
        assert response.headers["Retry-After"]
    async with server.post(ask(), path="/v1/messages/count_tokens") as response:  # needs no lane
        assert response.status == 200
    engine.health = plain
    async with server.post(ask(system="x" * 3000), path="/v1/messages") as response:
        assert (response.status, (await response.json())["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails(client, engine, stream):
    engine.play = lambda answer: answer.start().say("</think>a").fail("rank 1 is silent")

    async def read() -> None:
        if not stream:
            await client.messages.create(**ask())
        async with client.messages.stream(**ask()) as events:
            await events.until_done()

    with pytest.raises(anthropic.APIStatusError) as fault:
        await read()
    assert fault.value.body["error"]["type"] == "api_error"
    assert "rank 1 is silent" in fault.value.body["error"]["message"]


async def test_after_an_error_event_the_stream_ends(server, engine):
    engine.play = lambda answer: answer.start().say("</think>a").fail("gone")
    async with server.post({**ask(), "stream": True}, path="/v1/messages") as response:
        text = await response.text()
    assert text.rstrip("\n").splitlines()[-2] == "event: error"
    assert "message_stop" not in text


async def test_a_large_max_tokens_is_lowered_to_the_room(server, engine):
    engine.script("</think>x")
    async with server.post(ask(max_tokens=10**9, system="tide " * 500), path="/v1/messages") as response:
        assert response.status == 200
    assert engine.request.max_tokens == 4096 - len(engine.request.prompt_ids)


async def test_a_prompt_that_is_too_long_in_the_words_that_clients_look_for(server, engine):
    for text, pattern in [("tide " * 9000, r"prompt is too long: (\d+) tokens > 4096 maximum")]:
        async with server.post(ask(system=text), path="/v1/messages") as response:
            error = (await response.json())["error"]
            assert response.status == 400
        found = re.fullmatch(pattern, error["message"])
        assert found
        assert int(found[1]) > 4096
    assert not engine.answers


async def test_a_prompt_that_is_too_long_is_counted_to_its_end(server, engine):
    """Clients shorten by the difference. Words are counted on from behind the context; digits are seen to be too many
    without being tokenised."""
    for text in ("tide " * 9000, "9" * 200_000, " tide" * 4300):
        counts = []
        for path in ("/v1/messages/count_tokens", "/v1/messages"):
            async with server.post(ask(system=text), path=path) as response:
                counts.append(await response.json())
        assert counts[1]["error"]["message"] == f"prompt is too long: {counts[0]['input_tokens']} tokens > 4096 maximum"
    assert not engine.answers


async def test_the_room_ends_one_token_before_the_context(server, engine):
    """A prompt of exactly the context leaves no room for an answer; one token less does."""
    engine.script("</think>x")

    async def status(letters: int) -> tuple[int, str]:
        async with server.post(ask(system="9" * letters), path="/v1/messages") as response:
            return response.status, await response.text()

    assert (await status(100))[0] == 200
    rest = 100 + 4096 - len(engine.request.prompt_ids)  # a digit is a token
    assert (await status(rest - 1))[0] == 200
    assert (len(engine.request.prompt_ids), engine.request.max_tokens) == (4095, 1)
    code, text = await status(rest)
    assert code == 400
    assert "prompt is too long: 4096 tokens > 4095 maximum" in text


async def test_counting_counts_what_messages_counts(client, engine):
    engine.script("</think>x")
    fields = {"system": [{"type": "text", "text": "be short"}], "tools": TOOLS, "messages": USER, "model": "m"}
    counted = await client.messages.count_tokens(**fields)
    reply = await client.messages.create(max_tokens=5, **fields)
    assert counted.input_tokens == reply.usage.input_tokens == len(engine.request.prompt_ids)
    long = await client.messages.count_tokens(**{**fields, "system": "9" * 10_000})
    assert long.input_tokens > 10_000  # beyond the context: clients ask in order to know
    assert len(engine.answers) == 1


def billed(number: str) -> list[dict]:
    line = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
    return [{"type": "text", "text": line}, {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]


async def test_the_attribution_line_is_no_part_of_the_prompt(server, engine):
    engine.script("</think>x")
    prompts = []
    for system in (billed("1"), billed("2"), "S", f"{billed('3')[0]['text']}\nS"):
        async with server.post(ask(system=system), path="/v1/messages?beta=true") as response:
            assert response.status == 200
        prompts.append(engine.request.prompt_ids)
    middle = [*USER, {"role": "system", "content": billed("4")[0]["text"]}]
    async with server.post(ask(system="S", messages=middle), path="/v1/messages") as response:
        assert response.status == 200
    prompts.append(engine.request.prompt_ids)
    assert all(prompt == prompts[0] for prompt in prompts)


async def test_a_system_message_in_the_middle_keeps_the_prefix(server, engine):
    engine.script("</think>x")
    prompts = []
    for more in ([], [{"role": "system", "content": "Agents: none"}]):
        async with server.post(ask(system="S", messages=[*USER, *more]), path="/v1/messages") as response:
            assert response.status == 200
        prompts.append(engine.request.prompt_ids)
    short, long = prompts
    assert len(long) > len(short)
    assert long[: len(short) - 2] == short[:-2]  # but for the open answer's two tokens


async def test_what_is_accepted_and_changes_nothing(server, engine):
    engine.script("</think>x")
    marked = [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]
    extra = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "container": "c", "mcp_servers": [], "speed": "fast",
        "context_management": {"edits": []}, "thinking": {"type": "enabled", "budget_tokens": 9000}, "unknown": [1],
    }  # fmt: skip
    empty = [
        {
            "role": "user",
            "content": [{"type": "text", "text": ""}, {"type": "new_thing"}, {"type": "text", "text": "hi"}],
        }
    ]
    prompts = []
    for fields in ({}, {"messages": marked}, extra, {"messages": empty}):
        async with server.post(ask(**fields), path="/v1/messages", headers={"anthropic-beta": "x"}) as response:
            assert response.status == 200, await response.text()
        prompts.append(engine.request.prompt_ids)
    assert all(prompt == prompts[0] for prompt in prompts)


async def test_server_tools_are_left_out(server, engine):
    engine.script("</think>x")
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    lengths = []
    for tools in ([], [hosted], TOOLS, [*TOOLS, hosted]):
        async with server.post(ask(tools=tools), path="/v1/messages") as response:
            assert response.status == 200
        lengths.append(len(engine.request.prompt_ids))
    assert lengths[0] == lengths[1] < lengths[2] == lengths[3]
    async with server.post(ask(tools=TOOLS, tool_choice={"type": "none"}), path="/v1/messages") as response:
        assert response.status == 200
    assert len(engine.request.prompt_ids) == lengths[0]


async def test_one_call_at_a_time(client, engine):
    engine.script("</think>", CALLS)
    reply = await client.messages.create(
        **ask(tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    )
    assert [block.name for block in reply.content] == ["f"]
    assert reply.stop_reason == "tool_use"


async def test_an_answer_that_was_begun_is_continued(client, engine):
    engine.script(" and out")
    reply = await client.messages.create(
        **ask(messages=[*USER, {"role": "assistant", "content": "in"}], thinking={"type": "disabled"})
    )
    assert reply.content[0].text == " and out"


async def test_statistics_where_the_profile_says_so(serve, engine):
    engine.script("</think>x")
    server = await serve(anthropic_stats=True)
    async with server.post(ask(), path="/v1/messages") as response:
        assert (await response.json())["x_engine_stats"]["lane"] == 0


async def test_a_client_that_leaves_is_cancelled(client, engine):
    async with client.messages.stream(**ask()) as stream:
        await until(lambda: bool(engine.answers))
        engine.answers[0].start().say("</think>a")
        async for event in stream:
            if event.type == "text":
                break
    await until(lambda: bool(engine.cancels))
    asked = asyncio.create_task(client.messages.create(**ask()))
    await until(lambda: len(engine.answers) == 2)
    asked.cancel()
    await until(lambda: len(engine.cancels) == 2)


@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_the_probes_of_claude_code(serve, tmp_path, method):
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    server = await serve(api_keys_file=str(keys))
    for path in ("/", "/api/hello"):
        async with server.session.request(method, path, allow_redirects=False) as response:
            assert response.status == 200
            assert (await response.read() == b"") == (method == "HEAD")


def tokens_of_bytes(tokenizer) -> dict[int, int]:
    """The token of each byte alone."""
    return {piece[0]: at for at, piece in enumerate(tokenizer.token_bytes) if piece is not None and len(piece) == 1}


async def test_bytes_of_a_character_are_never_parted(client, engine, tokenizer):
    """One byte a token: what a client reads is whole at every event."""
    text = "🌊涨潮é"

    def play(answer):
        answer.start().say("</think>")
        for byte in text.encode():
            answer.draw([single[byte]])
        answer.finish()

    engine.play, single = play, tokens_of_bytes(tokenizer)
    got = ""
    async with client.messages.stream(**ask()) as stream:
        async for event in stream:
            if event.type == "text":
                assert "�" not in event.text
                got += event.text
    assert got == text


async def test_the_openai_routes_keep_their_shape(server):
    error = await server.refused(said("hi", temperature=9))
    assert error["param"] == "temperature"
