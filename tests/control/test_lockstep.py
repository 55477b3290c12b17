import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager

import msgspec
import pytest
import zmq

from tests.control.conftest import make_settings
from tided.control import lockstep, wire
from tided.control.keys import load_keys
from tided.control.lockstep import Follower, Leader
from tided.control.messages import (
    Admission,
    Change,
    Decode,
    Digest,
    Hello,
    Landed,
    Load,
    Prefill,
    Ready,
    Recalled,
    Step,
    Stop,
    Swap,
    Welcome,
)
from tided.engine.types import Request, Sampling
from tided.errors import GuardError, PairError, PermissionError_, UnavailableError

FACTS = {"engine.lanes": "2", "code": "abc"}
RESIDENTS = [(0, 1), (3, 7)]


@contextmanager
def group(ranks, keys, **parallel):
    settings = make_settings(ranks, **parallel)
    with closing(Leader(settings, keys)) as leader, ThreadPoolExecutor(8) as pool:
        followers = [Follower(settings, rank, keys) for rank in range(1, ranks)]
        try:
            yield leader, followers, pool
        finally:
            for follower in followers:
                follower.close()


@contextmanager
def joined(ranks, keys, **parallel):
    with group(ranks, keys, **parallel) as (leader, followers, pool):
        welcomes = [pool.submit(follower.join, FACTS) for follower in followers]
        leader.gather(FACTS, RESIDENTS)
        for welcome in welcomes:
            welcome.result(10)
        yield leader, followers


def let_in(leader, rank):
    """Waits until the leader knows it."""
    deadline_s = time.monotonic() + 20
    while rank not in list(leader._rank_of.values()):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    return True


def test_every_rank_gets_the_session_and_the_residents(keys):
    with group(4, keys) as (leader, followers, pool):
        welcomes = [pool.submit(follower.join, FACTS) for follower in followers]
        session = leader.gather(FACTS, RESIDENTS)
        assert [w.result(10) for w in welcomes] == [Welcome(session, RESIDENTS)] * 3


def test_a_difference_is_refused_with_field_and_both_values_on_both_sides(keys):
    with group(2, keys) as (leader, (follower,), pool):
        refused = pool.submit(follower.join, FACTS | {"engine.lanes": "3", "extra": "1"})
        with pytest.raises(GuardError) as ours:
            leader.gather(FACTS, RESIDENTS)
        with pytest.raises(GuardError) as theirs:
            refused.result(10)
    assert str(ours.value) == str(theirs.value)
    assert "engine.lanes: rank 0 has 2, rank 1 has 3" in str(ours.value)
    assert "extra: rank 0 has (absent), rank 1 has 1" in str(ours.value)


def test_other_ranks_hear_that_one_was_refused(keys):
    with group(3, keys) as (leader, followers, pool):
        good = pool.submit(followers[0].join, FACTS)
        bad = pool.submit(lambda: let_in(leader, 1) and followers[1].join({"engine.lanes": "9"}))
        with pytest.raises(GuardError) as refusal:
            leader.gather(FACTS, RESIDENTS)
        leader.stop(str(refusal.value))
        with pytest.raises(PairError, match="rank 0 ended"):
            good.result(10)
        with pytest.raises(GuardError):
            bad.result(10)


def test_a_rank_twice_and_a_rank_too_many_are_refused(keys):
    with group(2, keys) as (leader, (follower,), pool):
        settings = leader._settings
        with closing(Follower(settings, 1, keys)) as twin, closing(Follower(settings, 2, keys)) as extra:
            first = pool.submit(follower.join, FACTS)
            leader.gather(FACTS, RESIDENTS)
            assert first.result(10).residents == RESIDENTS
            second, third = pool.submit(twin.join, FACTS), pool.submit(extra.join, FACTS)
            follower.ready("digest")
            pool.submit(lambda: (wait([second, third]), follower.report(1, "a")))
            leader.ready("digest")
            leader.compare(1, "a")  # newcomers are turned away meanwhile; the pair goes on
            for newcomer in (second, third):
                with pytest.raises(GuardError, match="session"):
                    newcomer.result(10)


def test_a_missing_rank_is_named(keys):
    with group(3, keys, start_timeout_s=0.5) as (leader, followers, pool):
        pool.submit(followers[0].join, FACTS)
        with pytest.raises(UnavailableError, match="rank 2 did not come"):
            leader.gather(FACTS, RESIDENTS)


def test_a_missing_rank_0_is_said(keys):
    settings = make_settings(start_timeout_s=0.2)
    with (
        closing(Follower(settings, 1, keys)) as follower,
        pytest.raises(UnavailableError, match="rank 0 did not answer"),
    ):
        follower.join(FACTS)


def test_another_key_gets_nowhere_and_is_told_why(keys, tmp_path):
    settings = make_settings(start_timeout_s=3)
    foreign = load_keys(tmp_path / "other" / "curve.key", create=True)
    half = msgspec.structs.replace(foreign, leader=keys.leader)  # knows rank 0, is not on its list
    with closing(Leader(settings, keys)) as leader, ThreadPoolExecutor() as pool:
        for intruder_keys in (foreign, half):
            with closing(Follower(settings, 1, intruder_keys)) as intruder:
                joining = pool.submit(intruder.join, FACTS)
                with pytest.raises(UnavailableError):
                    leader.gather(FACTS, RESIDENTS)
                with pytest.raises(PermissionError_, match="different keys"):
                    joining.result(10)


def test_without_curve_nothing_is_read(keys):
    settings = make_settings(start_timeout_s=0.7)
    with closing(Leader(settings, keys)) as leader, zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(wire.endpoint(settings.parallel, 0))
        plain.send(wire.encode(Hello(1, FACTS)))
        with pytest.raises(UnavailableError):
            leader.gather(FACTS, RESIDENTS)


def test_rank_0_listens_on_its_own_address_and_a_busy_port_is_named(keys):
    settings = make_settings()
    with closing(Leader(settings, keys)) as leader:
        assert leader._socket.last_endpoint.startswith(b"tcp://127.0.0.1:")
        with pytest.raises(UnavailableError, match=str(settings.parallel.control_port)):
            Leader(settings, keys)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"not msgpack",
        msgspec.msgpack.encode({"type": "Hello", "rank": 1}),
        msgspec.msgpack.encode({"type": "System", "command": "ls"}),
        msgspec.msgpack.encode({"type": "Digest", "rank": 1, "seq": 1, "digest": "a", "more": 1}),
    ],
)
def test_a_malformed_message_ends_the_pair(keys, payload):
    with joined(2, keys) as (leader, (follower,)):
        follower._socket.send(payload)
        with pytest.raises(PairError, match="rank 1 sent a message that cannot be read"):
            leader.compare(1, "a")
        leader._socket.send_multipart([next(iter(leader._rank_of)), payload])
        with pytest.raises(PairError, match="rank 0 sent a message that cannot be read"):
            follower.receive(10)


def test_an_unexpected_message_ends_the_pair(keys):
    with joined(2, keys) as (leader, (follower,)):
        follower._send(Ready(1, "x"))
        with pytest.raises(PairError, match="unexpected Ready"):
            leader.compare(1, "a")
        follower._send(Digest(2, 1, "a"))  # speaks in another's name
        with pytest.raises(PairError, match="unexpected Digest"):
            leader.compare(1, "a")


def test_what_followers_have_read_is_heard_whenever_they_say_it(keys):
    with joined(3, keys) as (leader, (one, other)):
        assert (leader.followers, leader.landed()) == (2, [])
        one.landed([1, 2])
        one.report(1, "a")
        other.landed([2])
        other.report(1, "a")
        waited_s = leader.compare(1, "a")  # digests and reads come in any order
        assert sorted(waited_s) == [1, 2]
        assert all(0 <= seconds < 10 for seconds in waited_s.values())
        assert sorted(leader.landed()) == [1, 2, 2]
        assert leader.landed() == []
        other.landed([1], [3, 4])
        heard, deadline_s = [], time.monotonic() + 10
        while not heard and time.monotonic() < deadline_s:
            heard = leader.landed()
        assert (heard, leader.failed(), leader.failed()) == ([1], [3, 4], [])


def test_what_followers_have_read_back_is_heard_with_their_rank(keys):
    with joined(3, keys) as (leader, (one, other)):
        one.recalled(7, [0, 2], 2)
        one.landed([1])
        one.report(1, "a")
        other.recalled(7, [], -1)
        other.report(1, "a")
        leader.compare(1, "a")
        heard = sorted(leader.recalled(), key=lambda answer: answer.rank)
        assert heard == [Recalled(1, 7, [0, 2], 2), Recalled(2, 7, [], -1)]
        assert (leader.recalled(), leader.landed()) == ([], [1])


def test_a_rank_tells_of_its_own_reads_only(keys):
    with joined(3, keys) as (leader, (one, _)):
        one._send(Landed(2, [1]))
        assert leader._socket.poll(10_000)
        with pytest.raises(PairError, match="rank 1 sent an unexpected Landed"):
            leader.landed()


def test_an_oversized_message_is_never_decoded(keys):
    settings = make_settings(start_timeout_s=1.0)
    with closing(Leader(settings, keys)) as leader, closing(Follower(settings, 1, keys)) as follower:
        follower._socket.send(wire.encode(Hello(1, FACTS | {"big": "x" * wire.SMALL_BYTES})))
        with pytest.raises(UnavailableError):
            leader.gather(FACTS, RESIDENTS)


def test_other_residents_after_loading_are_refused_on_both_sides(keys):
    with joined(2, keys) as (leader, (follower,)):
        follower.ready("bbb")
        for call in (lambda: leader.ready("aaa"), lambda: follower.receive(10)):
            with pytest.raises(GuardError, match="residents: rank 0 has aaa, rank 1 has bbb"):
                call()


def test_a_rank_that_loads_is_waited_for_as_long_as_is_said_and_something_else_is_done_meanwhile(keys, monkeypatch):
    monkeypatch.setattr(lockstep, "MEANWHILE_S", 0.01)
    looks = []

    def meanwhile():
        looks.append(len(looks))
        if len(looks) == 5:
            follower.ready("aaa")

    with joined(2, keys) as (leader, (follower,)):
        leader.ready("aaa", 20, meanwhile)
        assert looks[:5] == [0, 1, 2, 3, 4]
        with pytest.raises(PairError, match=r"rank 1 sent no Ready within 0\.1 s"):
            leader.ready("aaa", 0.1)
        with pytest.raises(ZeroDivisionError):
            leader.ready("aaa", 20, lambda: 1 / 0)


def request(tokens):
    return Request(request_id="r", prompt_ids=list(range(tokens)), sampling=Sampling(), max_tokens=4, stop_ids=(2,))


def test_steps_arrive_whole_and_in_order(keys):
    steps = [
        Step(1, 0, admit=[Admission(0, request(20))], work=Prefill(0, 0, 20)),
        Step(
            2,
            1,
            release=[1],
            change=Change([3], [Swap((0, 1), (0, 2))], [(0, 1)], [Load(4, (0, 5))], [2]),
            work=Decode([0]),
            digest_due=True,
        ),
        Step(3, 1),
    ]
    with joined(3, keys) as (leader, followers):
        for step in steps:
            leader.send(step)
        leader.stop("done")
        for follower in followers:
            assert [follower.receive(10) for _ in range(4)] == [*steps, Stop("done")]
            assert follower.receive(0) is None


@pytest.mark.parametrize("seqs", [[2], [1, 3], [1, 1], [1, 2, 1]])
def test_a_lost_or_repeated_step_is_refused(keys, seqs):
    with joined(2, keys) as (leader, (follower,)):
        *good, bad = seqs
        for seq in good:
            leader.send(Step(seq, 0))
        with pytest.raises(ValueError, match="cannot follow"):
            leader.send(Step(bad, 0))
        leader._send_all(Step(bad, 0))
        assert [follower.receive(10).seq for _ in good] == good
        with pytest.raises(PairError, match=f"was sent step {bad} after step {len(good)}"):
            follower.receive(10)


def test_equal_digests_pass_and_a_difference_names_step_and_rank(keys):
    with joined(3, keys) as (leader, (one, two)):
        one.report(64, "a")
        two.report(64, "a")
        leader.compare(64, "a")
        one.report(128, "a")
        two.report(128, "b")
        with pytest.raises(PairError, match="rank 2 differs from rank 0 after step 128"):
            leader.compare(128, "a")


def test_a_digest_of_another_step_ends_the_pair(keys):
    with joined(2, keys) as (leader, (follower,)):
        follower.report(63, "a")
        with pytest.raises(PairError, match="rank 1 is at step 63, rank 0 at step 64"):
            leader.compare(64, "a")


def test_a_step_to_a_rank_that_hung_up_fails(keys):
    with joined(2, keys) as (leader, (follower,)):
        follower.close()
        with pytest.raises(PairError, match="rank 1 hung up"):
            send_many(leader, 1000, pause_s=0.01)


def test_a_rank_that_reads_nothing_does_not_queue_for_ever(keys):
    with joined(2, keys, peer_timeout_s=0.2) as (leader, _), pytest.raises(PairError, match="reads nothing"):
        send_many(leader, 200_000)


def send_many(leader, count, pause_s=0.0):
    for seq in range(1, count):
        leader.send(Step(seq, 0, admit=[Admission(0, request(60))]))
        time.sleep(pause_s)
