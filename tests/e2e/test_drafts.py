"""What a client learns of drafts: each answer's steps, tokens a step and depths, over HTTP, from two ranks."""

from collections.abc import Iterator

import pytest

from tests.daemon.helpers import Running, running
from tests.e2e.conftest import ask, mini, post

QUESTION = "What is 12 + 9? Answer step by step."


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(mini(extra='draft = "3"'), tmp_path_factory.mktemp("drafting")) as started:
        yield started


async def stats_of(pair: Running, **fields: object) -> dict:
    status, reply = await post(pair.url, ask(QUESTION, max_tokens=40, **fields))
    assert status == 200, reply
    return reply["x_engine_stats"]


async def test_an_answer_tells_its_steps_tokens_a_step_and_depths(drafting):
    stats = await stats_of(drafting)
    depths = {int(depth): steps for depth, steps in stats["spec_depth"].items()}
    assert stats["steps"] == sum(depths.values()) < stats["completion_tokens"] - 1
    assert max(depths) == 3
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
async def test_what_hangs_on_the_token_before_is_not_drafted(drafting, fields):
    stats = await stats_of(drafting, **fields)
    assert stats["spec_depth"] == {"0": stats["completion_tokens"] - 1}
    assert stats["accept_len_mean"] == 1
    none = {"steps": 0, "drafted": 0, "accepted": 0, "accept_len_mean": 1, "depth_mean": 0}
    assert stats["spec"] == none
