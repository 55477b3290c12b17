"""Prompts and answers share the time as stated. The clock is simulated: a step costs what the test says."""

from itertools import pairwise

import pytest
from engine_fakes import LIMITS, request
from hypothesis import given, settings
from hypothesis import strategies as st

from tided.control.messages import Decode, Prefill
from tided.engine.fairness import LEAST_PART, MOST_STEPS, Pace
from tided.engine.scheduler import Limits, Scheduler

CHUNK = 512


def scheduler(lanes=2, share=0.3) -> Scheduler:
    limits = {name: getattr(LIMITS, name) for name in Limits.__dataclass_fields__}
    big = {
        "context_tokens": 1 << 20,
        "pool_tokens": 1 << 22,
        "page_tokens": 128,
        "chunk_tokens": CHUNK,
        "park_tokens": 0,
    }
    return Scheduler(Limits(**(limits | big | {"lanes": lanes, "prefill_share": share, "queue": 64})))


def step(s: Scheduler, chunk_s: float, decode_s: float) -> tuple[Prefill | Decode, float]:
    """One step as the ledger accounts it: tokens are drawn and nobody ends."""
    taken = s.next_step()
    assert taken is not None
    work = taken.work
    seconds = decode_s if isinstance(work, Decode) else chunk_s * work.count / CHUNK
    s.took(work, seconds, len(work.lanes) if isinstance(work, Decode) else 0)
    for lane in work.lanes if isinstance(work, Decode) else [work.lane]:
        if not s.running[lane].in_prefill:
            s.drew(lane, 1)
    return work, seconds


def until_first_token(s: Scheduler, lane: int, chunk_s: float, decode_s: float) -> tuple[float, int]:
    """Seconds, and tokens of lane 0 meanwhile."""
    spent, tokens = 0.0, 0
    for _ in range(100_000):
        work, seconds = step(s, chunk_s, decode_s)
        spent += seconds
        tokens += isinstance(work, Decode)
        if lane in s.running and not s.running[lane].in_prefill:
            return spent, tokens
    raise AssertionError("no first token")


def answering(chunk_s: float, decode_s: float, **asked) -> Scheduler:
    s = scheduler(**asked)
    s.submit(request("long", prompt=CHUNK, max_tokens=500_000))
    for _ in range(20):
        step(s, chunk_s, decode_s)
    return s


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("chunk_s", [0.02, 0.2, 1.0, 4.0])
def test_a_newcomer_leaves_the_running_answer_its_rate_and_gets_its_first_token(chunk_s, share):
    decode_s = 0.04
    s = answering(chunk_s, decode_s, share=share)
    s.submit(request("new", prompt=2048))
    spent, tokens = until_first_token(s, 1, chunk_s, decode_s)
    assert tokens * decode_s / spent >= 1 - share - 1e-9
    if chunk_s > decode_s:  # and no more than its share is kept from the newcomer, but for the rounding to steps
        assert spent <= 4 * chunk_s / share + 5 * decode_s


def test_a_chunk_that_was_slow_once_holds_up_its_followers_for_a_few_chunks_at_most():
    pace = Pace(0.5)
    for _ in range(3):
        pace.prefilled(100, 1.0, beside=True)
    pace.alone()
    pace.prefilled(100, 1000.0, beside=True)
    steps = 0
    while not pace.may_prefill(100):
        pace.decoded(1, 1, 0.1, beside=True)
        steps += 1
    assert 0 < steps <= 51


@pytest.mark.parametrize(("share", "slower"), [(0.1, 1.04), (0.3, 1.05), (0.3, 1.15), (0.6, 1.4)])
def test_steps_that_are_slower_beside_a_prompt_do_not_cost_the_answer_its_rate(share, slower):
    """What is read for a newcomer may slow the answer's own steps: then the newcomer waits longer."""
    s = answering(0.5, 0.04, share=share)
    s.submit(request("new", prompt=2048))
    spent, tokens = until_first_token(s, 1, 0.5, 0.04 * slower)
    assert tokens * 0.04 / spent >= 1 - share - 1e-9


def test_however_slow_steps_become_a_prompt_gets_half_of_its_share():
    s = answering(0.5, 0.04, share=0.3)
    s.submit(request("new", prompt=2048))
    spent, _ = until_first_token(s, 1, 0.5, 0.4)
    chunks_s, part = 4 * 0.5, LEAST_PART * 0.3 / 0.7
    assert spent <= chunks_s * (1 + 1 / part) + 2 * 0.4


def test_what_lanes_had_alone_is_known_by_their_number():
    """Two answers take longer steps than one: beside a prompt each pair is compared with pairs."""
    pace = Pace(0.3)
    for _ in range(9):
        pace.decoded(1, 1, 0.05, beside=False)
        pace.decoded(2, 4, 0.4, beside=False)
        pace.prefilled(10, 1.0, beside=False)
    pace.alone()
    steps = 0
    while not pace.may_prefill(10):
        pace.decoded(2, 2, 0.2, beside=True)  # as fast as alone, with fewer drafts
        steps += 1
    assert steps == 12  # 1 s are 0.3 of the time behind 2.34 s


def test_a_clock_that_stands_still_starves_nobody():
    pace = Pace(0.3)
    pace.prefilled(100, 1.0, beside=True)
    for _ in range(MOST_STEPS):
        assert not pace.may_prefill(100)
        pace.decoded(1, 1, 0.0, beside=True)
    assert pace.may_prefill(100)


def test_time_is_not_saved_up_while_nobody_waits():
    s = answering(1.0, 0.04)
    for _ in range(500):
        step(s, 1.0, 0.04)
    s.submit(request("new", prompt=CHUNK))
    assert isinstance(step(s, 1.0, 0.04)[0], Decode)
    assert until_first_token(s, 1, 1.0, 0.04)[1] >= 0.7 / 0.3 * 1.0 / 0.04 - 2


def test_chunks_end_where_snapshots_fit_whatever_runs_beside_them():
    s = answering(0.5, 0.05)
    s.submit(request("new", prompt=1300))
    chunks = []
    while len(chunks) < 3:
        work, _ = step(s, 0.5, 0.05)
        chunks += [work] if isinstance(work, Prefill) else []
    assert chunks == [Prefill(1, 0, 512), Prefill(1, 512, 512), Prefill(1, 1024, 276)]


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 3000), min_size=2, max_size=5),
    chunk_s=st.floats(0.01, 0.5),
    decode_s=st.floats(0.02, 0.5),
)
def test_of_several_prompts_none_starves(prompts, chunk_s, decode_s):
    """Each begins within one round of all, and between two chunks of a prompt lies at most one of every other."""
    s = answering(chunk_s, decode_s, lanes=6)
    for number, tokens in enumerate(prompts):
        s.submit(request(f"p{number}", prompt=tokens, max_tokens=200_000))
    order = []
    for _ in range(100_000):
        work, _ = step(s, chunk_s, decode_s)
        order += [work.lane] if isinstance(work, Prefill) else []
        if not s.waiting and not any(running.in_prefill for running in s.running.values()):
            break
    else:
        raise AssertionError("a prompt was never complete")
    for lane in range(1, len(prompts) + 1):
        assert order.index(lane) < len(prompts)
        places = [index for index, other in enumerate(order) if other == lane]
        for first, second in pairwise(places):
            between = order[first + 1 : second]
            assert len(between) == len(set(between))
