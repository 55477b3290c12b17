"""What the pilot is told while prompts and answers are computed, and what becomes of the plans it answers with."""

import numpy as np
from engine_fakes import EXPERTS, LAYERS, PAIRS, SWAPS, TOP_K, Bench, FakePilot, request

from tided.settings import Tide
from tided.tide.demand import Demand, RouterShape
from tided.tide.history import History
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
    bench = Bench(pilot=(pilot := Watching()))
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
