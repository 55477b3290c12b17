"""Replies at the limit of log probabilities: the loop turns while a thread writes them, and no answer changes."""

import asyncio
import json
import sys
import threading

import pytest
from scripted_engine import data, said

from tided.api import json_text
from tided.api.answers import Answers
from tided.api.json_text import Later, to_json
from tided.api.logprob_json import LogprobJson
from tided.engine.types import TokenLogprob, Tokens

TOP = 20
WANTED = {"logprobs": True, "top_logprobs": TOP}


def drawn(answer, ids, top=TOP):
    told = [TokenLogprob(one, -0.5, [(place + 3, -float(place)) for place in range(top)]) for one in ids]
    answer.events.put_nowait(Tokens(answer.request.request_id, list(ids), told))
    answer.drawn += len(told)


def play_of(engine, before, text, times, after="!"):
    def play(answer):
        answer.start()
        drawn(answer, engine.ids(before))
        for _ in range(times):
            drawn(answer, engine.ids(text))
        drawn(answer, engine.ids(after))
        answer.finish()

    return play


@pytest.fixture
def switching():
    """Whoever asks for the interpreter gets it soon, from code that can be asked."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


async def test_the_loop_turns_while_a_long_reply_is_encoded(server, engine, monkeypatch, switching):
    turns, seen, inside, main = 0, set(), False, threading.get_ident()
    encode, make = json_text._encode, LogprobJson._with_likeliest

    async def turn():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def encoding(value):
        nonlocal inside
        inside = threading.get_ident() != main
        text, inside = encode(value), False
        return text

    def making(shown, told):
        if inside:
            seen.add(turns)
        return make(shown, told)

    engine.play = play_of(engine, "</think>", "aä", 1000)
    turning = asyncio.create_task(turn())
    monkeypatch.setattr(json_text, "_encode", encoding)
    monkeypatch.setattr(LogprobJson, "_with_likeliest", making)
    _, reply = await server.ask(said("hi", **WANTED))
    turning.cancel()
    assert len(reply["choices"][0]["logprobs"]["content"][5]["top_logprobs"]) == TOP
    assert len(seen) > 5


async def test_what_a_stream_held_back_is_written_beside_the_loop_at_its_end(server, engine, monkeypatch):
    """Reasoning that is not shown, and whose log probabilities are."""
    threads, chat = [], LogprobJson.chat
    monkeypatch.setattr(
        LogprobJson, "chat", lambda it, told: threads.append((len(told), threading.get_ident())) or chat(it, told)
    )
    monkeypatch.setattr("tided.api.exchange.MOST_AT_ONCE", 50 * (1 + TOP))
    engine.play = play_of(engine, "", "thought", 60, "</think>a")
    more = {"logprobs_include_reasoning": True, "include_reasoning": False}
    chunks = data(await server.stream(said("hi", enable_thinking=True, **WANTED, **more)))
    told = [one for chunk in chunks for choice in chunk["choices"] for one in choice.get("x_reasoning_logprobs", ())]
    assert len(told) > 50
    long = {thread for count, thread in threads if count > 50}
    assert long
    assert threading.get_ident() not in long


async def test_log_probabilities_that_nobody_is_told_do_not_make_a_reply_long(server, engine, monkeypatch):
    threads, chat = set(), LogprobJson.chat
    monkeypatch.setattr(LogprobJson, "chat", lambda *given: threads.add(threading.get_ident()) or chat(*given))
    monkeypatch.setattr("tided.api.exchange.MOST_AT_ONCE", 50 * (1 + TOP))
    engine.play = play_of(engine, "", "thought", 60, "</think>a")
    await server.ask(said("hi", enable_thinking=True, **WANTED))
    assert threads == {threading.get_ident()}


async def test_no_answer_changes_between_two_pieces(server, engine, monkeypatch):
    """A thread may be writing what the first of them said."""
    met, read = [], Answers.next

    async def watched(answers, timeout_s):
        pieces = await read(answers, timeout_s)
        tokens = [generation.reader.tokens for generation in answers.generations]
        for answer in engine.answers:
            answer.say("</think>b") if len(met) < 10 else answer.finish()
        for _ in range(20):
            await asyncio.sleep(0)
        met.append([generation.reader.tokens for generation in answers.generations] == tokens)
        return pieces

    monkeypatch.setattr(Answers, "next", watched)
    engine.play = lambda answer: answer.start() if engine.answers[0] is answer else None
    reply = data(await server.stream(said("hi", n=3)))
    assert len(met) > 10
    assert all(met)
    assert sum(choice["finish_reason"] == "stop" for chunk in reply for choice in chunk["choices"]) == 3


@pytest.mark.parametrize("text", ["plain", "ä\x85 \u2028\u2029\n", "\u2028" * 3])
def test_what_is_made_later_stands_in_its_place(text):
    value = {"a": [Later(lambda one: {"b": one}, text), None], "c": text}
    written = to_json(value)
    assert json.loads(written) == {"a": [{"b": text}, None], "c": text}
    assert not {"\x85", "\u2028", "\u2029"} & set(written)


def test_what_is_no_json_is_refused():
    with pytest.raises(TypeError, match="bytes"):
        to_json({"a": b"x"})
