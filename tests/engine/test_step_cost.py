"""What rank 0 does in a step beside the model, by calls: what is for people is made when somebody looks, or now and
then, and not in each step."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from engine_fakes import Bench, FakePilot, request
from msgspec import structs

from tided.engine import leader

STEPS = 50
MOST_CALLS = 140  # of functions of `tided` in a step of one lane, over a model of three layers
FOR_PEOPLE = ("Ledger.lanes", "Ledger.reads", "Ledger.routed", "RequestStats.drafts", "_line", "_work", "_change")
FOR_OTHERS = ("shaped", "Depths.done", "LaneDrafts.stepped")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    calls = Counter[str]()

    def called(frame, event, _):
        code = frame.f_code
        if event == "call" and "/tided/" in code.co_filename and not code.co_name.startswith("<"):
            calls[code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def answering(**sampling) -> Bench:
    bench = Bench(pilot=FakePilot())
    asked = request("a", prompt=3, max_tokens=4 * STEPS)
    bench.submit(structs.replace(asked, sampling=structs.replace(asked.sampling, **sampling)))
    bench.turn(5)
    return bench


@pytest.fixture(autouse=True)
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "FIGURES_EVERY_S", 1e9)


def test_a_plain_step_makes_nothing_that_nobody_asked_for():
    bench = answering()
    with counted() as calls:
        bench.turn(STEPS)
    assert calls["Executor.execute"] == calls["Flight.end"] == STEPS
    assert {name: calls[name] for name in (*FOR_PEOPLE, *FOR_OTHERS) if calls[name]} == {}
    assert sum(calls.values()) <= MOST_CALLS * STEPS


def test_it_is_made_when_it_is_asked_for(monkeypatch):
    bench = answering(presence_penalty=1.0)
    monkeypatch.setattr(leader, "FIGURES_EVERY_S", 0.0)
    with counted() as calls:
        bench.turn(STEPS)
        lines = bench.engine.flight.lines()
    assert calls["Ledger.lanes"] == calls["Ledger.reads"] == calls["shaped"] == STEPS
    assert calls["_line"] == calls["_work"] == len(lines) >= STEPS
    assert [line["seq"] for line in lines[-STEPS:]] == list(range(lines[-1]["seq"] - STEPS + 1, lines[-1]["seq"] + 1))
    assert all(line["done"] and line["work"] == "decode" and line["lanes"] == [0] for line in lines[-STEPS:])
