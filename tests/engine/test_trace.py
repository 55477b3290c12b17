"""What is told of a request's experts afterwards."""

import numpy as np
import pytest

from tided.control.messages import Change, Load, Swap
from tided.engine import trace
from tided.engine.trace import Movement, Traces, Uses

LAYERS, EXPERTS = 2, 4


def uses(*pairs, missed: float = 0.0, read: float = 0.0) -> Uses:
    grids = [np.zeros((LAYERS, EXPERTS), dtype=np.float32) for _ in range(3)]
    for pair in pairs:
        for grid, value in zip(grids, (3, missed, read), strict=True):
            grid[pair] = value
    return Uses(*grids)


def changes(traces: Traces, *each: Change, first: int = 1) -> None:
    for step, change in enumerate(each, first):
        traces.changed(step, change, lambda ticket: {1: "prompt"}.get(ticket, "hot read"), step / 1000)


def test_a_request_is_told_what_happened_to_the_pairs_it_wanted_while_it_ran():
    traces = Traces()
    changes(traces, Change(load=[Load(1, (0, 3), (0, 0)), Load(2, (1, 2))]))
    traces.began("one", 1, 0.001)
    changes(traces, Change(publish=[1], load=[Load(3, (1, 1))]), Change(publish=[2, 3]), first=2)
    changes(traces, Change(promote=[Swap((1, 0), (1, 2))], withdraw=[(1, 0)]), first=4)
    traces.ended("one", "stop", 5, 0.005, uses((0, 3), (1, 2), missed=0.5, read=0.25))
    told = traces.find("one")
    assert told == traces.newest
    assert (told.first_step, told.last_step, told.ms, told.ended) == (2, 5, 4.0, "stop")
    assert (told.pairs_wanted, told.pairs_missed, told.missed_weight) == (2, 2, 1.0)
    assert (told.pairs_read, told.read_weight) == (2, 0.5)
    assert told.movements == [
        Movement(2, 1.0, "routable", 0, 3, (0, 0), "prompt"),
        Movement(3, 2.0, "routable", 1, 2, None, "hot read"),
        Movement(4, 3.0, "promoted", 1, 2, (1, 0), "hot read"),
    ]
    assert told.movements_of_others == 4  # (0, 0) left; (1, 1) was asked for and came; (1, 0) left


def test_a_read_that_failed_is_told_as_such():
    traces = Traces()
    traces.began("one", 0, 0.0)
    changes(traces, Change(load=[Load(1, (0, 3), (0, 0))]), Change(give_up=[1]))
    traces.ended("one", "stop", 3, 0.003, uses((0, 3), missed=0.5))
    assert [(one.what, one.why) for one in traces.newest.movements] == [("asked", "prompt"), ("not read", "prompt")]


def test_pairs_are_told_by_missed_weight_and_then_by_picks(monkeypatch):
    monkeypatch.setattr(trace, "MOST_PAIRS", 3)
    picked = uses((0, 0), (0, 1), (1, 3), (1, 2))
    picked.missed[1, 3] = 2.0
    picked.picks[0, 1] = 9
    traces = Traces()
    traces.began("one", 0, 0.0)
    traces.ended("one", "length", 1, 1.0, picked)
    assert [(pair.layer, pair.expert) for pair in traces.newest.pairs] == [(1, 3), (0, 1), (0, 0)]
    assert (traces.newest.pairs_wanted, traces.newest.pairs_read) == (4, 0)


@pytest.mark.parametrize("waited", [False, True])
def test_of_a_request_without_a_lane_there_is_nothing_to_tell(waited):
    traces = Traces()
    if waited:
        traces.began("one", 0, 0.0)
    traces.ended("one", "cancelled", 1, 1.0, None)
    assert traces.newest is None
    assert traces.find("one") is None


def test_the_newest_are_kept(monkeypatch):
    monkeypatch.setattr(trace, "KEPT_REQUESTS", 2)
    traces = Traces()
    for name in ("one", "two", "three"):
        traces.ended(name, "stop", 1, 1.0, uses((0, 0)))
    assert [traces.find(name) is None for name in ("one", "two", "three")] == [True, False, False]
    assert traces.newest.request_id == "three"


def test_of_many_movements_the_newest_are_told(monkeypatch):
    monkeypatch.setattr(trace, "MOST_EVENTS", 2)
    traces = Traces()
    traces.began("one", 0, 0.0)
    changes(traces, *(Change(load=[Load(ticket, (0, ticket))]) for ticket in range(4)))
    traces.ended("one", "stop", 4, 1.0, uses(*((0, expert) for expert in range(4))))
    assert [one.expert for one in traces.newest.movements] == [2, 3]
