"""C5 and C9 over HTTP, with the whole set resident so that nothing but the engine decides, and drafts, of which each
answer tells its steps, tokens a step and depths."""

import asyncio
import json
import re

import aiohttp
import pytest

from tests.daemon.helpers import running
from tests.e2e.conftest import ROOT, answer, ask, chunks, mini, post

pytestmark = pytest.mark.xdist_group("serving")
QUESTION = "Tell me about Japan."
DRAFTS = 3


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    drafted = mini(model, resident=model.experts, extra=f'draft = "{DRAFTS}"')
    with running(drafted, tmp_path_factory.mktemp("whole")) as started:
        yield started


async def test_a_seeded_request_repeats_whatever_runs_beside_it(whole):
    body = ask("Tell me a short story about a fox.", temperature=1.2, seed=77, max_tokens=40)
    alone = answer(await post(whole.url, body))
    noisy = [ask(f"Tell me a story about {x}.", temperature=1, max_tokens=60) for x in ("a fox", "the sea")]
    beside, *_ = await asyncio.gather(post(whole.url, body), *(post(whole.url, other) for other in noisy))
    assert answer(beside) == alone
    assert answer(await post(whole.url, body | {"seed": 78})) != alone


async def test_a_greedy_answer_is_the_same_alone_and_beside_another_lane(whole):
    alone = answer(await post(whole.url, ask(QUESTION)))
    beside, _ = await asyncio.gather(post(whole.url, ask(QUESTION)), post(whole.url, ask("What is 12 + 30?")))
    assert answer(beside) == alone


async def test_streamed_and_whole_answers_are_the_same(whole):
    body = ask("What is the capital of Norway?", max_tokens=24)
    answered = answer(await post(whole.url, body))
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{whole.url}/v1/chat/completions", json=body | {"stream": True}) as reply,
    ):
        events = await chunks(reply)
    streamed = "".join(c["delta"].get("content") or "" for e in events[:-1] for c in e["choices"])
    assert events[-1] == "[DONE]"
    assert streamed == answered != ""


async def test_with_every_expert_resident_nothing_is_substituted(whole):
    _, reply = await post(whole.url, ask(QUESTION))
    assert reply["x_engine_stats"]["substituted_weight_share"] == 0
    assert reply["x_engine_stats"]["expert_misses"] == 0


async def stats_of(pair, **fields):
    status, reply = await post(pair.url, ask("What is 12 + 9? Answer step by step.", max_tokens=40, **fields))
    assert status == 200, reply
    return reply["x_engine_stats"]


async def test_an_answer_tells_its_steps_tokens_a_step_and_depths(whole):
    stats = await stats_of(whole)
    depths = {int(depth): steps for depth, steps in stats["spec_depth"].items()}
    assert stats["steps"] == sum(depths.values()) < stats["completion_tokens"] - 1
    assert max(depths) == DRAFTS
    assert stats["spec"]["drafted"] == sum(depth * steps for depth, steps in depths.items())
    assert stats["spec"]["accepted"] == round(stats["accept_len_mean"] * stats["steps"]) - stats["steps"] > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.5},
        {"logit_bias": {"300": -5}},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_hangs_on_the_token_before_is_not_drafted(whole, fields):
    stats = await stats_of(whole, **fields)
    assert stats["spec_depth"] == {"0": stats["completion_tokens"] - 1}
    assert stats["accept_len_mean"] == 1
    none = {"steps": 0, "drafted": 0, "accepted": 0, "accept_len_mean": 1, "depth_mean": 0}
    assert stats["spec"] == none


async def test_an_exact_answer_of_a_quarter_of_the_experts_is_that_of_all(model, whole, tmp_path):
    """And one without drafts is that with them."""
    questions = [ask(QUESTION), ask("What is 12 + 30?", seed=5, temperature=0.8)]
    expected = [answer(await post(whole.url, body)) for body in questions]
    with running(mini(model, resident=model.experts // 4), tmp_path) as few:
        replies = await asyncio.gather(*(post(few.url, body | {"fidelity": "exact"}) for body in questions))
        assert [answer(reply) for reply in replies] == expected
        for _, reply in replies:
            stats = reply["x_engine_stats"]
            assert (stats["fidelity"], stats["substituted_weight_share"]) == ("exact", 0)
            assert stats["decode"]["classes"]["read"] == stats["decode"]["missed_picks"] > 0
        status, reply = await post(few.url, questions[0] | {"fidelity": "perfect"})
        assert (status, reply["error"]["param"]) == (400, "fidelity")


async def test_the_requests_of_the_page_do_what_it_says(whole):
    page = (ROOT / "docs" / "openai.md").read_text()
    bodies = [json.loads(body) for body in re.findall(r"-d '(\{.*?\})'", page, re.DOTALL)]
    tool = next(body for body in bodies if "tools" in body)
    thinking = next(body for body in bodies if "thinking" in body)
    call = (await post(whole.url, tool))[1]["choices"][0]["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("read_file", {"path": "notes.txt"})
    message = (await post(whole.url, thinking))[1]["choices"][0]["message"]
    assert message["reasoning_content"].strip()
    assert "38." in message["content"]
