"""Two real ranks, of every family, and a record that one of them cannot read while a request waits for it: that request
ends, and nobody else's does."""

import pytest
from msgspec.structs import replace
from real_pair import Living, Served, opened, with_tide
from test_fidelity import ask
from test_mixed_sizes import ask as ask_exl3
from test_mixed_sizes import model as exl3
from test_motion_ranks import Disk

from tests.bundled import Mini
from tided.engine.build import open_model
from tided.engine.types import Failed, Finished, Tokens
from tided.errors import PairError
from tided.experts import fetch
from tided.settings import Tide


class Worn(Disk):
    """The next `left` records that are asked for are damaged."""

    left = 0

    def read(self, layer, expert, out) -> None:
        if self.left and (layer, expert) not in self.bad:
            self.left -= 1
            self.bad.add((layer, expert))
        super().read(layer, expert, out)


def living(model, rank: int = 1) -> Living:
    def prepare(served):
        served.disk = Worn(served.ranks[rank])

    return Living(model, prepare=prepare)


def few(mini: Mini, **tide):
    """One slot for all that is waited for: hardly anything is kept, and each token reads."""
    return with_tide(opened(2, mini.random.least, "native", of=mini), sync_slots=1, **tide)


def finished(served: Living, *names: str) -> list[int]:
    served.rest()
    assert served.faults == []
    served.check()
    assert len({rank.executor.urgent.state() for rank in served.ranks}) == 1
    return [len(served.tokens(name)) for name in names if isinstance(served.end(name), Finished)]


@pytest.fixture(scope="module")
def whole(mini):
    """Every expert resident."""
    served = Served(opened(2, numerics="native", of=mini), [ask(mini, "a"), ask(mini, "b", begin=30)])
    return {name: served.tokens(name) for name in "ab"}


@pytest.mark.parametrize(  # `after`: tokens of the answer
    ("rank", "after", "fidelity"), [(1, 0, "balanced"), (1, 5, "exact"), (0, 5, "balanced"), (0, 0, "exact")]
)
def test_who_waited_for_it_ends_with_its_name_and_no_wrong_token(mini, whole, rank, after, fidelity):
    """And the lane beside has the tokens that it has alone, its prompt's and its answer's."""
    beside = ask(mini, "b", begin=30, answer=30)
    alone = Served(few(mini), [beside]).tokens("b")
    served = living(few(mini, sync_weight=0.0), rank)
    served.submit(ask(mini, "a", fidelity), beside)
    while len(served.tokens("a")) < after:
        served.turn()
    served.disk.left = 1
    assert finished(served, "b") == [30]
    assert served.tokens("b") == alone
    (layer, expert) = next(iter(served.disk.bad))
    end = served.end("a")
    assert isinstance(end, Failed)
    assert f"expert {expert} of layer {layer} cannot be read on rank {rank}" in end.message
    assert len(served.tokens("a")) == after
    if fidelity == "exact":
        assert served.tokens("a") == whole["a"][:after]
    served.close()


def test_balanced_does_without_it_from_then_on_and_exact_with_it_once_it_can_be_read(mini, whole):
    served = living(few(mini, sync_weight=0.0))
    served.disk.left = 1
    served.submit(ask(mini, "first", "balanced"))
    assert finished(served, "first") == []
    bad, reads = set(served.disk.bad), []
    for rank in served.ranks:
        assert rank.executor.urgent.unreadable == bad
    read = served.ranks[0].reads.io._source.read
    served.ranks[0].reads.io._source = type("Seen", (), {"read": lambda _, *of: reads.append(of[:2]) or read(*of)})()
    served.submit(ask(mini, "second", "balanced"))
    assert finished(served, "second") == [12]
    assert reads
    assert not bad & set(reads)
    served.submit(ask(mini, "third", "exact"))
    assert finished(served, "third") == []
    assert "cannot be read on rank 1" in served.end("third").message
    served.disk.bad.clear()  # the file was put back
    served.submit(ask(mini, "fourth", "exact"))
    assert finished(served, "fourth") == [12]
    assert served.tokens("fourth") == whole["a"]
    for rank in served.ranks:
        assert rank.executor.urgent.unreadable == set()
    served.close()


def test_what_the_ring_could_not_read_nobody_waits_for_until_it_can(mini):
    """The balanced request that wants it ends whole, although no request found the damage before it."""
    served = living(with_tide(opened(2, mini.random.least, of=mini), hot_ring_slots=6, sync_slots=4, sync_weight=0.0))
    served.disk.left = 1
    served.submit(ask(mini, "a", answer=40, temperature=1.0, seed=4))
    assert finished(served, "a") == [40]
    bad = set(served.disk.bad)
    urgent = served.ranks[0].executor.urgent
    assert urgent.unreadable == bad
    served.submit(ask(mini, "b", "balanced", temperature=1.0, seed=4))
    assert finished(served, "b") == [12]
    served.disk.bad.clear()
    motion = served.engine.motion
    for name in "cdefgh":
        motion._left_alone.update(dict.fromkeys(motion._left_alone, 0))  # long enough
        served.submit(ask(mini, name, answer=40, temperature=1.0, seed=4))
        assert finished(served, name) == [40]
        if not urgent.unreadable:
            break
    assert urgent.unreadable == set()
    served.close()


def test_records_that_differ_in_size_too():
    served = living(exl3(2, 6, tide={"sync_slots": 2, "sync_weight": 0.0}))
    served.disk.left = 1
    served.submit(ask_exl3("a", "exact"), ask_exl3("b", begin=30, tokens=17))
    served.rest()
    assert served.faults == []
    assert "cannot be read on rank 1" in served.end("a").message
    assert isinstance(served.end("b"), Finished)
    served.disk.bad.clear()
    served.submit(ask_exl3("c", "exact"))
    served.rest()
    assert served.tokens("c") == Served(exl3(2), [ask_exl3("c")]).tokens("c")
    served.close()


def test_what_was_computed_without_it_is_no_snapshot(mini, whole):
    """The prompt's second chunk: the next request begins behind the first, and computes the second."""
    model = few(mini)
    settings = replace(model.settings, cache=replace(model.settings.cache, prefix_ram_bytes=1 << 24))
    served = living(open_model(replace(settings, tide=Tide(sync_slots=1))))
    served.submit(ask(mini, "first", "exact"))
    while not served.ranks[0].executor.lanes or served.ranks[0].executor.lanes[0].state.position < 16:
        served.turn()
    served.disk.left = 1
    assert finished(served, "first") == []
    served.disk.bad.clear()
    served.submit(replace(ask(mini, "a", "exact"), request_id="again"))
    assert finished(served, "again") == [12]
    assert served.tokens("again") == whole["a"]
    assert served.stats("again")["cached_tokens"] == 16
    served.close()


def test_a_disk_that_reads_nothing_ends_the_pair(mini, monkeypatch):
    monkeypatch.setattr(fetch, "MOST_LOST", 3)
    served = living(few(mini))
    served.disk.broken = True
    served.submit(ask(mini, "a", "exact"))
    with pytest.raises(PairError, match="experts cannot be read: the last"):
        served.rest()
    assert not [event for event in served.events if isinstance(event, Tokens)]


def test_one_rank_alone_does_the_same(mini):
    served = living(with_tide(opened(resident=mini.random.least, numerics="native", of=mini), sync_slots=1), rank=0)
    served.disk.left = 1
    served.submit(ask(mini, "a", "exact"))
    served.rest()
    assert "cannot be read on rank 0" in served.end("a").message
    served.disk.bad.clear()
    served.submit(ask(mini, "again", "exact"))
    served.rest()
    assert len(served.tokens("again")) == 12
    served.close()
