"""When a plan is due while tokens are generated: a lane's own counters, two clocks that do not spend each other."""

import pytest

from tided.tide.windows import WINDOW_TOKENS, Windows

GATE, RATE, GAP, EVERY = 0.01, 0.1, 150, 200


class Feed:
    """Windows, fed with answers of 100 picks a token."""

    def __init__(self, every: int = EVERY, rate: float = RATE, gap: int = GAP) -> None:
        self.windows = Windows(every, GATE, rate, gap)
        self.lanes: dict[int, list[float]] = {}

    def step(self, miss_rate: float, tokens: int = 1, lane: int = 0) -> str:
        """One step; what it made due, attempted at once."""
        total = self.lanes.setdefault(lane, [0, 0.0, 0.0])
        for i, more in enumerate((tokens, 100.0 * tokens, 100.0 * tokens * miss_rate)):
            total[i] += more
        assert self.windows.advance(lane, *total) == tokens
        due = self.windows.due()
        if due is None:
            return ""
        self.windows.attempted(due[0])
        return due[0]

    def run(self, miss_rate: float, tokens: int, lane: int = 0) -> list[tuple[int, str]]:
        said = [(i + 1, self.step(miss_rate, lane=lane)) for i in range(tokens)]
        return [(at, due) for at, due in said if due]


def test_a_decode_plan_comes_every_so_many_tokens_of_an_answer():
    assert Feed().run(0.02, 650) == [(200, "decode"), (400, "decode"), (600, "decode")]


def test_an_answer_that_misses_little_is_looked_at_again_after_as_many_tokens():
    feed = Feed()
    assert feed.run(0.009, 200) == []
    assert feed.run(0.02, 199) == []
    assert feed.run(0.02, 1) == [(1, "decode")]


def test_switched_off_there_is_no_decode_plan():
    assert Feed(every=0).run(0.09, 2000) == []


def test_what_earlier_answers_missed_does_not_count():
    """A rate over all that was served would have stopped moving long before."""
    feed = Feed()
    feed.run(0.0, 100_000)
    assert feed.run(0.2, 60)[0] == (WINDOW_TOKENS // 2 + 1, "urgent")


def test_urgent_fires_after_a_window_of_misses_and_is_spaced():
    assert Feed(every=0).run(0.3, 500) == [(30, "urgent"), (180, "urgent"), (330, "urgent"), (480, "urgent")]


def test_ten_percent_is_not_urgent_and_one_switches_it_off():
    assert Feed(every=0).run(0.1, 500) == []
    assert Feed(every=0, rate=1.0).run(1.0, 500) == []


def test_a_decode_plan_does_not_spend_the_urgent_one_nor_the_other_way_round():
    said = Feed(gap=30).run(0.3, 241)
    assert [at for at, due in said if due == "decode"] == [200]
    assert [at for at, due in said if due == "urgent"] == [30, 60, 90, 120, 150, 180, 230]


def test_the_gap_outlives_the_answer():
    """Else a lane of short answers would have an urgent plan each."""
    feed = Feed(every=0)
    assert feed.run(0.5, 40) == [(30, "urgent")]
    for _ in range(2):
        feed.windows.ended(0)
        feed.lanes.clear()
        assert feed.run(0.5, 50) == []


def test_each_lane_has_its_own_window():
    feed = Feed(every=0)
    for _ in range(WINDOW_TOKENS - 1):
        assert feed.step(0.0, lane=0) == ""
        assert feed.step(0.15, lane=1) == ""
    assert feed.step(0.0, lane=0) == ""
    assert feed.step(0.15, lane=1) == "urgent", "together both lanes miss 7.5 %"


def test_a_step_of_several_tokens_ends_a_window_at_its_boundary():
    feed = Feed(every=0)
    assert [feed.step(0.2, tokens=4) for _ in range(8)] == [""] * 7 + ["urgent"]


def test_nothing_is_urgent_while_a_plan_is_on_its_way():
    """The swaps that would be asked for again are being read; a new plan would drop what is left of theirs."""
    windows = Windows(EVERY, GATE, RATE, GAP)
    for tokens in range(1, 200):
        windows.advance(0, tokens, 100.0 * tokens, 50.0 * tokens)
        assert windows.due(moving=True) is None
    assert windows.due() == ("urgent", 0.5)
    windows.advance(0, 200, 20000.0, 10000.0)
    assert windows.due(moving=True) == ("decode", 0.5)


def test_old_misses_leave_the_window():
    feed = Feed(every=0, gap=0)
    assert feed.run(0.1, 29) == []
    assert feed.run(0.0, 31) == []
    assert feed.run(0.2, 15) == []
    assert feed.run(0.2, 1) == [(1, "urgent")]


def test_counters_that_go_back_are_an_error():
    windows = Windows(0, GATE, RATE, GAP)
    windows.advance(0, 10, 100.0, 5.0)
    with pytest.raises(ValueError, match="lane 0 went back"):
        windows.advance(0, 11, 90.0, 5.0)
