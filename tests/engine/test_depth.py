"""The policy of drafts: what pays is taken, what does not is left, and nothing gets stuck."""

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tided.engine.costs import Touched
from tided.engine.depth import EXPLORE_STEPS, LAST_GAP, Depths, Row

DRAFT_S = 0.2


def step_s(rows: int, slope: float = 0.2) -> float:
    return 1 + slope * (rows - 1)


class Text:
    """A lane whose drafts are right with one chance each; the drafter knows it, or says always the same."""

    def __init__(self, chance: float, seed: int = 1, honest: bool = True) -> None:
        self.chance, self.random, self.honest = chance, random.Random(seed), honest
        self.sure: list[float] = []


def run(depths: Depths, text: Text, tokens: int, cost=step_s, room: int = 10**6) -> tuple[float, list[int], int]:
    """-> seconds, the depth of each step, how often drafts were made."""
    seconds, taken, made, came = 0.0, [], 0, 0
    while came < tokens:
        (depth,), propose = depths.plan([Row(0, room)])
        right = 0
        while right < depth and text.random.random() < text.chance:
            right += 1
        took = cost(1 + depth)
        sure = [2.0 if text.honest and text.chance > 0.5 else -2.0] * 5 if propose else []
        depths.done({0: (depth, 1 + right)}, {0: sure}, took, DRAFT_S if propose else None)
        seconds, came, made = seconds + took + (DRAFT_S if propose else 0.0), came + 1 + right, made + propose
        taken.append(depth)
    return seconds / came, taken, made


@pytest.mark.parametrize("mode", ["acceptance", "confidence"])
def test_good_drafts_are_taken_whole(mode):
    seconds, taken, _ = run(Depths(mode, 5), Text(0.9), 600)
    assert seconds < 1 / 1.7
    assert sum(depth >= 4 for depth in taken) > 0.8 * len(taken)


@pytest.mark.parametrize("mode", ["acceptance", "confidence"])
def test_hopeless_drafts_cost_next_to_nothing(mode):
    seconds, taken, made = run(Depths(mode, 5), Text(0.05), 1000)
    assert seconds < 1 / 0.95
    assert made <= 1000 / LAST_GAP + 1000 / EXPLORE_STEPS + 8
    assert sum(depth > 0 for depth in taken) <= made


def test_where_rows_cost_as_much_as_steps_nothing_is_drafted():
    seconds, taken, _ = run(Depths("acceptance", 5), Text(0.7), 1000, lambda rows: float(rows))
    assert seconds < 1 / 0.95
    assert sum(depth > 1 for depth in taken) < 0.05 * len(taken)


def test_a_text_that_changes_is_noticed():
    depths, text = Depths("acceptance", 5), Text(0.05)
    run(depths, text, 500)
    text.chance = 0.9
    run(depths, text, 200)
    seconds, _, _ = run(depths, text, 200)
    assert seconds < 1 / 1.6
    text.chance = 0.02
    _, taken, _ = run(depths, text, 200)
    assert sum(depth > 1 for depth in taken[-60:]) <= 4


def test_a_new_answer_is_probed_whatever_the_last_was_like():
    depths = Depths("acceptance", 5)
    run(depths, Text(0.02), 400)
    depths.forget(0)
    _, taken, _ = run(depths, Text(0.9), 60)
    assert max(taken[:6]) > 0


@pytest.mark.parametrize("answers", [1, 6])
def test_the_first_block_of_an_answer_is_as_deep_as_the_answers_before_were_right(answers):
    """What is believed of the next answer follows the last ones; of a place that it has not reached, nothing else is
    known."""

    def first(chance: float) -> int:
        depths = Depths("acceptance", 5)
        for width in range(1, 7):  # all that differs is what was accepted
            depths.costs.tell({0: width}, step_s(width, 0.3))
            depths.costs.tell({0: width}, step_s(width, 0.3))
        for _ in range(answers):
            depths.begin(Row(0, 9))
            depths.begun(0, [0.0] * 5)
            right = 5 if chance > 0.5 else 0
            depths.done({0: (5, 1 + right)}, {}, step_s(6, 0.3), None)
            depths.forget(0)
        depths.begin(Row(0, 9))
        depths.begun(0, [0.0] * 5)
        (depth,), _ = depths.plan([Row(0, 9)])
        return depth

    assert first(0.02) < first(0.9)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("factor", [0.01, 50.0])
@pytest.mark.parametrize("slope", [0.1, 0.3])
def test_case_44_one_bad_timing_does_not_wedge_the_depth(width, factor, slope):
    """One sample of a width is far off: within 200 tokens the speed is what it was."""
    depths, text = Depths("acceptance", 5), Text(0.8)
    healthy, _, _ = run(depths, text, 300, lambda rows: step_s(rows, slope))
    left = [1]

    def cost(rows: int) -> float:
        if rows == width and left[0]:
            left[0] -= 1
            return step_s(rows, slope) * factor
        return step_s(rows, slope)

    for known in (depths, Depths("acceptance", 5)):  # with good samples before it, and as the very first
        left[0] = 1
        run(known, text, 200, cost)
        after, _, _ = run(known, text, 400, lambda rows: step_s(rows, slope))
        assert after < 1.1 * healthy


@pytest.mark.parametrize("mode", ["acceptance", "confidence"])
def test_an_outlier_of_a_hundred_and_a_lasting_change_are_over_within_200_tokens(mode):
    """Rows that become dear, and cheap again, as each step of a drafted answer is timed."""
    depths, text = Depths(mode, 5), Text(0.8)
    healthy, _, _ = run(depths, text, 400)
    for spoilt in range(1, 7):
        left = [1]

        def cost(rows, spoilt=spoilt, left=left):
            far_off = rows == spoilt and left[0]
            left[0] -= bool(far_off)
            return step_s(rows) * (100 if far_off else 1)

        run(depths, text, 200, cost)
        again, _, _ = run(depths, text, 200)
        assert again < 1.12 * healthy, spoilt
    run(depths, text, 200, float)
    dear, taken, _ = run(depths, text, 300, float)  # rows that cost as much as steps
    assert dear < 1 / 0.95
    assert sum(taken) < 0.2 * len(taken)
    run(depths, text, 200)
    cheap, _, _ = run(depths, text, 300)
    assert cheap < 1.12 * healthy


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["fixed", "acceptance", "confidence"]))
def test_no_series_of_steps_breaks_the_policy(data, mode):
    """Whatever lanes come and go, is timed, touched, waited for and accepted: depths fit the blocks that wait, and all
    steps have a cost."""
    depths, sure = Depths(mode, 5, 3), {}
    number = st.floats(0, 1e4)
    for _ in range(data.draw(st.integers(1, 25))):
        rows = [
            Row(lane, data.draw(st.integers(0, 8)), data.draw(st.booleans()))
            for lane in data.draw(st.sets(st.integers(0, 2), min_size=1))
        ]
        plan, propose = depths.plan(rows)
        assert all(
            0 <= depth <= min(row.room, len(sure.get(row.lane, ()))) for row, depth in zip(rows, plan, strict=True)
        )
        assert not propose or any(row.room > 1 for row in rows)
        came = {row.lane: (depth, 1 + data.draw(st.integers(0, depth))) for row, depth in zip(rows, plan, strict=True)}
        for row in rows:
            sure[row.lane] = data.draw(st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=5)) if propose else []
        touched = Touched(data.draw(st.integers(0, 500)), data.draw(st.integers(0, 50)), data.draw(number))
        depths.done(came, sure, data.draw(number), data.draw(number) if propose else None, touched)
        widths = {row.lane: 1 + depth for row, depth in zip(rows, plan, strict=True)}
        assert 0 < depths.costs.step(widths) < math.inf
        if data.draw(st.booleans()):
            depths.forget(rows[0].lane)
            sure.pop(rows[0].lane)


@pytest.mark.parametrize("mode", ["acceptance", "confidence"])
def test_wide_steps_that_were_slow_the_first_time_are_tried_again(mode):
    """The first step of every width beyond two rows takes far too long; drafts are good."""
    depths, text, first = Depths(mode, 5), Text(0.9), set()

    def cost(rows):
        slow = rows > 2 and rows not in first
        first.add(rows)
        return step_s(rows) * (20 if slow else 1)

    run(depths, text, 100, cost)
    _, taken, _ = run(depths, text, 100, cost)
    assert statistics.mean(taken[5:]) > 3.5


def test_an_answer_begins_with_a_block():
    depths = Depths("acceptance", 5)
    assert depths.begin(Row(0, 5))
    depths.begun(0, [0.0] * 5, 0.1)
    (depth,), _ = depths.plan([Row(0, 5)])
    assert depth > 0
    assert not depths.begin(Row(1, 0))
    assert not Depths("off", 5).begin(Row(0, 5))
    assert Depths("fixed", 5, 3).begin(Row(0, 1))


def test_a_lane_that_waits_for_experts_drafts_less_where_they_are_read():
    """The same text and rows; each expert that a block misses is waited for."""

    def answer(reads_a_row: float) -> float:
        depths, text, taken = Depths("acceptance", 5), Text(0.75), []
        for _ in range(300):
            (depth,), propose = depths.plan([Row(0, 10**6, True)])
            right = 0
            while right < depth and text.random.random() < text.chance:
                right += 1
            reads = round(reads_a_row * (1 + depth))
            touched = Touched(40, reads, 0.1 * reads)
            seconds = step_s(1 + depth) + touched.waited_s
            depths.done({0: (depth, 1 + right)}, {0: [0.0] * 5 if propose else []}, seconds, DRAFT_S, touched)
            taken.append(depth)
        return statistics.mean(taken[100:])

    assert answer(8) < answer(0) - 1


def test_fixed_and_off():
    assert Depths("off", 5).plan([Row(0, 9)]) == ([0], False)
    depths = Depths("fixed", 5, 3)
    assert depths.plan([Row(0, 9), Row(1, 0)]) == ([0, 0], True)
    depths.done({0: (0, 1), 1: (0, 1)}, {0: [0.0] * 5, 1: []}, 1.0, 0.1)
    assert depths.plan([Row(0, 2), Row(1, 0)]) == ([2, 0], True)
    assert Depths("fixed", 5, 9).fixed == 5


@pytest.mark.parametrize("mode", ["fixed", "acceptance", "confidence"])
def test_never_more_than_there_is_room_for(mode):
    depths, text = Depths(mode, 5, 5), Text(1.0)
    for room in (9, 5, 2, 1, 0):
        (depth,), propose = depths.plan([Row(0, room)])
        assert depth <= room
        assert not (propose and room <= 1)
        depths.done({0: (depth, depth + 1)}, {0: [text.chance * 3] * 5 if propose else []}, 1.0, 0.1)


def test_lanes_share_the_rows_by_what_they_bring():
    depths = Depths("acceptance", 5)
    good, bad = random.Random(1), random.Random(2)
    for _ in range(200):
        plan, propose = depths.plan([Row(0, 99), Row(1, 99)])
        right = [0, 0]
        for lane, (chance, source) in enumerate(((0.9, good), (0.05, bad))):
            while right[lane] < plan[lane] and source.random() < chance:
                right[lane] += 1
        rows = {lane: (plan[lane], 1 + right[lane]) for lane in (0, 1)}
        depths.done(rows, {0: [0.0] * 5, 1: [0.0] * 5} if propose else {}, step_s(2 + sum(plan), 0.1), 0.1)
    plans = [depths.plan([Row(0, 99), Row(1, 99)])[0] for _ in range(3)]
    assert plans[0][0] >= 4
    assert plans[0][1] <= 1


def chained(rights, per_place_s: float, step_s: float = 0.1, row_s: float = 0.005, steps: int = 60, mode="acceptance"):
    """One lane whose drafts are right so many times in a row; a proposal costs by its tokens. -> places asked for."""
    depths, made, asked = Depths(mode, 7, one_by_one=True), 0, []
    if depths.begin(Row(0, 100)):
        made = depths.places
        depths.begun(0, [2.0] * made, made * per_place_s)
    for step in range(steps):
        (depth,), more = depths.plan([Row(0, 100)])
        assert depth <= made
        came = 1 + min(depth, rights(step))
        made = depths.places if more else 0
        asked.append(made)
        seconds = step_s + row_s * depth
        depths.done({0: (depth, came)}, {0: [2.0] * made}, seconds, made * per_place_s if more else None)
    return asked


def test_a_chain_is_as_long_as_its_tokens_are_worth():
    """Drafts that are all right, at a twentieth of a step each: all seven. The first two right: about two. At twice a
    step each: none but probes of one."""
    cheap, short, hopeless = chained(lambda _: 7, 0.005), chained(lambda _: 2, 0.03), chained(lambda _: 7, 0.2)
    assert min(cheap[20:]) >= 6
    assert 2 <= min(short[40:]) <= max(short[40:]) <= 4
    assert sum(hopeless[20:]) < 6
    assert set(hopeless[20:]) <= {0, 1}


def test_a_chain_follows_what_is_accepted():
    """Right for a while, then never: it grows, then rests but for probes, and grows again."""
    found = chained(lambda step: 7 if step < 60 or step >= 160 else 0, 0.01, steps=260)
    assert min(found[30:60]) >= 5
    assert sum(found[110:160]) < 15
    assert max(found[240:]) >= 5


def test_a_block_that_is_made_at_once_has_no_places():
    depths = Depths("acceptance", 5)
    depths.begin(Row(0, 100))
    assert depths.places == 0
