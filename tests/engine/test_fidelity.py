"""What a request may ask for when experts are missing, of every family: `exact` answers are those of a model that holds
every expert, at any budget, alone or beside others, on one rank or two, however contexts are kept."""

from functools import cache

import numpy as np
import pytest
import torch
from engine_fakes import FakePilot
from msgspec.structs import replace
from real_pair import FORMS, Form, Served, forms, opened, with_tide
from real_pair import ask as asked

from tests.bundled import Mini
from tided.engine.build import build_rank, open_model
from tided.engine.offline import first_pairs, settings_of
from tided.engine.types import Request
from tided.errors import PairError, RequestError
from tided.experts.fetch import UrgentReads
from tided.models.parallel import Alone
from tided.settings import Cache, Engine, Experts, Parallel


def ask(mini: Mini, name, fidelity="fast", begin=0, tokens=40, answer=12, **sampling) -> Request:
    return asked(name, mini.random.prompt[begin : begin + tokens], answer, fidelity, **sampling)


def traffic(mini: Mini, fidelity) -> list[Request]:
    """Five prompts of other lengths, greedy and drawn, two at a time."""
    return [
        ask(mini, "a", fidelity),
        ask(mini, "b", fidelity, begin=30, tokens=17, temperature=1.0, seed=5),
        ask(mini, "c", fidelity, begin=50, tokens=33),
        ask(mini, "d", fidelity, begin=7, tokens=3, temperature=0.8, seed=9),
        ask(mini, "e", fidelity, begin=20, tokens=64, temperature=1.0, seed=1),
    ]


@cache
def all_resident(form: Form) -> dict[str, list[int]]:
    served = Served(form.model(), traffic(form.mini, "fast"))
    return {name: served.tokens(name) for name in "abcde"}


@pytest.fixture
def whole(mini):
    """Of one rank."""
    return all_resident(FORMS[str(mini)])


@pytest.mark.parametrize(("kept", "slots", "draft"), [("least", 1, "off"), ("some", 3, "3")])
@forms("deepseek, bounded", "deepseek, bounded, two ranks", "glm, fp8")
def test_exact_is_all_resident_token_for_token(form, kept, slots, draft):
    resident = getattr(form.mini.random, kept)
    served = Served(form.model(resident, tide={"sync_slots": slots}, draft=draft), traffic(form.mini, "exact"))
    assert served.faults == []
    assert {name: served.tokens(name) for name in "abcde"} == all_resident(form)
    for name in "abcde":
        stats = served.stats(name)
        assert stats["substituted_weight_share"] == 0
        for phase in ("prefill", "decode"):
            assert stats[phase]["missed_picks"] == stats[phase]["classes"]["read"] > 0
    states = {rank.executor.urgent.state() for rank in served.ranks}
    assert len(states) == 1
    for rank in served.ranks:
        rank.executor.check()
    served.ranks[0].executor.urgent._pair_in.clear()
    with pytest.raises(PairError, match="read before use is broken"):
        served.ranks[0].executor.check()


@pytest.mark.parametrize("numerics", ["native", "fp32"])
@pytest.mark.parametrize("slots", [1, 5])
def test_exact_logits_are_those_of_all_experts_bit_for_bit(mini, numerics, slots):
    """A chunk of more rows than a decode step takes, a short one, and single tokens."""
    logits = []
    for resident in (mini.random.experts, mini.random.least):
        model = with_tide(opened(resident=resident, numerics=numerics, of=mini), sync_slots=slots)
        rank = build_rank(model, Alone(), first_pairs(model), lambda *_: None)
        rank.executor.urgent.open(0, "exact")
        rank.executor.urgent.begin_step([0])
        lane, ids = rank.model.open_lane(0), torch.tensor(mini.random.prompt)
        parts = [rank.model.prefill(lane, part, "all") for part in (ids[:40], ids[40:48])]
        parts += [rank.model.decode([lane], token[None]) for token in ids[48:52]]
        logits.append(torch.cat(parts))
    assert torch.equal(*logits)


def test_r6_a_prompt_that_misses_more_than_there_are_slots_stops_no_rank(mini):
    """What a layer waits for is read in turns, the same on every rank: none raises while the other waits for its part
    of a sum."""
    model = with_tide(opened(2, mini.random.least, "native", of=mini), sync_slots=1)
    served = Served(model, [ask(mini, "a", "exact", tokens=64, answer=4), ask(mini, "b", "exact", begin=30, answer=4)])
    assert served.faults == []
    assert [len(served.tokens(name)) for name in "ab"] == [4, 4]
    waits = [rank.executor.urgent.waits.reads for rank in served.ranks]
    assert waits[0] == waits[1] > 100
    assert len({rank.executor.urgent.state() for rank in served.ranks}) == 1


def test_without_exact_the_answers_differ(mini, whole):
    served = Served(opened(resident=mini.random.least, numerics="native", of=mini), traffic(mini, "fast"))
    assert {name: served.tokens(name) for name in "abcde"} != whole


def test_lanes_of_every_class_share_a_step_and_none_sees_the_other(mini, whole):
    """The fast answer is the one it gets alone, the exact one that of all experts, whoever is beside them."""
    few = opened(resident=mini.random.some, numerics="native", lanes=3, of=mini)
    fast = ask(mini, "f", begin=60, temperature=0.7, seed=3)
    alone = Served(few, [fast]).tokens("f")
    served = Served(few, [ask(mini, "x", "balanced", begin=10, answer=20), ask(mini, "a", "exact"), fast])
    assert served.tokens("a") == whole["a"]
    assert served.tokens("f") == alone
    assert (served.stats("f")["fidelity"], served.stats("f")["decode"]["classes"]["read"]) == ("fast", 0)
    balanced = served.stats("x")["decode"]
    assert 0 < balanced["classes"]["read"] < balanced["missed_picks"]
    assert 0 < balanced["substituted_weight_share"] < balanced["missed_weight_share"]


@pytest.mark.parametrize("reads", [0, 1, 3, 10])
def test_balanced_reads_no_more_than_its_share_of_a_step_up_to_any_layer(mini, reads, monkeypatch):
    """Of the reads of a step, (l + 1) / L at most are spent up to layer l: early layers cannot take them all."""
    spent: list[list[tuple[int, int]]] = []  # by step: (layer, reads so far)
    begin, heaviest = UrgentReads.begin_step, UrgentReads._heaviest
    monkeypatch.setattr(UrgentReads, "begin_step", lambda self, lanes: spent.append([]) or begin(self, lanes))

    def counted(self, layer, routing, heavy):
        chosen = heaviest(self, layer, routing, heavy)
        spent[-1].append((layer, self._spent))
        return chosen

    monkeypatch.setattr(UrgentReads, "_heaviest", counted)
    model = with_tide(opened(resident=mini.random.least, of=mini), sync_reads=reads, sync_weight=0.0)
    served = Served(model, [ask(mini, "x", "balanced")])
    assert served.faults == []
    steps = [step for step in spent if step]
    assert steps
    for layer, so_far in (entry for step in steps for entry in step):
        assert so_far <= reads * (layer + 1) // mini.random.layers
    assert max(step[-1][1] for step in steps) == reads  # and all of them are spent when enough is missing
    assert (served.stats("x")["read_before_use"]["reads"] > 0) == (reads > 0)


def test_balanced_waits_for_heavy_misses_only(mini):
    read = {}
    for weight in (0.0, 0.4, 1.0):
        model = with_tide(opened(resident=mini.random.some, of=mini), sync_weight=weight, sync_reads=100)
        read[weight] = Served(model, [ask(mini, "x", "balanced")]).stats("x")["read_before_use"]["reads"]
    assert read[0.0] > read[0.4] > read[1.0] == 0


def test_demand_is_what_the_router_wanted_whatever_was_read(mini):
    """An exact answer votes as one from all experts does."""
    counts = []
    for resident, fidelity in ((mini.random.experts, "fast"), (mini.random.least, "exact")):
        model = opened(resident=resident, numerics="native", of=mini)
        pilot = RememberingPilot(model)
        Served(model, [ask(mini, "a", fidelity)], pilot)
        counts.append(pilot.counts)
    assert all((one == other).all() for one, other in zip(*counts, strict=True))


class RememberingPilot(FakePilot):
    def __init__(self, model) -> None:
        super().__init__()
        self.shape, self.floor, self.pairs, self.counts = model.shape, model.shape.top_k, first_pairs(model), []

    def scores(self):
        return np.ones((self.shape.moe_layers, self.shape.experts_per_layer))

    def boot_pairs(self):
        return self.pairs

    def prompt_done(self, counts, mass, totals, tokens, *, lane):
        self.counts.append(counts)
        return []

    def request_done(self, counts, mass, totals, tokens, *, lane):
        self.counts.append(counts)


def test_without_slots_only_fast_is_served(mini):
    model = with_tide(opened(of=mini), sync_slots=0)
    with pytest.raises(RequestError, match="fidelity exact is off here"):
        Served(model, [ask(mini, "a", "exact")])
    assert len(Served(model, [ask(mini, "a")]).tokens("a")) == 12


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trained_model_is_exact_with_the_least_that_can_be_resident(mini, ranks):
    """So many experts a layer as a token wants."""
    prompts = [[(7 * i * i + 13 * p) % 1000 + 5 for i in range(3 + 9 * p)] for p in range(4)]
    requests = [asked(f"r{p}", ids, 6, "exact", temperature=p % 2 * 1.0, seed=p) for p, ids in enumerate(prompts)]
    answers = []
    for resident in (mini.experts, mini.least):
        served = Served(trained(mini, ranks, resident), requests)
        assert served.faults == []
        answers.append([served.tokens(request.request_id) for request in requests])
    assert answers[0] == answers[1]
    assert sum(served.stats(request.request_id)["experts"]["miss_picks"] for request in requests) > 500


def trained(mini: Mini, ranks: int, resident: int):
    settings = settings_of(mini.path)
    return open_model(
        replace(
            settings,
            model=replace(settings.model, prefill_chunk_tokens=24),
            experts=Experts(resident=resident, spare_slots=3),
            cache=Cache(context_tokens=256, pool_tokens=512),
            engine=Engine(lanes=2, guard_every_steps=4),
            parallel=Parallel(ranks=ranks),
        )
    )
