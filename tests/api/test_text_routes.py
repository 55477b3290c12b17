"""/tokenize, /detokenize, /v1/debug/prompt and /v1/stats."""

import pytest
from scripted_engine import STATS, said

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}


async def asked(server, path, body, **options):
    status, reply = await server.ask(body, path=path, **options)
    assert status == 200, reply
    return reply


async def test_a_text_to_tokens_and_back(server, tokenizer):
    text = "the tide 涨潮 🌊 <｜User｜>"
    found = await asked(server, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 4096
    assert not set(found["tokens"]) & set(tokenizer.special_ids.values())  # text, whatever it spells
    assert (await asked(server, "/detokenize", {"tokens": found["tokens"]})) == {"prompt": text}
    begun = await asked(server, "/tokenize", {"prompt": "a", "add_special_tokens": True})
    assert (await asked(server, "/detokenize", {"tokens": begun["tokens"]}))["prompt"] == "<｜begin▁of▁sentence｜>a"
    assert (await asked(server, "/tokenize", {"prompt": ""}))["tokens"] == []
    whole = [float(one) for one in found["tokens"]]  # integers, as JSON has it
    assert (await asked(server, "/detokenize", {"tokens": whole})) == {"prompt": text}


@pytest.mark.parametrize(
    "body", [said("hi"), said("hi <｜User｜>", tools=[TOOL], enable_thinking=False)], ids=["a", "b"]
)
async def test_the_prompt_is_the_one_that_the_engine_gets(server, engine, body):
    engine.script("</think>x")
    await server.ask(body)
    ids = engine.request.prompt_ids
    assert (await asked(server, "/tokenize", body))["tokens"] == ids
    shown = await asked(server, "/v1/debug/prompt", body)
    assert shown["prompt_token_ids"] == ids
    assert shown["prompt"] == (await asked(server, "/detokenize", {"tokens": ids}))["prompt"]
    spans = [shown["prompt"][start:end] for start, end in shown["special_token_spans"]]
    assert spans[0] == "<｜begin▁of▁sentence｜>"
    assert spans.count("<｜User｜>") == 1  # the other one is text
    assert shown["thinking"] is (body.get("enable_thinking") is not False)
    assert shown["grammar"] is False
    assert len(engine.answers) == 1


async def test_what_a_message_and_a_forced_call_would_be(server, engine):
    engine.script("</think>x")
    message = {"max_tokens": 5, "system": "be brief", "messages": said("hi")["messages"]}
    async with server.post(message, path="/v1/messages") as reply:
        assert reply.status == 200
    headers = {"anthropic-version": "2023-06-01"}
    shown = await asked(server, "/v1/debug/prompt", message, headers=headers)
    assert shown["prompt_token_ids"] == engine.request.prompt_ids
    forced = await asked(server, "/v1/debug/prompt", said("hi", tools=[TOOL], tool_choice="required"))
    assert forced["grammar"] is True


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [10**9]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [0, 1.5]}, "tokens[1]"),
        ("/detokenize", {"tokens": [0] * 5000}, "tokens"),
        ("/v1/debug/prompt", said("hi", temperature=9), "temperature"),
    ],
)
async def test_refusals_name_the_field(server, path, body, param):
    assert (await server.refused(body, path=path))["param"] == param


async def test_a_text_beyond_the_context_is_refused(server):
    assert (await server.refused({"prompt": "tide " * 9000}, path="/tokenize"))["code"] == "context_length_exceeded"


async def test_they_answer_while_all_lanes_are_busy(server, engine, monkeypatch):
    full = {"state": "ready", "fault": "", "lanes": {"total": 2, "busy": 2}, "queue": 64, "busy": True}
    monkeypatch.setattr(engine, "health", lambda: full)
    await asked(server, "/tokenize", {"prompt": "a"})
    await asked(server, "/v1/debug/prompt", said("hi"))
    assert not engine.answers


async def test_the_last_answers_statistics(server, engine):
    engine.script("</think>x")
    for _ in range(3):
        await server.ask(said("hi"))
    for query, count in (("", 3), ("?n=2", 2), ("?n=100", 3)):
        async with server.session.get("/v1/stats" + query) as reply:
            assert await reply.json() == {"object": "list", "data": [STATS] * count}
    for query in ("0", "101", "-1", "x", "1e2", "9" * 50, "00000001000", "000000010" + "0" * 4400, "٣"):
        async with server.session.get(f"/v1/stats?n={query}") as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, "n")
