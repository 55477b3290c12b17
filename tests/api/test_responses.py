"""POST /v1/responses: items and events in their order, and what is stored nowhere is refused."""

import json

import pytest
from scripted_engine import events

from tided.chat.deepseek_v41_tools import DSML

PATH = {"path": "/v1/responses"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = (
    f'\n\n<{DSML} calls>\n<{DSML} invoke name="f">\n<{DSML} parameter name="a" string="false">1</{DSML} parameter>\n'
    f"</{DSML} invoke>\n</{DSML} calls>"
)


async def stream(server, body) -> list[dict]:
    async with server.post({**body, "stream": True}, **PATH) as reply:
        assert reply.status == 200
        sent = [one for one in events(await reply.text()) if not one.startswith(":")]
    told = []
    for one in sent:
        name, line = one[:-2].split("\n")
        told.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    return told


async def test_reasoning_text_and_a_call_in_their_exact_order(server, engine):
    engine.script("pl", "an</think>", "Hi ", "you", CALL)
    told = await stream(server, {"input": "x", "tools": [TOOL], "reasoning": {"effort": "low"}})
    kinds = [one["type"].removeprefix("response.") for one in told]
    # Deltas of one kind in a row count as one: how many there are depends on the model's tokens.
    assert [kind for at, kind in enumerate(kinds) if kinds[at - 1 : at] != [kind]] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    final = told[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
    assert final["output"] == [one["item"] for one in told if one["type"] == "response.output_item.done"]
    assert [one["output_index"] for one in told if one["type"] == "response.output_item.added"] == [0, 1, 2]
    reasoning, message, call = final["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "plan"}]
    assert message["content"][0]["text"] == "Hi you"
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": 1})
    assert "".join(o["delta"] for o in told if o["type"].endswith("arguments.delta")) == call["arguments"]
    added = next(one["item"] for one in told if one["type"] == "response.output_item.added")
    assert added["content"] == []
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert final["store"] is False


async def test_the_whole_reply_is_the_stream_s_last_word(server, engine):
    engine.script("Hello")
    body = {"input": "x", "enable_thinking": False, "instructions": "Be kind."}
    status, whole = await server.ask(body, **PATH)
    last = (await stream(server, body))[-1]["response"]
    assert (status, whole["status"], whole["object"]) == (200, "completed", "response")
    assert whole["id"].startswith("resp_")
    texts = [[item["content"][0]["text"] for item in reply["output"]] for reply in (whole, last)]
    assert texts == [["Hello"], ["Hello"]]
    assert whole["instructions"] == "Be kind."


async def test_an_answer_that_was_cut_is_incomplete(server, engine):
    engine.script("Hel", reason="length")
    told = await stream(server, {"input": "x", "enable_thinking": False, "max_output_tokens": 3})
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told[-1]["response"]["output"][0]["status"] == "incomplete"
    assert engine.request.max_tokens == 3


async def test_a_fault_ends_the_stream_with_an_event(server, engine):
    engine.play = lambda answer: answer.start().say("a</think>b").fail("a rank is gone")
    told = await stream(server, {"input": "x"})
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["status"] == "failed"
    assert "a rank is gone" in told[-1]["response"]["error"]["message"]


async def test_a_turn_s_items_render_as_the_chat_s_messages(server, engine):
    engine.script("ok")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "think"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    await server.ask({"input": items, "instructions": "sys", "tools": [TOOL]}, **PATH)
    own = engine.request.prompt_ids
    function = {"name": "f", "arguments": '{"a": 1}'}
    messages = [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "let me", "reasoning_content": "think",
         "tool_calls": [{"id": "c1", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]  # fmt: skip
    nested = {"type": "function", "function": {name: TOOL[name] for name in ("name", "parameters")}}
    await server.ask({"messages": messages, "tools": [nested]})
    assert engine.request.prompt_ids == own


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": [], "role": "user", "content": "a"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "content": ["a"]}]}, "input[0].content[0]"),
        ({"input": [{"type": "reasoning", "content": [{"text": 5}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "nobody", "content": "b"}]}, "input[1].role"),
        ({"instructions": "s", "input": [{"role": "nobody", "content": "b"}]}, "input[0].role"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "parameters": 3}]}, "tools[0].parameters"),
        ({"tools": [{"type": 3}]}, "tools[0].type"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named_as_the_client_knows_it(server, fields, param):
    error = await server.refused({"input": "x", **fields}, **PATH)
    assert error["param"] == param
    assert "messages" not in error["message"]


async def test_an_input_that_is_neither_text_nor_items(server):
    assert (await server.refused({"input": 5}, **PATH))["message"] == "input: expected a text or an array, got 5"


async def test_statistics_are_left_out_where_they_are_not_wanted(server, engine):
    engine.script("</think>x")
    for fields, headers, shown in (
        ({}, {}, True),
        ({"x_engine_stats": False}, {}, False),
        ({}, {"x-engine-stats": "0"}, False),
    ):
        _, reply = await server.ask({"input": "x", **fields}, headers=headers, **PATH)
        assert ("x_engine_stats" in reply) == shown
