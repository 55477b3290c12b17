"""Every field of a chat request: what is taken, what it becomes, what is refused and how."""

import gzip
import json
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scripted_engine import said, settings_with

from tided.api.body import MOST_VALUES, count_values, decompressed
from tided.api.prepare import prepare
from tided.api.served import ServedModel
from tided.chat.families import DEEPSEEK_V41
from tided.errors import RequestError
from tided.settings import Cache, Engine, Tide

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
NAN = '{"messages": [{"role": "user", "content": "x"}], "temperature": %s}'


def sampling(**fields):
    return fields


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"temperature": 1.0, "top_p": 0.95, "top_k": 0, "min_p": 0.0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 2, "top_p": 1, "min_p": 1}, {"temperature": 2.0, "top_p": 1.0, "min_p": 1.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 10.0}, {"top_k": 10}),
        ({"top_k": 2**62}, {"top_k": 0}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
        ({"temperature": None, "top_p": None, "seed": None, "stop": None, "tools": None}, {"temperature": 1.0}),
    ],
)
async def test_sampling(server, engine, fields, expected):
    engine.script("</think>x")
    status, _ = await server.ask(said("hi", **fields))
    assert status == 200
    got = engine.request.sampling
    assert {name: getattr(got, name) for name in expected} == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": True},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_k": -2},
        {"top_k": 1.5},
        {"top_k": False},
        {"min_p": -1},
        {"min_p": 1.1},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"seed": 0.5},
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"max_tokens": True},
        {"max_tokens": "10"},
        {"max_completion_tokens": 0},
        {"presence_penalty": 3},
        {"frequency_penalty": []},
        {"repetition_penalty": 0},
        {"n": 0},
        {"stop": 3},
        {"stream": "yes"},
        {"stream": 1},
        {"stream_options": []},
        {"tools": {}},
        {"tool_choice": 1},
        {"tool_choice": "maybe"},
        {"model": 3},
        {"chat_template_kwargs": "x"},
        {"enable_thinking": "true"},
        {"parallel_tool_calls": 0},
        {"reasoning": "high"},
        {"stop_token_ids": 3},
        {"top_logprobs": 3},
        {"top_logprobs": 21},
        {"logit_bias": []},
        {"response_format": "json"},
        {"x_engine_stats": 0},
    ],
    ids=str,
)
async def test_wrong_values_are_named(server, fields):
    error = await server.refused(said("hi", **fields))
    [name] = fields
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(name)
    assert name in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"n": 5}, "n", "1 to 4"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "schema"),
        ({"response_format": {"type": "json_schema", "name": "x"}}, "response_format.schema", "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "schema",
        ),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "-100 to 100"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "token ids"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens", "ends the answer"),
        ({"tools": [TOOL], "tool_choice": "required", "min_tokens": 3}, "min_tokens", "grammar"),
        ({"tools": [STRICT], "min_tokens": 3}, "min_tokens", "grammar"),
        ({"tools": [STRICT], "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"modalities": ["text", "audio"]}, "modalities", "only text"),
        ({"audio": {"voice": "x"}}, "modalities", "only text"),
        ({"functions": [{}]}, "functions", "use tools"),
        ({"function_call": "auto"}, "function_call", "use tools"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name", "name of a function"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "no tool h"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools", "at least one"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "continue_final_message"),
    ],
    ids=str,
)
async def test_fields_that_would_change_the_answer_are_refused_not_ignored(server, fields, param, hint):
    error = await server.refused(said("hi", **fields))
    assert error["param"] == param
    assert hint in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "anything"},
        {"user": "u", "metadata": {"a": 1}, "store": True, "service_tier": "x", "safety_identifier": 3},
        {"prompt_cache_key": "k", "cache_salt": "s", "verbosity": "low", "web_search_options": {}, "prediction": 1},
        {"an_unknown_field": {"deep": [1]}},
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logprobs": False},
        {"logit_bias": {}, "response_format": {"type": "text"}, "modalities": ["text"], "top_logprobs": 0},
        {"tool_choice": "auto"},
        {"tools": [TOOL], "min_tokens": 1},
        {"tools": [STRICT], "tool_choice": "none", "min_tokens": 1},
        {"response_format": {"type": "json_object"}, "min_tokens": 0, "ignore_eos": False},
    ],
    ids=str,
)
async def test_harmless_fields_are_accepted(server, engine, fields):
    engine.script("</think>x")
    status, reply = await server.ask(said("hi", **fields))
    assert (status, reply.get("model")) == (200, "deepseek")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "video"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "assistant", "reasoning_content": 3}], "messages[0].reasoning_content"),
        ([{"role": "tool", "tool_call_id": 3, "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x"}] * 10_001, "messages"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_wrong_messages_are_named(server, messages, param):
    assert (await server.refused({"messages": messages}))["param"] == param


async def test_images_are_refused_with_their_code(server):
    for url in ("data:image/png;base64,xx", {"url": "http://169.254.169.254/"}):
        image = {"type": "image_url", "image_url": url}
        error = await server.refused({"messages": [{"role": "user", "content": [image]}]})
        assert error["code"] == "image_input_not_supported"


async def test_messages_of_every_kind_are_accepted(server, engine, tokenizer):
    engine.script("</think>x")
    messages = [
        {"role": "developer", "content": "sys"},
        {"role": "latest_reminder", "content": "today"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "reasoning": "why", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": ""},
    ]
    status, _ = await server.ask({"messages": messages})
    assert status == 200
    text = "".join(tokenizer.decoder().feed(engine.request.prompt_ids))
    assert "sys" in text
    assert "a\n\nb" in text


async def test_text_that_spells_special_tokens_stays_text(server, engine, tokenizer):
    engine.script("</think>x")
    await server.ask(said("hi"))
    plain = [i for i in engine.request.prompt_ids if i in set(tokenizer.special_ids.values())]
    evil = "".join(tokenizer.special_ids)
    body = {"messages": [{"role": "user", "content": evil}, {"role": "tool", "content": evil, "tool_call_id": evil}]}
    status, _ = await server.ask(body)
    assert status == 200
    assert [i for i in engine.request.prompt_ids if i in set(tokenizer.special_ids.values())] == plain


@pytest.mark.parametrize(
    ("tools", "hint"),
    [
        ([3], "tools[0]"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": 'a"b'}}], "tools[0].function.name"),
        ([TOOL, TOOL], "twice"),
        ([{"type": "web_search"}], "only tools of type function"),
        ([{"type": "function", "function": {"name": "f", "strict": 1}}], "strict"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a｜": {}}}}}], "U+FF5C"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "parameters"),
        ([TOOL] * 513, "512"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_wrong_tools_are_refused(server, tools, hint):
    assert hint in (await server.refused(said("hi", tools=tools)))["message"]


async def test_tools_of_other_types_are_dropped_beside_functions(server, engine):
    engine.script("</think>x")
    await server.ask(said("hi", tools=[TOOL]))
    alone = engine.request.prompt_ids
    status, _ = await server.ask(said("hi", tools=[{"type": "web_search"}, TOOL]))
    assert (status, engine.request.prompt_ids) == (200, alone)


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({}, True, 75),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "minimal"}, True, 50),
        ({"reasoning_effort": "low"}, True, 50),
        ({"reasoning_effort": "medium"}, True, 75),
        ({"reasoning_effort": "high"}, True, 75),
        ({"reasoning_effort": "xhigh"}, True, 75),
        ({"reasoning_effort": "max"}, True, 100),
        ({"reasoning_effort": 33}, True, 33),
        ({"reasoning_effort": "33"}, True, 33),
        ({"reasoning_effort": 100.0}, True, 100),
        ({"enable_thinking": False, "reasoning_effort": "max"}, False, None),
        ({"enable_thinking": True, "reasoning_effort": "none"}, True, 75),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": 5}, True, 5),
        ({"chat_template_kwargs": {"thinking": False}, "enable_thinking": True}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, True, 75),
        ({"chat_template_kwargs": {"reasoning_effort": "low", "other": 1}}, True, 50),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "max"}, True, 50),
        ({"reasoning": {"enabled": False}}, False, None),
    ],
    ids=str,
)
async def test_thinking(server, engine, fields, thinking, effort):
    engine.script("x</think>y" if thinking else "y")
    _, reply = await server.ask(said("hi", **fields))
    stats = reply["x_engine_stats"]
    assert (stats["thinking"], stats["effort"]) == (thinking, effort)
    assert reply["choices"][0]["message"]["content"] == "y"


@pytest.mark.parametrize(("fields", "thinking"), [({}, False), ({"reasoning_effort": 20}, True)], ids=str)
async def test_a_request_that_does_not_say_follows_the_server(serve, engine, fields, thinking):
    server = await serve(thinking=False)
    engine.script("x</think>y" if thinking else "y")
    _, reply = await server.ask(said("hi", **fields))
    assert reply["x_engine_stats"]["thinking"] is thinking


@pytest.mark.parametrize("effort", ["", "huge", 0, 101, -1, 1.5, True, [], "1000", "٣"])
async def test_wrong_effort(server, effort):
    assert (await server.refused(said("hi", reasoning_effort=effort)))["param"] == "reasoning_effort"


async def test_stop_strings_are_bounded(server, engine):
    engine.script("</think>x")
    assert (await server.refused(said("hi", stop=["x"] * 17)))["param"] == "stop"
    assert (await server.refused(said("hi", stop=["x" * 257])))["param"] == "stop[0]"
    assert (await server.refused(said("hi", stop=["x", 3])))["param"] == "stop[1]"
    status, _ = await server.ask(said("hi", stop=["y", ""]))
    assert status == 200


async def test_stop_ids(server, engine, tokenizer):
    engine.script("</think>x")
    end = tokenizer.special_ids["<｜end▁of▁sentence｜>"]
    await server.ask(said("hi"))
    assert engine.request.stop_ids == (end,)
    await server.ask(said("hi", stop_token_ids=[3, 4.0]))
    assert engine.request.stop_ids == (end, 3, 4)
    await server.ask(said("hi", ignore_eos=True))
    assert engine.request.stop_ids == ()
    error = await server.refused(said("hi", stop_token_ids=[10**9]))
    assert error["param"] == "stop_token_ids.0"


async def test_lengths(server, engine):
    engine.script("</think>x")
    await server.ask(said("hi"))
    prompt = len(engine.request.prompt_ids)
    assert engine.request.max_tokens == 4096 - prompt
    await server.ask(said("hi", max_tokens=4096 - prompt))
    assert engine.request.max_tokens == 4096 - prompt
    await server.ask(said("hi", max_completion_tokens=5, max_tokens=7))
    assert engine.request.max_tokens == 5
    error = await server.refused(said("hi", max_tokens=4097 - prompt))
    assert error == {
        "message": "This model's maximum context length is 4096 tokens. However, you requested 4097 tokens "
        f"({prompt} in the messages, {4097 - prompt} in the completion).",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


async def test_a_prompt_over_the_context(server):
    for stream in (False, True):
        error = await server.refused(said("tide " * 5000, stream=stream))
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 4096 tokens" in error["message"]


async def test_default_limit_is_the_models(tokenizer):
    large = settings_with(Cache(context_tokens=1 << 20, pool_tokens=1 << 20))
    served = ServedModel.of(DEEPSEEK_V41, tokenizer, large)
    for fields, limit in [({"enable_thinking": False}, 8192), ({}, 65536), ({"reasoning_effort": "max"}, 131072)]:
        prepared = prepare(json.dumps(said("hi", **fields)).encode(), served, lambda: None)
        assert prepared.request.max_tokens == limit


async def test_continue_a_final_message(server, engine, tokenizer):
    engine.script(" more")
    half = {"role": "assistant", "content": "half"}
    for fields in ({"continue_final_message": True}, {}):
        last = half if fields else {**half, "prefix": True}
        _, reply = await server.ask({"messages": [{"role": "user", "content": "q"}, last], **fields})
        assert reply["choices"][0]["message"]["content"] == " more"
        assert tokenizer.decoder().feed(engine.request.prompt_ids).endswith("half")
    assert (await server.refused(said("q", continue_final_message=True)))["param"] == "messages[0]"
    both = said("q", continue_final_message=True, add_generation_prompt=True)
    assert (await server.refused(both))["param"] == "add_generation_prompt"


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '"x"',
        '{"messages": [}',
        b"\xff\xfe{\x00}\x00",
        b'{"messages": "\xff"}',
        NAN % "NaN",
        NAN % "Infinity",
        NAN % "-Infinity",
        NAN % "1e999",
        NAN % ("9" * 5000),
        NAN % ("0." + "9" * 5000),
        "[" * 100_000,
    ],
    ids=lambda body: str(body)[:30],
)
async def test_bodies_that_are_no_request(server, body):
    error = await server.refused(body)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300


async def test_bodies_that_are_accepted(server, engine, tokenizer):
    engine.script("</think>x")
    body = json.dumps(said("hi"))
    for options in ({"headers": {"Content-Type": "application/x-www-form-urlencoded"}}, {"headers": {}}):
        assert (await server.ask(body, **options))[0] == 200
    for encoding, packed in (("gzip", gzip.compress(body.encode())), ("Deflate", zlib.compress(body.encode()))):
        assert (await server.ask(packed, headers={"Content-Encoding": encoding}))[0] == 200
    deep = json.dumps(said("hi", x=json.loads("[" * 127 + "]" * 127)))
    assert (await server.ask(deep))[0] == 200
    assert (await server.ask('{"messages": 3, "messages": [{"role": "user", "content": "last wins"}]}'))[0] == 200
    assert "last wins" in tokenizer.decoder().feed(engine.request.prompt_ids)


async def test_odd_characters_are_kept_and_lone_surrogates_replaced(server, engine, tokenizer):
    engine.script("</think>x")
    text = "a\\ud800b\\u0000c\\ud83c\\udf0a"
    body = (
        json.dumps(said("@", stop="%", other=1)).replace("@", text).replace("%", "\\udfff").replace("other", "\\ud801")
    )
    assert (await server.ask(body))[0] == 200
    assert "a\ufffdb\0c🌊" in tokenizer.decoder().feed(engine.request.prompt_ids)
    error = await server.refused('{"messages": [{"role": "\\ud800"}]}')
    assert error["param"] == "messages[0].role"


async def test_body_limits(serve):
    server = await serve(max_body_bytes=4096)
    assert (await server.refused(said("x" * 5000), 413))["code"] == "request_too_large"
    bomb = gzip.compress(json.dumps(said(" " * 100_000)).encode())
    assert len(bomb) < 4096
    assert (await server.refused(bomb, 413, headers={"Content-Encoding": "gzip"}))["code"] == "request_too_large"

    async def chunks():
        for _ in range(100):
            yield b" " * 1000

    async with server.session.post("/v1/chat/completions", data=chunks()) as response:
        assert response.status == 413


async def test_a_damaged_compressed_body(server):
    await server.refused(b"no gzip at all", headers={"Content-Encoding": "gzip"})
    whole = gzip.compress(json.dumps(said("hi")).encode())
    for damaged in (whole[:-12], whole[:-1], whole + b"more"):
        await server.refused(damaged, headers={"Content-Encoding": "gzip"})
    await server.refused(whole, headers={"Content-Encoding": "br"})


@pytest.mark.parametrize("deep", ["[" * 128 + "]" * 128, '{"a":' * 128 + "1" + "}" * 128], ids=["arrays", "objects"])
async def test_a_body_nested_too_deep(server, deep):
    error = await server.refused(json.dumps(said("hi", x=json.loads(deep))))
    assert "nested deeper than 128" in error["message"]


@pytest.mark.parametrize("filler", ["[],", "{},", "1,", '"",', '{"":1},', '"",[{"a":[]}],'])
@pytest.mark.parametrize("encoding", ["deflate", ""])
async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(server, monkeypatch, filler, encoding):
    monkeypatch.setattr("tided.api.body.json.loads", None)  # whoever parses fails with 500
    body = ('{"messages": [' + filler * MOST_VALUES + "1]}").encode()
    headers = {"Content-Encoding": encoding} if encoding else {}
    error = await server.refused(zlib.compress(body) if encoding else body, 413, headers=headers)
    assert error["code"] == "request_too_large"
    assert "values" in error["message"]


async def test_a_body_of_too_many_keys_is_refused_before_it_is_parsed(server, monkeypatch):
    monkeypatch.setattr("tided.api.body.json.loads", None)
    error = await server.refused('{"x": {' + '"":0,' * MOST_VALUES + '"":0}}', 413)
    assert error["code"] == "request_too_large"


async def test_what_stands_in_a_text_is_no_value(server):
    text = '{"a": [1, 2, "b"], "c\\": {}},' * (MOST_VALUES // 4)
    error = await server.refused(said(text))
    assert error["code"] == "context_length_exceeded"


VALUES = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\[]{},:\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a"\\,[{')), inner),
)


def least_count(value) -> int:
    """Strings, keys, arrays, objects, and the commas between."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 1 + max(len(value) - 1, 0) + sum(map(least_count, value))
    if isinstance(value, dict):
        return 1 + max(len(value) - 1, 0) + len(value) + sum(map(least_count, value.values()))
    return 0


@given(VALUES, st.booleans())
def test_values_are_counted_as_they_are(value, compact):
    text = json.dumps(value, separators=(",", ":") if compact else None)
    assert count_values(text.encode()) == least_count(value)


@pytest.mark.parametrize("piece", [b'\\"', b"\\\\", b"a", b"\\n"], ids=str)
def test_counting_takes_one_look_at_every_byte(piece):
    """An open string whose every quote is escaped; looking at the rest again from each would take hours."""
    assert count_values(b'["' + piece * 2_000_000) == 2
    assert count_values(b'["' + piece * 2_000_000 + b"\\") == 2


NUMBERS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "n", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "top_logprobs", "reasoning_effort"),
)


@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["huge", "negative"])
@pytest.mark.parametrize("name", NUMBERS)
async def test_integers_beyond_every_float_are_named(server, name, value):
    assert (await server.refused(said("hi", **{name: value})))["param"] == name


async def test_integers_beyond_every_float_in_a_list_are_named(server):
    for value in (10**400, -(10**400)):
        error = await server.refused(said("hi", stop_token_ids=[value]))
        assert error["param"] == "stop_token_ids.0"


def test_a_bomb_is_never_unfolded():
    bomb = gzip.compress(b" " * 50_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as refusal:
            decompressed(bomb, "gzip", 4096, lambda: None)
        assert refusal.value.status == 413
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, "fast"), ({"fidelity": None}, "fast"), ({"fidelity": "exact"}, "exact")]
)
async def test_fidelity(server, engine, fields, expected):
    engine.script("</think>x")
    status, _ = await server.ask(said("hi", **fields))
    assert (status, engine.request.fidelity) == (200, expected)


@pytest.mark.parametrize("value", ["", "EXACT", 1, True, ["exact"]])
async def test_a_fidelity_that_there_is_not_is_refused_by_name(server, value):
    status, reply = await server.ask(said("hi", fidelity=value))
    assert (status, reply["error"]["param"]) == (400, "fidelity")


def test_a_request_that_does_not_say_gets_the_profiles_fidelity(tokenizer):
    body = json.dumps(said("hi")).encode()
    settings = replace(settings_with(), tide=Tide(fidelity="balanced"))
    prepared = prepare(body, ServedModel.of(DEEPSEEK_V41, tokenizer, settings), lambda: None)
    assert prepared.request.fidelity == "balanced"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 12),
        ({"loop_break": None}, 12),
        ({"loop_break": 0}, 0),
        ({"loop_break": 2}, 2),
        ({"loop_break": 1000.0}, 1000),
        ({"ignore_eos": True}, 0),
        ({"ignore_eos": True, "loop_break": 5}, 5),
    ],
)
async def test_loop_break(server, engine, fields, expected):
    engine.script("</think>x")
    status, _ = await server.ask(said("hi", **fields))
    assert (status, engine.request.loop_break) == (200, expected)
    status, _ = await server.ask({"prompt": "hi", **fields}, path="/v1/completions")
    assert (status, engine.request.loop_break) == (200, expected)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", said("hi", max_tokens=5)), ("/v1/responses", {"input": "hi"})],
)
async def test_loop_break_by_other_ways(server, engine, path, body):
    engine.script("</think>x")
    for own, expected in (({}, 12), ({"loop_break": 7}, 7)):
        status, _ = await server.ask(body | own, path=path)
        assert (status, engine.request.loop_break) == (200, expected)


@pytest.mark.parametrize("value", [1, -1, 1001, 2.5, True, "12", []])
async def test_a_loop_break_that_makes_no_sense_is_refused_by_name(server, value):
    error = await server.refused(said("hi", loop_break=value))
    assert error["param"] == "loop_break"


def test_a_request_that_does_not_say_gets_the_profiles_loop_break(tokenizer):
    body = json.dumps(said("hi")).encode()
    settings = replace(settings_with(), engine=Engine(loop_break=30))
    prepared = prepare(body, ServedModel.of(DEEPSEEK_V41, tokenizer, settings), lambda: None)
    assert prepared.request.loop_break == 30
