"""What a step is believed to cost: what was measured, bounded by what a step can be, and never wrong for long."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tided.engine.costs import KEPT, OLD_STEPS, ROW_SHARE, SPREAD, Costs, Touched

SECONDS = st.floats(1e-4, 1e3)
STEPS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), SECONDS, st.integers(0, 200)), max_size=60)


def widths(lanes: int, more: int = 0) -> dict[int, int]:
    return {lane: 1 + (more if lane == 0 else 0) for lane in range(lanes)}


def told(steps) -> Costs:
    costs = Costs()
    for lanes, more, seconds, experts in steps:
        costs.tell(widths(lanes, more), seconds, Touched(experts))
    return costs


@given(STEPS, st.integers(1, 3), st.integers(0, 12))
def test_more_rows_never_cost_less_nor_more_than_their_steps_one_by_one(steps, lanes, more):
    costs = told(steps)
    plain, wide, wider = (costs.step(widths(lanes, rows)) for rows in (0, more, more + 1))
    assert 0 < plain <= wide * (1 + 1e-9)
    assert wide <= wider * (1 + 1e-9)
    assert wider <= plain * (lanes + more + 1) / lanes * (1 + 1e-9)
    assert costs.draft(range(lanes)) > 0


@given(st.lists(st.floats(0, 0.9), min_size=6, max_size=6), st.sampled_from([1e-3, 1e3]), st.integers(0, 5))
def test_one_sample_far_off_moves_nothing(slopes, factor, more):
    """Of a width that was measured three times, whatever its neighbours cost."""
    costs = Costs()
    for _ in range(3):
        for rows in range(6):
            costs.tell(widths(1, rows), 1 + sum(slopes[:rows]))
    before = [costs.step(widths(1, rows)) for rows in range(6)]
    costs.tell(widths(1, more), before[more] * factor)
    assert [costs.step(widths(1, rows)) for rows in range(6)] == pytest.approx(before)


@given(STEPS, st.floats(1e-3, 1e3))
def test_what_has_changed_is_believed_once_most_samples_say_so(steps, seconds):
    costs = told([(lanes, more, timed, 0) for lanes, more, timed, _ in steps])
    for more in random.Random(1).sample([*range(6)] * (KEPT // 2 + 1), 6 * (KEPT // 2 + 1)):
        costs.tell(widths(1, more), seconds * (1 + 0.2 * more))
    for more in range(6):
        assert costs.step(widths(1, more)) == pytest.approx(seconds * (1 + 0.2 * more))


def test_seldom_measured_widths_believe_three_of_their_newest_five():
    costs = Costs()
    for _ in range(KEPT):
        costs.tell(widths(1, 2), 2.0)
    for seconds, expected in ((1.4, 2.0), (1.4, 2.0), (1.4, 1.4)):
        for _ in range(70):
            costs.tell(widths(1), 1.0)
        costs.tell(widths(1, 2), seconds)
        assert costs.step(widths(1, 2)) == pytest.approx(expected)


def test_no_step_is_free_whatever_is_told():
    """Slopes that would leave nothing for the rows, waits longer than their step, steps of no time."""
    for seconds, experts, waited_s in ((0.0, 40, 0.0), (1.0, 40, 3.0), (1.0, 10, 0.0)):
        costs = Costs()
        for step in range(40):
            costs.tell(widths(1), seconds + step % 2, Touched(experts + step % 2, step % 2, waited_s))
        assert costs.step(widths(1)) > 0
        assert costs.step(widths(1, 5)) > 0


def test_slopes_that_ask_more_for_experts_than_a_step_took_leave_the_rows_a_share():
    """An expert is believed to cost a second, by steps that took one or two with ten and eleven; a lane that asks for
    none is no step for nothing."""
    costs = Costs()
    for step in range(20):
        costs.tell({0: 1}, 1.0 + step % 2, Touched(10 + step % 2))
    assert costs.per_expert_s == pytest.approx(1.0)
    costs.tell({1: 1}, 1.0, Touched(0))
    for rows in (1, 2, 6):
        assert 0.1 <= costs.step({1: rows}) < 1.0 * rows


def test_between_and_beyond_what_was_measured():
    costs = Costs()
    assert costs.step(widths(1, 2)) == pytest.approx(1 + 2 * ROW_SHARE)  # in plain steps
    costs.tell(widths(1), 1.0)
    assert costs.step(widths(1)) == 1.0
    assert costs.step(widths(1, 2)) == pytest.approx(1 + 2 * ROW_SHARE)
    costs.tell(widths(1, 2), 1.2)
    assert costs.step(widths(1, 1)) == pytest.approx(1.1)
    assert costs.step(widths(1, 4)) == pytest.approx(1.4)  # on as steeply as it was measured
    costs.tell(widths(1, 3), 100.0)
    assert costs.step(widths(1, 3)) == pytest.approx(1.3)  # one sample of bad news is none
    costs.tell(widths(1, 3), 100.0)
    assert costs.step(widths(1, 3)) == 4.0  # four steps of one token each would not cost more
    for _ in range(2):
        costs.tell(widths(1, 5), 1.8)
    assert costs.step(widths(1, 3)) == 1.8  # nor six rows less


def test_drafts_are_believed_to_cost_a_share_of_a_step_until_they_were_timed():
    costs = Costs()
    costs.drafted(1, 0.02)
    assert 0.1 < costs.draft([0]) < 1  # steps have no seconds yet: in plain steps
    costs.tell(widths(1), 0.1)
    assert costs.draft([0]) == 0.02
    assert costs.draft([0, 1]) > 0


def test_old_samples_do_not_count():
    costs = Costs()
    costs.tell(widths(1, 1), 9.0)
    costs.tell(widths(1), 9.0)
    for _ in range(OLD_STEPS):
        costs.tell(widths(2), 1.0)
    assert costs.samples(1, 2) == 0
    assert costs.samples(2, 2) == KEPT


def test_the_cost_of_an_expert_is_learned_apart_from_that_of_rows():
    """Steps whose texts touch different numbers of experts, timings with noise and outliers: the price of an expert,
    and a block of a text that touches many costs more than one of a text that touches few."""
    noise, costs = random.Random(5), Costs()

    def work(lane: int, rows: int, experts: float) -> None:
        seconds = 0.5 + 0.1 * rows + 0.01 * experts
        far_off = 30.0 if noise.random() < 0.05 else 1.0
        costs.tell({lane: rows}, seconds * noise.uniform(0.98, 1.02) * far_off, Touched(round(experts)))

    for step in range(200):
        lane, rows = step // 20 % 2, (1, 4)[step % 2]
        work(lane, rows, (40 if lane else 80) * noise.uniform(0.7, 1.3) * rows**SPREAD)
    assert costs.per_expert_s == pytest.approx(0.01, rel=0.2)
    many, few = costs.step({0: 4}), costs.step({1: 4})
    assert many - few == pytest.approx(0.01 * 40 * 4**SPREAD, rel=0.35)
    costs.forget(0)
    assert costs.step({0: 4}) == pytest.approx(few)  # as the lanes that are known


def test_reads_that_are_waited_for_cost_what_was_waited():
    costs = Costs()
    for rows in (1, 4) * 30:
        reads = 3 * rows
        costs.tell({0: rows, 1: 1}, 1.0 + 0.05 * reads, Touched(40, reads, 0.05 * reads), waiting=[0])
    assert costs.per_read_s == pytest.approx(0.05)
    block, plain = costs.step({0: 4, 1: 1}), costs.step({0: 1, 1: 1})
    assert 1.2 < block - plain + 1 < 2.0  # 6 to 12 reads more, no other cost
    assert costs.step({1: 4, 2: 1}) < plain  # lanes that wait for nothing


@pytest.mark.parametrize("rows", [2, 6])
def test_a_read_that_took_for_ever_once_is_outvoted(rows):
    costs = Costs()
    for step in range(12):
        waited = 100.0 if step == 6 else 0.1
        costs.tell({0: rows}, 1 + waited, Touched(40, 2, waited), waiting=[0])
    assert costs.per_read_s == pytest.approx(0.05)
    assert costs.step({0: rows}) < 2
