"""Rank 0's loop, turned by hand."""

import threading
from contextlib import closing

import numpy as np
import pytest
from engine_fakes import EXPERTS, LAYERS, LIMITS, PAIRS, SWAPS, TOP_K, Alone, Bench, FakePilot, executor, request
from test_loops import chanting

from tided.control.messages import Admission, Change, Load, Prefill, Step, Swap
from tided.engine import motion
from tided.engine.core import IDLE_WAIT_S, LANDING_WAIT_S
from tided.engine.fairness import Pace
from tided.engine.sampling import sample
from tided.engine.scheduler import Limits
from tided.engine.types import Failed, Finished, Tokens
from tided.errors import ContextOverflowError, PairError
from tided.experts.sendings import Sendings
from tided.settings import Tide
from tided.tide.demand import RouterShape
from tided.tide.history import History
from tided.tide.pilot import Pilot


def limits(**changes) -> Limits:
    return Limits(**({name: getattr(LIMITS, name) for name in Limits.__dataclass_fields__} | changes))


def test_an_answer_ends_at_max_tokens():
    bench = Bench()
    bench.submit(request("a", prompt=20, max_tokens=6))
    bench.finish()
    assert len(bench.tokens("a")) == 6
    assert (bench.end("a").reason, bench.end("a").prompt_tokens, bench.end("a").completion_tokens) == ("length", 20, 6)
    assert bench.model.open == []


def test_a_stop_id_ends_the_answer_and_is_counted_but_not_sent():
    free = Bench()
    free.submit(request("a", max_tokens=6))
    free.finish()
    tokens = free.tokens("a")
    stop = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    bench = Bench()
    bench.submit(request("a", max_tokens=6, stop=[tokens[stop]]))
    bench.finish()
    assert bench.tokens("a") == tokens[:stop]
    assert (bench.end("a").reason, bench.end("a").completion_tokens) == ("stop", stop + 1)


def test_every_drawn_token_but_the_last_enters_the_context():
    bench = Bench()
    bench.submit(request("a", prompt=9, max_tokens=20))
    bench.turn(7)
    (lane,) = bench.model.open
    assert lane.ids == request("a", prompt=9).prompt_ids + bench.tokens("a")[:-1]


def test_one_token_comes_with_the_last_chunk():
    bench = Bench()
    bench.submit(request("a", prompt=9, max_tokens=1))
    bench.finish()
    assert bench.model.calls == [("prefill", 8), ("prefill", 1)]
    assert len(bench.tokens("a")) == 1


def test_the_chunk_size_does_not_change_the_answer():
    answers = []
    for chunk in (1, 8, 64):
        bench = Bench(limits=limits(chunk_tokens=chunk))
        bench.submit(request("a", prompt=21))
        bench.finish()
        answers.append(bench.tokens("a"))
    assert answers[0] == answers[1] == answers[2]


def test_a_seeded_answer_repeats_whatever_runs_beside_it():  # C9
    drawn = {"temperature": 1.0, "seed": 42}
    alone, crowded = Bench(), Bench()
    alone.submit(request("a", max_tokens=12, **drawn))
    alone.finish()
    crowded.submit(request("x", prompt=19, max_tokens=20, temperature=1.0, seed=1))
    crowded.turn(2)
    crowded.submit(request("a", max_tokens=12, **drawn), request("y", temperature=0.9, seed=2))
    crowded.finish()
    assert crowded.tokens("a") == alone.tokens("a")
    other = Bench()
    other.submit(request("a", max_tokens=12, temperature=1.0, seed=43))
    other.finish()
    assert other.tokens("a") != alone.tokens("a")


def test_a_running_answer_goes_on_while_a_long_prompt_is_computed():
    bench = Bench()
    bench.submit(request("a", prompt=3, max_tokens=40))
    bench.turn(3)
    bench.submit(request("b", prompt=40, max_tokens=2))
    bench.finish()
    work = "".join(bench.work())
    answering = [index for index, kind in enumerate(work) if kind == "d"][:39]
    assert work.count("p") == 6
    assert "pp" not in work[: answering[-1]]
    assert bench.started() == ["a", "b"]


def test_requests_beyond_the_lanes_run_in_order():
    bench = Bench()
    bench.submit(*[request(name, max_tokens=3) for name in "abcdef"])
    bench.finish()
    assert bench.started() == list("abcdef")
    assert all(bench.end(name).reason == "length" for name in "abcdef")


def test_a_request_cancelled_in_the_queue_never_runs():
    bench = Bench(limits=limits(lanes=1))
    bench.submit(request("a", max_tokens=4), request("b"), request("c", max_tokens=2))
    bench.turn()
    bench.cancel("b")
    bench.finish()
    assert bench.started() == ["a", "c"]
    end = bench.end("b")
    assert (end.reason, end.completion_tokens, end.stats["lane"], end.stats["ttft_s"]) == ("cancelled", 0, None, None)


def test_a_running_request_is_cancelled_at_once():
    bench = Bench()
    bench.submit(request("a", max_tokens=40))
    bench.turn(5)
    bench.cancel("a")
    assert bench.end("a").completion_tokens == 5
    bench.finish()
    assert len(bench.tokens("a")) == 5
    assert bench.model.open == []
    bench.cancel("a")  # of an ended request nothing is left
    bench.finish()


def test_a_request_that_cannot_run_is_refused_alone():
    bench = Bench()
    with pytest.raises(ContextOverflowError, match="maximum context length is 400 tokens"):
        bench.submit(request("a", prompt=400))
    bench.submit(request("b"))
    bench.finish()
    assert bench.end("b").reason == "length"
    assert bench.faults == []


def test_one_too_many_fails_alone():
    bench = Bench(limits=limits(lanes=1, queue=1))
    bench.submit(*[request(name) for name in "abc"])
    bench.finish()
    assert [e.request_id for e in bench.events if isinstance(e, Failed)] == ["c"]
    assert [bench.end(name).reason for name in "ab"] == ["length"] * 2


def test_a_change_is_sent_to_the_device_once_before_the_step_computes(monkeypatch):
    rank, sent = executor(ring_slots=2), []
    residents, send = rank.residents, Sendings.send
    rank.execute(Step(1, 0, change=Change(load=[Load(1, (0, 7)), Load(2, (1, 6), (1, 1)), Load(3, (2, 5))])))
    residents.landed()
    rank.execute(Step(2, 0, change=Change(publish=[1])))
    monkeypatch.setattr(Sendings, "send", lambda self: (sent.append(residents.reading), send(self)))
    admit = [Admission(0, request("a", prompt=3))]
    change = Change(publish=[2, 3], promote=[Swap((0, 0), (0, 7))], withdraw=[(0, 0)], load=[Load(4, (0, 0))])
    rank.execute(Step(3, 1, change=change, admit=admit, work=Prefill(0, 0, 3)))
    assert sent == [0], "the change is whole, and no read of the step has begun"
    there = {(layer, expert) for layer, expert in rank.model.tables.routable.nonzero().tolist()}
    assert there == {*PAIRS, (1, 6), (2, 5), (0, 7)} - {(1, 1), (0, 0)}


class Eager(Alone):
    """Another rank is done with a step as soon as it was sent. Where its digest is due that is what comes from it next,
    and who looks for anything else is at odds with it, as `control.lockstep` is."""

    def __init__(self) -> None:
        super().__init__()
        self.due, self.compared, self.looks = False, 0, []

    def send(self, step: Step) -> None:
        super().send(step)
        self.due = step.digest_due

    def landed(self) -> list[int]:
        if self.due:
            raise PairError("rank 1 sent an unexpected Digest")
        self.looks.append(len(self.sent))
        return []

    failed = landed

    def compare(self, seq: int, digest: str) -> dict[int, float]:
        self.due, self.compared = False, self.compared + 1
        return {}


def test_beside_a_step_nobody_looks_for_reads_where_a_digest_comes_next():
    bench = Bench(link=Eager(), pilot=FakePilot(prompt=SWAPS))
    bench.engine.executor.residents.holds = True
    bench.submit(request("a", prompt=9, max_tokens=20))
    bench.turn(12)
    assert bench.link.compared == 3
    assert bench.engine.motion.reading == 2
    looked = [bench.link.looks.count(step) for step in range(6, 10)]
    assert looked == [4, 4, 2, 4], "beside a step and behind it, but for the one whose digest is due"


# The moments of the tide


def test_a_prompts_plan_is_read_beside_the_answer_and_published_when_it_is_there():
    pilot = FakePilot(prompt=SWAPS)
    bench = Bench(pilot=pilot)
    bench.submit(request("a", prompt=9, max_tokens=6))
    bench.finish()
    assert pilot.published == SWAPS
    changes = [(step.seq, len(step.change.load), step.change.publish) for step in bench.link.sent if step.change]
    assert changes == [(3, 2, []), (4, 1, [1, 2]), (5, 0, [3])]  # after chunks 1 and 2; two swaps are read at once
    assert [step.plan_version for step in bench.link.sent] == [0, 0, 0, 1, 2, 2, 2, 2]
    assert set(bench.engine.executor.residents.pairs) >= {in_ for _, in_ in SWAPS}
    stats = bench.end("a").stats
    assert (stats["swaps"], stats["residency"]["generation"]) == (3, 2)
    assert stats["decode_adaptation"] == {
        "passes": [{"output_tokens": 2, "swaps": 3, "planned": 3, "reason": "prompt"}]
    }


def test_no_step_waits_for_a_read():
    bench = Bench(pilot=FakePilot(prompt=SWAPS))
    bench.engine.executor.residents.holds = True
    bench.submit(request("a", prompt=9, max_tokens=20))
    bench.turn(30)
    assert bench.end("a").completion_tokens == 20
    assert bench.engine.residency.generation == 0
    bench.engine.executor.residents.holds = False
    bench.finish()
    assert bench.engine.residency.generation == 2


def test_an_idle_engine_sleeps_between_looks_at_its_reads_and_publishes_them():
    bench = Bench(pilot=FakePilot(prompt=SWAPS))
    residents, waits = bench.engine.executor.residents, []
    residents.holds = True
    bench.submit(request("a", max_tokens=1))
    bench.turn(3)
    take_in = bench.engine.take_in

    def look(wait_s=0.0):
        waits.append(wait_s)
        if waits.count(LANDING_WAIT_S) == 5:
            residents.holds = False
        if bench.engine.residency.generation == 2 and not bench.engine.motion.reading:
            bench.engine.close("done")
        take_in(wait_s)

    bench.engine.take_in = look
    run(bench)
    assert 4 <= waits.count(LANDING_WAIT_S) <= 8
    assert bench.faults == []
    assert bench.engine.residency.generation == 2


def test_demand_is_told_once_by_phase():
    pilot = FakePilot()
    bench = Bench(pilot=pilot)
    bench.submit(request("a", prompt=9, max_tokens=6))
    bench.finish()
    layers_times_k = 6
    assert pilot.told == [("prompt", 9 * layers_times_k), ("request", 5 * layers_times_k), ("idle", 0)]


def test_the_tide_plans_once_when_the_engine_comes_to_rest():
    pilot = FakePilot(idle=SWAPS)
    bench = Bench(pilot=pilot)
    bench.turn(3)
    assert pilot.told == []  # nothing happened yet: no plan at a start without a request
    bench.submit(request("a", max_tokens=1))
    bench.finish()
    bench.turn(3)
    assert pilot.told.count(("idle", 0)) == 1
    assert [len(step.change.load) for step in bench.link.sent] == [0, 0, 2, 1, 0]
    assert [len(step.change.publish) for step in bench.link.sent] == [0, 0, 0, 2, 1]
    assert bench.engine.residency.generation == 2


def test_the_ring_looks_as_often_as_the_profile_says():
    motion = Bench(pilot=FakePilot(), limits=limits(look_rows=3), ring_slots=2).engine.motion
    assert [motion.stepped(2), motion.stepped(1)] == [False, True]


def pieces(bench: Bench) -> int:
    """Turns that do a piece of the rest, until none is left."""
    count = 0
    while bench.engine.turn():
        count += 1
    return count


def test_who_comes_at_rest_waits_for_one_piece_of_it_and_the_rest_begins_again():
    pilot = FakePilot()
    bench = Bench(pilot=pilot, ring_slots=2)
    bench.submit(request("a", max_tokens=1))
    while not bench.engine._resting:
        bench.turn()
    bench.turn()
    assert bench.engine.executor.residents.checked == 1
    assert ("idle", 0) not in pilot.told
    bench.submit(request("b", max_tokens=1))
    bench.turn()
    assert bench.started() == ["a", "b"]  # in the very next turn
    assert ("idle", 0) not in pilot.told
    assert pieces(bench) >= 4
    assert bench.engine.executor.residents.checked == 2
    assert pilot.told.count(("idle", 0)) == 1
    assert pieces(bench) == 0


def test_nothing_is_done_at_rest_before_it_has_been_quiet_for_a_while():
    pilot = FakePilot(idle=SWAPS)
    bench = Bench(pilot=pilot)
    bench.submit(request("a", max_tokens=1))
    bench.turn(2)
    bench.engine._rest_after_s = 1000.0
    assert pieces(bench) == 0
    assert bench.engine.executor.residents.checked == 0
    assert 0.5 < bench.engine._idle_wait_s() <= IDLE_WAIT_S
    bench.engine._rest_after_s = 0.0
    assert bench.engine._idle_wait_s() == 0.0  # as soon as it is due
    assert pieces(bench) >= 4
    assert ("idle", 0) in pilot.told
    assert bench.engine._idle_wait_s() == IDLE_WAIT_S


def test_what_a_set_at_rest_is_made_from_is_computed_once_and_only_when_it_is_due():
    asked, pilot = [], FakePilot()
    pilot.rest_scores = lambda: asked.append(1) or np.ones((LAYERS, EXPERTS)) / EXPERTS
    bench = Bench(pilot=pilot, ring_slots=2)
    bench.submit(request("a", max_tokens=1))
    bench.finish()
    assert asked == [1]
    pilot.rest_due = False
    bench.submit(request("b", max_tokens=1))
    bench.finish()
    assert asked == [1]


def test_no_step_is_sent_at_rest():
    bench = Bench()
    assert not bench.engine.turn()
    assert bench.link.sent == []


# Failures


def test_logits_that_are_no_numbers_fail_every_request():
    bench = Bench()
    bench.submit(request("a", prompt=3, max_tokens=30), request("b", prompt=4), *[request(n) for n in "cd"])
    bench.model.nan_at = 6
    run(bench)
    failed = [event.request_id for event in bench.events if isinstance(event, Failed)]
    assert sorted(failed) == list("abcd")
    assert "no numbers" in bench.faults[0].what
    assert not any(isinstance(event, Finished) for event in bench.events)


def test_an_error_in_a_step_fails_open_requests_and_those_on_their_way():
    bench = Bench()
    bench.submit(request("a", max_tokens=30))
    bench.engine.submit(request("late"))
    bench.model.raise_at = 7
    run(bench)
    assert {event.request_id for event in bench.events if isinstance(event, Failed)} == {"a", "late"}
    assert isinstance(bench.faults[0], PairError)
    assert "the disk is gone" in bench.faults[0].what
    assert not isinstance(bench.events[-1], Tokens)


def test_a_request_that_comes_while_the_engine_fails_is_told():
    bench = Bench()
    bench.submit(request("a", max_tokens=30))

    def fail(step):
        bench.engine.submit(request("late"))  # between the last look at the inbox and the end
        raise OSError("the disk is gone")

    bench.engine.executor.execute = fail
    run(bench)
    assert {event.request_id for event in bench.events if isinstance(event, Failed)} == {"a", "late"}


def test_a_swap_that_cannot_be_read_is_left_out_and_the_others_are_made():
    bench = Bench(pilot=FakePilot(prompt=SWAPS))
    residents = bench.engine.executor.residents
    residents.fails = {SWAPS[1][1]}
    bench.submit(request("a", max_tokens=12))
    bench.finish()
    assert len(bench.tokens("a")) == 12
    assert SWAPS[0][1] in residents.pairs
    assert SWAPS[2][1] in residents.pairs
    assert SWAPS[1][0] in residents.pairs
    assert bench.engine.motion.count.failed == 1
    assert residents.reading == 0
    assert [step.change.give_up for step in bench.link.sent if step.change.give_up] == [[2]]
    assert bench.engine._reading == 0


def test_when_nothing_can_be_read_any_more_the_engine_ends(monkeypatch):
    monkeypatch.setattr(motion, "MOST_FAILED", 3)
    bench = Bench(pilot=FakePilot(prompt=SWAPS))
    bench.engine.executor.residents.fails = {in_ for _, in_ in SWAPS}
    bench.submit(request("a", max_tokens=100))
    run(bench)
    assert "experts cannot be read: the last 3 that were tried failed" in bench.faults[0].what
    assert len(bench.tokens("a")) < 10
    assert bench.engine.residency.generation == 0


def test_a_history_that_cannot_be_written_loses_no_request(tmp_path):
    shape = RouterShape(LAYERS, EXPERTS, TOP_K)
    with closing(History.open(tmp_path, "ab" * 32, shape, record=True)) as history:
        pilot = Pilot(history, None, Tide(), shape, len(PAIRS))
        assert pilot.boot_pairs() == PAIRS
        bench = Bench(pilot=pilot)
        bench.submit(request("a", max_tokens=2))
        bench.finish()
        assert (history.write_error, history.demand.requests) == ("", 1)
        history._connection.close()  # as when the disk is full or gone: every write fails
        bench.submit(request("b", max_tokens=2), request("c", prompt=40, max_tokens=9))
        bench.finish()
        assert "could not be written" in history.write_error
        assert history.demand.requests > 2  # both count all the same; an older one counts a little less
    assert [bench.end(name).reason for name in "abc"] == ["length"] * 3
    assert bench.faults == []


def test_a_lane_that_leaks_is_noticed_at_rest():
    bench = Bench()
    bench.submit(request("a", max_tokens=1))
    bench.turn(2)
    bench.engine.executor.lanes[1] = object()
    with pytest.raises(PairError, match="held while no request runs"):
        bench.turn()


def test_the_resident_set_is_verified_once_at_rest():
    bench = Bench()
    residents = bench.engine.executor.residents
    bench.submit(request("a"))
    bench.finish()
    bench.turn(3)
    assert residents.checked == 1
    residents.broken = True
    bench.submit(request("b"))
    run(bench)
    assert "broken" in bench.faults[0].what
    assert bench.end("b").reason == "length"


def test_a_stop_cancels_what_is_open():
    bench = Bench()
    bench.submit(request("a", max_tokens=100))
    bench.turn(2)
    bench.engine.close("restart")
    run(bench)
    assert bench.end("a").reason == "cancelled"
    assert bench.link.stopped == "restart"
    assert bench.faults == []


def test_the_same_id_twice_is_a_fault():
    bench = Bench()
    bench.submit(request("a"))
    with pytest.raises(PairError, match="twice"):
        bench.submit(request("a"))


def run(bench: Bench) -> None:
    thread = threading.Thread(target=bench.engine.run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


# Statistics


def test_statistics_tell_prefill_from_decode():
    bench = Bench()
    bench.submit(request("a", prompt=20, max_tokens=6, seed=9))
    bench.finish()
    stats = bench.end("a").stats
    assert (stats["prompt_tokens"], stats["completion_tokens"], stats["steps"], stats["seed"]) == (20, 6, 5, 9)
    assert stats["prefill_s"] > 0
    assert stats["decode_s"] > 0
    assert stats["ttft_s"] >= stats["prefill_s"] / 2
    experts = stats["experts"]
    assert experts["routed_picks"] == 25 * 6
    assert experts["miss_picks"] == stats["expert_misses"] + stats["prefill_expert_misses"] > 0
    assert stats["substituted_weight_share"] == pytest.approx(experts["miss_picks"] / 150, abs=1e-6)
    assert (experts["resident"], experts["total"], experts["resident_pct"]) == (15, 24, 62.5)
    assert stats["residency"] == {
        "generation": 0, "residents": 15, "mask_hash": "0" * 16, "per_layer_min": 5, "per_layer_max": 5,
    }  # fmt: skip


def test_an_aborted_request_reports_its_own_numbers():
    bench = Bench(limits=limits(lanes=1))
    bench.submit(request("first", prompt=30, max_tokens=20))
    bench.finish()
    bench.submit(request("second", prompt=17, max_tokens=20))
    bench.turn(2)  # two of three chunks
    bench.cancel("second")
    stats = bench.end("second").stats
    assert (stats["prompt_tokens"], stats["completion_tokens"], stats["expert_misses"]) == (17, 0, 0)
    assert stats["experts"]["routed_picks"] == 16 * 6
    assert stats["prefill_expert_misses"] > 0
    assert (stats["decode_s"], stats["decode_tok_s"], stats["expert_hit_rate"] is None) == (0.0, None, False)


def test_the_log_line_holds_no_token(caplog):
    bench = Bench()
    with caplog.at_level("INFO", "tided.engine"):
        bench.submit(request("a", prompt=20, max_tokens=6))
        bench.finish()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("request a length: prompt 20 tokens")
    assert str(bench.tokens("a")) not in line
    assert str(request("a", prompt=20).prompt_ids)[1:-1] not in line


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(("captured", "begun"), [(False, 2), (True, 0)])
def test_reads_begin_behind_a_launch_and_before_what_this_thread_computes(monkeypatch, captured, begun, depth):
    """A CPU computes on this thread: its disk would stand still for a step. A device has its work by then, the draw of
    all lanes too. What others are shown of the change is made behind the launch as well."""
    bench = chanting(monkeypatch, depth)
    monkeypatch.setattr(Pace, "may_prefill", lambda *_: True)
    bench.submit(request("a", max_tokens=40), request("b", max_tokens=40))
    bench.turn(3)
    executor, board = bench.engine.executor, bench.engine.board
    monkeypatch.setattr(executor.model, "is_captured", lambda rows: captured)
    seen, drawn, real = [], [], executor.model.decode
    rows = 2 * (1 + depth)

    def drawing(logits, laws):
        seen.append((executor.residents.reading, len(laws)))
        return lambda: drawn.append((executor.residents.reading, len(board.loading))) or sample(logits, laws)

    monkeypatch.setattr(
        executor.model, "decode", lambda *given: seen.append((executor.residents.reading, rows)) or real(*given)
    )
    monkeypatch.setattr("tided.engine.executor.drawing", drawing)
    bench.engine.motion.take_plan(SWAPS, "test")
    bench.turn()
    assert (seen, drawn) == ([(begun, rows)] * 2, [(2, 2)])
