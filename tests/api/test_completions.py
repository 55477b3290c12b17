"""POST /v1/completions: raw prompts, several of them, in a stream and whole."""

import re
import threading

import pytest
from scripted_engine import data

from tided.api.logprob_json import LogprobJson
from tided.chat.deepseek_v41 import BOS
from tided.chat.messages import Segment
from tided.engine.types import Scored, TokenLogprob, Tokens

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


async def test_the_bytes_of_a_stream(server, engine):
    engine.script("He", "llo")
    async with server.post({"prompt": "a", "echo": True, "stream": True, "x_engine_stats": False}, **PATH) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        got = (await response.read()).decode()
    [head] = set(re.findall(r'\{"id".*?"choices": ', got))
    assert re.fullmatch(
        r'\{"id": "cmpl-[0-9A-Za-z]{24}", "object": "text_completion", "created": \d+, "model": "deepseek", '
        r'"system_fingerprint": "tidelm-[0-9a-f]{8}", "choices": ',
        head,
    )
    texts = [
        ": ok\n\n",
        *(
            f'data: {head}[{{"index": 0, "text": "{text}", "logprobs": null, "finish_reason": null}}]}}\n\n'
            for text in ("a", "He", "llo")
        ),
        f'data: {head}[{{"index": 0, "text": "", "logprobs": null, "finish_reason": "stop", '
        '"stop_reason": null}]}\n\n',
        "data: [DONE]\n\n",
    ]
    assert got == "".join(texts)


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
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0, "logprobs": 1, "echo": False}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0, "prompt_logprobs": 101}, "prompt_logprobs"),
        ({"prompt": "a", "adapt": False}, "adapt"),
        ({"prompt": "a", "adapt": False, "prompt_logprobs": 1}, "adapt"),
        ({"prompt": "a", "adapt": False, "max_tokens": 0, "echo": True}, "adapt"),
        ({"prompt": "a", "max_tokens": False, "echo": True}, "max_tokens"),
        ({"prompt": "a", "n": 5}, "n"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(server, fields, param):
    assert (await server.refused(fields, **PATH))["param"] == param


def scores_of(engine, answer: str = "", parts: int = 2):
    """The engine tells of a prompt in several events, then draws `answer` and one token more."""

    def play(running):
        running.start()
        ids = running.request.prompt_ids
        told = [
            TokenLogprob(token_id, -float(at), [(4, -0.5), (token_id, -float(at)), (3, -9.0)], 2)
            for at, token_id in enumerate(ids)
        ]
        cut = -(-len(told) // parts)
        for at in range(1, len(told), cut):
            running.events.put_nowait(Scored(running.request.request_id, told[at : at + cut]))
        for token_id in [*engine.ids(answer), 5]:
            told = [TokenLogprob(token_id, -0.5, [])]
            running.drawn += 1
            running.events.put_nowait(Tokens(running.request.request_id, [token_id], told))
        running.finish("length")

    engine.play = play


async def choice_of(server, body, stream: bool) -> tuple[dict, int]:
    """(the whole choice, completion tokens)."""
    if not stream:
        _, reply = await server.ask(body, **PATH)
        return reply["choices"][0], reply["usage"]["completion_tokens"]
    chunks = data(await server.stream(body | {"stream_options": {"include_usage": True}}, **PATH))
    choice: dict = {"text": "", "logprobs": {}}
    for one in (one for chunk in chunks for one in chunk["choices"]):
        choice["text"] += one["text"]
        for name, values in (one["logprobs"] or {}).items():
            choice["logprobs"].setdefault(name, []).extend(values)
        choice["finish_reason"] = one["finish_reason"]
    return choice, chunks[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_and_nothing_is_answered(server, engine, tokenizer, stream):
    scores_of(engine)
    body = {"prompt": "the tide 🌊 goes", "echo": True, "logprobs": 2, "max_tokens": 0}
    choice, completion_tokens = await choice_of(server, body, stream)
    ids = engine.request.prompt_ids
    assert (engine.request.scored, engine.request.scored_top, engine.request.adapts) == (True, 2, True)
    assert (choice["text"], choice["finish_reason"], completion_tokens) == (body["prompt"], "length", 0)
    told = choice["logprobs"]
    assert told["token_logprobs"] == [None, *(-float(at) for at in range(1, len(ids)))]
    assert told["tokens"][:2] == [BOS, tokenizer.decoder().feed([ids[1]])]
    assert told["top_logprobs"][0] is None
    assert len(told["top_logprobs"][1]) == 2
    # Each token's place in the text: the beginning token, which the text lacks, takes none.
    decoder, place = tokenizer.decoder(), 0
    for token_id, offset in zip(ids, told["text_offset"], strict=True):
        assert offset == place
        place += len(decoder.feed([token_id]))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_before_its_answer(server, engine, stream):
    scores_of(engine, "out")
    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 0, "max_tokens": 9}
    choice, completion_tokens = await choice_of(server, body, stream)
    drawn = engine.answers[-1].drawn
    assert completion_tokens == drawn
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0] + [-0.5] * drawn
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert len({len(values) for values in choice["logprobs"].values()}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_s_tokens_are_told_by_id_with_their_ranks(server, engine, stream):
    """The shape is vLLM's, so that a client of one reads the other."""
    scores_of(engine)
    body = {"prompt": [5, 6, 7], "prompt_logprobs": 1, "max_tokens": 0, "adapt": False}
    reply = await server.stream(body, **PATH) if stream else (await server.ask(body, **PATH))[1]
    chunks = data(reply) if stream else [reply]
    assert (engine.request.scored, engine.request.scored_top, engine.request.adapts) == (True, 1, False)
    assert engine.request.logprobs is None
    choices = [one for chunk in chunks for one in chunk["choices"]]
    assert "".join(one["text"] for one in choices) == ""
    assert choices[0]["logprobs"] is None
    [told] = [one["prompt_logprobs"] for one in choices if "prompt_logprobs" in one]
    assert told[0] is None
    assert [list(one) for one in told[1:]] == [["6", "4"], ["7", "4"]]
    assert told[2]["7"] | {"decoded_token": ""} == {"logprob": -2.0, "rank": 2, "decoded_token": ""}
    assert told[2]["4"]["rank"] == 1
    assert [one["4"]["logprob"] for one in told[1:]] == [-0.5, -0.5]


async def test_an_echo_and_ids_tell_of_as_many_as_each_was_asked_for(server, engine):
    scores_of(engine)
    body = {"prompt": [5, 6], "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 0}
    _, reply = await server.ask(body, **PATH)
    [choice] = reply["choices"]
    assert engine.request.scored_top == 3
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1
    assert list(choice["prompt_logprobs"][1]) == ["6", "4", "3"]


async def test_what_one_reply_tells_of_a_prompt_is_bounded(server, engine, monkeypatch):
    monkeypatch.setattr("tided.api.completions_request.MAX_SCORES", 100)
    error = await server.refused({"prompt": [5] * 34, "prompt_logprobs": 2, "max_tokens": 0}, **PATH)
    assert error["param"] == "prompt"
    scores_of(engine)
    await server.ask({"prompt": [5] * 33, "prompt_logprobs": 2, "max_tokens": 0}, **PATH)


@pytest.mark.parametrize(
    ("fields", "each"),
    [({"prompt_logprobs": 2}, 3), ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, 5)],
    ids=["by id", "in both shapes"],
)
async def test_all_choices_of_one_reply_count_together(server, engine, monkeypatch, fields, each):
    body = {"prompt": [[5] * 10] * 8, "n": 4, "max_tokens": 0, **fields}
    scores_of(engine)
    monkeypatch.setattr("tided.api.completions_request.MAX_SCORES", 8 * 4 * 10 * each - 1)
    error = await server.refused(body, **PATH)
    assert error["param"] == "prompt"
    monkeypatch.setattr("tided.api.completions_request.MAX_SCORES", 8 * 4 * 10 * each)
    status, reply = await server.ask(body, **PATH)
    assert (status, len(reply["choices"])) == (200, 32)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("long", [False, True])
async def test_a_long_reply_is_written_beside_the_loop(server, engine, monkeypatch, stream, long):
    """The loop feeds the service manager's watchdog."""
    monkeypatch.setattr("tided.api.exchange.MOST_AT_ONCE", 100)
    threads, by_id = set(), LogprobJson.by_id
    monkeypatch.setattr(LogprobJson, "by_id", lambda *given: threads.add(threading.get_ident()) or by_id(*given))
    scores_of(engine)
    body = {"prompt": [[5] * (12 if long else 4)] * 2, "n": 4, "prompt_logprobs": 2, "max_tokens": 0}
    reply = data(await server.stream(body, **PATH)) if stream else [(await server.ask(body, **PATH))[1]]
    told = {one["index"] for chunk in reply for one in chunk["choices"] if "prompt_logprobs" in one}
    assert told == set(range(8))
    assert (threading.get_ident() in threads) is not long


async def test_a_long_answer_s_probabilities_are_written_beside_the_loop_too(server, engine, monkeypatch):
    monkeypatch.setattr("tided.api.exchange.MOST_AT_ONCE", 10)
    threads, listed = set(), LogprobJson.listed
    monkeypatch.setattr(LogprobJson, "listed", lambda *given: threads.add(threading.get_ident()) or listed(*given))

    def play(answer):
        ids = answer.start().ids("a long answer of more than a few tokens")
        told = [TokenLogprob(one, -0.5, [(one, -0.5)]) for one in ids]
        answer.events.put_nowait(Tokens(answer.request.request_id, ids, told))
        answer.finish()

    engine.play = play
    await server.ask({"prompt": "a", "logprobs": 5}, **PATH)
    assert threads
    assert threading.get_ident() not in threads


async def test_a_spelled_token_takes_its_place_in_the_text(server, engine):
    scores_of(engine)
    prompt = f"{BOS}a"
    choice, _ = await choice_of(server, {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}, False)
    assert choice["logprobs"]["tokens"] == [BOS, "a"]
    assert choice["logprobs"]["text_offset"] == [0, len(BOS)]


@pytest.mark.parametrize("fields", [{"echo": True}, {"logprobs": 1}, {}], ids=str)
async def test_a_prompt_is_scored_only_where_both_are_asked_for(server, engine, fields):
    engine.script("x")
    await server.ask({"prompt": "a", **fields}, **PATH)
    assert not engine.request.scored


async def test_a_prompt_and_an_answer_that_do_not_fit_are_refused_with_the_numbers(server):
    for body in ({"prompt": [3] * 4090, "max_tokens": 100}, {"prompt": [3] * 5000}):
        error = await server.refused(body, **PATH)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "4096" in error["message"]
