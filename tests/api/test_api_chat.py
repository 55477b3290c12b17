"""POST /v1/chat/completions, whole and streamed, as clients see it."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from scripted_engine import STATS, data, events, gather, said, until

from tided.engine.board import ExpertBoard
from tided.engine.types import Finished, Started, Tokens

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/encodings/sse_streams.json").read_text())["cases"][0]
CALLS = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n'
    '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="g">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]


async def test_whole_reply(server, engine):
    engine.script("plan", "</think>Hel", "lo")
    status, reply = await server.ask(said("hi", seed=7))
    assert status == 200
    assert re.fullmatch(r"chatcmpl-[0-9A-Za-z]{24}", reply["id"])
    assert re.fullmatch(r"tidelm-[0-9a-f]{8}", reply["system_fingerprint"])
    assert (reply["object"], reply["model"]) == ("chat.completion", "deepseek")
    [choice] = reply["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello",
        "reasoning_content": "plan",
        "refusal": None,
    }
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    prompt, completion = len(engine.request.prompt_ids), engine.answers[0].drawn + 1
    assert reply["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0, "image_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": len(engine.ids("plan"))},
        "prompt_cache_hit_tokens": 0,
        "prompt_cache_miss_tokens": prompt,
    }
    assert reply["x_engine_stats"].items() >= (STATS | {"seed": 7, "thinking": True, "effort": 75}).items()
    assert engine.cancels == []


async def test_stream_is_framed_as_the_reference_stream(server, engine):
    def play(answer):
        answer.start().say("plan").say("</think>Hel")
        for piece in ("lo", *re.split("(?<=>1)", CALLS)):
            answer.say(piece)
        answer.finish(stats={"lane": 0})

    engine.play = play
    sent = await server.stream(said("hi", tools=TOOLS, stream_options={"include_usage": True}, x_engine_stats=True))
    chunks, reference = data(sent), data(GOLDEN["chunks"])
    assert sent[0] == GOLDEN["chunks"][0] == ": ok\n\n"
    got, wanted = gather(chunks), gather(reference)
    assert [got[k] for k in ("content", "reasoning_content", "finish_reason")] == [
        wanted[k] for k in ("content", "reasoning_content", "finish_reason")
    ]
    assert [(c["name"], json.loads(c["arguments"])) for c in got["tool_calls"]] == [
        (c["name"], c["arguments"]) for c in GOLDEN["expected"]["tool_calls"]
    ]
    for chunk, event in zip(chunks, [e for e in sent if e.startswith("data: {")], strict=True):
        # The reference's separators and order of members, with this stream's own values.
        assert event == f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
    assert [list(chunk) for chunk in (chunks[0], chunks[-2])] == [
        list(chunk) for chunk in (reference[0], reference[-2])
    ]
    kinds = [json.loads(re.sub(r'call_[^"]*', "call", json.dumps(shape(chunk)))) for chunk in chunks]
    assert kinds[:4] == [shape(chunk) for chunk in reference[:4]]
    assert kinds[-2:] == [shape(chunk) for chunk in reference[-2:]]
    assert sent[-1] == GOLDEN["chunks"][-1] == "data: [DONE]\n\n"


def shape(chunk: dict) -> dict:
    """A chunk without what differs from stream to stream."""
    return {
        key: sorted(value) if key == "usage" and value else value
        for key, value in chunk.items()
        if key not in ("id", "created", "system_fingerprint", "x_engine_stats")
    }


async def test_all_chunks_share_the_envelope_and_only_the_last_has_statistics(server, engine):
    engine.script("a", "</think>b")
    chunks = data(await server.stream(said("hi")))
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"], c["object"]) for c in chunks}) == 1
    assert [("x_engine_stats" in c, c["choices"][0]["finish_reason"]) for c in chunks] == [
        *[(False, None)] * (len(chunks) - 1),
        (True, "stop"),
    ]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_chunk_only_when_asked(server, engine):
    engine.script("a", "</think>b")
    chunks = data(await server.stream(said("hi", stream_options={"include_usage": True})))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    chunks = data(await server.stream(said("hi", stream_options={"continuous_usage_stats": True})))
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
    status, reply = await server.ask(said("hi", stream_options={"include_usage": True}))
    assert (status, reply["object"]) == (200, "chat.completion")


async def test_headers_of_replies(server, engine):
    engine.script("</think>b")
    async with server.post(said("hi", stream=True), headers={"x-request-id": "mine-1"}) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache, no-transform"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["x-request-id"] == "mine-1"
        assert response.headers["Transfer-Encoding"] == "chunked"
        assert "Content-Encoding" not in response.headers
        await response.read()
    async with server.post(said("hi"), headers={"x-request-id": "not harmless\x01"[:12]}) as response:
        assert re.fullmatch(r"req_[0-9A-Za-z]{24}", response.headers["x-request-id"])
        assert response.headers["Content-Type"] == "application/json; charset=utf-8"


async def test_statistics_can_be_left_out(server, engine):
    engine.script("</think>b")
    _, reply = await server.ask(said("hi", x_engine_stats=False))
    assert "x_engine_stats" not in reply
    _, reply = await server.ask(said("hi"), headers={"x-engine-stats": "0"})
    assert "x_engine_stats" not in reply


async def test_tool_calls(server, engine):
    engine.script("hm</think>Text.", CALLS)
    body = said("hi", tools=TOOLS)
    _, reply = await server.ask(body)
    [choice] = reply["choices"]
    calls = choice["message"]["tool_calls"]
    assert [(c["type"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
        ("function", "f", {"a": 1}),
        ("function", "g", {}),
    ]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Text.", "tool_calls")
    streamed = gather(data(await server.stream(body)))
    assert [c["name"] for c in streamed["tool_calls"]] == ["f", "g"]
    assert (streamed["content"], streamed["finish_reason"]) == ("Text.", "tool_calls")
    engine.script("</think>" + CALLS)
    _, reply = await server.ask(body)
    assert reply["choices"][0]["message"]["content"] is None


async def test_no_tool_calls_member_without_calls(server, engine):
    engine.script("</think>plain")
    _, reply = await server.ask(said("hi", tools=TOOLS))
    assert "tool_calls" not in reply["choices"][0]["message"]
    assert "tool_calls" not in json.dumps(await server.stream(said("hi", tools=TOOLS)))


async def test_tool_choice_none_leaves_tools_out_of_the_prompt_and_calls_out_of_the_answer(server, engine):
    engine.script("</think>" + CALLS)
    await server.ask(said("hi", tools=TOOLS))
    with_tools = len(engine.request.prompt_ids)
    _, reply = await server.ask(said("hi", tools=TOOLS, tool_choice="none"))
    assert len(engine.request.prompt_ids) < with_tools
    assert "tool_calls" not in reply["choices"][0]["message"]
    assert reply["choices"][0]["finish_reason"] == "stop"


async def test_parallel_tool_calls_false_ends_after_the_first(server, engine):
    engine.script("</think>" + CALLS)
    _, reply = await server.ask(said("hi", tools=TOOLS, parallel_tool_calls=False))
    assert [c["function"]["name"] for c in reply["choices"][0]["message"]["tool_calls"]] == ["f"]
    assert reply["choices"][0]["finish_reason"] == "tool_calls"


async def test_what_follows_a_call_block_is_dropped_and_not_computed(server, engine):
    def play(answer):
        answer.start().say("</think>" + CALLS).say("and then").say("more")

    engine.play = play
    _, reply = await server.ask(said("hi", tools=TOOLS))
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert engine.cancels == [engine.request.request_id]


@pytest.mark.parametrize("pieces", [["one DEF", "G", "HI", "J three"], ["one DEFGHIJ"], list("one DEFGHIJ!")])
async def test_stop_string_over_token_borders(server, engine, pieces):
    def play(answer):
        answer.start().say("DEFGHIJ is not one here</think>")
        for piece in pieces:
            answer.say(piece)

    engine.play = play  # goes on until it is cancelled
    for streams in (False, True):
        if streams:
            chunks = data(await server.stream(said("hi", stop="DEFGHIJ")))
            reply = gather(chunks)
            assert chunks[-1]["choices"][0]["stop_reason"] == "DEFGHIJ"
        else:
            _, whole = await server.ask(said("hi", stop=["", "DEFGHIJ"]))
            reply = whole["choices"][0]["message"] | whole["choices"][0]
            assert reply["stop_reason"] == "DEFGHIJ"
            assert whole["usage"]["completion_tokens"] <= engine.answers[-1].drawn
        assert reply["content"] == "one "
        assert reply["reasoning_content"] == "DEFGHIJ is not one here"
        assert reply["finish_reason"] == "stop"
        assert engine.cancels == [answer.request.request_id for answer in engine.answers]


async def test_tokens_behind_a_stop_string_are_not_counted(server, engine):
    kept = engine.ids("</think>a STOP")
    engine.play = lambda answer: answer.start().draw(kept + engine.ids("!!! and more"))
    _, reply = await server.ask(said("hi", stop="STOP"))
    assert reply["usage"]["completion_tokens"] == reply["x_engine_stats"]["completion_tokens"] == len(kept)


async def test_near_miss_of_a_stop_string_appears_whole(server, engine):
    engine.script("</think>", *"one DEFGHX")
    assert gather(data(await server.stream(said("hi", stop="DEFGHIJ"))))["content"] == "one DEFGHX"
    assert engine.cancels == []


async def test_an_engine_that_never_confirms_a_cancel_does_not_hold_the_answer(server, engine):
    engine.play = lambda answer: answer.start().say("</think>a STOP")
    engine.cancel = lambda request_id: engine.cancels.append(request_id)
    _, reply = await server.ask(said("hi", stop="STOP"))
    assert reply["choices"][0]["message"]["content"] == "a "
    assert engine.cancels == [engine.request.request_id]


async def test_what_follows_a_call_block_is_not_computed(server, engine):
    engine.play = lambda answer: answer.start().say("</think>" + CALLS).say("and").say("more")
    for stream in (False, True):
        before = len(engine.cancels)
        if stream:
            reply = gather(data(await server.stream(said("hi", tools=TOOLS))))
            assert [call["name"] for call in reply["tool_calls"]] == ["f", "g"]
        else:
            _, whole = await server.ask(said("hi", tools=TOOLS))
            assert [call["function"]["name"] for call in whole["choices"][0]["message"]["tool_calls"]] == ["f", "g"]
        assert engine.cancels[before:] == [engine.request.request_id]


async def test_an_end_token_right_behind_a_call_block_is_waited_for(server, engine):
    engine.script("</think>", CALLS)
    _, reply = await server.ask(said("hi", tools=TOOLS))
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert engine.cancels == []


async def test_length(server, engine):
    engine.script("thinking about", reason="length")
    _, reply = await server.ask(said("hi", max_tokens=5))
    [choice] = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["reasoning_content"] == "thinking about"
    thought = len(engine.ids("thinking about"))
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought > 0


async def test_characters_of_several_tokens(server, engine, tokenizer):
    text = "🌊涨潮é\ufffdx"

    def play(answer):
        answer.start().say("</think>")
        for token_id in tokenizer.encode_text(text):
            answer.draw([token_id])
        answer.draw(tokenizer.encode_text("潮")[:1])
        answer.finish("length")

    engine.play = play
    chunks = data(await server.stream(said("hi")))
    assert gather(chunks)["content"] == text + "\ufffd"
    _, reply = await server.ask(said("hi"))
    assert reply["choices"][0]["message"]["content"] == text + "\ufffd"


async def test_line_separators_do_not_end_lines(server, engine):
    engine.script("</think>a\u2028b\u0085c")
    async with server.post(said("hi", stream=True)) as response:
        text = await response.text()
    assert not {"\u2028", "\u0085"} & set(text)
    assert gather(data([line + "\n\n" for line in text.split("\n\n")[:-1]]))["content"] == "a\u2028b\u0085c"


async def test_tokens_that_come_together_go_out_together(server, engine):
    def play(answer):
        answer.start().draw(engine.ids("</think>" + "the tide " * 50))
        answer.finish()

    engine.play = play
    chunks = data(await server.stream(said("hi")))
    assert sum("content" in c["choices"][0]["delta"] for c in chunks[1:]) == 1


async def test_reasoning_can_be_hidden(server, engine):
    engine.script("plan</think>answer")
    for hide in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        _, reply = await server.ask(said("hi", **hide))
        assert "plan" not in json.dumps(reply)
        assert "plan" not in "".join(await server.stream(said("hi", **hide)))
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(engine.ids("plan"))


async def test_seed_is_reported_and_random_without_one(server, engine):
    engine.script("</think>x")
    seeds = []
    for _ in range(3):
        _, reply = await server.ask(said("hi"))
        seeds.append(reply["x_engine_stats"]["seed"])
        assert engine.request.sampling.seed == seeds[-1]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_two_streams_at_once_do_not_mix(server, engine):
    first = asyncio.create_task(server.stream(said("first")))
    await until(lambda: len(engine.answers) == 1)
    second = asyncio.create_task(server.stream(said("second")))
    await until(lambda: len(engine.answers) == 2)
    one, two = engine.answers
    one.start().say("</think>")
    two.start().say("</think>")
    for _ in range(20):
        one.say("one ")
        two.say("two ")
        await asyncio.sleep(0)
    two.finish()
    assert gather(data(await second))["content"] == "two " * 20
    assert not first.done()
    one.finish()
    assert gather(data(await first))["content"] == "one " * 20


async def test_keep_alive_comments_while_nothing_else_is_sent(server, engine):
    text = ""
    async with asyncio.timeout(30), server.post(said("hi", stream=True)) as response:
        while text.count(": keep-alive") < 2:
            text += (await response.content.readany()).decode()
        engine.answers[0].start().say("</think>x").finish()
        text += await response.text()
    sent = events(text)
    assert sent[0] == ": ok\n\n"
    assert sent[1] == sent[2] == ": keep-alive\n\n"
    assert gather(data(sent))["content"] == "x"


@pytest.mark.parametrize(
    ("fields", "piece"),
    [({"include_reasoning": False}, "thought "), ({"tools": TOOLS}, "\n")],
    ids=["hidden reasoning", "held back"],
)
async def test_keep_alive_comments_while_the_engine_works_and_nothing_is_shown(server, engine, fields, piece):
    """Tokens come all the time, more often than a comment is due."""
    async with server.post(said("hi", stream=True, **fields)) as response:
        await until(lambda: bool(engine.answers))
        answer = engine.answers[0].start()
        if "tools" in fields:
            answer.say("</think>text")
        comments = 0
        async with asyncio.timeout(10):
            while comments < 3:
                answer.say(piece)
                try:
                    async with asyncio.timeout(0.05):
                        comments += (await response.content.readline()).startswith(b": keep-alive")
                except TimeoutError:
                    pass
        answer.finish()
        assert b"[DONE]" in await response.read()


async def test_text_is_streamed_when_it_is_there(server, engine):
    """Each piece reaches the client before the next is drawn."""
    async with server.post(said("hi", stream=True)) as response:
        await until(lambda: bool(engine.answers))
        answer = engine.answers[0].start().say("</think>")
        for word in ("tide", "in", "out"):
            answer.say(word)
            async for line in response.content:
                if f'"content": "{word}"'.encode() in line:
                    break
        answer.finish()
        assert b"[DONE]" in await response.read()


async def test_the_real_client_fits(serve, ids):
    """The engine's own client behind the API, over a scripted engine thread."""
    client_module = pytest.importorskip("tided.engine.client")
    client = client_module.EngineClient(lanes=2, queue=4)

    class Thread:
        residency = client_module.Residency(generation=0, residents=4, total=8, mask_hash="0")
        last_step_s, seq, expert_reads, data_plane, about, living = 0.0, 0, (), (), {}, (4, 4)
        board = ExpertBoard(2, 4, [])

        def check(self, request):
            pass

        def submit(self, request, guide=None, pixels=()):
            rid = request.request_id
            tokens = ids("a</think>b")
            client.post([Started(rid), Tokens(rid, tokens), Finished(rid, "stop", 3, len(tokens) + 1, {"lane": 1})])

        def cancel(self, request_id):
            raise AssertionError("nothing is to be cancelled")

        def close(self, reason):
            pass

    server = await serve(serves=client)
    async with server.session.get("/health") as response:
        assert (response.status, (await response.json())["status"]) == (503, "loading")
    status, reply = await server.ask(said("hi"))
    assert (status, reply["error"]["code"]) == (503, "engine_unavailable")
    client.attach(Thread())
    status, reply = await server.ask(said("hi"))
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "b")
    assert reply["x_engine_stats"]["lane"] == 1
    async with server.session.get("/health") as response:
        assert response.status == 200
