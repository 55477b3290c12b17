"""The engine's contracts on GLM-5.3's other contexts: in FP8, shared by two ranks, and both."""

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace
from real_pair import Served
from test_real_glm53 import ALL, PREFIXES, SOME, TOKENS, ask, glm

from tided.engine.offline import logits

FORMS = {
    "fp8": (1, {"dtype": "fp8"}),
    "split": (2, {"split": True}),
    "fp8 split": (2, {"dtype": "fp8", "split": True}),
}
REQUESTS = (
    ask("a", answer=8),
    ask("b", begin=30, tokens=17, answer=8, temperature=1.0, seed=5),
    ask("c", begin=50, tokens=90, answer=8, temperature=0.8, seed=9),
)
forms = pytest.mark.parametrize("form", FORMS)


def served(form: str, requests, cache_dir: Path | None = None, given=None, **engine) -> Served:
    ranks, kept = FORMS[form]
    found = Served(glm(ranks, cache=kept | (given or {}), **engine), requests, cache_dir=cache_dir)
    assert found.faults == []
    for rank in found.ranks:
        rank.executor.check()
    return found


@cache
def alone(form: str) -> dict[str, list[int]]:
    """One lane, no drafts, all experts."""
    found = served(form, REQUESTS, lanes=1)
    return {one.request_id: found.tokens(one.request_id) for one in REQUESTS}


@forms
@pytest.mark.parametrize("draft", ["off", "3"])
def test_beside_another_lane_and_with_drafts_an_answer_is_the_same(form, draft):
    found = served(form, REQUESTS, draft=draft)
    assert {one.request_id: found.tokens(one.request_id) for one in REQUESTS} == alone(form)


@forms
def test_exact_answers_are_those_of_all_experts(form):
    exact = [replace(one, fidelity="exact") for one in REQUESTS]
    found = served(form, exact, resident=SOME, tide={"sync_slots": 4})
    assert {one.request_id: found.tokens(one.request_id) for one in REQUESTS} == alone(form)


def test_a_parked_answer_is_as_if_it_never_was(tmp_path: Path):
    requests = [ask("a", tokens=252, answer=134), ask("b", begin=10, tokens=120, answer=140, temperature=1.0, seed=3)]
    roomy = served("fp8 split", requests)
    tight = served("fp8 split", requests, tmp_path, {"pool_tokens": 640})
    assert tight.stats("b")["parked"] >= 1
    for name in "ab":
        assert tight.tokens(name) == roomy.tokens(name)


@pytest.mark.parametrize("form", ["fp8", "fp8 split"])
def test_a_prefix_that_is_hit_is_as_good_as_computed(form, tmp_path: Path):
    """From memory, then from disk by another engine."""
    computed = served(form, PREFIXES, draft="3")
    both = {"prefix_ram_bytes": 1 << 26, "prefix_disk_bytes": 1 << 26}
    hit = served(form, PREFIXES, tmp_path, both, draft="3", lanes=1)
    for rank in hit.ranks:
        assert rank.executor.caching.background.flush(60)
        rank.close()
    later = served(form, PREFIXES[1:], tmp_path, both, draft="3", lanes=1)
    for one in PREFIXES:
        assert hit.tokens(one.request_id) == computed.tokens(one.request_id)
    assert [hit.stats(one.request_id)["cached_tokens"] for one in PREFIXES] == [0, 200, 96]
    for one, cached in zip(PREFIXES[1:], (200, 100), strict=True):
        assert later.tokens(one.request_id) == computed.tokens(one.request_id)
        assert later.stats(one.request_id)["cached_tokens"] == cached


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        ({"dtype": "bf16"}, {"dtype": "fp8"}),
        ({"dtype": "fp8"}, {"dtype": "bf16"}),
        ({"split": True}, {"split": False}),
        ({"split": False}, {"split": True}),
    ],
)
def test_what_was_written_in_one_form_is_not_read_in_another(wrote, reads, tmp_path: Path):
    """Of one rank the rows of a shared context and of a whole one are of the same size: the name alone tells."""
    disk = {"prefix_disk_bytes": 1 << 26}
    for kept, cached in ((wrote, 0), (wrote, 200), (reads, 0)):
        found = Served(glm(cache=disk | kept, lanes=1), [PREFIXES[0]], cache_dir=tmp_path)
        assert found.faults == []
        assert found.stats("first")["cached_tokens"] == cached
        for rank in found.ranks:
            assert rank.executor.caching.background.flush(60)
            rank.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_greedy_answer_of_a_shared_context_is_that_of_one_rank_that_keeps_all(dtype):
    """Sums in another order differ in the last bits, not in what is drawn. Teacher-forced logits: within 2e-4."""
    found = served("split", [ask("a", tokens=100)], given={"dtype": dtype}, numerics="fp32")
    settings = glm(cache={"dtype": dtype}, numerics="fp32").settings
    tokens = found.tokens("a")
    forced = logits(settings, TOKENS[:100] + tokens[:-1], resident=ALL)
    assert forced[99:].argmax(dim=-1).tolist() == tokens
