"""What is shown of the experts follows every change, and agrees with the residents themselves."""

import random

import numpy as np
import pytest

from tided.control.messages import Change, Load, Swap
from tided.engine.board import RECENT_S, ExpertBoard, HeatLevels, as_json, cells, heat_levels, held


def rows(board: ExpertBoard) -> list[str]:
    return as_json(board, None, 0.0)["states"]


def test_a_swap_and_a_hot_read():
    board = ExpertBoard(2, 4, [(0, 0), (0, 1), (1, 2)])
    assert rows(board) == ["1100", "0010"]
    board.changed(Change(load=[Load(1, (0, 3), (0, 0)), Load(2, (1, 0), None)]), 10.0)
    assert rows(board) == ["1103", "3010"]
    assert as_json(board, None, 10.0)["activity"] == {"sequence": 1, "active": [[0, 3], [1, 0]], "recent": []}
    board.changed(Change(publish=[1]), 11.0)
    assert rows(board) == ["0101", "3010"]
    board.changed(Change(publish=[2]), 12.0)
    assert rows(board) == ["0101", "2010"]
    board.changed(Change(promote=[Swap((1, 2), (1, 0))]), 12.0)
    assert rows(board) == ["0101", "1020"]
    board.changed(Change(withdraw=[(1, 2)]), 12.0)
    found = as_json(board, None, 12.0)
    assert found["states"] == ["0101", "1000"]
    assert found["counts"] == {"not_loaded": 5, "resident": 3, "transient": 0, "loading": 0}
    assert found["resident_per_layer"] == [2, 1]


def test_slots_are_those_of_what_can_be_routed_to():
    slots = {(0, 0): 5, (1, 2): 0}
    board = ExpertBoard(2, 4, [(0, 0), (1, 2)], slot_of=slots.get, arena_slots=7)
    assert "slots" not in as_json(board, None, 0.0)
    found = as_json(board, None, 0.0, slots=True)
    assert (found["slots"], found["arena_slots"]) == ([[5, -1, -1, -1], [-1, -1, 0, -1]], 7)
    board.changed(Change(load=[Load(1, (0, 3), (0, 0))]), 10.0)
    assert board.slots == [5, -1, -1, -1, -1, -1, 0, -1]
    slots[0, 3] = 6
    board.changed(Change(publish=[1]), 11.0)
    assert board.slots == [-1, -1, -1, 6, -1, -1, 0, -1]


def test_a_load_is_seen_for_three_seconds():
    board = ExpertBoard(1, 4, [(0, 0)])
    board.changed(Change(load=[Load(1, (0, 3), None)]), 10.0)
    board.changed(Change(publish=[1]), 10.001)
    for now_s, seen in [(10.01, [[0, 3]]), (10.0 + RECENT_S, [[0, 3]]), (10.1 + RECENT_S, [])]:
        activity = as_json(board, None, now_s)["activity"]
        assert (activity["active"], activity["recent"]) == ([], seen)


def test_heat_is_a_digit_by_place():
    board = ExpertBoard(2, 10, [(0, 0)])
    heat = np.arange(20, dtype=np.float64)[::-1].copy()
    assert as_json(board, heat, 0.0)["heat"] == ["9988776655", "4433221100"]


def test_random_changes_agree_with_the_books_of_the_motion():
    """Beside the policy that rank 0 decides with: after any changes both say the same."""
    from tided.engine.motion import Motion
    from tided.tide.demand import RouterShape
    from tided.tide.hot import HotReads

    dice, shape = random.Random(7), RouterShape(3, 16, 2)
    residents = [(layer, expert) for layer in range(3) for expert in range(6)]
    hot = HotReads(shape, residents, 6, 2, np.ones((3, 16)))
    motion, board = Motion(hot, 1, 4), ExpertBoard(3, 16, residents)
    for step in range(400):
        weights = np.zeros((3, 16))
        for _ in range(6):
            weights[dice.randrange(3), dice.randrange(16)] = dice.random()
        if motion.stepped(4):
            motion.observe(weights, np.full(3, 4))
        if step % 20 == 0:
            motion.take_plan([((0, 0), (0, 9))], "test")
        change, _ = motion.change()
        board.changed(change, float(step))
        ended = [ticket for ticket in list(motion._reading) if dice.random() < 0.7 and motion._reading[ticket].missing]
        for ticket in ended:
            (motion.failed if dice.random() < 0.1 else motion.landed)([ticket])
        digits = "".join(rows(board))
        pairs = {divmod(index, 16): digit for index, digit in enumerate(digits) if digit != "0"}
        assert {pair for pair, digit in pairs.items() if digit == "1"} == set(hot.residents)
        assert {pair for pair, digit in pairs.items() if digit == "2"} == set(hot.ring)
        assert {pair for pair, digit in pairs.items() if digit == "3"} == {
            r.load.pair for r in motion._reading.values()
        }
    assert board.sequence > 50


def test_what_is_shown_of_the_largest_model_is_small():
    board = ExpertBoard(40, 480, [(layer, expert) for layer in range(40) for expert in range(250)])
    from tided.api.json_text import to_json

    text = to_json(as_json(board, np.random.default_rng(1).random(19_200), 0.0))
    assert len(text) < 60_000


def test_equal_heat_is_in_the_same_tenth():
    assert heat_levels(np.ones(100)).tolist() == [0] * 100
    mixed = heat_levels(np.array([1.0] * 50 + [2.0] * 50))
    assert mixed.tolist() == [0] * 50 + [5] * 50


def test_cells_are_state_and_heat():
    board = ExpertBoard(1, 10, [(0, 0), (0, 1)], [(0, 9)])
    board.changed(Change(load=[Load(1, (0, 8), None)]), 0.0)
    assert cells(board, None) == bytes([0x1F, 0x1F, *[0x0F] * 6, 0x3F, 0x2F])
    heat = np.arange(10.0)
    assert cells(board, heat_levels(heat)) == bytes([0x10, 0x11, 2, 3, 4, 5, 6, 7, 0x38, 0x29])
    assert held(board, heat) == pytest.approx((0 + 1 + 9) / 45)


def test_heat_is_looked_at_once_a_second_and_where_it_is_new():
    levels, first, second = HeatLevels(), np.arange(10.0), np.arange(10.0)[::-1].copy()
    assert levels.of(None, 0.0) is None
    one = levels.of(first, 10.0)
    assert one is not None
    assert one.tolist() == list(range(10))
    assert levels.of(second, 10.5) is one
    two = levels.of(second, 11.0)
    assert two is not None
    assert two.tolist() == list(range(10))[::-1]
    assert levels.of(second, 99.0) is two
