"""A figure of the recent past, by times that the test gives."""

import pytest

from tided.engine.speed import RECENT_S, DecodeSpeed


def grow(speed, begin_s, steps, every_s, tokens=1):
    for step in range(steps + 1):
        speed.note(tokens, True, begin_s + step * every_s)
    return begin_s + steps * every_s


@pytest.mark.parametrize(("every_s", "tokens", "expected"), [(0.02, 1, 50), (0.25, 1, 4), (0.1, 3, 30)])
def test_a_steady_speed_is_told_exactly_from_the_second_token_on(every_s, tokens, expected):
    for steps in (1, 3, 200):
        speed = DecodeSpeed()
        now_s = grow(speed, 10, steps, every_s, tokens)
        assert speed.tok_s(now_s) == pytest.approx(expected)


def test_the_recent_past_outweighs_the_rest():
    speed = DecodeSpeed()
    now_s = grow(speed, 0, 1000, 0.1)
    now_s = grow(speed, now_s + 0.05, int(3 * RECENT_S / 0.05), 0.05)
    assert 19 < speed.tok_s(now_s) < 20


def test_the_time_between_answers_does_not_count():
    speed = DecodeSpeed()
    now_s = grow(speed, 0, 100, 0.1)
    speed.note(0, False, now_s)
    assert speed.tok_s(now_s) is None
    now_s = grow(speed, now_s + 60, 10, 0.1)  # a prompt of a minute, its first token, ten more
    assert speed.tok_s(now_s) == pytest.approx(10)


def test_a_stall_lowers_it_and_is_forgotten():
    speed = DecodeSpeed()
    now_s = grow(speed, 0, 100, 0.1)
    assert speed.tok_s(now_s + 30) < 1
    now_s = grow(speed, now_s + 30, 300, 0.1)
    assert speed.tok_s(now_s) == pytest.approx(10, rel=0.05)


def test_one_token_has_no_speed():
    speed = DecodeSpeed()
    assert speed.tok_s(0) is None
    speed.note(1, True, 5)
    assert speed.tok_s(6) is None
