"""What rank 0 shows of its lanes and of the routing weight agrees with what each answer reports."""

import pytest
from engine_fakes import SWAPS, Bench, FakePilot, request

from tided.engine import leader
from tided.engine.board import tide


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "FIGURES_EVERY_S", 0.0)


def test_lanes_as_they_run():
    bench = Bench(pilot=FakePilot(prompt=SWAPS))
    bench.submit(request("a", prompt=12, max_tokens=4), request("b", prompt=3, max_tokens=9))
    bench.turn()
    [first, second] = bench.engine.figures.lanes
    assert (first.phase, first.computed_tokens, first.prompt_tokens, first.answer_tokens) == ("prompt", 8, 12, 0)
    assert (second.phase, second.computed_tokens) == ("prompt", 0)
    seen = []
    while bench.engine.turn():
        seen.append([(lane.lane, lane.phase, lane.answer_tokens) for lane in bench.engine.figures.lanes])
    assert [(0, "prompt", 0), (1, "answer", 1)] in seen
    assert bench.engine.figures.lanes == ()
    assert bench.engine.figures.answer_tokens == 4 + 9


def test_routing_weight_is_counted_once_and_never_falls():
    bench = Bench(pilot=FakePilot())
    bench.submit(request("a", prompt=12, max_tokens=4), request("b", prompt=3, max_tokens=9))
    weights = []
    while bench.engine.turn():
        figures = bench.engine.figures
        weights.append(figures.weight)
        assert 0 <= figures.substituted_weight <= figures.missed_weight <= figures.weight
    assert weights == sorted(weights)
    assert len(set(weights)) > 8  # while answers grow, and not at their ends alone
    parts = [bench.end(name).stats["prune_miss_request"] for name in "ab"]
    assert figures.weight == pytest.approx(sum(part["total_score"] for part in parts), abs=1e-3)
    assert figures.missed_weight == pytest.approx(sum(part["missed_score"] for part in parts), abs=1e-3)
    assert figures.missed_weight > 0


def test_a_cancelled_request_counts_what_it_routed():
    bench = Bench(pilot=FakePilot())
    bench.submit(request("a", prompt=12, max_tokens=20))
    bench.turn(5)
    before = bench.engine.figures.weight
    bench.cancel("a")
    bench.finish()
    assert bench.engine.figures.weight >= before > 0
    assert bench.engine.ledger._totals == {}


def test_what_is_wanted_is_shown_without_a_ring():
    bench = Bench(pilot=FakePilot())
    shown = bench.engine.heat
    assert shown is not None
    assert shown is bench.engine.heat
    bench.submit(request("a"))
    bench.finish()
    assert bench.engine.heat is not shown
    assert Bench().engine.heat is None


def test_the_newest_plan_is_shown_as_it_is_carried_out():
    bench = Bench(pilot=FakePilot(prompt=SWAPS))
    engine = bench.engine
    assert tide(engine.board, 0.0) == {"moving": False, "last_plan": None}
    bench.submit(request("a", prompt=12, max_tokens=9))
    seen, made = [], set()
    while engine.turn():
        seen.append(tide(engine.board, engine.last_step_s))
        made |= {engine.board.plan.at_s} if engine.board.plan else set()
    plans = [(one["moving"], one["last_plan"]["done"]) for one in seen if one["last_plan"]]
    assert plans[0] == (True, 0)
    assert plans[-1] == (False, len(SWAPS))
    assert plans == sorted(plans, key=lambda plan: plan[1])
    assert {(one["last_plan"]["reason"], one["last_plan"]["swaps"]) for one in seen if one["last_plan"]} == {
        ("prompt", len(SWAPS))
    }
    [at_s] = made
    assert tide(engine.board, at_s + 90.04)["last_plan"]["age_s"] == 90.0
