"""Several answers, log probabilities, grammars and tool choices of chat completions."""

import pytest
from scripted_engine import data, gather, said

from tided.chat.deepseek_v41_tools import DSML
from tided.engine.types import TokenLogprob, Tokens

CALL = (
    f'\n\n<{DSML} calls>\n<{DSML} invoke name="f">\n<{DSML} parameter name="a" string="false">1</{DSML} parameter>\n'
    f"</{DSML} invoke>\n</{DSML} calls>"
)


def tool(name="f", **more):
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


async def test_n_answers_of_one_prompt(server, engine):
    engine.play = lambda answer: (answer.start().say(f"</think>{len(engine.answers)}"), answer.finish())
    _, reply = await server.ask(said("hi", n=3, seed=2**63 - 1))
    assert [(c["index"], c["message"]["content"]) for c in reply["choices"]] == [(0, "1"), (1, "2"), (2, "3")]
    seeds = [answer.request.sampling.seed for answer in engine.answers]
    assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1], "they follow each other, within 64 bits"
    one = len(engine.request.prompt_ids)
    assert reply["usage"]["prompt_tokens"] == one
    assert reply["usage"]["completion_tokens"] == sum(answer.drawn + 1 for answer in engine.answers)


async def test_the_chunks_of_several_answers_interleave_and_each_has_its_first_and_its_last(server, engine):
    engine.script("</think>", "He", "llo")
    chunks = data(await server.stream(said("hi", n=2, stream_options={"include_usage": True})))
    for at in range(2):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == at]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Hello"
        assert [choice["finish_reason"] for choice in own][-1] == "stop"
        assert own[-1]["delta"] == {}
    assert chunks[-1]["choices"] == []
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_fault_of_one_of_several_ends_the_stream_and_cancels_the_others(server, engine):
    def play(answer):
        answer.start().say("</think>a")
        if len(engine.answers) == 2:
            answer.fail("gone")

    engine.play = play
    chunks = data(await server.stream(said("hi", n=2)))
    assert "gone" in chunks[-1]["error"]["message"]
    assert engine.cancels == [engine.answers[0].request.request_id]


def with_logprobs(answer, ids, text):
    told = [TokenLogprob(token, -0.5, [(token, -0.5), (3, float("-inf"))]) for token in ids(text)]
    answer.events.put_nowait(Tokens(answer.request.request_id, ids(text), told))
    answer.drawn += len(told)


@pytest.mark.parametrize("with_reasoning", [False, True])
async def test_log_probabilities_of_content_and_where_asked_of_reasoning(
    server, engine, ids, tokenizer, with_reasoning
):
    def play(answer):
        with_logprobs(answer.start(), ids, "so</think>")
        with_logprobs(answer, ids, "é!")
        answer.finish()

    engine.play = play
    body = said("hi", logprobs=True, top_logprobs=2, logprobs_include_reasoning=with_reasoning)
    _, reply = await server.ask(body)
    assert engine.request.logprobs == 2
    choice = reply["choices"][0]
    told = choice["logprobs"]["content"]
    assert [byte for one in told for byte in one["bytes"]] == list("é!".encode())
    assert [one["token"] for one in told] == [
        bytes(tokenizer.token_bytes[token]).decode("utf-8", "replace") for token in ids("é!")
    ]
    assert told[0]["top_logprobs"][1]["logprob"] == -9999.0, "JSON has no infinity"
    assert choice["logprobs"]["refusal"] is None
    reasoning = choice.get("x_reasoning_logprobs")
    assert [one["token"] for one in reasoning or ()] == (["s", "o"] if len(ids("so")) == 2 else ["so"]) * with_reasoning
    chunks = data(await server.stream(body))
    streamed = [one for chunk in chunks for c in chunk["choices"] if c["logprobs"] for one in c["logprobs"]["content"]]
    assert streamed == told


async def test_without_logprobs_the_member_is_null(server, engine):
    engine.script("</think>x")
    assert (await server.ask(said("hi")))[1]["choices"][0]["logprobs"] is None


async def test_reasoning_inside_the_text_where_it_is_asked_for(server, engine):
    engine.script("pl", "an</think>", "Hi")
    _, reply = await server.ask(said("hi", separate_reasoning=False))
    assert reply["choices"][0]["message"]["content"] == "<think>plan</think>Hi"
    assert "reasoning_content" not in reply["choices"][0]["message"]
    streamed = gather(data(await server.stream(said("hi", separate_reasoning=False))))
    assert streamed["content"] == "<think>plan</think>Hi"
    engine.script("plan", reason="length")
    assert (await server.ask(said("hi", separate_reasoning=False)))[1]["choices"][0]["message"]["content"].endswith(
        "</think>"
    )


def allows(guide, token_id: int) -> bool:
    mask = guide.mask()
    return mask is None or bool(mask[token_id // 8] >> token_id % 8 & 1)


@pytest.fixture
def guided(server, engine, ids):
    """guided(body, text) -> how many tokens of the text the request's guide allows, and whether all."""
    guides = []
    submit = engine.submit
    engine.submit = lambda request, guide=None, pixels=(): (guides.append(guide), submit(request))[1]

    async def follow(body, text):
        engine.script("x")
        status, reply = await server.ask(body)
        assert status == 200, reply
        guide = guides[-1]
        assert engine.request.guided is (guide is not None)
        for token_id in ids(text) if guide else ():
            if not allows(guide, token_id):
                return False
            guide.advance(token_id)
        return guide is None or allows(guide, engine.request.stop_ids[0])

    return follow


ANSWER = said("hi", enable_thinking=False)
FORCED = [
    pytest.param("required", id="required"),
    pytest.param({"type": "function", "function": {"name": "f"}}, id="named"),
    pytest.param({"type": "function", "name": "f"}, id="named, flat"),
    pytest.param({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool()]}}, id="allowed"),
]


@pytest.mark.parametrize("choice", FORCED)
async def test_a_forced_choice_is_kept_and_with_thinking_after_it(guided, engine, choice):
    body = {"tools": [tool(), tool("g")], "tool_choice": choice}
    inside = CALL.partition(" calls>\n")[2]
    assert await guided(ANSWER | body, inside)
    assert not await guided(ANSWER | body, "Hello")
    assert await guided(ANSWER | body, inside.replace('"f"', '"g"')) is (choice == "required")
    assert await guided(said("hi", enable_thinking=True) | body, f"I think.</think>{CALL}")
    assert not await guided(said("hi", enable_thinking=True) | body, "I think.</think>Hello")


async def test_auto_binds_only_where_a_tool_is_strict_or_tools_are_chosen(guided):
    wrong = CALL.replace(">1<", ">x<")
    assert await guided(ANSWER | {"tools": [tool()]}, wrong)
    strict = ANSWER | {"tools": [tool(strict=True)]}
    assert not await guided(strict, wrong)
    assert await guided(strict, f"Let me see.{CALL}")
    assert await guided(strict, "No call.")
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    assert not await guided(ANSWER | {"tools": [tool(), tool("g")], "tool_choice": some}, CALL)
    assert await guided(ANSWER | {"tools": [tool(strict=True)], "tool_choice": "none"}, "anything")


async def test_one_call_where_calls_are_not_parallel(guided, engine):
    inside = CALL.partition(" calls>\n")[2]
    invoke, _, end = inside.rpartition("</")
    body = ANSWER | {"tools": [tool()], "tool_choice": "required"}
    assert await guided(body, f"{invoke}{invoke}</{end}")
    assert not await guided(body | {"parallel_tool_calls": False}, f"{invoke}{invoke}</{end}")


async def test_formats(guided, engine, tokenizer):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    named = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    free = {"response_format": {"type": "json_object"}}
    assert await guided(ANSWER | named, '{"a": 1}')
    assert not await guided(ANSWER | named, '{"b": 1}')
    prompt = engine.request.prompt_ids
    assert await guided(ANSWER | free, '{"b": [1]}')
    assert not await guided(ANSWER | free, "[1]")
    assert len(engine.request.prompt_ids) < len(prompt), "the schema is in the prompt"
    assert await guided(said("hi") | named, 'well {</think>{"a": 1}')
    assert await guided(ANSWER | {"response_format": {"type": "text"}}, "anything")


async def test_a_schema_that_cannot_be_enforced_is_refused(server):
    body = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "sausage"}}}
    error = await server.refused(ANSWER | {"response_format": body})
    assert error["param"] == "response_format.json_schema.schema"
    assert "cannot be enforced" in error["message"]


async def test_penalties_bias_and_least_length_reach_the_engine(server, engine):
    engine.script("</think>x")
    body = said(
        "hi", presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={"7": -100}, min_tokens=2
    )
    assert (await server.ask(body))[0] == 200
    sampling = engine.request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -0.5, 1.5)
    assert sampling.logit_bias == {7: -100}
    assert engine.request.min_tokens == 2
