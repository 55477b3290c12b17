"""GLM-5.3's format behind both APIs: what the model reads and writes is its own, what clients see is the same."""

import json
from collections.abc import Callable

import anthropic
import pytest
from scripted_engine import ScriptedEngine, data, gather, output_ids, said
from small_tokenizer import build

from tided.chat.families import GLM53, Family
from tided.chat.glm53 import END_OF_TEXT, OBSERVATION, REQUIRED_SPECIALS, STOPS
from tided.chat.tokenizer import Tokenizer

FIND = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "most": {"type": "integer"}, "deep": {"type": "boolean"}},
    "required": ["text", "most"],
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": FIND}} for name in ("find", "list_ports")]
ITS_TOOLS = [{"name": name, "input_schema": FIND} for name in ("find", "list_ports")]
CALL = (
    "<tool_call>find<arg_key>text</arg_key><arg_value>42</arg_value>"
    "<arg_key>most</arg_key><arg_value>3</arg_value><arg_key>deep</arg_key><arg_value>true</arg_value></tool_call>"
)
ARGUMENTS = {"text": "42", "most": 3, "deep": True}


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> Tokenizer:
    return Tokenizer.open(build(tmp_path_factory.mktemp("glm"), specials=REQUIRED_SPECIALS))


@pytest.fixture
def tokenizer(glm) -> Tokenizer:
    return glm


@pytest.fixture
def family() -> Family:
    return GLM53


@pytest.fixture
def engine(glm) -> ScriptedEngine:
    return ScriptedEngine(output_ids(glm))


@pytest.fixture
async def client(server):
    async with anthropic.AsyncAnthropic(api_key="k", base_url=f"http://127.0.0.1:{server.port}", max_retries=0) as made:
        yield made


def prompt_of(engine, glm) -> str:
    """The prompt that the engine got, special tokens by their spellings."""
    marks = {token_id: spelling for spelling, token_id in glm.special_ids.items()}
    return glm.decoder(marks).feed(engine.request.prompt_ids)


def message(**fields):
    return {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}], **fields}


async def test_a_thinking_answer_of_a_chat(server, engine, glm):
    engine.script("plan", "</think>", "\nHi")
    status, reply = await server.ask(said("hi", reasoning_effort="high"))
    assert status == 200
    assert prompt_of(engine, glm) == ("[gMASK]<sop><|system|>Reasoning Effort: High<|user|>hi<|assistant|><think>")
    assert engine.request.stop_ids == tuple(map(glm.special_id, STOPS))
    shown = reply["choices"][0]["message"]
    assert (shown["reasoning_content"], shown["content"]) == ("plan", "Hi")
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(glm.encode_text("plan"))
    assert reply["x_engine_stats"]["notes"] == []


@pytest.mark.parametrize("stop", STOPS)
async def test_with_ignore_eos_an_answer_goes_on_behind_a_token_that_would_end_it(server, engine, stop):
    engine.script("One", stop, " two", stop, ".")
    status, reply = await server.ask(said("hi", ignore_eos=True, enable_thinking=False))
    assert status == 200
    assert engine.request.stop_ids == ()
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "One two."
    engine.script("One", stop, " two")
    _, reply = await server.ask(said("hi", enable_thinking=False))
    assert reply["choices"][0]["message"]["content"] == "One"


@pytest.mark.parametrize("piece", [1, 3, 1000])
async def test_calls_of_a_chat_have_the_types_of_their_schema(server, engine, piece):
    ids = engine.ids("plan</think>Look:" + CALL + "<tool_call>list_ports</tool_call>")

    def play(answer):
        answer.start()
        for at in range(0, len(ids), piece):
            answer.draw(ids[at : at + piece])
        answer.finish()

    engine.play = play
    streamed = gather(data(await server.stream(said("hi", tools=TOOLS))))
    _, reply = await server.ask(said("hi", tools=TOOLS))
    whole = reply["choices"][0]["message"]
    for calls in (streamed["tool_calls"], [call["function"] for call in whole["tool_calls"]]):
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
            ("find", ARGUMENTS), ("list_ports", {}),
        ]  # fmt: skip
    assert streamed["finish_reason"] == reply["choices"][0]["finish_reason"] == "tool_calls"
    assert streamed["content"] == whole["content"] == "Look:"
    assert "<" not in streamed["reasoning_content"] + streamed["content"]


@pytest.mark.parametrize("text", ["mcp__db-x__list-ports", "\nmcp__db-x__list-ports\n"])
async def test_a_call_without_arguments_is_one_call(server, engine, text):
    tools = [{"type": "function", "function": {"name": "mcp__db-x__list-ports", "parameters": {"type": "object"}}}]
    engine.script("</think>", f"<tool_call>{text}</tool_call>")
    streamed = gather(data(await server.stream(said("hi", tools=tools))))
    [call] = streamed["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("mcp__db-x__list-ports", {})
    assert streamed["finish_reason"] == "tool_calls"


async def test_a_message_thinks_calls_and_reads_the_result(client, engine, glm):
    engine.script("plan", "</think>Look:", CALL)
    first = await client.messages.create(**message(tools=ITS_TOOLS))
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert (first.content[2].input, first.stop_reason) == (ARGUMENTS, "tool_use")
    turns = [
        *message()["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": first.content[2].id, "content": "found"}]},
    ]
    engine.script("good</think>", "done")
    second = await client.messages.create(**message(messages=turns, tools=ITS_TOOLS))
    assert second.content[-1].text == "done"
    assert prompt_of(engine, glm).endswith(
        f"<|user|>hi<|assistant|><think>plan</think>Look:{CALL}"
        "<|observation|><tool_response>found</tool_response><|assistant|><think>"
    )
    counted = await client.messages.count_tokens(model="m", messages=turns, tools=ITS_TOOLS)
    assert counted.input_tokens == second.usage.input_tokens == len(engine.request.prompt_ids)


async def test_texts_of_a_message_are_paragraphs_though_the_format_puts_nothing_between_parts(server, engine, glm):
    engine.script("</think>x")

    def texts(*given):
        return [{"type": "text", "text": text} for text in given]

    result = {"type": "tool_result", "tool_use_id": "a", "content": texts("r", "s")}
    turns = [
        {"role": "user", "content": texts("q", "u")},
        {"role": "system", "content": texts("m", "n")},
        {"role": "system", "content": "o"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "list_ports", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    body = message(system=texts("a", "b"), messages=turns, tools=ITS_TOOLS)
    assert (await server.ask(body, path="/v1/messages"))[0] == 200
    _, _, shown = prompt_of(engine, glm).partition("<|system|>a")
    assert shown.startswith("\n\nb<|user|>qu<|system|>m\n\nn\n\no<|assistant|><think></think><tool_call>list_ports")
    assert "<tool_response>r\n\ns</tool_response>" in shown


async def test_a_message_streams_every_block(client, engine):
    engine.script("plan", "</think>", "Look:", CALL)
    async with client.messages.stream(**message(tools=ITS_TOOLS)) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == ARGUMENTS


async def test_without_thinking_nothing_of_it_leaks_and_the_statistics_say_what_was_done(server, engine, glm):
    """The model has no such mode: its prompt holds an empty reasoning, and the parser begins behind it."""
    engine.script("Hi <think> there")
    _, reply = await server.ask(said("hi", enable_thinking=False))
    assert prompt_of(engine, glm).endswith("Reasoning Effort: Low<|user|>hi<|assistant|><think></think>")
    assert reply["choices"][0]["message"]["content"] == "Hi  there"
    assert "reasoning_content" not in reply["choices"][0]["message"]
    [note] = reply["x_engine_stats"]["notes"]
    assert "without thinking" in note


async def test_no_thinking_is_refused_where_the_profile_says_so(serve, engine):
    engine.script("</think>x")
    strict = await serve(allow_no_thinking=False)
    error = await strict.refused(said("hi", reasoning_effort="none"))
    assert error["param"] == "thinking"
    off = message(thinking={"type": "disabled"})
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, reply = await strict.ask(off, path=path)
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert (await strict.ask(said("hi")))[0] == 200


async def test_an_image_is_refused_in_the_question_and_a_reminder_in_the_history(server, engine, glm):
    """The model sees none; one that was sent once must not end the conversation for good."""
    engine.script("</think>x")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "look"}, image]}
    error = await server.refused({"messages": [asked]})
    assert error["code"] == "image_input_not_supported"
    assert error["param"].startswith("messages[0].content[1]")
    later = [asked, {"role": "assistant", "content": "I cannot"}, {"role": "user", "content": "then not"}]
    assert (await server.ask({"messages": later}))[0] == 200
    assert "look<reminder>You are unable to process this image" in prompt_of(engine, glm)


async def test_a_role_token_ends_the_answer_and_is_not_shown(server, engine):
    """Also where an engine goes on behind it."""
    engine.script("answer<|user|>", "and a question of its own")
    for body in (said("hi", enable_thinking=False), said("hi", enable_thinking=False, tools=TOOLS)):
        _, reply = await server.ask(body)
        assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]) == ("answer", "stop")


async def test_a_completion_begins_as_the_model_s_prompts_do(server, engine, glm):
    engine.script("x")
    await server.ask({"prompt": "hi"}, path="/v1/completions")
    assert prompt_of(engine, glm) == "[gMASK]<sop>hi"
    await server.ask({"prompt": "[gMASK]<sop>hi"}, path="/v1/completions")
    assert prompt_of(engine, glm) == "[gMASK]<sop>hi"


@pytest.fixture
def follows(server, engine, glm) -> Callable:
    """follows(body, text, path) -> whether the request's guide lets the model write the text and end there."""
    guides = []
    submit = engine.submit
    engine.submit = lambda request, guide=None, pixels=(): (guides.append(guide), submit(request))[1]

    def allows(guide, token_id: int) -> bool:
        mask = guide.mask()
        return mask is None or bool(mask[token_id // 8] >> token_id % 8 & 1)

    async def follow(body, text, path="/v1/chat/completions", end=END_OF_TEXT) -> bool:
        engine.script("x")
        status, reply = await server.ask(body, path=path)
        assert status == 200, reply
        guide = guides[-1]
        assert engine.request.guided
        for token_id in engine.ids(text):
            if not allows(guide, token_id):
                return False
            guide.advance(token_id)
        assert not guide.error
        return allows(guide, glm.special_id(end))

    return follow


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


async def test_forced_calls_keep_to_the_grammar_in_either_api(follows):
    one = said("hi", tools=TOOLS, tool_choice="required")
    other = message(tools=ITS_TOOLS, tool_choice={"type": "any"})
    for body, path in ((one, "/v1/chat/completions"), (other, "/v1/messages")):
        for end in (END_OF_TEXT, OBSERVATION):
            assert await follows(body, "I think. < x</think>" + CALL + CALL, path, end)
        assert not await follows(body, "</think>Sure.", path)
        assert not await follows(body, "</think>", path)
        for inside in ("<tool_call>", "<|user|>", END_OF_TEXT):  # reasoning ends by its own end alone
            assert not await follows(body, f"{inside}</think>{CALL}", path)
        assert not await follows(body, "</think>" + CALL.replace("3", "three"), path)
        assert not await follows(body, "</think>" + CALL.replace("find", "lost"), path)
        assert not await follows(body, "</think>" + CALL + "More.", path)
    named = message(tools=ITS_TOOLS, tool_choice={"type": "tool", "name": "list_ports"})
    assert not await follows(named, "</think>" + CALL, "/v1/messages")
    assert await follows(named, "</think>" + CALL.replace("find", "list_ports"), "/v1/messages")
    single = message(tools=ITS_TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert not await follows(single, "</think>" + CALL + CALL, "/v1/messages")


async def test_strict_tools_leave_text_free_and_bind_calls(follows):
    strict = [{**tool, "strict": True} for tool in ITS_TOOLS]
    body = message(tools=strict, thinking={"type": "disabled"})
    for text, fits in [
        ("Only words.", True),
        ("Look:\n" + CALL, True),
        (CALL.replace("<arg_value>true", "<arg_value>maybe"), False),
        (CALL.partition("<arg_key>most")[0] + "</tool_call>", False),
        (CALL + "more", False),
    ]:
        assert await follows(body, text, "/v1/messages") is fits, text
    assert await follows(body, "Only words.", "/v1/messages", "<|user|>")


async def test_listed_strings_of_any_characters_are_held(follows):
    listed = {"type": "object", "properties": {"a": {"enum": ["x\x7f", "y"]}}, "required": ["a"]}
    body = message(tools=[{"name": "f", "input_schema": listed, "strict": True}], thinking={"type": "disabled"})
    for value, fits in (("x\x7f", True), ("y", True), ("x", False)):
        call = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert await follows(body, call, "/v1/messages") is fits, value


async def test_a_format_holds_behind_the_reasoning(follows, engine, glm):
    body = message(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert await follows(body, '{ is thought</think>{"n": 3}', "/v1/messages")
    assert not await follows(body, '</think>{"n": "3"}', "/v1/messages")
    with_tools = said(
        "hi", tools=TOOLS, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    )
    for text in ('{"n": 3}', CALL):
        assert await follows(with_tools, "</think>" + text)
    assert not await follows(with_tools, "</think>Sure.")
