"""What a Messages request may demand of its answer: calls, strict arguments, a format; each held by a grammar."""

import anthropic
import pytest

from tided.chat.deepseek_v41_tools import DSML

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
OFF = {"type": "disabled"}


def tool(name: str, **fields) -> dict:
    return {"name": name, "description": "d", "input_schema": SCHEMA, **fields}


def invoke(name: str, value: str = "1") -> str:
    parameter = f'<{DSML} parameter name="n" string="false">{value}</{DSML} parameter>\n'
    return f'<{DSML} invoke name="{name}">\n{parameter}</{DSML} invoke>\n'


def block(*invokes: str) -> str:
    return f"\n\n<{DSML} calls>\n{''.join(invokes)}</{DSML} calls>"


INSIDE = f"{invoke('f')}</{DSML} calls>"
"""A block that the prompt has opened."""


def ask(**fields) -> dict:
    return {"model": "m", "max_tokens": 99, "messages": USER, **fields}


@pytest.fixture
def follows(server, engine):
    """follows(body, text) -> whether the request's guide lets the model write the text and end there."""
    guides = []
    submit = engine.submit
    engine.submit = lambda request, guide=None, pixels=(): (guides.append(guide), submit(request))[1]

    def allows(guide, token_id: int) -> bool:
        mask = guide.mask()
        return mask is None or bool(mask[token_id // 8] >> token_id % 8 & 1)

    async def follow(body, text) -> bool:
        engine.script("x")
        status, reply = await server.ask(body, path="/v1/messages")
        assert status == 200, reply
        guide = guides[-1]
        assert engine.request.guided is (guide is not None)
        for token_id in engine.ids(text) if guide else ():
            if not allows(guide, token_id):
                return False
            guide.advance(token_id)
        return guide is None or allows(guide, engine.request.stop_ids[0])

    return follow


@pytest.mark.parametrize(
    ("choice", "other"), [({"type": "any"}, True), ({"type": "tool", "name": "f"}, False)], ids=["any", "tool"]
)
async def test_a_forced_call(follows, engine, choice, other):
    body = ask(tools=[tool("f"), tool("g")], tool_choice=choice)
    plain = body | {"thinking": OFF}
    assert await follows(plain, INSIDE)
    assert not await follows(plain, "Sure.")
    assert await follows(plain, INSIDE.replace('"f"', '"g"')) is other
    assert not await follows(plain, INSIDE.replace(">1<", ">one<"))
    assert await follows(body, "I shall. " + "</think>" + block(invoke("f")))
    assert not await follows(body, "</think>" + "Sure.")


async def test_a_forced_call_whose_block_the_prompt_has_opened_arrives_whole(server, engine, tokenizer):
    engine.script(INSIDE)
    body = ask(tools=[tool("f")], tool_choice={"type": "any"}, thinking=OFF)
    async with anthropic.AsyncAnthropic(api_key="k", base_url=f"http://127.0.0.1:{server.port}") as client:
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            streamed = await stream.get_final_message()
    for reply in (whole, streamed):
        [call] = reply.content
        assert (call.type, call.name, call.input, reply.stop_reason) == ("tool_use", "f", {"n": 1}, "tool_use")
    marks = {token_id: spelling for spelling, token_id in tokenizer.special_ids.items()}
    assert tokenizer.decoder(marks).feed(engine.request.prompt_ids).endswith(f"</think>\n\n<{DSML} calls>\n")


async def test_one_call_where_calls_are_not_parallel(follows):
    twice = invoke("f") + invoke("f") + f"</{DSML} calls>"
    body = ask(tools=[tool("f")], thinking=OFF)
    assert await follows(body | {"tool_choice": {"type": "any"}}, twice)
    single = {"type": "any", "disable_parallel_tool_use": True}
    assert not await follows(body | {"tool_choice": single}, twice)
    assert await follows(body | {"tool_choice": single}, INSIDE)


async def test_a_tool_that_must_be_called_is_shown_alone(server, engine):
    engine.script(INSIDE)
    choice = {"tool_choice": {"type": "tool", "name": "f"}, "thinking": OFF}
    for tools in ([tool("f"), tool("g")], [tool("f")]):
        status, _ = await server.ask(ask(tools=tools, **choice), path="/v1/messages")
        assert status == 200
    both, alone = (answer.request.prompt_ids for answer in engine.answers)
    assert both == alone


async def test_none_leaves_the_tools_out_of_the_prompt(server, engine):
    engine.script("x")
    lengths = []
    for fields in ({}, {"tools": [tool("f")]}, {"tools": [tool("f")], "tool_choice": {"type": "none"}}):
        status, _ = await server.ask(ask(**fields), path="/v1/messages")
        assert status == 200
        assert not engine.request.guided
        lengths.append(len(engine.request.prompt_ids))
    assert lengths[0] == lengths[2] < lengths[1]


async def test_auto_is_free_unless_a_tool_is_strict(follows, engine):
    wrong = "Look." + block(invoke("f", '"one"'))
    loose, strict = ask(tools=[tool("f")], thinking=OFF), ask(tools=[tool("f", strict=True)], thinking=OFF)
    assert await follows(loose, wrong)
    assert not engine.request.guided
    assert not await follows(strict, wrong)
    assert await follows(strict, "Look." + block(invoke("f")))
    assert await follows(strict, "Only words.")


@pytest.mark.parametrize("spelling", ["output_config", "output_format"])
async def test_a_format_binds_the_text_and_is_told_to_the_model(follows, engine, tokenizer, spelling):
    form = {"type": "json_schema", "schema": SCHEMA}
    fields = {"output_config": {"format": form}} if spelling == "output_config" else {"output_format": form}
    assert await follows(ask(**fields), "{ think</think>" + '{"n": 3}')
    assert not await follows(ask(**fields), "</think>" + '{"n": "3"}')
    assert not await follows(ask(**fields), "</think>" + '{"n": 3} and more')
    assert not await follows(ask(**fields, thinking=OFF), "Sure: ")
    assert "## Response Format:" in tokenizer.decoder().feed(engine.request.prompt_ids)
    with_tools = ask(**fields, thinking=OFF, tools=[tool("f")])
    for text in ('{"n": 3}', block(invoke("f"))):
        assert await follows(with_tools, text)


async def test_counting_counts_the_format_and_the_opened_block(server, engine):
    engine.script("x")
    for fields in (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"tools": [tool("f")], "tool_choice": {"type": "any"}, "thinking": OFF},
    ):
        await server.ask(ask(**fields), path="/v1/messages")
        _, counted = await server.ask(ask(**fields), path="/v1/messages/count_tokens")
        assert counted == {"input_tokens": len(engine.request.prompt_ids)}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice.type: any, but there are no tools"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [tool("f")]}, "tool_choice.name"),
        (
            {"tool_choice": {"type": "tool", "name": "bash"}, "tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tool_choice.name",
        ),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/nowhere"}}}},
            "output_config.format.schema: cannot be enforced",
        ),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
                "messages": [*USER, {"role": "assistant", "content": "{"}],
                "thinking": OFF,
            },
            "output_config.format.schema: a text that was begun",
        ),
        ({"tools": [tool("f", strict="yes")]}, "tools[0].strict"),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_its_field(server, engine, fields, words):
    engine.script("x")
    before = len(engine.answers)
    status, reply = await server.ask(ask(**fields), path="/v1/messages")
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert words in reply["error"]["message"]
    assert len(engine.answers) == before


WHOLE = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"output_config": {"format": {}}}, "output_config.format.type"),
        ({"output_format": {"schema": SCHEMA}}, "output_format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_config": {"format": WHOLE}, "output_format": {"schema": SCHEMA}}, "output_format.type"),
    ],
)
async def test_a_format_is_whole_or_refused_also_where_another_one_counts(server, path, fields, param):
    status, reply = await server.ask(ask(**fields), path=path)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert reply["error"]["message"].startswith(f"{param}: ")
