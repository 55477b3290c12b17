"""What is computed before a rank is ready leaves nothing behind."""

from types import SimpleNamespace

import pytest
import torch
from integrity import at_rest
from msgspec.structs import replace
from real_pair import opened

from tided import boot
from tided.engine.build import build_rank
from tided.engine.offline import first_pairs
from tided.engine.warming import ends, prompts, row_counts, warm_up
from tided.models.parallel import Alone
from tided.settings import Cache, Engine


def last_logits(model):
    lane = model.open_lane(1)
    found = model.prefill(lane, torch.arange(3, 27), "last").clone()
    model.close_lane(lane)
    return found


def test_it_computes_every_number_of_rows_and_nothing_of_it_is_left(monkeypatch):
    model = opened(numerics="native", resident=40, draft="2")
    rank = build_rank(model, Alone(), first_pairs(model), lambda *_: None)
    told, decoded, proposed, prefilled = [], [], [], []
    counted = []
    seen = {"decode": decoded, "propose": proposed, "prefill": prefilled}

    def watched(name, real):
        def call(self, *given):
            seen[name].append(given)
            counted.extend([rank.bank.tap.enabled] * (name == "prefill"))
            return real(self, *given)

        return call

    cold = last_logits(rank.model)
    rank.bank.tap.forget(1)
    rank.bank.tap.wishes[-1].clear()
    before = rank.executor._digest()
    for name in seen:
        monkeypatch.setattr(type(rank.model), name, watched(name, getattr(type(rank.model), name)))
    warm_up(rank.model, rank.bank.tap, model.settings, lambda *progress: told.append(progress))
    monkeypatch.undo()
    assert [given[2] for given in decoded[:-1]] == [[count] for count in range(1, 7)]  # two lanes, two drafts each
    assert [len(given[1]) for given in prefilled] == [*range(1, 17), 37, 16, 37]
    assert counted == [False] * 18 + [True]  # the last prompt and step, whose demand is forgotten
    assert [len(given[0]) for given in proposed] == [1, 1, 1, 2, 2, 2]  # of one lane and two, by three laws
    assert [given[2].law(1).name for given in proposed[:3]] == ["likeliest", "raced", "ranked"]
    assert told[0] == ("warming up", 0, 6)
    assert told[-1] == ("warming up", 6, 6)
    tap = rank.bank.tap
    assert tap.enabled
    assert not any(bool(part.any()) for part in (tap.counts, tap.mass, tap.totals, tap.uses))
    assert list(tap.wishes) == [[]]
    at_rest(rank)
    assert rank.executor._digest() == before
    assert torch.equal(last_logits(rank.model), cold)
    rank.close()


def test_rows_and_prompts_are_what_the_profile_can_ask_for():
    base = opened().settings
    for lanes, draft, most in ((4, "off", 4), (2, "3", 8), (2, "acceptance", 12), (4, "acceptance", 16), (1, "off", 1)):
        settings = replace(base, engine=Engine(lanes=lanes, draft=draft))
        assert list(row_counts(settings, 5)) == list(range(1, most + 1))
    tiny = replace(base, cache=Cache(context_tokens=9, pool_tokens=128), engine=Engine(lanes=8))
    assert list(row_counts(tiny, 0)) == [1, 2, 3, 4]
    assert prompts(tiny, 4) == [1]
    assert list(ends(tiny)) == list(range(1, 9))
    assert prompts(base, 16) == [37, base.model.prefill_chunk_tokens]


class Side:
    def __init__(self):
        self.told = []

    def tell(self, message, *_):
        self.told.append(message)

    def joined(self, session): ...

    def events(self, events): ...

    def ready(self, engine):
        self.told.append("ready")
        engine.close("enough")

    def ended(self, error):
        assert error is None, error


def test_a_rank_is_ready_behind_it(monkeypatch, tmp_path):
    side = Side()
    monkeypatch.setattr(boot, "_warm", lambda built, rank, loop: loop.tell("warmed"))
    boot.run_rank(opened(resident=40).settings, 0, None, tmp_path, side)
    assert side.told[-2:] == ["warmed", "ready"]


def test_a_wait_for_other_ranks_is_told_all_the_time(monkeypatch):
    """What is told is progress: the service manager gives a start more time by it."""
    side, looks, now_s = Side(), [], iter([100.0, 101.0, 106.0, 107.0, 112.0])
    monkeypatch.setattr(boot, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    waiting = boot._Waiting(side, "waiting", lambda: looks.append(1))
    for _ in range(4):
        waiting()
    assert side.told == ["waiting, for 6 s now", "waiting, for 12 s now"]
    assert len(looks) == 4


@pytest.mark.parametrize(("device", "expected"), [("cpu", []), ("cuda", ["warming up", "loaded", "warm"])])
def test_the_ranks_meet_before_it_and_a_cpu_has_none_of_it(monkeypatch, device, expected):
    side = Side()
    settings = replace(opened().settings, engine=Engine(device=device))
    group = SimpleNamespace(meet=lambda where, wait_s, meanwhile: side.tell(where))
    built = SimpleNamespace(
        opened=SimpleNamespace(settings=settings), model=None, group=group, bank=SimpleNamespace(tap=None)
    )
    monkeypatch.setattr(boot, "TorchGroup", SimpleNamespace)
    monkeypatch.setattr(boot, "warm_up", lambda *_: side.tell("warm"))
    boot._warm(built, 0, side)
    assert side.told == expected
