"""Two real ranks, of every family, while the routable set moves: late, failing and reordered reads on one of them."""

import threading

import numpy as np
import pytest
from engine_fakes import FakePilot
from real_pair import Served, opened, with_tide
from test_fidelity import ask

from tests.bundled import Mini
from tided.engine import motion
from tided.engine.offline import first_pairs
from tided.engine.types import Failed, Tokens
from tided.errors import DataError, PairError


def swaps(mini: Mini):
    """In some layers the first expert, which is resident, against the last, which is not."""
    layers, last = mini.random.layers, mini.random.experts // mini.random.layers - 1
    return [((layer, 0), (layer, last)) for layer in range(min(layers, 6))]


class Plans(FakePilot):
    """One plan, after the first prompt."""

    def __init__(self, mini: Mini, model) -> None:
        super().__init__(prompt=swaps(mini))
        self.pairs, self.floor = first_pairs(model), model.shape.top_k
        self.grid = np.ones((model.shape.moe_layers, model.shape.experts_per_layer))

    def scores(self):
        return self.grid

    def boot_pairs(self):
        return self.pairs


class Disk:
    """A rank's source: reads pass when `open` is set, and fail when `broken`, or of the pairs that it names."""

    def __init__(self, rank) -> None:
        self.inner, self.open, self.broken, self.reads = rank.reads.io._source, threading.Event(), False, 0
        self.bad: set[tuple[int, int]] = set()
        rank.reads.io._source = self
        self.open.set()

    def read(self, layer, expert, out) -> None:
        self.reads += 1
        assert self.open.wait(60)
        if self.broken or (layer, expert) in self.bad:
            raise DataError("cannot be read: Input/output error", where="pack-1-of-2:4096")
        self.inner.read(layer, expert, out)


def moving(mini: Mini, **tide):
    return with_tide(opened(2, mini.random.some, of=mini), **tide)


def test_a_read_that_lands_on_one_rank_only_is_routable_on_none(mini):
    model, masks = moving(mini), []

    def prepare(served):
        served.disk = Disk(served.ranks[1])
        served.disk.open.clear()
        execute = served.ranks[0].executor.execute

        def watched(step):
            outcome = execute(step)
            masks.append([rank.residents.mask_hash for rank in served.ranks])
            if len(masks) == 14:
                served.disk.open.set()
            return outcome

        served.ranks[0].executor.execute = watched

    served = Served(model, [ask(mini, "a", answer=16)], Plans(mini, model), prepare)
    assert served.faults == []
    assert len(served.tokens("a")) == 16  # no token waited
    before = masks[0]
    assert masks[:14] == [before] * 14
    assert masks[-1][0] != before[0]
    assert served.ranks[0].residents.state() == served.ranks[1].residents.state()
    assert served.engine.residency.generation > 0


def test_case_11_a_swap_that_fails_on_one_rank_is_made_on_neither_and_both_serve_on(mini):
    """Nothing of a plan is applied in part: the swap that one rank cannot read is given up on both, the others are
    made on both, in one step, and no token is lost."""
    bad = swaps(mini)[2][1]

    def prepare(served):
        Disk(served.ranks[1]).bad = {bad}

    served = Served(
        moving(mini),
        [ask(mini, "a", answer=60), ask(mini, "b", begin=30, answer=60)],
        Plans(mini, moving(mini)),
        prepare,
    )
    assert served.faults == []
    assert [len(served.tokens(name)) for name in "ab"] == [60, 60]
    assert served.link.compared > 5  # and the ranks were equal each time
    assert len({rank.residents.state() for rank in served.ranks}) == 1
    for rank in served.ranks:
        resident = rank.residents.pairs
        assert bad not in resident
        assert [in_ for _, in_ in swaps(mini) if in_ in resident] == [in_ for _, in_ in swaps(mini) if in_ != bad]
        assert swaps(mini)[2][0] in resident
        assert rank.residents.reading == 0
        rank.residents.check_integrity()
    assert served.engine.motion.count.failed == 1
    assert served.engine.ledger.reads().failed == 0  # rank 0's own disk is well


def test_a_disk_that_fails_for_good_stops_both_ranks_and_no_token_follows(mini, monkeypatch):
    monkeypatch.setattr(motion, "MOST_FAILED", len(swaps(mini)))
    model = moving(mini)

    class Stopped(Served):
        def _serve(self):
            self.engine.run()

    def prepare(served):
        Disk(served.ranks[1]).broken = True
        served.engine._on_fault = lambda error: (served._fault(error), [other.close() for other in served.others])

    served = Stopped(
        model, [ask(mini, "a", answer=200), ask(mini, "b", begin=30, answer=200)], Plans(mini, model), prepare
    )
    kinds = [type(fault) for fault in served.faults]
    assert kinds == [PairError]
    assert "experts cannot be read" in str(served.faults[0])
    told = sum(len(event.token_ids) for event in served.events if isinstance(event, Tokens))
    assert told < 100
    assert told == served.tokens_at_fault  # of rank 0's own end: nothing came after
    assert sorted(event.request_id for event in served.events if isinstance(event, Failed)) == ["a", "b"]
    assert served.engine.residency.generation == 0
    for rank in served.ranks:  # nothing half-read is routable anywhere
        assert not any(bool(rank.bank.tables.routable[in_]) for _, in_ in swaps(mini))


@pytest.mark.parametrize("late", [0, 1])
def test_hot_reads_keep_the_ranks_equal_when_one_disk_is_slow(mini, late):
    model = moving(mini, hot_ring_slots=6)

    def prepare(served):
        disk = Disk(served.ranks[late])
        read, calls = disk.inner.read, []

        def slow(layer, expert, out):
            calls.append(1)
            threading.Event().wait(0.003 * (len(calls) % 4))  # reads of one rank overtake each other
            read(layer, expert, out)

        disk.inner = type("Slow", (), {"read": staticmethod(slow)})

    requests = [ask(mini, "a", answer=40, temperature=1.0, seed=2), ask(mini, "b", begin=40, answer=40)]
    served = Served(model, requests, Plans(mini, model), prepare)
    assert (served.faults, served.link.compared > 5) == ([], True)
    states = {rank.residents.state() for rank in served.ranks}
    assert len(states) == 1
    stats = served.stats("b")
    assert stats["hot"]["reads"] > 0
    assert stats["hot"]["used"] > 0
    assert stats["hot"]["bytes"] > 0
    for rank in served.ranks:
        rank.residents.check_integrity()


def test_hot_reads_lower_what_is_substituted(mini):
    shares = {}
    for ring in (0, 12):
        served = Served(moving(mini, hot_ring_slots=ring), [ask(mini, "a", answer=60, temperature=1.0, seed=4)])
        shares[ring] = served.stats("a")["decode"]["substituted_weight_share"]
    assert shares[12] < 0.9 * shares[0]


def test_a_ring_entry_that_only_one_rank_has_ends_the_pair(mini):
    """The running digest covers the ring (C3)."""
    model = moving(mini, hot_ring_slots=6)

    def prepare(served):
        execute = served.ranks[1].executor.execute

        def tampered(step):
            outcome = execute(step)
            residents = served.ranks[1].residents
            if len(residents.ring) > 1:  # the order in which they came; what is routable stays the same
                first = residents.ring[0]
                residents._roles.ring[first] = residents._roles.ring.pop(first)
            return outcome

        served.ranks[1].executor.execute = tampered

    with pytest.raises(PairError, match="the ranks differ"):
        Served(model, [ask(mini, "a", answer=60)], Plans(mini, model), prepare)
