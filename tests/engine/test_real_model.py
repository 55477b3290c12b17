"""The engine's contracts on real models, of every family: ranks, lanes, chunks and a resident set that changes while it
serves."""

from functools import cache
from pathlib import Path

import pytest
from engine_fakes import request
from real_pair import Form, Served, ask, forms, opened, with_tide

from tests.bundled import Mini
from tided.engine.offline import logits
from tided.engine.types import Request
from tided.tide.demand import RouterShape
from tided.tide.history import History
from tided.tide.pilot import Pilot


def asked(mini: Mini, name: str, begin: int = 0, tokens: int = 40, answer: int = 12, **sampling) -> Request:
    return ask(name, mini.random.prompt[begin : begin + tokens], answer, **sampling)


def drawn_and_greedy(mini: Mini) -> list[Request]:
    """A short prompt, a long one, drawn and greedy ones."""
    return [
        asked(mini, "a", tokens=60),
        asked(mini, "b", begin=30, tokens=17, temperature=1.0, seed=5),
        asked(mini, "c", begin=50, tokens=90, answer=8, temperature=0.8, seed=9),
        asked(mini, "d", begin=90, tokens=3),
    ]


def test_a_greedy_answer_is_that_of_teacher_forcing_it(mini):
    prompt = mini.random.prompt[:100]
    tokens = Served(opened(of=mini), [ask("a", prompt, 10)]).tokens("a")
    forced = logits(mini.random.path, prompt + tokens[:-1], numerics="fp32")
    assert forced[len(prompt) - 1 :].argmax(dim=-1).tolist() == tokens


@pytest.mark.parametrize("draft", ["off", "3"])
def test_one_rank_and_two_ranks_draw_the_same_tokens(mini, draft):
    requests = [
        asked(mini, "a"),
        asked(mini, "b", begin=30, temperature=1.0, seed=5),
        asked(mini, "c", begin=50, tokens=21),
    ]
    one, two = (Served(opened(ranks, of=mini, draft=draft), requests) for ranks in (1, 2))
    assert (two.faults, two.link.compared > 3) == ([], True)
    for name in "abc":
        assert one.tokens(name) == two.tokens(name)
        assert len(two.tokens(name)) == 12


@cache
def alone(form: Form, resident: int) -> dict[str, list[int]]:
    """One lane, no drafts."""
    served = Served(form.model(resident, lanes=1), drawn_and_greedy(form.mini))
    assert served.faults == []
    return {name: served.tokens(name) for name in "abcd"}


@pytest.mark.parametrize(("kept", "draft"), [("experts", "off"), ("experts", "3"), ("some", "acceptance")])
@forms("deepseek, bounded", "deepseek, bounded, two ranks", "deepseek, two ranks", "glm, two ranks")
def test_alone_and_beside_other_lanes_an_answer_is_the_same(form, kept, draft):
    resident = getattr(form.mini.random, kept)
    beside = Served(form.model(resident, draft=draft), drawn_and_greedy(form.mini))
    assert beside.faults == []
    assert {name: beside.tokens(name) for name in "abcd"} == alone(form, resident)
    for rank in beside.ranks:
        rank.executor.check()


def test_with_every_expert_resident_nothing_is_missed(mini):
    served = Served(opened(of=mini), [asked(mini, "a")])
    stats, shape = served.stats("a"), served.ranks[0].model.shape
    assert (stats["expert_hit_rate"], stats["substituted_weight_share"], stats["swaps"]) == (1.0, 0.0, 0)
    assert stats["experts"]["routed_picks"] == (40 + 11) * shape.moe_layers * shape.top_k


def adaptive(mini: Mini, ranks: int, folder: Path, requests) -> Served:
    some = mini.random.some
    model = with_tide(opened(ranks, some, of=mini), sensitivity="max", min_prefill_tokens=16)
    shape = RouterShape(model.shape.moe_layers, model.shape.experts_per_layer, model.shape.top_k)
    history = History.open(folder, "random", shape, record=True)
    try:
        return Served(model, requests, Pilot(history, None, model.settings.tide, shape, some))
    finally:
        history.close()


def test_the_resident_set_follows_the_traffic_on_both_ranks_alike(mini, tmp_path):
    requests = [asked(mini, "a"), asked(mini, "b", begin=50), asked(mini, "c", begin=20)]
    two = adaptive(mini, 2, tmp_path, requests)
    assert (two.faults, two.link.compared > 3) == ([], True)
    assert two.engine.residency.generation >= 2
    assert two.ranks[0].residents.pairs == two.ranks[1].residents.pairs == two.pilot.residents
    assert two.ranks[0].residents.state() == two.ranks[1].residents.state()
    assert sum(two.stats(name)["swaps"] for name in "abc") > 0
    for rank in two.ranks:
        rank.residents.check_integrity()


def test_a_full_pool_makes_requests_wait_and_serves_them_all(mini):
    """4 pages; each of the long ones takes 2."""
    long = [asked(mini, name, tokens=100, answer=40) for name in "abc"]
    served = Served(opened(lanes=4, of=mini, queue=8), [*long, request("tiny", prompt=3, max_tokens=2)])
    assert served.faults == []
    assert [len(served.tokens(name)) for name in ("a", "b", "c", "tiny")] == [40, 40, 40, 2]
    assert served.stats("c")["queue_s"] > 0
