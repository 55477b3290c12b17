"""Two ranks: what rank 0 decides, the other replays (C1), swaps in the same step (C2), and the guard runs (C3)."""

import threading

import msgspec
import pytest
from engine_fakes import SWAPS, Bench, FakePilot, Wire, executor, follower, request, tokens_of

from tided.control.messages import Admission, Prefill, Step
from tided.engine.types import Failed
from tided.errors import PairError


def traffic(bench: Bench) -> None:
    bench.submit(request("a", prompt=20, max_tokens=9, temperature=1.0, seed=3), request("b", max_tokens=4))
    bench.turn(4)
    bench.submit(*[request(name, prompt=11, temperature=0.8, seed=i) for i, name in enumerate("cd")])
    bench.turn(3)
    bench.cancel("a")
    bench.finish()


def test_recorded_steps_replay_to_the_same_tokens():
    bench = Bench(pilot=FakePilot(prompt=SWAPS, idle=[((0, 7), (0, 0))]))
    traffic(bench)
    steps = [msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step) for step in bench.link.sent]
    replayed, lane_of, tokens = executor(), {}, {name: [] for name in "abcd"}
    for step in steps:
        lane_of |= {admission.lane: admission.request.request_id for admission in step.admit}
        for lane, token in replayed.execute(step).tokens:
            tokens[lane_of[lane]].append(token)
        replayed.residents.landed()
    assert tokens == {name: tokens_of(bench.events, name) for name in "abcd"}
    assert replayed.residents.pairs == bench.engine.executor.residents.pairs
    assert replayed.lanes == {}


def pair(pilot=None):
    wire, faults = Wire(), []
    other = follower(wire, faults)
    thread = threading.Thread(target=other.run, daemon=True)  # a failing test must not hang
    return Bench(link=wire, pilot=pilot), other, thread, faults


def test_two_ranks_agree_step_by_step():
    bench, other, thread, faults = pair(FakePilot(prompt=SWAPS))
    thread.start()
    traffic(bench)
    bench.engine.close("done")
    bench.engine.run()
    thread.join(20)
    assert not thread.is_alive()
    assert (faults, bench.faults) == ([], [])
    assert bench.link.compared >= 4
    assert other.seq == bench.engine.seq
    assert other.executor.residents.digest() == bench.engine.executor.residents.digest()


def diverging(change) -> Bench:
    bench, other, thread, _ = pair()
    change(other.executor)
    thread.start()
    bench.engine.submit(request("a", prompt=20, max_tokens=30))
    bench.engine.run()
    other.close()
    thread.join(20)
    assert not thread.is_alive()
    return bench


def assert_stopped(bench: Bench) -> None:
    assert "differ after step 4" in bench.faults[0].what
    assert [event.request_id for event in bench.events if isinstance(event, Failed)] == ["a"]
    assert bench.engine.seq == 4


def test_another_mask_is_noticed():
    assert_stopped(diverging(lambda rank: rank.residents.change([((0, 0), (0, 7))])))


def test_the_digest_covers_mask_demand_and_tokens_each_alone():
    def digest(change) -> str:
        rank = executor()
        change(rank)
        return rank.execute(Step(1, 0, digest_due=True)).digest

    def token(rank):
        rank._history.update(b"another token")

    def mask(rank):
        rank.residents.change([((0, 0), (0, 7))])

    def wanted(rank):
        rank.tap.counts[1, 2, 3] += 1

    def missed(rank):
        rank.tap.totals[0, 1] += 1

    changes = (lambda rank: None, token, mask, wanted, missed)
    assert len({digest(change) for change in changes}) == len(changes)
    assert digest(mask) == digest(mask)


def test_another_token_is_noticed():
    def other_token(rank):
        draw = rank._draw

        def wrong(lanes, logits, outcome):
            draw(lanes, logits.flip(-1), outcome)

        rank._draw = wrong

    assert_stopped(diverging(other_token))


def test_a_token_is_noticed_before_anything_is_computed_from_it():
    def digest(wrong: bool) -> str:
        rank = executor()
        if wrong:
            draw = rank._draw
            rank._draw = lambda lanes, logits, outcome: draw(lanes, logits.flip(-1), outcome)
        return rank.execute(
            Step(1, 0, admit=[Admission(0, request("a"))], work=Prefill(0, 0, 5), digest_due=True)
        ).digest

    assert digest(False) == digest(False) != digest(True)


def test_other_experts_are_noticed():
    def one_more(rank):
        take = rank.tap.take

        def taken(lane):
            demand = take(lane)
            rank.tap.counts[lane, 1, 2] += 1
            return demand

        rank.tap.take = taken

    assert_stopped(diverging(one_more))


def test_a_lost_step_ends_the_follower():
    bench, _, thread, faults = pair()
    bench.submit(request("a", prompt=20))
    bench.turn()
    bench.link.steps.get_nowait()
    thread.start()
    bench.turn()
    thread_ended(thread)
    assert "came after step 0" in faults[0].what


def test_a_plan_that_one_rank_missed_ends_it():
    with pytest.raises(PairError, match="plan 0 is in place where step 1 expects 1"):
        executor().execute(Step(1, 1))


def thread_ended(thread: threading.Thread) -> None:
    thread.join(20)
    assert not thread.is_alive()


def test_a_follower_verifies_its_residents_when_the_pair_rests():
    bench, other, thread, faults = pair()
    other.executor.residents.broken = True
    thread.start()
    bench.submit(request("a", prompt=20))
    bench.finish()
    thread_ended(thread)
    assert "broken" in faults[0].what
    assert other.seq == bench.engine.seq
