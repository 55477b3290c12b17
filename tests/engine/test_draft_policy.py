"""The policy of drafts on what the mini's drafter really proposed: its answers replayed, as exact as a run of the
engine, with times from a table instead of a clock.

`mini_drafts.jsonl` holds held-out answers of eight domains (`bench/drafts.py --record`): how many drafts behind each
token are right, and the drafter's confidence. Which tokens come does not depend on what is drafted, so whatever a
policy does, this says what it would have got. Times are those of a step and of a proposal on one core: 18.4 ms, 25.2,
30.2, 35.0, 39.5 and 44.8 for one to six rows, 6.5 for a proposal; every timing has a random error.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tided.engine.depth import Depths, Row

STEP_MS, DRAFT_MS = (18.4, 25.2, 30.2, 35.0, 39.5, 44.8), 6.5
NOISE = 0.08
GOOD, MIDDLING, PLAIN = ("qa", "math", "codechat", "lang"), ("tools", "story"), ("prose", "code")  # as drafts are
DOMAINS = (*GOOD, *MIDDLING, *PLAIN)
SEEDS = range(4)
LONG = 10**6  # an answer that ends by itself does not know its length


@dataclass(frozen=True)
class Answer:
    domain: str
    tokens: int  # behind the first
    ends: bool
    right: list[int]
    sure: list[list[float]]


def recorded() -> list[Answer]:
    text = (Path(__file__).parent / "mini_drafts.jsonl").read_text(encoding="utf-8")
    return [Answer(**json.loads(line)) for line in text.splitlines()]


ANSWERS = recorded()


def replay(depths: Depths, answer: Answer, clock: random.Random) -> float:
    """-> milliseconds, proposals behind the prompt included."""

    def room(at: int) -> int:
        return LONG if answer.ends else answer.tokens - at - 1

    def took(ms: float) -> float:
        return ms * clock.lognormvariate(0, NOISE)

    at, total, waits = 0, 0.0, depths.begin(Row(0, room(0)))
    if waits:
        total += DRAFT_MS
        depths.begun(0, answer.sure[0], took(DRAFT_MS) / 1000)
    while at < answer.tokens:
        (depth,), propose = depths.plan([Row(0, room(at))])
        assert not depth or waits
        came = min(1 + min(depth, answer.right[at]), answer.tokens - at)
        at, waits = at + came, propose
        sure = {0: answer.sure[at] if propose and at < len(answer.sure) else []}
        depths.done({0: (depth, came)}, sure, took(STEP_MS[depth]) / 1000, took(DRAFT_MS) / 1000 if propose else None)
        total += STEP_MS[depth] + DRAFT_MS * propose
    depths.forget(0)
    return total


def speeds(mode: str, fixed: int = 0, answers: list[Answer] = ANSWERS) -> dict[str, float]:
    """Domain -> its speed by that without drafts; answers of all domains in turns, over all seeds."""
    total, plain = dict.fromkeys(DOMAINS, 0.0), dict.fromkeys(DOMAINS, 0.0)
    for seed in SEEDS:
        clock, depths = random.Random(seed), Depths(mode, 5, fixed)
        for answer in clock.sample(answers, len(answers)):
            total[answer.domain] += replay(depths, answer, clock)
            plain[answer.domain] += answer.tokens * STEP_MS[0]
    return {domain: plain[domain] / spent for domain, spent in total.items() if spent}


def mean(found: dict[str, float]) -> float:
    return sum(found[domain] for domain in GOOD) / len(GOOD)


@pytest.mark.parametrize("mode", ["acceptance", "confidence"])
def test_drafts_pay_where_they_are_good_and_cost_next_to_nothing_where_they_are_hopeless(mode):
    found = speeds(mode)
    assert min(found[domain] for domain in PLAIN) > 0.95
    assert min(found[domain] for domain in MIDDLING) > 0.9
    assert mean(found) > 1.35
    assert min(found[domain] for domain in GOOD) > 1.12


@pytest.mark.parametrize("fixed", [1, 3, 5])
def test_no_fixed_depth_does_both(fixed):
    found = speeds("fixed", fixed)
    assert min(found[domain] for domain in PLAIN) < 0.85
    assert mean(found) < mean(speeds("confidence"))


def test_neither_way_to_believe_in_a_draft_is_much_slower():
    """Profiles may choose either: by what was accepted, or by the drafter's confidence."""
    confidence, acceptance = mean(speeds("confidence")), mean(speeds("acceptance"))
    assert 0.96 < confidence / acceptance < 1.04


def test_hopeless_text_is_probed_less_and_less():
    calls = []

    class Counted(Depths):
        def plan(self, rows):
            plan = super().plan(rows)
            calls.append(plan[1])
            return plan

    prose = [answer for answer in ANSWERS if answer.domain == "prose"]
    for mode in ("acceptance", "confidence"):
        calls.clear()
        depths = Counted(mode, 5)
        for answer in prose:
            replay(depths, answer, random.Random(1))
        assert 1 <= sum(calls) <= len(prose) * 8
