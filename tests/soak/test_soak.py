"""The soak in small, and that it would see what it looks for. `make soak` is the long one."""

import json

import pytest

from tests.bundled import MINIS
from tests.soak import __main__ as command
from tests.soak import watch
from tests.soak.bodies import Ask, Visit, distinct, traffic
from tests.soak.clients import Answer, Tally
from tests.soak.soak import Size, Verdict, soak
from tests.soak.watch import Held

FEW, SEED = Size(requests=8, distinct=8, cancel_share=0.3), 203  # which lets all happen that a soak must see


@pytest.mark.xdist_group("soak")
@pytest.mark.timeout(600)  # of a machine that others use as well
@pytest.mark.parametrize("mini", MINIS, ids=str)
def test_a_few_requests(mini, tmp_path):
    said: list[str] = []
    verdict = soak(mini, SEED, "whole", FEW, tmp_path, said.append)
    assert verdict.faults == [], verdict.line
    assert verdict.tally.done == FEW.requests
    assert "nothing wrong" in verdict.line
    assert sum(line.startswith("at rest") for line in said) == 2


@pytest.mark.parametrize(
    ("arguments", "ran"),
    [
        ([], [(1, "whole"), (2, "whole"), (1, "moving")]),
        (["--seeds", "3"], [(3, "whole"), (3, "moving")]),
        (["--set", "whole"], [(1, "whole"), (2, "whole")]),
        (["--set", "moving"], [(1, "moving"), (2, "moving")]),
    ],
)
@pytest.mark.parametrize("name", ["all", *map(str, MINIS)])
@pytest.mark.parametrize("wrong", ["", "whole", "moving"])
def test_the_command_soaks_both_sets_and_fails_where_any_was_wrong(monkeypatch, capsys, arguments, ran, name, wrong):
    def soaked(mini, seed, which, size, folder, tell):
        wrong_one = which == wrong and mini is minis[-1]
        return Verdict(mini, seed, which, Tally(), faults=["an answer differs"] if wrong_one else [])

    minis = [mini for mini in MINIS if name in ("all", mini.name)]
    monkeypatch.setattr(command, "soak", soaked)
    assert command.main([*arguments, "--mini", name]) == int(wrong in [which for _, which in ran])
    lines = capsys.readouterr().out.splitlines()
    told = [f"{mini}, seed {seed}, {which}" for mini in minis for seed, which in ran]
    assert [line.split(":")[0] for line in lines[-len(told) :]] == told


def test_traffic_repeats_and_has_every_kind():
    asks = distinct(3, 40)
    assert asks == distinct(3, 40)
    assert len({ask.kind for ask in asks}) == 8
    visits = traffic(3, asks, 200, 0.3)
    assert visits == traffic(3, asks, 200, 0.3) != traffic(4, asks, 200, 0.3)
    assert [visit.ask.kind for visit in visits[:2]] == ["tale", "tale"]
    for seed in range(20):  # one that waits for experts would be left behind by one that does not
        first = traffic(seed, distinct(seed, 40, 0.5), 20, 0.3)[:2]
        assert len({visit.ask.compared for visit in first}) == 1
    hurried = [visit for visit in visits if visit.events or visit.seconds]
    assert 30 < len(hurried) < 90
    fidelities = {ask.body["fidelity"]: ask.compared for ask in distinct(3, 40, 0.5)}
    assert fidelities == {"exact": True, "fast": False}


def event(**delta) -> dict:
    return {"choices": [{"delta": delta, "finish_reason": None}]}


def answer(*parts: str, whole: bool = True) -> Answer:
    found = Answer(whole=whole, finish="stop" if whole else "")
    for part in parts:
        found.take(event(content=part))
    return found


def test_another_answer_is_wrong_and_so_is_another_beginning():
    visit, tally = Visit(Ask("question", "1", {})), Tally()
    alone = answer("Oslo is ", "far.")
    for one in (answer("Oslo ", "is far."), answer("Oslo is", whole=False)):
        tally.take(visit, one, alone)
    assert (tally.wrong, tally.compared, tally.hung_up) == ([], 1, 1)
    failed = answer("Oslo", whole=False)
    failed.take({"error": {"message": "the pair ended"}})
    for one in (answer("Oslo is near."), answer("Paris", whole=False), failed):
        tally.take(visit, one, alone)
    assert len(tally.wrong) == 3
    call = {"function": {"name": "read_file", "arguments": json.dumps({"path": "a"})}}
    one, other = Answer(whole=True), Answer(whole=True)
    one.take(event(tool_calls=[call | {"id": "1"}]))
    other.take(event(tool_calls=[call | {"id": "2"}]))
    assert one.said == other.said != Answer(whole=True).said


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fds": 90}, "file descriptors"),
        ({"threads": 60}, "threads"),
        ({"rss_bytes": 1 << 29}, "memory"),
        ({"parked_files": 1}, "parked"),
        ({"unfinished_files": 1}, "not whole"),
        ({"prefix_bytes": 101}, "prompt cache"),
    ],
)
def test_what_grows_is_named(change, word):
    before = {
        "fds": 60,
        "threads": 40,
        "rss_bytes": 400 << 20,
        "parked_files": 0,
        "unfinished_files": 0,
        "prefix_bytes": 90,
    }
    assert watch.leaks(Held(**before), Held(**before), 100) == []
    (found,) = watch.leaks(Held(**before), Held(**(before | change)), 100)
    assert word in found


def test_warnings_in_a_log_are_seen():
    log = "1 INFO daemon ready\n2 WARNING cache a context is lost\n3 ERROR engine it ends\nTraceback (most recent)\n"
    assert len(watch.flagged(log)) == 3
