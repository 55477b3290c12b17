"""The engine's contracts on GLM-5.3: nothing of the engine is written for one family alone."""

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace
from real_pair import GLM, Served, opened
from safetensors.torch import load_file
from test_drafted_answers import Prompter

from tided.engine.build import open_model
from tided.engine.offline import logits
from tided.engine.types import Request, Sampling
from tided.settings import Cache, Tide

TOKENS = load_file(GLM / "golden_main.safetensors")["tokens"].tolist()
ALL, SOME, LEAST = 64, 40, 16  # experts: four layers of 16, and top-4 of each


def ask(name: str, begin: int = 0, tokens: int = 60, answer: int = 12, **fields) -> Request:
    drawn = {key: fields.pop(key) for key in ("temperature", "seed", "top_p") if key in fields}
    return Request(
        request_id=name,
        prompt_ids=(TOKENS * 2)[begin : begin + tokens],
        sampling=Sampling(**{"temperature": 0.0} | drawn),
        max_tokens=answer,
        stop_ids=(),
        **fields,
    )


REQUESTS = (
    ask("a"),
    ask("b", begin=30, tokens=17, temperature=1.0, seed=5),
    ask("c", begin=50, tokens=120, temperature=0.8, seed=9),
    ask("d", begin=90, tokens=3),
)


def glm(ranks: int = 1, resident: int = ALL, numerics: str = "native", lanes: int = 2, tide=None, cache=None, **engine):
    model = opened(ranks, resident, numerics, lanes, path=GLM, prefill_share=0.99, **engine)
    changed = replace(
        model.settings,
        tide=Tide(**tide or {}),
        cache=Cache(**{"context_tokens": 400, "pool_tokens": 1024} | (cache or {})),
    )
    return open_model(changed)


@cache
def plain(resident: int = ALL) -> dict[str, list[int]]:
    """One rank, one lane, no drafts."""
    served = Served(glm(resident=resident, lanes=1), REQUESTS)
    assert served.faults == []
    return {one.request_id: served.tokens(one.request_id) for one in REQUESTS}


def same_answers(served: Served, resident: int = ALL) -> None:
    assert served.faults == []
    for one in REQUESTS:
        assert served.tokens(one.request_id) == plain(resident)[one.request_id], one.request_id
    for rank in served.ranks:
        rank.executor.check()


def test_a_greedy_answer_is_that_of_teacher_forcing_it():
    tokens = Served(glm(numerics="fp32"), [ask("a", tokens=100)]).tokens("a")
    forced = logits(GLM, TOKENS[:100] + tokens[:-1], numerics="fp32")
    assert forced[99:].argmax(dim=-1).tolist() == tokens


@pytest.mark.parametrize("resident", [ALL, SOME])
@pytest.mark.parametrize("draft", ["off", "3", "acceptance"])
def test_beside_another_lane_with_drafts_and_without_an_answer_is_the_same(resident, draft):
    same_answers(Served(glm(resident=resident, draft=draft), REQUESTS), resident)


def test_drafts_that_are_right_are_taken_and_change_nothing():
    """The golden drafter is random and never right, so a prompter that knows the plain answers speaks through it."""

    def prepare(served: Served) -> None:
        for rank in served.ranks:
            rank.executor.model = Prompter(rank.model, REQUESTS, plain())

    served = Served(glm(draft="3"), REQUESTS, prepare=prepare)
    same_answers(served)
    spec = [served.stats(one.request_id)["spec"] for one in REQUESTS]
    assert 10 < sum(one["accepted"] for one in spec) < sum(one["drafted"] for one in spec)


@pytest.mark.parametrize("draft", ["off", "3"])
def test_two_ranks_agree(draft):
    requests = [replace_tokens(one) for one in REQUESTS]
    one, two = (Served(glm(ranks, numerics="fp32", draft=draft), requests) for ranks in (1, 2))
    assert (two.faults, two.link.compared > 3) == ([], True)
    for request in requests:
        assert one.tokens(request.request_id) == two.tokens(request.request_id)


def replace_tokens(request: Request) -> Request:
    """Shorter: two ranks take turns on one core."""
    return replace(request, max_tokens=8)


@pytest.mark.parametrize("resident", [LEAST + 8, SOME])
def test_exact_answers_are_those_of_all_experts(resident):
    exact = [replace(one, fidelity="exact") for one in REQUESTS]
    same_answers(Served(glm(resident=resident, tide={"sync_slots": 4}, draft="3"), exact))


def test_without_exact_the_answers_differ():
    assert plain(LEAST + 8) != plain(ALL)


def test_a_parked_answer_is_as_if_it_never_was(tmp_path: Path):
    requests = [ask("a", tokens=252, answer=136), ask("b", begin=10, tokens=20, answer=180, temperature=1.0, seed=3)]
    roomy = Served(glm(draft="3"), requests)
    tight = Served(glm(cache={"pool_tokens": 640}, draft="3"), requests, cache_dir=tmp_path)
    assert tight.faults == []
    assert tight.stats("b")["parked"] >= 1
    for name in "ab":
        assert tight.tokens(name) == roomy.tokens(name)


PREFIXES = (ask("first", tokens=200), ask("again", tokens=200), ask("half", tokens=100))


def test_a_prefix_that_is_hit_is_as_good_as_computed():
    computed = Served(glm(draft="3"), PREFIXES)
    hit = Served(glm(cache={"prefix_ram_bytes": 1 << 26}, draft="3", lanes=1), PREFIXES)
    assert hit.faults == []
    for one in PREFIXES:
        assert hit.tokens(one.request_id) == computed.tokens(one.request_id)
    assert [hit.stats(name)["cached_tokens"] for name in ("first", "again", "half")] == [0, 200, 96]


def test_a_prefix_from_disk_outlives_the_process(tmp_path: Path):
    first, again, half = PREFIXES
    disk = glm(cache={"prefix_disk_bytes": 1 << 26}, draft="3", lanes=1)
    before = Served(disk, [first], cache_dir=tmp_path)
    for rank in before.ranks:
        assert rank.executor.caching.background.flush(60)
        rank.close()
    later = Served(disk, [again, half], cache_dir=tmp_path)
    assert later.faults == []
    assert later.tokens("again") == before.tokens("first")
    assert [later.stats(name)["cached_tokens"] for name in ("again", "half")] == [200, 96]
