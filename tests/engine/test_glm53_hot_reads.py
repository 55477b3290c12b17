"""GLM-5.3's policy for what is missing: a layer's heaviest misses are read before it goes on, some a step, and kept."""

from msgspec.structs import replace
from real_pair import Form, Served, ask

from tests.bundled import GLM
from tided.experts.fetch import Serving
from tided.models import mixture
from tided.models.glm53 import mlp
from tided.settings import Engine, Tide

REQUEST = ask("x", GLM.random.prompt[:30], 16, "balanced")


def served(requests=(REQUEST,), ranks: int = 1, prepare=lambda served: None, **tide) -> Served:
    found = Served(Form(GLM, ranks).model(GLM.random.least, lanes=1, tide=tide), requests, prepare=prepare)
    assert found.faults == []
    for rank in found.ranks:
        rank.executor.check()
    return found


def test_the_policy_is_the_default():
    """The seed's: from a weight of 0.2 on, 16 a step; a cycle of tokens ends at its twelfth time."""
    assert (Tide().sync_weight, Tide().sync_reads, Engine().loop_break) == (0.2, 16, 12)


def test_what_weighs_is_read_and_what_does_not_is_substituted():
    stats = served().stats("x")["decode"]
    assert 0 < stats["classes"]["read"] < stats["missed_picks"]
    assert 0 < stats["substituted_weight_share"] < stats["missed_weight_share"]
    fast = served([replace(REQUEST, fidelity="fast")]).stats("x")["decode"]
    assert stats["substituted_weight_share"] < fast["substituted_weight_share"]


def test_what_was_read_is_kept_until_others_need_the_slot():
    """With as many slots as experts are missing, each is read once; with one, again and again."""
    reads = {}
    for kept in (1, 48):
        found = served(sync_slots=kept, sync_weight=0.1)
        waits = found.ranks[0].executor.urgent.waits
        reads[kept] = waits.reads
        if kept == 48:
            assert waits.reads <= 48
            assert waits.kept > waits.reads / 2
    assert reads[1] > reads[48]


def test_a_read_is_behind_the_shared_and_the_resident_experts(monkeypatch):
    """Begun before them, waited for after them."""
    told: list[str] = []

    def noted(owner, name, what):
        real = getattr(owner, name)

        def told_first(*given, **named):
            told.append(what)
            return real(*given, **named)

        monkeypatch.setattr(owner, name, told_first)

    noted(Serving, "__init__", "layer")
    noted(Serving, "_submit", "begin")
    noted(mlp.Dense, "of", "shared")
    noted(mixture, "pick_outputs", "experts")
    noted(Serving, "_arrived", "wait")
    served(sync_slots=32)
    layers = [part.split() for part in " ".join(told).split("layer")[1:]]
    waiting = [layer for layer in layers if "wait" in layer]
    assert waiting
    for layer in waiting:
        assert layer[:3] == ["begin", "experts", "shared"]


def test_two_ranks_read_the_same():
    found = served(ranks=2, sync_slots=6)
    states = {rank.executor.urgent.state() for rank in found.ranks}
    waits = [rank.executor.urgent.waits.reads for rank in found.ranks]
    assert len(states) == 1
    assert waits[0] == waits[1] > 0
