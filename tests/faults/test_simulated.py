"""Some seeds of the simulated pair of each family, and that wrong tokens and lost votes are seen; `make faults` runs a
thousand."""

import random

import pytest

from tests.bundled import MINIS
from tests.faults import simulated
from tests.faults.simulated import Plan, run, small
from tided.tide import history as histories


@pytest.fixture(scope="module", params=MINIS, ids=str)
def checkpoint(request):
    with small(request.param) as made:
        yield made


@pytest.mark.parametrize("seed", [12, 34])
def test_a_pair_that_is_struck_tells_nothing_wrong_and_keeps_its_votes(checkpoint, tmp_path, seed):
    told = run(seed, checkpoint, tmp_path)
    assert told.faults == []
    assert told.seen["answers compared"] > 0
    assert told.seen["votes"] > 0


def test_seeds_differ_and_repeat():
    plans = [Plan.draw(random.Random(seed)) for seed in range(200)]
    assert plans == [Plan.draw(random.Random(seed)) for seed in range(200)]
    assert {plan.fatal for plan in plans} == {"", "raise", "hang", "kill", "cut"}
    assert {plan.rank for plan in plans if plan.fatal} == {0, 1}


def calm(monkeypatch) -> None:
    monkeypatch.setattr(Plan, "draw", lambda chance: Plan("", 0, 0, 0.0, 0, 0.0, 10**9, 0, 0, False))


def test_a_record_that_is_another_is_seen(checkpoint, tmp_path, monkeypatch):
    calm(monkeypatch)
    read = simulated.Disk.read

    def changed(self, layer, expert, out):
        read(self, layer, expert, out)
        out[: len(out) // 2 : 2] = bytes([0x71]) * len(
            out[: len(out) // 2 : 2]
        )  # of BF16 no sign and hardly an exponent

    monkeypatch.setattr(simulated.Disk, "read", changed)
    assert any("where alone it is" in fault for seed in (1, 2) for fault in run(seed, checkpoint, tmp_path).faults)


def test_a_vote_that_is_not_written_is_seen(checkpoint, tmp_path, monkeypatch):
    calm(monkeypatch)
    write = histories._write
    monkeypatch.setattr(histories, "_write", lambda at, demand: None if demand.requests >= 3 else write(at, demand))
    assert any("votes were written" in fault for seed in (1, 2) for fault in run(seed, checkpoint, tmp_path).faults)
