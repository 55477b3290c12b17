"""POST /v1/completions: raw prompts, several of them, in a stream and whole."""

import pytest
from scripted_engine import data

from tided.chat.deepseek_v41 import BOS
from tided.chat.messages import Segment

PATH = {"path": "/v1/completions"}


async def test_a_text_gets_a_beginning_token_and_an_answer(server, engine, tokenizer):
    engine.script("Hello", " there")
    status, reply = await server.ask({"prompt": "Say"}, **PATH)
    assert status == 200
    assert reply["object"] == "text_completion"
    assert [(c["index"], c["text"], c["finish_reason"], c["logprobs"]) for c in reply["choices"]] == [
        (0, "Hello there", "stop", None)
    ]
    assert engine.request.prompt_ids == [tokenizer.special_id(BOS), *tokenizer.encode_text("Say")]
    assert engine.request.max_tokens == 16
    assert reply["usage"]["prompt_tokens"] == len(engine.request.prompt_ids)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": f"{BOS}a"}, [Segment(BOS, special=True), Segment("a")]),
        ({"prompt": f"{BOS}a", "parse_special": False}, [Segment(BOS, special=True), Segment(f"{BOS}a")]),
        ({"prompt": "a", "add_bos": False}, [Segment("a")]),
        ({"prompt": ""}, [Segment(BOS, special=True)]),
        ({}, [Segment(BOS, special=True)]),
        ({"prompt": []}, [Segment(BOS, special=True)]),
    ],
)
async def test_what_a_prompt_s_ids_are(server, engine, tokenizer, body, expected):
    engine.script("x")
    assert (await server.ask(body, **PATH))[0] == 200
    assert engine.request.prompt_ids == tokenizer.encode(expected)


async def test_ids_are_taken_as_they_are(server, engine):
    engine.script("x")
    await server.ask({"prompt": [5, 6, 7]}, **PATH)
    assert engine.request.prompt_ids == [5, 6, 7]


async def test_several_prompts_with_several_answers_each_and_echo(server, engine):
    engine.script("!")
    _, reply = await server.ask({"prompt": ["a", "b"], "n": 2, "echo": True, "seed": 7}, **PATH)
    assert [(c["index"], c["text"]) for c in reply["choices"]] == [(0, "a!"), (1, "a!"), (2, "b!"), (3, "b!")]
    assert [answer.request.sampling.seed for answer in engine.answers] == [7, 8, 7, 8]
    assert len({answer.request.request_id for answer in engine.answers}) == 4
    assert reply["usage"]["prompt_tokens"] == sum(len(a.request.prompt_ids) for a in engine.answers[::2])
    assert reply["usage"]["completion_tokens"] == 8


async def test_a_stream_has_a_last_chunk_for_each_choice_and_a_usage_chunk(server, engine):
    engine.script("He", "llo")
    body = {"prompt": ["a", "b"], "echo": True, "stream_options": {"include_usage": True}}
    sent = await server.stream(body, **PATH)
    assert sent[0] == ": ok\n\n"
    assert sent[-1] == "data: [DONE]\n\n"
    chunks = data(sent)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * (engine.answers[0].drawn + 1)
    for at, echo in enumerate("ab"):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == at]
        assert "".join(choice["text"] for choice in own) == f"{echo}Hello"
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
        assert own[-1]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_a_stop_string_is_found_over_pieces_in_all_text(server, engine):
    engine.script("DEF", "G", "HI", "J", "more")
    _, reply = await server.ask({"prompt": "x", "stop": "EFGHIJ"}, **PATH)
    assert reply["choices"][0]["text"] == "D"
    assert reply["choices"][0]["stop_reason"] == "EFGHIJ"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": [[1], "a", {}]}, "prompt[2]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "echo"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "n": 5}, "n"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(server, fields, param):
    assert (await server.refused(fields, **PATH))["param"] == param


async def test_a_prompt_and_an_answer_that_do_not_fit_are_refused_with_the_numbers(server):
    for body in ({"prompt": [3] * 4090, "max_tokens": 100}, {"prompt": [3] * 5000}):
        error = await server.refused(body, **PATH)
        assert error["code"] == "context_length_exceeded"
        assert "4096" in error["message"]
