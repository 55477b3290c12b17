"""What the pilot is told while prompts and answers are computed, and what becomes of the plans it answers with."""

from dataclasses import replace

import numpy as np
import pytest
from engine_fakes import EXPERTS, LAYERS, LIMITS, PAIRS, SWAPS, TOP_K, Bench, FakePilot, request

from tided.engine import core, executor
from tided.engine.moments import Moments
from tided.engine.motion import Motion, Moved, Plan
from tided.engine.types import Finished
from tided.settings import Tide
from tided.tide.demand import Demand, RouterShape
from tided.tide.history import History
from tided.tide.hot import HotReads
from tided.tide.pilot import Pilot, Planned

PICKS = LAYERS * TOP_K  # of one token


class Watching(FakePilot):
    """Remembers chunks and steps, and answers with a plan when asked to."""

    def __init__(self, chunk_at=-1, step_at=-1, reason="decode") -> None:
        super().__init__()
        self.chunk_at, self.step_at, self.reason = chunk_at, step_at, reason
        self.chunks, self.steps, self.moving, self.seen = [], [], [], []

    def chunk_done(self, tokens, chunks_left, demand, *, lane):
        self.chunks.append((lane, tokens, chunks_left))
        self.seen.append(demand(lane)[0].sum())
        return SWAPS if len(self.chunks) == self.chunk_at else []

    def step_done(self, answers, demand, moving):
        assert all(demand(lane)[2][:2].tolist() == totals[:2].tolist() for lane, (_, totals) in answers.items())
        self.steps.append({lane: (tokens, totals[0]) for lane, (tokens, totals) in answers.items()})
        self.moving.append(moving)
        return Planned(self.reason, SWAPS) if len(self.steps) == self.step_at else None


def passes(bench: Bench, name: str) -> list[tuple]:
    made = bench.end(name).stats["decode_adaptation"]["passes"]
    return [(one["reason"], one["output_tokens"], one["swaps"]) for one in made]


def test_the_pilot_hears_of_every_chunk_but_the_last_with_the_demand_so_far():
    bench = Bench(pilot=(pilot := Watching()))
    bench.submit(request("a", prompt=29, max_tokens=2))
    bench.finish()
    assert pilot.chunks == [(0, 8, 3), (0, 16, 2), (0, 24, 1)]
    assert pilot.seen == [8 * PICKS, 16 * PICKS, 24 * PICKS]
    assert pilot.told[0] == ("prompt", 29 * PICKS), "looking took nothing away"


def test_a_plan_between_chunks_serves_the_rest_of_the_prompt():
    bench = Bench(pilot=(pilot := Watching(chunk_at=1)))
    bench.submit(request("a", prompt=60, max_tokens=3))
    bench.finish()
    published = [step.seq for step in bench.link.sent if step.change.publish]
    prompt = [step.seq for step in bench.link.sent if step.work and hasattr(step.work, "start")]
    assert pilot.published == SWAPS
    assert published[-1] < prompt[-1]
    assert passes(bench, "a") == [("chunk", 0, 3)]


def test_the_pilot_hears_of_every_answer_that_goes_on():
    at_once = replace(
        LIMITS, prefill_share=0.99
    )  # the prompt of b does not wait for the answer to a, however busy we are
    bench = Bench(pilot=(pilot := Watching()), limits=at_once)
    bench.submit(request("a", prompt=5, max_tokens=24), request("b", prompt=5, max_tokens=26))
    bench.finish()
    together = [step for step in pilot.steps if len(step) == 2]
    assert together
    for step in pilot.steps:
        for tokens, picks in step.values():
            assert picks == tokens * PICKS, "an answer's own, from its first step on"
    last = [step for step in pilot.steps if 1 in step][-1]
    assert last[1][0] == 24, "the step that ends an answer is told by the request's end"


def test_a_plan_while_tokens_are_generated_is_read_beside_them_with_its_reason():
    for reason in ("decode", "urgent"):
        bench = Bench(pilot=(pilot := Watching(step_at=5, reason=reason)))
        bench.submit(request("a", max_tokens=20))
        bench.finish()
        assert passes(bench, "a") == [(reason, 7, 3)]
        assert pilot.published == SWAPS
        assert pilot.moving[:5] == [False] * 5
        assert pilot.moving[5], "two of three are being read, one is still to be"
        assert not any(pilot.moving[7:])


def real_pilot(bench_pairs, **settings) -> Pilot:
    shape = RouterShape(LAYERS, EXPERTS, TOP_K)
    history = History(None, Demand.none(shape), None, "")
    return Pilot(history, None, Tide(**settings), shape, len(bench_pairs))


def test_the_real_pilot_follows_an_answer_that_leaves_its_prompt():
    """From the tap to the published set: a tap that is read at the wrong moment gives no plan, or one of nothing."""
    pilot = real_pilot(PAIRS, replan_decode_tokens=12, replan_chunk_tokens=8, sensitivity=0.4, prior_votes=0.5)
    bench = Bench(pilot=pilot)
    bench.submit(request("a", prompt=33, max_tokens=60), request("b", prompt=6, max_tokens=60))
    bench.finish()
    reasons = {reason for name in "ab" for reason, _, _ in passes(bench, name)}
    assert "decode" in reasons
    assert sorted(bench.engine.executor.residents.pairs) == pilot.residents
    assert pilot.history.demand.requests == 2
    assert np.isfinite(pilot.scores()).all()


# To whom a moment is told


def moments(pilot: FakePilot | None = None, ring: int = 2) -> tuple[Moments, Motion]:
    even = np.ones((LAYERS, EXPERTS))
    motion = Motion(HotReads(RouterShape(LAYERS, EXPERTS, TOP_K), PAIRS, ring, TOP_K, even), 1, 8)
    return Moments(motion, pilot or FakePilot()), motion


def mass(*pairs) -> np.ndarray:
    grid = np.zeros((LAYERS, EXPERTS))
    for pair in pairs:
        grid[pair] = 1.0
    return grid


TOTALS = np.array([2.0, 0.0, 2.0, 0.0])
OF_PROMPT, OF_ANSWER = [(0, 5), (1, 5)], [(0, 6), (2, 1)]


def test_a_request_that_has_ended_is_remembered_whole_with_prompt_and_answer():
    """Whose prompt is like its prompt is expected to want what its answer wanted."""
    told, motion = moments()
    like_before = motion.hot.kin.like(mass(*OF_PROMPT))
    told.prompt_done(mass(*OF_PROMPT), mass(*OF_PROMPT), TOTALS, 4, 1)
    told.request_done(mass(*OF_ANSWER), mass(*OF_ANSWER), TOTALS, 4, 1)
    like = motion.hot.kin.like(mass(*OF_PROMPT))
    assert all(like[pair] > 2 * like_before[pair] for pair in [*OF_PROMPT, *OF_ANSWER])
    assert like[0, 7] < like_before[0, 7]


def test_a_prompts_share_goes_with_its_request_and_not_with_the_lanes_next():
    told, motion = moments()
    told.prompt_done(mass(*OF_PROMPT), mass(*OF_PROMPT), TOTALS, 4, 1)
    told.request_done(mass(*OF_ANSWER), mass(*OF_ANSWER), TOTALS, 4, 1)
    told.request_done(mass((1, 6)), mass((1, 6)), TOTALS, 0, 1)  # cancelled in its prompt
    like = motion.hot.kin.like(mass((1, 6)))
    assert like[1, 6] > 0.9
    assert like[1, 5] < 0.1


def test_what_a_running_request_is_like_ends_with_it():
    told, motion = moments()
    told.prompt_done(mass(*OF_PROMPT), mass(*OF_PROMPT), TOTALS, 4, 1)
    told.prompt_done(mass(*OF_ANSWER), mass(*OF_ANSWER), TOTALS, 4, 0)
    told.request_done(mass(*OF_ANSWER), mass(*OF_ANSWER), TOTALS, 4, 1)
    assert list(motion.hot._like) == [0]


def test_a_plan_beside_a_ring_heeds_the_pilots_word_on_what_has_just_gone():
    class Steady(FakePilot):
        def steadied(self, scores):
            return scores * (1.0 - mass((0, 7)))

    asked = {}
    for pilot in (FakePilot(prompt=SWAPS), Steady(prompt=SWAPS)):
        told, motion = moments(pilot)
        motion.hot.observe([7, 6], [0.5, 0.5], 64)  # both are missed badly: (0, 7) and (0, 6)
        told.prompt_done(mass((0, 7), (0, 6)), mass((0, 7), (0, 6)), TOTALS, 4, 0)
        asked[type(pilot)] = {load.pair for load in motion.change()[0].load}
    assert (0, 7) in asked[FakePilot]
    assert (0, 7) not in asked[Steady]
    assert (0, 6) in asked[Steady]


class Settling(FakePilot):
    """Remembers what was published as settled, and what not."""

    def __init__(self, **plans) -> None:
        super().__init__(**plans)
        self.applied_as: list[tuple[bool, list]] = []

    def applied(self, swaps, settled=True):
        self.applied_as.append((settled, list(swaps)))

    def rest_scores(self):
        return (mass((0, 7)) + 0.001) / EXPERTS


@pytest.mark.parametrize("late", [False, True], ids=["before the next request", "after it began"])
def test_what_a_rest_exchanges_is_not_settled_whenever_it_lands(late):
    told, motion = moments(pilot := Settling())
    told.idle()
    change, _ = motion.change()
    assert [load.pair for load in change.load] == [(0, 7)]
    if late:
        told.prompt_done(mass(*OF_PROMPT), mass(*OF_PROMPT), TOTALS, 4, 0)
    motion.landed([load.ticket for load in change.load])
    told.published(motion.change()[1])
    assert pilot.applied_as == [(False, [(change.load[0].out, (0, 7))])]


def test_each_swap_of_a_step_is_settled_or_not_by_its_own_plan_and_promotions_are():
    told, _ = moments(pilot := Settling())
    rest, asked = Plan("idle", 2), Plan("prompt", 1)
    promoted = ((2, 0), (2, 6))
    told.published(Moved([*SWAPS, promoted], [rest, rest, asked]))
    assert pilot.applied_as == [(False, SWAPS[:2]), (True, [SWAPS[2], promoted])]
    told.published(Moved())
    assert len(pilot.applied_as) == 2


def test_without_a_ring_the_plan_at_rest_is_for_what_was_asked():
    told, motion = moments(pilot := Settling(idle=SWAPS), ring=0)
    told.idle()
    change, _ = motion.change()
    motion.landed([load.ticket for load in change.load])
    told.published(motion.change()[1])
    assert pilot.applied_as == [(True, SWAPS)]


def test_i6_the_time_of_a_step_ends_when_its_tokens_have_been_read(monkeypatch):
    """A device works on when a launch returns: only who has read its result knows how long it took."""
    bench, clock, real, took = Bench(), [100.0], executor.drawing, []
    monkeypatch.setattr(core.time, "monotonic", lambda: clock[0])

    def begins(*given):
        tokens = real(*given)

        def read_from_the_device():
            clock[0] += 5.0
            return tokens()

        return read_from_the_device

    monkeypatch.setattr(executor, "drawing", begins)
    bench.engine.scheduler.took = lambda work, seconds, tokens: took.append(seconds)
    bench.submit(request("a", max_tokens=3))
    while "a" not in [getattr(event, "request_id", "") for event in bench.events if isinstance(event, Finished)]:
        bench.turn()
    assert took == [5.0, 5.0, 5.0]
    assert bench.end("a").stats["decode_s"] == 10.0
