"""The engine's contracts on a real model: ranks, lanes, chunks and a resident set that changes while it serves."""

import json
from pathlib import Path

import pytest
from engine_fakes import request
from msgspec.structs import replace
from real_pair import GOLDEN, Served, opened

from tided.engine.offline import logits
from tided.engine.types import Request, Sampling
from tided.settings import Tide
from tided.tide.demand import RouterShape
from tided.tide.history import History
from tided.tide.pilot import Pilot

PROMPT = json.loads((GOLDEN / "inputs.json").read_text())["prompt_ids"]


def ask(name: str, begin: int = 0, tokens: int = 40, answer: int = 12, **sampling) -> Request:
    return Request(
        request_id=name,
        prompt_ids=PROMPT[begin : begin + tokens],
        sampling=Sampling(**{"temperature": 0.0} | sampling),
        max_tokens=answer,
        stop_ids=(),
    )


def test_a_greedy_answer_is_that_of_teacher_forcing_it():
    tokens = Served(opened(), [ask("a", tokens=len(PROMPT), answer=10)]).tokens("a")
    forced = logits(GOLDEN, PROMPT + tokens[:-1], numerics="fp32")
    assert forced[len(PROMPT) - 1 :].argmax(dim=-1).tolist() == tokens


def test_one_rank_and_two_ranks_draw_the_same_tokens():
    requests = [ask("a"), ask("b", begin=30, temperature=1.0, seed=5), ask("c", begin=50, tokens=21)]
    one, two = Served(opened(1), requests), Served(opened(2), requests)
    assert (two.faults, two.link.compared > 3) == ([], True)
    for name in "abc":
        assert one.tokens(name) == two.tokens(name)
        assert len(two.tokens(name)) == 12


@pytest.mark.parametrize("resident", [80, 45])
def test_alone_and_beside_other_lanes_an_answer_is_the_same(resident):
    drawn = ask("a", temperature=1.0, seed=11)
    alone = Served(opened(resident=resident, numerics="native"), [drawn])
    beside = Served(
        opened(resident=resident, numerics="native"),
        [ask("x", begin=10, tokens=50, answer=20), drawn, ask("y", begin=60, temperature=0.7)],
    )
    assert beside.tokens("a") == alone.tokens("a")


def test_with_every_expert_resident_nothing_is_missed():
    stats = Served(opened(), [ask("a")]).stats("a")
    assert (stats["expert_hit_rate"], stats["substituted_weight_share"], stats["swaps"]) == (1.0, 0.0, 0)
    assert stats["experts"]["routed_picks"] == (40 + 11) * 10 * 3


def adaptive(ranks: int, folder: Path, requests) -> Served:
    model = opened(ranks, resident=45)
    model = replace_tide(model, Tide(sensitivity="max", min_prefill_tokens=16))
    shape = RouterShape(model.shape.moe_layers, model.shape.experts_per_layer, model.shape.top_k)
    history = History.open(folder, "golden", shape, record=True)
    try:
        return Served(model, requests, Pilot(history, None, model.settings.tide, shape, 45))
    finally:
        history.close()


def replace_tide(model, tide):
    return type(model)(replace(model.settings, tide=tide), model.checkpoint, model.family, model.shape, model.record)


def test_the_resident_set_follows_the_traffic_on_both_ranks_alike(tmp_path):
    requests = [ask("a"), ask("b", begin=50), ask("c", begin=20)]
    two = adaptive(2, tmp_path, requests)
    assert (two.faults, two.link.compared > 3) == ([], True)
    assert two.engine.residency.generation >= 2
    assert two.ranks[0].residents.pairs == two.ranks[1].residents.pairs == two.pilot.residents
    assert two.ranks[0].residents.state() == two.ranks[1].residents.state()
    assert sum(two.stats(name)["swaps"] for name in "abc") > 0
    for rank in two.ranks:
        rank.residents.check_integrity()


def test_a_full_pool_makes_requests_wait_and_serves_them_all():
    requests = [ask(name, tokens=100, answer=60) for name in "abc"] + [request("tiny", prompt=3, max_tokens=2)]
    served = Served(opened(lanes=4, queue=8), requests)  # 4 pages; each of the long ones takes 2
    assert served.faults == []
    assert [len(served.tokens(name)) for name in ("a", "b", "c", "tiny")] == [60, 60, 60, 2]
    assert served.stats("c")["queue_s"] > 0
