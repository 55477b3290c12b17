"""Which collectives go by one launch, who may ask for it, and what is said where it cannot be."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine_fakes import executor
from torch.distributed import HashStore

from kernels.one_shot_triton import ADDED, LARGEST_BYTES, MOST_RANKS, STACKED
from tests.control.conftest import make_settings
from tided import boot
from tided.control.messages import Step
from tided.engine import dataplane, link_probe, one_shot, peer_memory
from tided.engine.dataplane import TorchGroup, refuse_one_shot
from tided.engine.one_shot import Offer, OneShot, exchanged
from tided.errors import ConfigError, PairError, UnavailableError
from tided.settings import Parallel


@pytest.mark.parametrize(
    ("parallel", "on_cuda", "why"),
    [
        (Parallel(ranks=2, one_shot=True), False, 'engine.device is not "cuda"'),
        (Parallel(ranks=2, one_shot=True, hosts=("192.0.2.1", "192.0.2.2")), True, "names 2 hosts"),
        (Parallel(ranks=1, one_shot=True), True, "parallel.ranks is 1"),
        (Parallel(ranks=9, one_shot=True), True, "parallel.ranks is 9, above 8"),
    ],
)
def test_who_cannot_share_memory_is_refused_before_the_ranks_meet(parallel, on_cuda, why):
    with pytest.raises(ConfigError, match=why):
        refuse_one_shot(parallel, on_cuda)


def test_ranks_of_one_host_may_ask_and_others_are_left_alone():
    for parallel in (Parallel(ranks=2, one_shot=True), Parallel(ranks=8, one_shot=True, hosts=("192.0.2.1",) * 8)):
        refuse_one_shot(parallel, True)
    refuse_one_shot(Parallel(ranks=2, hosts=("192.0.2.1", "192.0.2.2")), True)
    with pytest.raises(ConfigError, match="share one host"):
        TorchGroup(make_settings(2, one_shot=True), 0)
    with (
        pytest.raises(ConfigError, match=r"parallel\.one_shot is for"),
        boot._group(make_settings(1, one_shot=True), 0, None),
    ):
        pass


def a_rank(rank=0, ranks=2, word=0):
    return OneShot(rank, torch.zeros(ranks + 1, dtype=torch.int64), torch.tensor([word]), 9.0)


def test_what_is_too_large_or_not_of_four_bytes_goes_by_the_library():
    one = a_rank()
    assert one.takes(torch.empty(16, 64640))
    assert one.takes(torch.empty(LARGEST_BYTES // 4, dtype=torch.int32))
    assert not one.takes(torch.empty(LARGEST_BYTES // 4 + 1))
    assert not one.takes(torch.empty(0, 5))
    assert not one.takes(torch.empty(4, dtype=torch.bfloat16))
    assert not one.takes(torch.empty(4, dtype=torch.int64))


class Taken:
    """Takes what has one row."""

    most_bytes = 1 << 20

    def __init__(self):
        self.asked, self.checks, self.ended = [], 0, False

    def takes(self, part):
        return len(part) == 1

    def __call__(self, part, kind):
        self.asked.append(kind)
        return part

    def check(self):
        self.checks += 1

    def end(self):
        self.ended = True


class Library:
    """What NCCL would be asked."""

    def __init__(self):
        self.asked = 0

    def _allgather_base(self, out, part):
        self.asked += 1
        out.copy_(part.repeat(2))
        return self

    def wait(self):
        pass

    def abort(self):
        pass


@pytest.fixture
def group():
    group = TorchGroup.__new__(TorchGroup)
    group.rank, group.ranks, group.calls, group.seconds = 0, 2, 0, 0.0
    group.one_shot, group._group, group._combine = Taken(), Library(), group._everywhere
    return group


def test_a_group_gives_small_parts_away_and_says_how_they_are_joined(group):
    small, large = torch.ones(1, 4), torch.ones(2, 4)
    for work in (group.sum, group.gather, group.concat):
        work(small)
    assert group.one_shot.asked == [ADDED, STACKED]
    assert group._group.asked == 1, "columns are NCCL's"
    assert torch.equal(group.sum(large), 2 * large)
    assert group._group.asked == 2
    with group.by_library():
        assert torch.equal(group.sum(small), 2 * small)
    assert (len(group.one_shot.asked), group._group.asked, group.calls) == (2, 3, 5)


def test_a_start_measures_both_ways(group):
    group.one_shot.takes = lambda part: True
    speed = link_probe.measure(group, torch.device("cpu"))
    assert set(group.one_shot.asked) == {ADDED}
    assert group._group.asked > 2
    assert "GB/s; by one launch, sums of 40 KB in " in str(speed)
    assert speed.about()["one_shot"].keys() == speed.about().keys() - {"one_shot"}
    assert group.one_shot.checks == 1
    assert speed.one_shot.large_bytes == group.one_shot.most_bytes
    group.one_shot = None
    assert "one_shot" not in link_probe.measure(group, torch.device("cpu")).about()


def test_closing_a_group_ends_all_waits(group):
    one = group.one_shot
    group.close()
    assert one.ended


def test_a_peer_that_did_not_come_ends_the_pair():
    a_rank().check()
    with pytest.raises(PairError, match=r"rank 0 waited 9 s on its device for rank 1, in a collective"):
        a_rank(word=2).check()
    one = a_rank()
    one.end()
    one.check()  # nobody was waited for in vain: the rank ends
    assert int(one._word) == one_shot.ENDED


def test_a_step_that_went_without_a_peer_ends_by_it(group):
    rank = executor()
    rank._group, group.one_shot = group, a_rank()
    rank.execute(Step(1, 0))
    group.one_shot._word[0] = 2
    with pytest.raises(PairError, match="in a collective"):
        rank.execute(Step(2, 0))


class Missed(TorchGroup):
    """Whose next collective is missed by rank 1; or who learns it as its device comes to rest."""

    def __init__(self, group, later=False):
        self.__dict__ = group.__dict__ | {"one_shot": a_rank()}
        if not later:
            self._combine = self._without

    def _without(self, part, join):
        self.one_shot._word[0] = 2
        return part


class Asked:
    """Reads before use: one lane asked, and got what it asked for."""

    asked, settled = True, False

    def begin_step(self, lanes):
        pass

    def missing_here(self):
        return [0]

    def settle(self, told):
        self.settled = True
        return {}


def test_what_ranks_told_without_a_peer_settles_nothing(group):
    rank = executor()
    rank._group, rank.urgent = Missed(group), Asked()
    with pytest.raises(PairError, match="in a collective"):
        rank.execute(Step(1, 0))
    assert not rank.urgent.settled


def test_a_context_that_lacks_a_peer_is_not_saved(group, monkeypatch):
    """Nothing of a chunk is looked at: the launch that waited in vain may still be on its way."""
    rank = executor()
    rank._group, rank._device = Missed(group, later=True), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: rank._group.one_shot._word.fill_(2))
    monkeypatch.setattr(rank, "_save", pytest.fail)
    with pytest.raises(PairError, match="in a collective"):
        rank.execute(Step(1, 0, save=[0]))


def exchange(*offers, wait_s=5.0):
    """What each rank has of a round: offers, or its error."""
    store = HashStore()
    with ThreadPoolExecutor(len(offers)) as pool:
        rounds = [pool.submit(exchanged, store, "lent", n, len(offers), own, wait_s) for n, own in enumerate(offers)]
    return [one.exception() or one.result() for one in rounds]


def test_ranks_tell_each_other_what_they_lend():
    offers = [Offer(device=f"GPU-{rank}", handle=bytes([0, 255, rank])) for rank in range(3)]
    assert exchange(*offers) == [offers] * 3


def test_what_one_cannot_do_ends_the_start_of_all():
    found = exchange(Offer(device="GPU-0"), Offer(fault="no peer access"))
    for error in found:
        assert isinstance(error, UnavailableError)
        assert "rank 1 cannot share memory with its peers: no peer access" in error.what
        assert "NCCL" in error.hint


def test_a_rank_that_tells_nothing_is_not_waited_for_longer():
    store = HashStore()
    with pytest.raises(UnavailableError, match=r"not every rank with parallel\.one_shot within 0\.1 s"):
        exchanged(store, "lent", 0, 2, Offer(), 0.1)


def test_devices_that_do_not_reach_each_other_are_told_apart(monkeypatch):
    """Nothing is lent to, or taken from, a device whose memory launches could not read, or not signal in."""
    atomics, access = [1], [True]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(peer_memory, "identity", lambda number: f"GPU-{number}")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda mine, other: access[0])

    def call(name, found, *rest):
        assert (name, rest[1:]) == ("cuDeviceGetP2PAttribute", (0, 1))
        found._obj.value = atomics[0]

    monkeypatch.setattr(peer_memory, "_call", call)
    assert peer_memory.why_apart(0, "GPU-0") == peer_memory.why_apart(0, "GPU-1") == ""
    assert "does not see that device" in peer_memory.why_apart(0, "GPU-7")
    atomics[0] = 0
    assert "has no atomics" in peer_memory.why_apart(0, "GPU-1")
    access[0] = False
    assert "no peer access" in peer_memory.why_apart(0, "GPU-1")


def test_the_patience_is_that_of_other_collectives(monkeypatch):
    """And the kernel is given microseconds."""
    given = []
    monkeypatch.setattr(one_shot, "one_shot", lambda *all_: given.append(all_))
    a_rank()(torch.ones(1, 4), ADDED)
    assert given[0][-1] == 9_000_000
    assert dataplane.MOST_SHARING == MOST_RANKS
